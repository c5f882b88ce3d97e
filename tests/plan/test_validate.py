"""Plans that are wrong in one way each, and what validate says about them."""

from dataclasses import replace
from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan import validate as proof
from counterpoint.plan.families import build
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Signal, Step
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem

GATHER = Problem("all_gather_matmul", 6, 5, 4, 2)
SCATTER = Problem("matmul_reduce_scatter", 6, 5, 4, 2)
PUSH = build(GATHER, "shard_p2p ring")  # open, matmul_0, push_1, matmul_1
FUSED = build(GATHER, "uniform_fused_2d ring")
SERIAL = build(GATHER, "serial")  # gather, matmul


def changed(plan: Plan, step: str, /, **changes: Any) -> Plan:
    assert any(s.name == step for s in plan.steps)
    steps = tuple(replace(s, **changes) if s.name == step else s for s in plan.steps)
    return replace(plan, steps=steps)


def buffer_of(plan: Plan, name: str, **changes: Any) -> Plan:
    buffers = tuple(replace(b, **changes) if b.name == name else b for b in plan.buffers)
    return replace(plan, buffers=buffers)


def step_of(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def ordered(plan: Plan, *names: str) -> Plan:
    return replace(plan, steps=tuple(step_of(plan, name) for name in names))


def refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(plan)


# --- deadlock


def talking() -> Plan:
    """After the opening, b tells the peer's a, on another lane."""
    a = Step("a", "compute", "barrier", after=("open",), waits=(Signal(9, (1,)),))
    b = Step("b", "signal", "barrier", after=("open",), posts=(Signal(9, (1,)),))
    return replace(PUSH, steps=(*PUSH.steps, b, a))


def test_deadlock_by_crossed_waits():
    # matmul_1 posts only when it has ended, and waits for a push that waits for it
    plan = changed(PUSH, "push_1", waits=(Signal(8, (1,)),))
    plan = changed(plan, "matmul_1", posts=(Signal(8, (1,)),))
    refused(plan, "^plan shard_p2p ring: deadlock: .*these wait for one another: .*'push_1'")


def test_a_barrier_posts_before_it_waits():
    meet = Step("meet", "compute", "barrier", (), (), ("open",), (Signal(9, (1,)),),
                (Signal(9, (1,)),))  # fmt: skip
    validate(replace(PUSH, steps=(*PUSH.steps, meet)))


def test_deadlock_only_in_launch_order():
    validate(talking())
    # a waits for b of the other rank, and b is launched behind a: if a fills the GPU, b never runs
    names = [step.name for step in PUSH.steps]
    refused(
        ordered(talking(), *names, "a", "b"),
        "deadlock: launched in tuple order, these wait for one another: 'a' on rank 0",
    )


def test_a_copy_and_its_signal_need_no_sm():
    # launched behind a matmul_1 that fills the GPU and waits for them, they run all the same
    validate(ordered(PUSH, "open", "matmul_0", "matmul_1", "push_1"))


# --- signals

AGAIN = Step("again", "compute", "barrier", waits=(Signal(3, (1,)),))
THREE = build(Problem("all_gather_matmul", 6, 5, 4, 3), "shard_p2p ring")
BESIDE = "step push_1: signals before or beside the barrier that opens the call"


def met_by_some() -> Plan:
    """Rank r no longer hears of r - 2 that it has left the call before."""
    opens = step_of(THREE, "open")
    return changed(THREE, "open", waits=opens.waits[:1], posts=opens.posts[:1])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changed(PUSH, "push_1", posts=()),
         "step matmul_1: rank 0 waits for slot 3 from rank 1, which never posts it"),
        (changed(changed(PUSH, "matmul_1", waits=()), "matmul_1", after=("open", "push_1")),
         "step push_1: slot 3 is posted to rank 1, which never waits for it"),
        (replace(PUSH, steps=(*PUSH.steps, replace(step_of(PUSH, "push_1"), name="again"))),
         "step again: slot 3 of rank 1 is posted twice"),
        (replace(PUSH, steps=(*PUSH.steps, AGAIN)),
         "step again: slot 3 of rank 0 is waited for twice"),
        (changed(PUSH, "push_1", after=()), BESIDE),
        (changed(changed(ordered(PUSH, "matmul_0", "push_1", "matmul_1"), "push_1", after=()),
                 "matmul_1", after=()), BESIDE),
        (met_by_some(),
         "step open: opens the call, so every rank has to wait in it for every other"),
    ],
)  # fmt: skip
def test_posts_and_waits_pair_behind_the_barrier_of_all(plan: Plan, message: str):
    refused(plan, message)


