"""What can be seen of a plan without binding it: names, operands, engines, dtypes, regions."""

from counterpoint.errors import InputError, PlanError
from counterpoint.plan.activated import misuse_of_activation
from counterpoint.plan.attended import ATTENTION
from counterpoint.plan.extents import refuse_vast
from counterpoint.plan.families import build
from counterpoint.plan.scaled import misuse_of_scales, operands_of
from counterpoint.plan.steps import (
    OWN_PROTOCOL,
    VARYING,
    Buffer,
    Peer,
    Plan,
    Region,
    Step,
    same_batch,
)
from counterpoint.problem import ITEM_BYTES, Problem
from counterpoint.ranges import misfit
from counterpoint.schedules.invariant import varies
from counterpoint.schedules.mesh import lane_for_each_peer

# kinds whose rows counts or routes may say
MAY_VARY = ("copy", "matmul", "spread", "fold", "collective", "exchange", "fused")
MAX_BOXES = 2**16  # of all ranks: two seconds of a proof


def check_form(plan: Plan) -> None:
    """Check buffers, and that each step can run.

    Raises:
        PlanError: names the plan, the step and what is wrong.
    """

    def fail(problem: str, step: str = "") -> None:
        raise PlanError(plan.spec, problem, step=step)

    if found := misfit(plan, Plan, None, ""):
        fail(f"{found.where} must be {found.want}, got {found.got}")
    _check_size(plan)
    for name, items in (("buffer", plan.buffers), ("lane", plan.lanes), ("step", plan.steps)):
        names = [item.name for item in items]
        if len(set(names)) < len(names):
            fail(f"two {name}s have one name: {', '.join(names)}")
    operation = plan.problem.operation
    operands = {b.name: b for b in operands_of(plan.problem)}
    users = {b.name: b for b in plan.buffers if b.space in ("input", "output")}
    if operation.families and users != operands:
        fail(f"inputs and outputs must be {list(operands.values())}, got {list(users.values())}")
    for buffer in plan.buffers:
        own = buffer.space in OWN_PROTOCOL or buffer.name in operands
        dtypes = ITEM_BYTES if own else (plan.problem.dtype, plan.problem.x_dtype, "float32")
        if operation.families and buffer.dtype not in dtypes:
            fail(
                f"buffer {buffer.name!r} is {buffer.dtype}: neither float32 nor the problem's dtype"
            )
        if buffer.chunks != 1 and not (buffer.split and buffer.holds in ("all", "peers", "island")):
            fail(f"buffer {buffer.name!r} is stored by chunks, so it has to hold several blocks")
    limit = plan.problem.scratch_bytes_limit
    used = plan.workspace_bytes
    if limit and used > limit:
        fail(f"needs {used} bytes of scratch, scratch_bytes_limit is {limit}")
    seen: set[str] = set()
    for step in plan.steps:
        for name in step.after:
            if name not in seen:
                fail(f"is after {name!r}, which is no earlier step", step.name)
        seen.add(step.name)
        if problem := _misuse(plan, step):
            fail(problem, step.name)
    if plan.problem.invariant and (why := varies(plan)):
        fail(f"is not batch-invariant: {why}")
    for lane in plan.lanes:
        _check_batches(plan, [step for step in plan.steps if step.lane == lane.name])
    ours = [s.name for s in plan.steps
            if s.kind == "fused" or (s.arg("transport") and s.kind != "opaque")]  # fmt: skip
    differ = plan.problem.counts != "equal"
    if (ours or differ) and (problem := _not_as_built(plan)):
        fail(problem, ours[0] if ours else "")


def _check_size(plan: Plan) -> None:
    """Refuse a plan that no machine has memory for, or whose proof would take minutes.

    What is unrolled grows with ranks squared.
    """
    refuse_vast(plan)
    ranks = plan.problem.ranks
    split = {b.name for b in plan.buffers if b.split and b.holds != "own"}
    boxes = 0
    for step in plan.steps:
        boxes += len(step.waits) + len(step.posts) + (ranks if step.kind == "collective" else 2)
        for region in step.reads + step.writes:
            boxes += (len(region.shards) or ranks) if region.buffer in split else 1
    if boxes * ranks > MAX_BOXES:
        problem = (
            f"{boxes} boxes on each of {ranks} ranks, more than {MAX_BOXES}: too long to prove"
        )
        raise PlanError(plan.spec, problem)


