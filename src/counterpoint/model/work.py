"""What each step of a plan takes on a machine, by the closed forms of `Costs`."""

from collections import Counter
from typing import NamedTuple

from counterpoint.attention.plan_seconds import attention_s
from counterpoint.costs import Collective, Tiles, own_matmul
from counterpoint.errors import PlanError
from counterpoint.machine import LinkSpec, Machine
from counterpoint.plan.activated import one_kernel
from counterpoint.plan.bind import BoundStep, Box, Part, Program
from counterpoint.plan.launches import Run, batches, runs
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan
from counterpoint.problem import ITEM_BYTES
from counterpoint.schedules.expected_rows import once, share
from counterpoint.schedules.islands import all_to_all_s
from counterpoint.schedules.makespan import LOCAL_COPY, PIECE_S


class Work(NamedTuple):
    """What a step takes: seconds by itself, and the factor on them while a copy is under way."""

    seconds: float = 0.0
    beside_copy: float = 1.0


def works(program: Program, machine: Machine, tiles: Tiles) -> list[Work]:
    """Of each step of one rank; the first step of a launch takes the time of all.

    Args:
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    seconds = [0.0] * len(program.steps)
    for first, *rest in batches(program):
        seconds[first] = work_s(
            program.steps[first], program.plan, machine, tiles, batch=1 + len(rest)
        )
    matmuls = [bound.step.kind == "matmul" for bound in program.steps]
    matmuls_s = sum(s for s, is_matmul in zip(seconds, matmuls, strict=True) if is_matmul)
    settling = machine.costs.settling(matmuls_s)
    beside_copy = machine.costs.beside_copy(matmuls_s)
    return [Work(s * settling, beside_copy) if is_matmul else Work(s)
            for s, is_matmul in zip(seconds, matmuls, strict=True)]  # fmt: skip


def work_s(bound: BoundStep, plan: Plan, machine: Machine, tiles: Tiles, batch: int = 1) -> float:
    """Seconds of a step of one rank by itself, clocks not yet lowered.

    Args:
        tiles: the matmul library's tile for (rows, n, k), where it is known.
        batch: matmuls like this one that are one launch.
    """
    costs = machine.costs
    match bound.step.kind:
        case "barrier":
            return costs.barrier_s if bound.step.posts else costs.kernel_s
        case "matmul":
            return sum(
                _matmul_s(bound, run, plan, machine, tiles, batch) for run in runs(bound, plan)
            )
        case "copy":
            return _copies_s(bound, plan, machine)
        case "attention" | "attention_backward":
            return _attention_s(bound, plan, machine)
        case "exchange":
            nic, (part,) = nic_of(plan, machine), bound.parts
            longer = max(_num_bytes(plan, box) for box in (*part.reads, part.write))
            return nic.latency_s + longer / nic.bytes_per_s
        case "collective":
            return _collective_s(bound, plan, machine)
        case "spread" | "fold" if bound.step.routed:
            return costs.memory_s(_routed_bytes(bound, plan))
        case "fused":
            return _fused_s(bound, plan, machine)
        case _:
            return sum(
                costs.memory_s(sum(_num_bytes(plan, box) for box in (*part.reads, part.write)))
                for part in bound.parts
            )


def nic_of(plan: Plan, machine: Machine) -> LinkSpec:
    """What reaches other islands.

    Raises:
        PlanError: the machine has nothing of the kind.
    """
    if machine.nic is None:
        raise PlanError(plan.spec, f"goes to other islands, and {machine.name} has no nic")
    return machine.nic


def _matmul_s(
    bound: BoundStep, run: Run, plan: Plan, machine: Machine, tiles: Tiles, batch: int
) -> float:
    part, step, p = run.part, bound.step, plan.problem
    rows, n = part.write.shape
    k = part.reads[0].shape[0 if step.arg("contract") == "rows" else 1]
    costs, weights = machine.costs, step.weights
    # two products of one kernel share its tiles as one of all their columns does
    together = bool(step.arg("activation")) and one_kernel(p, rows, n, machine.sms.count)
    columns, times = (n * weights, 1) if together else (n, weights)
    seconds = times * costs.matmul_s(
        rows,
        columns,
        k,
        p.operand_bytes,
        machine.sms,
        tiles.get((rows, columns, k)),
        again=_again(bound, part, plan) or run.times > 1,
        count=batch * run.times,
    )
    if plan.problem.invariant:
        seconds *= own_matmul(rows)
    if step.arg("activation") and not together:
        seconds += costs.memory_s((1 + weights) * _num_bytes(plan, part.write))
    # a sum that it adds to is read once the products are there; one in fp32 is written then, too
    passes = bound.step.accumulates + (plan.buffer(part.write.buffer).dtype != p.dtype)
    return seconds + passes * _num_bytes(plan, part.write) / costs.hbm_bytes_per_s


def _attention_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Of the library, and a pass over what its results are merged into or added to."""
    first, costs, seconds = bound.step.writes[0].buffer, machine.costs, 0.0
    backward = bound.step.kind == "attention_backward"
    for part in bound.parts:
        if part.write.buffer != first:
            continue
        (queries, cols), (keys, _) = part.reads[0].shape, part.reads[1].shape
        seconds += attention_s(machine, queries, keys / (1 + part.diagonal), cols,
                               backward=backward)  # fmt: skip
        if bound.step.accumulates:
            y_bytes = _num_bytes(plan, part.write)
            seconds += costs.memory_s(2 * y_bytes + _num_bytes(plan, part.reads[0]))
    return seconds