# --- memory


def test_without_its_opening_barrier_a_call_writes_into_the_one_before():
    plan = replace(PUSH, steps=tuple(replace(s, after=()) for s in PUSH.steps if s.name != "open"))
    refused(plan, "step push_1: signals before or beside the barrier")
    # without any signal: serial with a copy of x to the peer, which reads it at some time
    full = buffer_of(SERIAL, "full", space="symmetric")
    push = Step("push", "copy", "copy", (Region("x"),), (Region("full", (1,), ((0,),)),))
    own = Step("own", "copy", "copy", (Region("x"),), (Region("full", shards=((0,),)),))
    plan = replace(
        full, lanes=(*SERIAL.lanes, Lane("copy", "copy")),
        steps=(own, push, replace(SERIAL.steps[1], after=("push", "own"))),
    )  # fmt: skip
    refused(plan, "uses symmetric memory before or beside the barrier that opens the call")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # my own block of full is what a peer may read in a call of another plan
        (changed(build(GATHER, "graded 2 ring"), "keep", after=()),
         "step keep: uses symmetric memory before or beside the barrier"),
        (changed(build(SCATTER, "shard_p2p ring"), "push_1", after=("open",)),
         "race: '(matmul_0|push_1)' on rank 0 and '(matmul_0|push_1)' on rank 0 read and write"),
        (changed(PUSH, "matmul_1", reads=(Region("full", shards=((0,),)), Region("w"))),
         r"'matmul_1' on rank . reads rows .:., columns 0:4 of 'full' on rank . before it is"),
        (ordered(PUSH, "open", "push_1", "matmul_1"),
         r"the user on rank . reads rows .:., columns 0:5 of 'y' on rank . before it is written"),
    ],
)  # fmt: skip
def test_memory_is_written_before_it_is_read_and_by_one(plan: Plan, message: str):
    refused(plan, message)


def two_moves(*pairs: tuple[Region, Region]) -> Plan:
    """Serial, and one copy step of those pairs over what has been gathered."""
    spare = Buffer("spare", (6, 4), "bfloat16", "scratch", split=True)
    fill = Step("fill", "compute", "move", (Region("full"),), (Region("spare"),))
    reads, writes = zip(*pairs, strict=True)
    copy = Step("copy", "copy", "copy", reads, writes, after=("fill",))
    return replace(
        SERIAL, buffers=(*SERIAL.buffers, spare), lanes=(*SERIAL.lanes, Lane("copy", "copy")),
        steps=(SERIAL.steps[0], fill, copy, replace(SERIAL.steps[1], after=("copy",))),
    )  # fmt: skip


def test_parts_of_one_step_run_in_any_order():
    full, spare = Region("full"), Region("spare")
    validate(two_moves((full, spare)))
    validate(two_moves((full, full)))
    # at once this would exchange the two; one after the other it does not
    refused(two_moves((full, spare), (spare, full)), "race: 'copy' on rank 0 and 'copy' on rank 0")


def test_a_matmul_does_not_overwrite_what_it_multiplies():
    problem = Problem("all_gather_matmul", 6, 4, 4, 2)
    plan = build(problem, "serial")
    copy = Step("matmul", "compute", "matmul", (Region("full", cols=(0, 4)), Region("w")),
                (Region("full"),))  # fmt: skip
    out = Step("out", "compute", "move", (Region("full"),), (Region("y"),))
    refused(replace(plan, steps=(plan.steps[0], copy, out)), "race: 'matmul' .*'matmul' .*'full'")


# --- values