def _check_batches(plan: Plan, steps: list[Step]) -> None:
    """Matmuls of one batch may be one launch: nothing comes between them, in memory neither.

    Raises:
        PlanError: a step is in a batch in which it cannot be.
    """
    batch: list[Step] = []
    for step in steps:
        begins = "batch" not in dict(step.args) or not batch or not same_batch(batch[-1], step)
        batch = [step] if begins else [*batch, step]
        if "batch" in dict(step.args) and step.kind != "matmul":
            raise PlanError(plan.spec, f"a {step.kind} is in no batch", step=step.name)
        if begins:
            continue
        if step.after or step.waits or batch[-2].posts:
            problem = "its batch is one launch: only its first step waits, only its last posts"
            raise PlanError(plan.spec, problem, step=step.name)
        written = {region.buffer for other in batch for region in other.writes}
        if written & {region.buffer for other in batch for region in other.reads}:
            problem = "its batch is one launch: no step of it reads what another writes"
            raise PlanError(plan.spec, problem, step=step.name)


def _not_as_built(plan: Plan) -> str:
    """Why steps that are a kernel of ours, or whose counts differ, cannot run, or ''.

    What such a kernel does is declared for the whole of the operator, for equal shares and the
    memory of its group; and where counts differ, the proof is that of equal ones. So they stand
    only as their family has them.
    """
    try:
        want = build(plan.problem, plan.spec)
    except InputError as error:
        return str(error)
    found = (plan.steps, plan.buffers, plan.lanes)
    if found not in ((b.steps, b.buffers, b.lanes) for b in (want, lane_for_each_peer(want))):
        what = "a kernel of ours, or a step whose counts differ,"
        return f"{what} stands only in the plan {want.spec!r} as it is built"
    return ""


def _misuse(plan: Plan, step: Step) -> str:
    """Why a step cannot run, or ''."""
    if step.kind == "opaque":
        peers = any(region.at for region in step.reads + step.writes)
        if plan.problem.operation.families or peers or step.waits or step.posts:
            return "an opaque step stands in a pipeline, on this rank, and signals nobody"
        return ""
    return _misplaced(plan, step) or misuse_of_activation(plan, step) or _misfit(plan, step)


def _misplaced(plan: Plan, step: Step) -> str:
    """Why a step cannot run on its lane, or cannot reach what it names, or ''."""
    engine = plan.lane(step.lane).engine
    sources = [region for region in step.reads if region.buffer not in VARYING]
    reads = [plan.buffer(r.buffer) for r in sources]
    writes = [plan.buffer(r.buffer) for r in step.writes]
    if step.counted and step.kind not in MAY_VARY:
        return f"a {step.kind} has boxes: it takes no counts"
    if engine != {"copy": "copy", "exchange": "nic"}.get(step.kind, "sm"):
        return f"a {step.kind} cannot run on lane {step.lane!r}, whose engine is {engine}"
    if (step.kind == "barrier") == bool(step.writes):
        return "a barrier moves no data, every other kind writes"
    places = (*(r.at for r in (*sources, *step.writes)), *(s.at for s in step.waits + step.posts))
    if plan.problem.islands > 1 and (problem := _leaves_island(plan, step, places)):
        return problem
    for region, buffer in zip((*sources, *step.writes), reads + writes, strict=True):
        if buffer.space in OWN_PROTOCOL and step.kind != "fused" and not step.arg("transport"):
            return f"uses {region.buffer!r}, which only kernels of ours keep in order"
        if buffer.space in OWN_PROTOCOL or step.kind == "fused":
            continue
        if region.at and step.kind != "copy":
            return f"reaches {region.buffer!r} on a peer: only copies do"
        if region.at and buffer.space != "symmetric":
            return f"reaches {region.buffer!r} on a peer, but it is not symmetric"
        users = buffer.space in ("input", "output")
        if step.kind == "copy" and users and not buffer.split:
            return f"copies {region.buffer!r}, whose strides are the user's"
        if plan.problem.experts and region.buffer == "w" and _spans(region, plan.problem):
            return "takes more than one expert's weight"
    if any(buffer.space == "input" for buffer in writes):
        return "writes to an input"
    return ""