def _again(bound: BoundStep, part: Part, plan: Plan) -> bool:
    """Whether a matmul before this one had all of the same w."""
    first = next(step for step in plan.steps if step.kind == "matmul")
    weight = part.reads[1]
    whole = weight.shape == plan.buffer(weight.buffer).shape
    if not whole or bound.step.arg("contract") == "rows":
        return False
    return bound.step.name != first.name or part is not bound.parts[0]


def _collective_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Of the whole buffer, what the busiest rank receives: see Problem.link_bytes."""
    name, p, costs = bound.step.arg("collective"), plan.problem, machine.costs
    if exchange_s := p.operation.exchange_s:
        return exchange_s(p, machine)
    gathers = name == "all_gather"
    whole = (bound.step.writes if gathers else bound.step.reads)[0].buffer
    whole_bytes = plan.buffer_bytes(plan.buffer(whole))
    rows = p.m - min(p.rows) if gathers else (p.ranks - 1) * max(p.rows)
    received = int(whole_bytes * share(p, whole)) * rows // max(p.m, 1)
    if name == "all_reduce":  # scattered and gathered
        received = 2 * whole_bytes * (p.ranks - 1) // p.ranks
    if bound.step.arg("transport") == "words":
        return costs.direct_s + received / costs.direct_bytes_per_s
    if name == "all_to_all":
        # as much comes as in an all-gather; of several experts, rows are put in order
        in_order = p.experts == 1 or p.by_routes  # of routes it is a step of its own
        pass_s = 0.0 if in_order else costs.memory_s(2 * whole_bytes)
        seconds = costs.collective_s("all_gather", received)
        if p.islands > 1:
            between_s = all_to_all_s(p, nic_of(plan, machine), received)
            seconds = max(seconds, costs.all_gather_s + between_s)
        return seconds + pass_s
    if p.islands > 1:  # a ring by the NICs of all ranks
        nic = nic_of(plan, machine)
        each = nic.collective_bytes_per_s or nic.bytes_per_s
        through = min(costs.collective_bytes_per_s, each * (p.ranks // p.islands))
        return costs.all_gather_s + p.islands * nic.latency_s + received / through
    kind: Collective = "all_gather" if gathers else "reduce_scatter"
    return costs.collective_s(kind, received)


def _fused_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    kernel = str(bound.step.arg("kernel"))
    predict = operation_of(kernel).fused_s
    if predict is None:
        raise PlanError(plan.spec, f"no time is known of kernel {kernel!r}", step=bound.step.name)
    return predict(plan.problem, bound.step, machine)


def _copies_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Of a batch of copies, one after another; on a mesh each peer has a link, and a lane, of its
    own.
    """
    costs, seconds = machine.costs, 0.0
    reached = set[tuple[int, int]]()
    for run in runs(bound, plan):
        source, target = run.part.reads[0], run.part.write
        cols = source.c1 - source.c0
        buffer = plan.buffer(source.buffer)
        row_bytes = cols * ITEM_BYTES[buffer.dtype] if cols < buffer.shape[1] else 0
        num_bytes = _num_bytes(plan, target) * run.times
        if run.times > 1:
            row_bytes = _num_bytes(plan, target)
        peers = {source.rank, target.rank}
        if len(peers) == 1:
            num_bytes = int(num_bytes / LOCAL_COPY)
        elif machine.link.topology == "mesh":
            num_bytes *= machine.num_devices - 1
        peer = source.rank, target.rank
        if bound.step.counted and peer in reached:  # a further one of its batch
            seconds += PIECE_S + num_bytes / costs.copy_bytes_per_s
            continue
        reached.add(peer)
        seconds += costs.copy_s(num_bytes, row_bytes)
    return seconds


def _num_bytes(plan: Plan, box: Box) -> int:
    rows, cols = box.shape
    num_bytes = rows * cols * ITEM_BYTES[plan.buffer(box.buffer).dtype]
    p = plan.problem
    return round(num_bytes * share(p, box.buffer)) if p.top_k else num_bytes


def _routed_bytes(bound: BoundStep, plan: Plan) -> int:
    """What a spread reads and writes again for each place, or a fold reads and sums."""
    p = plan.problem
    read = sum(_num_bytes(plan, box) for part in bound.parts for box in part.reads)
    written = sum(_num_bytes(plan, part.write) for part in bound.parts)
    if bound.step.kind == "spread":
        return 2 * written
    if plan.buffer(bound.step.writes[0].buffer).space == "output":  # a row of each token
        written = round(written * once(p, p.ranks))
    return read + written


def receiver(bound: BoundStep) -> int:
    """The peer that more than half of a copy step goes to; -1 for none, and for other steps.

    The others of a batch then count as if they went there too.
    """
    cells: Counter[int] = Counter()
    for part in bound.parts if bound.step.kind == "copy" else ():
        if part.reads[0].rank != part.write.rank:
            rows, cols = part.write.shape
            cells[part.write.rank] += rows * cols
    if not cells:
        return -1
    peer = max(cells, key=cells.__getitem__)
    return peer if 2 * cells[peer] > cells.total() else -1