def test_the_wrong_block_or_column_is_seen():
    plan = changed(PUSH, "matmul_0", writes=(Region("y", shards=((1,),)),))
    plan = changed(plan, "matmul_1", writes=(Region("y", shards=((0,),)),))
    message = "holds .*left_rank=1.*, the op defines .*left_rank=0"
    refused(plan, f"y of rank 0, rows 0:3, columns 0:5, {message}")
    plan = changed(FUSED, "push_0", reads=(Region("x", cols=(1, 3)),) * 2)
    refused(plan, r"step matmul_0: x and w meet at different k \(1, 0\)")


def test_a_bias_is_added_once_and_on_one_way():
    plan = build(replace(GATHER, bias=True), "shard_p2p ring")
    bare = step_of(plan, "matmul_1").reads[:2]
    refused(changed(plan, "matmul_1", reads=bare, args=()), "y of rank 0, rows 3:6, .*, the op def")

    scatter = build(replace(SCATTER, bias=True), "shard_p2p ring")
    biased = (*step_of(scatter, "matmul_1").reads, Region("bias"))
    twice = changed(scatter, "matmul_1", reads=biased, args=(("bias", 1),))
    refused(twice, r"y of rank 0, .*Row\(rank=0, .*Row\(rank=0, .*the op defines")
    refused(changed(scatter, "push_1", args=(("bias", 1),)), "step push_1: a copy adds no bias")
    only = changed(scatter, "reduce", reads=(Region("bias"),))
    refused(only, "step reduce: a reduce reads at least one region")


def test_sums_are_rounded_once():
    refused(
        buffer_of(FUSED, "sum", dtype="bfloat16"),
        "step matmul_1: accumulates in bfloat16: every pass would round",
    )
    scatter = build(SCATTER, "shard_p2p ring")
    total = Buffer("total", (SCATTER.m, SCATTER.n), "bfloat16", "scratch", split=True, holds="own")
    staged = changed(scatter, "reduce", writes=(Region("total"),))
    refused(
        replace(staged, buffers=(*staged.buffers, total)),
        "step reduce: sums into bfloat16, which a later step would round again",
    )
    fused = build(replace(GATHER, bias=True), "uniform_fused_2d ring")
    reads = (*step_of(fused, "matmul_1").reads, Region("bias"))
    refused(
        changed(fused, "matmul_1", reads=reads, args=(("bias", 1),)),
        "step matmul_1: adds a bias to a sum that is not yet rounded: a move or a reduce does",
    )


def test_dtypes():
    refused(buffer_of(SERIAL, "full", dtype="float16"), "buffer 'full' is float16: neither float32")
    refused(buffer_of(PUSH, "full", dtype="float32"), "step push_1: a copy keeps the dtype")
    wide = buffer_of(build(GATHER, "graded 2 ring"), "full", dtype="float32")
    refused(changed(wide, "push_1", kind="copy"), "step (keep|push_1): ")
    full = Buffer("wide", (6, 4), "float32", "scratch", split=True)
    move = Step("widen", "compute", "move", (Region("full"),), (Region("wide"),))
    matmul = replace(SERIAL.steps[1], reads=(Region("wide"), Region("w")))
    plan = replace(SERIAL, buffers=(*SERIAL.buffers, full), steps=(SERIAL.steps[0], move, matmul))
    refused(plan, "step matmul: a matmul multiplies bfloat16")


def backward(spec: str, op: Any = "all_gather_matmul_backward") -> Plan:
    return build(Problem(op, 6, 5, 4, 2), spec)


def test_rows_that_do_not_belong_together_are_seen():
    """Equal shards: by their shapes x of one rank fits dy of another."""
    plan = build(Problem("all_gather_matmul_wgrad", 6, 5, 4, 2), "serial")
    for x, dy in ((((0,),), ((1,),)), (((1,),), ((0,),))):
        reads = (Region("full", shards=x), Region("dy", shards=dy))
        refused(changed(plan, "matmul", reads=reads), "dw of rank 0, .*, holds .*shift=.*, the op")
    # and a sum over some rows is no sum over all
    reads = (Region("full", shards=((0,),)), Region("dy", shards=((0,),)))
    refused(changed(plan, "matmul", reads=reads), "dw of rank 0, rows 0:4, columns 0:5, holds")