def _leaves_island(plan: Plan, step: Step, places: tuple[Peer, ...]) -> str:
    """Why a step reaches memory that is not there, or ''."""
    if plan.peers != "grid" and any(places):
        return "names peers without their islands: the peers of a plan of several are a grid"
    if any(at and at[0] for at in places):
        return "reaches another island, which has no memory here: an exchange does"
    waits = step.spins and step.kind != "fused"  # of a kernel of ours all peers are named
    return "is a kernel that its peers wait in, on other islands" if waits else ""


def _misuse_of_exchange(plan: Plan, step: Step, buffers: list[Buffer]) -> str:
    to, islands = step.arg("to"), plan.problem.islands
    if plan.peers != "grid" or not (type(to) is int and 0 < to < islands):
        return f"an exchange is with 1 to {islands - 1} islands on, of a grid, got {to!r}"
    if len(buffers) != 2 or len({b.dtype for b in buffers}) != 1:
        return "an exchange reads one region, writes another, and keeps the dtype"
    lanes = {s.lane for s in plan.steps if s.kind == "exchange"}
    return "exchanges are on one lane: their order is that of all ranks" if len(lanes) > 1 else ""


def _misfit(plan: Plan, step: Step) -> str:
    """Why what a step reads and writes does not fit its kind, or ''."""
    reads = [plan.buffer(r.buffer) for r in step.reads if r.buffer not in VARYING]
    writes = [plan.buffer(r.buffer) for r in step.writes]
    bias = bool(step.arg("bias"))
    if bias and step.kind not in ("matmul", "move", "reduce"):
        return f"a {step.kind} adds no bias"
    if step.arg("contract", "rows") != "rows" or (step.arg("contract") and step.kind != "matmul"):
        return f"a {step.kind} contracts over {step.arg('contract')!r}: a matmul may, over 'rows'"
    operands = reads[:-1] if bias else reads
    dtypes = [(a.dtype, b.dtype) for a, b in zip(operands, writes, strict=False)]
    own = plan.problem.dtype
    if plan.problem.scales and step.kind == "matmul":
        return misuse_of_scales(plan, step, operands, writes[0].dtype)
    match step.kind:
        case "copy" | "spread" | "fold" if not dtypes or any(a != b for a, b in dtypes):
            return f"a {step.kind} keeps the dtype"
        case _ if step.arg("scales"):
            return f"a {step.kind} of {own} has no scales"
        case "matmul" if len(operands) != 1 + step.weights + step.accumulates:
            return "a matmul reads x, w and, to accumulate, one sum; gated, two weights"
        case "matmul" if {b.dtype for b in operands[: 1 + step.weights]} != {own}:
            return f"a matmul multiplies {own}"
        case "matmul" if step.accumulates and operands[-1].dtype != writes[0].dtype:
            return f"adds to {operands[-1].dtype} in {writes[0].dtype}"
        case "matmul" if step.accumulates and writes[0].dtype != "float32" and _is_cut(step):
            return f"accumulates in {writes[0].dtype}: every pass would round"
        case "matmul" if bias and (step.accumulates or writes[0].dtype != own):
            return "adds a bias to a sum that is not yet rounded: a move or a reduce does"
        case "move" if len(operands) != 1:
            return "a move reads one region"
        case "reduce" if not operands:
            return "a reduce reads at least one region"
        case "reduce" if (
            writes[0].space != "output" and writes[0].dtype != "float32" and plan.peers != "grid"
        ):
            return f"sums into {writes[0].dtype}, which a later step would round again"
        case "exchange":
            return _misuse_of_exchange(plan, step, reads + writes)
        case "collective":
            return _misuse_of_collective(plan, step, reads + writes)
        case kind if kind in ATTENTION:
            return _misuse_of_attention(plan, step, reads, writes)
        case _:
            return ""


def _is_cut(step: Step) -> bool:
    """Whether a matmul sums over a part of what one product sums over."""
    x, w = step.reads[:2]
    return bool(step.arg("contract") or x.cols or w.rows)


def _misuse_of_collective(plan: Plan, step: Step, buffers: list[Buffer]) -> str:
    want = step.arg("collective")
    sources = tuple(region for region in step.reads if region.buffer not in VARYING)
    if want not in plan.problem.operation.collectives:
        return f"has no collective {want!r}"
    if plan.problem.tables:
        return ""  # it stands behind a kernel of ours, and so only as its family has it
    if want == "all_reduce":
        return _misuse_of_all_reduce(plan, step, buffers)
    regions, buffers = sources + step.writes[:1], buffers[: len(sources) + 1]
    # by owner or by expert: the library's has a pass beside it that puts rows in order
    chunks = (1, plan.problem.experts) if want == "all_to_all" else (1,)
    whole = all(
        r == Region(r.buffer) and b.chunks in chunks for r, b in zip(regions, buffers, strict=True)
    )
    holds = {"all_gather": ["own", "all"], "reduce_scatter": ["all", "own"]}.get(
        str(want), ["all", "all"]
    )
    if [b.split and b.holds for b in buffers] != holds or not whole:
        return f"a collective {want} takes whole buffers, from {holds[0]!r} to {holds[1]!r}"
    if len({(b.dtype, b.shape) for b in buffers}) != 1 or buffers[0].shape[0] != plan.problem.m:
        return f"a collective {want} keeps columns and dtype of all {plan.problem.m} rows"
    return ""


def _spans(region: Region, p: Problem) -> bool:
    """Whether rows of the stacked weights are of more than one of them."""
    start, stop = region.rows or (0, p.experts * p.k)
    return stop > start and start // p.k != (stop - 1) // p.k


def _misuse_of_attention(plan: Plan, step: Step, reads: list[Buffer], writes: list[Buffer]) -> str:
    forward = step.kind == "attention"
    least, made, targets = (3, 2, 2) if forward else (6, 3, 1)
    added = step.reads[least:]
    if len(writes) != made or len(reads) < least or added not in ((), step.writes[:targets]):
        what = "q, k, v and its targets, y and lse" if forward else "q, k, v, dy, y, lse and dq"
        return f"an {step.kind} reads {what}, the last to add to them, and writes {made} regions"
    if not plan.problem.head_dim:
        return f"an {step.kind} needs heads, which the op has none of"
    lse = (writes if forward else reads[5:])[1 if forward else 0]
    if {b.dtype for b in reads[: 5 if not forward else 3]} != {plan.problem.dtype}:
        return f"an {step.kind} is of {plan.problem.dtype}"
    if lse.dtype != "float32":
        return f"a log-sum-exp is float32, got {lse.dtype}"
    if added and writes[0].dtype != "float32" and (not forward or writes[0].space != "output"):
        return f"adds up in {writes[0].dtype}: every pass would round"
    return ""


def _misuse_of_all_reduce(plan: Plan, step: Step, buffers: list[Buffer]) -> str:
    regions, buffers = step.reads + step.writes[:1], buffers[: len(step.reads) + 1]
    whole = all(r == Region(r.buffer) for r in regions)
    if not whole or any(b.split and b.holds != "all" for b in buffers):
        return "a collective all_reduce takes whole buffers"
    if len(step.reads) != 1 or len({(b.dtype, b.shape) for b in buffers}) != 1:
        return "a collective all_reduce takes one buffer, and keeps shape and dtype"
    return ""