def test_a_matmul_that_is_not_transposed_is_seen():
    # all square: 6 rows, n and k
    plan = build(Problem("all_gather_matmul_wgrad", 6, 6, 6, 1), "serial")
    validate(plan)
    refused(changed(plan, "matmul", args=()), "dw of rank 0, .*, holds .*transposed=False, .*True")


def test_all_outputs_are_looked_at():
    plan = backward("serial")
    swapped = changed(plan, "dgrad", reads=(Region("dy", shards=((1,), (0,))), Region("wt")))
    validate(swapped)  # in the order of absolute ranks all the same
    half = changed(plan, "wgrad", writes=(Region("dw", rows=(0, 2)),),
                   reads=(Region("full", cols=(0, 2)), Region("dy")))  # fmt: skip
    refused(half, "the user on rank . reads rows 2:4, columns 0:5 of 'dw' on rank . before it is")
    half = changed(plan, "wgrad", writes=(Region("dw", rows=(0, 2)),),
                   reads=(Region("full", cols=(2, 4)), Region("dy")))  # fmt: skip
    rest = replace(step_of(half, "wgrad"), name="rest", writes=(Region("dw", rows=(2, 4)),),
                   reads=(Region("full", cols=(0, 2)), Region("dy")))  # fmt: skip
    refused(replace(half, steps=(*half.steps, rest)), "dw of rank 0, rows 0:2, .*, holds .*dr=2")
    several = build(Problem("all_gather_matmul", 6, 6, 4, 2, splits=(3, 3)), "serial")
    first = step_of(several, "matmul_w0").reads
    refused(changed(several, "matmul_w1", reads=first), "y1 of rank 0, .*'w0'.*, the op .*'w1'")


def test_wgrad_beside_the_gather_of_x_is_seen():
    plan = backward("side_by_side ring")
    refused(
        changed(plan, "wgrad", after=("open",)),
        "race: '(x_keep|wgrad)' on rank . and '(x_keep|wgrad)' on rank . read and write 'full'",
    )
    scatter = backward("graded 1/1", "matmul_reduce_scatter_backward")
    refused(changed(scatter, "wgrad", after=()), "race: '(keep|wgrad)' on rank .*'full'")


# --- form


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        ("wgrad", (("contract", "cols"),), "a matmul contracts over 'cols': a matmul may, over"),
        ("gather", (("contract", "rows"),), "a collective contracts over 'rows': a matmul may"),
        ("wgrad", (), r"pairs regions of \[2\] blocks"),
        ("dgrad", (("contract", "rows"),), r"shapes .* -> \(6, 4\) do not fit a matmul"),
    ],
)
def test_only_matmuls_contract_and_only_over_rows(step: str, args: Any, message: str):
    refused(changed(backward("serial"), step, args=args), f"step {step}: {message}")


@pytest.mark.parametrize("name", ["wt", "dw"])
def test_copies_touch_nothing_whose_strides_are_the_user_s(name: str):
    plan = backward("side_by_side ring")
    spare = Buffer("spare", plan.buffer(name).shape, "bfloat16", "scratch")
    pair = (Region("wt"), Region("spare")) if name == "wt" else (Region("spare"), Region("dw"))
    copy = Step("more", "copy", "copy", *((region,) for region in pair))
    plan = replace(plan, buffers=(*plan.buffers, spare), steps=(*plan.steps, copy))
    refused(plan, f"step more: copies '{name}', whose strides are the user's")


def test_scratch_is_limited():
    need = PUSH.num_bytes("scratch", "symmetric")
    assert need == 6 * 4 * 2
    validate(replace(PUSH, problem=replace(GATHER, scratch_bytes_limit=need)))
    less = replace(PUSH, problem=replace(GATHER, scratch_bytes_limit=need - 1))
    refused(less, "needs 48 bytes of scratch, scratch_bytes_limit is 47")


SPOIL = Step("spoil", "compute", "move", (Region("x"),), (Region("x"),))
OPERANDS = "inputs and outputs must"
READS = "step matmul_0: a matmul reads x, w and, to accumulate, one sum"
X, W = Region("x"), Region("w")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changed(PUSH, "matmul_1", reads=(Region("full", (1,), ((0,),)), W)),
         "step matmul_1: reaches 'full' on a peer: only copies do"),
        (buffer_of(PUSH, "full", space="scratch"),
         "step push_1: reaches 'full' on a peer, but it is not symmetric"),
        (replace(PUSH, steps=(*PUSH.steps, SPOIL)), "step spoil: writes to an input"),
        (replace(THREE, peers="xor"), "XOR peers need a power of two of ranks, got 3"),
        *((changed(PUSH, "matmul_0", reads=reads), READS) for reads in ((X,), (X, W, W, W), ())),
        (changed(FUSED, "round", reads=(Region("sum"),) * 2),
         "step round: a move reads one region"),
        (changed(PUSH, "open", writes=(Region("full"),)),
         "step open: a barrier moves no data, every other kind writes"),
        (buffer_of(PUSH, "y", shape=(6, 4)), f"^plan shard_p2p ring: {OPERANDS}"),
        (replace(PUSH, buffers=PUSH.buffers[1:]), OPERANDS),
        (replace(PUSH, buffers=(*PUSH.buffers, PUSH.buffers[-1])), "two buffers have one name"),
        (replace(PUSH, lanes=(*PUSH.lanes, PUSH.lanes[0])), "two lanes have one name: compute"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused(plan: Plan, message: str):
    refused(plan, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lane": "compute"}, "a copy cannot run on lane 'compute', whose engine is sm"),
        ({"kind": "move"}, "a move cannot run on lane 'copy', whose engine is copy"),
        ({"lane": "nic"}, "no lane 'nic'"),
        ({"after": ("matmul_1",)}, "is after 'matmul_1', which is no earlier step"),
        ({"after": ("push_1",)}, "is after 'push_1', which is no earlier step"),
        ({"writes": ()}, "a barrier moves no data, every other kind writes"),
        ({"reads": ()}, "a copy keeps the dtype"),
        ({"reads": (Region("z"),)}, "no buffer 'z'"),
        ({"name": "open"}, "two steps have one name: open, matmul_0, open, matmul_1"),
    ],
)
def test_a_step_that_cannot_run_is_refused(changes: dict[str, Any], message: str):
    refused(changed(PUSH, "push_1", **changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": ()}, "has no collective 0"),
        ({"args": (("collective", "reduce_scatter"),)}, "has no collective 'reduce_scatter'"),
        ({"reads": (Region("x", cols=(0, 3)),)}, "takes whole buffers, from 'own' to 'all'"),
        ({"reads": ()}, "takes whole buffers, from 'own' to 'all'"),
        ({"reads": (Region("full"),)}, "takes whole buffers, from 'own' to 'all'"),
        ({"writes": (Region("full", shards=((1,), (0,))),)}, "takes whole buffers"),
        ({"writes": (Region("y"),)}, "keeps columns and dtype of all 6 rows"),
    ],
)
def test_a_collective_takes_whole_buffers(changes: dict[str, Any], message: str):
    refused(changed(SERIAL, "gather", **changes), f"step gather: .*{message}")


def test_the_message_names_plan_step_and_call():
    with pytest.raises(PlanError) as error:
        validate(changed(PUSH, "push_1", reads=(Region("x", cols=(0, 3)),)))
    assert str(error.value).startswith("plan shard_p2p ring, step push_1: shapes [(3, 3)] -> ")


def copies(count: int) -> Plan:
    """The serial plan, whose matmul stands there so many times."""
    *rest, matmul = SERIAL.steps
    many = (replace(matmul, name=f"matmul_{i}") for i in range(count))
    return replace(SERIAL, steps=(*rest, *many))


def test_a_proof_that_would_take_minutes_is_refused():
    validate(copies(50))
    refused(copies(900), r"pairs of accesses to the same cells: too long to prove")
    refused(copies(9000), r"boxes on each of 2 ranks, more than \d+: too long to prove")
    refused(build(Problem("all_gather_matmul", 4096, 5, 4, 4096), "serial"), "too long to prove")


def test_accesses_to_other_cells_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    compared = []
    monkeypatch.setattr(proof, "_check_ordered", lambda *args: compared.append(args))
    validate(build(Problem("all_gather_matmul", 64, 5, 4, 8), "uniform_fused_1d"))
    assert len(compared) < 8 * 1024  # of 360,000 pairs of one buffer
