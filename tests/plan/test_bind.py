"""From regions to boxes: what is merged, where chunks, slots and counted blocks lie."""

from dataclasses import replace
from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.bind import Arrival, Box, Part, bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Signal, Step
from counterpoint.problem import Problem

ROWS = (2, 5, 3, 1)
STARTS = (0, 2, 7, 10, 11)
GATHER = Problem("all_gather_matmul", 11, 6, 8, 4, rows=ROWS)
SCATTER = Problem("matmul_reduce_scatter", 11, 6, 8, 4, rows=ROWS)
LANES = (Lane("compute", "sm"), Lane("signal", "sm"), Lane("copy", "copy"))


def parts_of(plan: Plan, rank: int, name: str) -> tuple[Part, ...]:
    return next(b for b in bind(plan, rank).steps if b.step.name == name).parts


def rows_of(boxes: tuple[Box, ...] | list[Box]) -> list[tuple[int, int]]:
    return [(box.r0, box.r1) for box in boxes]


def one_step(read: Region, write: Region, *buffers: Buffer, peers: str = "ring", **kw: Any) -> Plan:
    """A plan that moves one region into another."""
    step = Step("s", "compute", "move", (read,), (write,), **kw)
    problem = GATHER
    return Plan(problem, "mine", "", peers, buffers, LANES, (step,))  # type: ignore[arg-type]


# --- boxes of a group


@pytest.mark.parametrize("rank", range(4))
def test_an_xor_group_is_one_box(rank: int):
    plan = build(GATHER, "graded 1/1/2 xor")
    (part,) = parts_of(plan, rank, "matmul_2")
    far = sorted({rank ^ 2, rank ^ 3})
    assert rows_of([part.write]) == [(STARTS[far[0]], STARTS[far[1] + 1])]
    assert part.reads[0] == Box(rank, "full", 0, part.write.r0, part.write.r1, 0, 8)
    assert part.reads[1] == Box(rank, "w", 0, 0, 8, 0, 6)


def test_a_ring_group_that_wraps_is_two_boxes():
    plan = build(GATHER, "graded 1/1/2 ring")
    rows = [rows_of([p.write for p in parts_of(plan, rank, "matmul_2")]) for rank in range(4)]
    # shards me - 2 and me - 3, in the order of ranks
    assert rows == [[(2, 10)], [(7, 11)], [(0, 2), (10, 11)], [(0, 7)]]
    for part in parts_of(plan, 2, "matmul_2"):
        assert rows_of([part.reads[0]]) == rows_of([part.write])
        assert part.reads[1].shape == (8, 6)


def test_an_empty_block_between_two_does_not_part_them():
    problem = Problem("all_gather_matmul", 5, 6, 8, 4, rows=(2, 0, 3, 0))
    plan = build(problem, "graded 4")
    for rank in range(4):
        (part,) = parts_of(plan, rank, "matmul_0")
        assert rows_of([part.write]) == [(0, 5)]
    push = build(problem, "graded 1/3")
    assert parts_of(push, 1, "push_1") == ()  # nothing to copy, but the signal is posted
    assert bind(push, 1).steps[2].posts == (Arrival(5, 2),)


def test_what_is_shared_is_not_joined_by_chance():
    """Blocks that follow one another in y, of an x that does not: two parts."""
    buffers = (
        Buffer("x", (11, 8), "bfloat16", "input", split=True, holds="own"),
        Buffer("y", (4, 6), "bfloat16", "output", split=True),
        Buffer("one", (1, 6), "bfloat16", "scratch"),
    )
    problem = Problem("all_gather_matmul", 4, 6, 8, 4)
    step = Step("s", "compute", "move", (Region("one"),), (Region("y"),))
    plan = Plan(problem, "mine", "", "ring", buffers, LANES, (step,))
    parts = bind(plan, 0).steps[0].parts
    assert [part.write.shape for part in parts] == [(1, 6)] * 4
    assert {part.reads for part in parts} == {(Box(0, "one", 0, 0, 1, 0, 6),)}


# --- how buffers are stored


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("i", range(4))
def test_a_chunk_of_every_block_is_one_box_where_stored_chunk_major(rank: int, i: int):
    plan = build(GATHER, "uniform_fused_1d ring")
    (part,) = parts_of(plan, rank, f"matmul_{i}")
    sizes = [[n * (j + 1) // 4 - n * j // 4 for n in ROWS] for j in range(4)]
    start = sum(map(sum, sizes[:i]))
    assert rows_of([part.reads[0], part.write]) == [(start, start + sum(sizes[i]))] * 2
    # my chunk lands behind those of the ranks before me, on every rank
    pushed = parts_of(plan, rank, f"push_{i}")
    mine = start + sum(sizes[i][:rank])
    assert all(rows_of([p.write]) == [(mine, mine + sizes[i][rank])] for p in pushed)
    assert len(pushed) == (4 if sizes[i][rank] else 0)
    # and is scattered into its rows of every block of y
    scattered = parts_of(plan, rank, f"scatter_{i}")
    rows = [row for p in scattered for row in range(p.write.r0, p.write.r1)]
    ends = [(s + n * i // 4, s + n * (i + 1) // 4) for s, n in zip(STARTS, ROWS, strict=False)]
    assert rows == [row for a, b in ends for row in range(a, b)]


@pytest.mark.parametrize("rank", range(4))
def test_a_partial_goes_into_the_slot_of_its_sender(rank: int):
    plan = build(SCATTER, "shard_p2p ring")
    for d in (1, 2, 3):
        owner = (rank + d) % 4
        (part,) = parts_of(plan, rank, f"push_{d}")
        assert part.reads == (Box(rank, "partial", 0, STARTS[owner], STARTS[owner + 1], 0, 6),)
        assert part.write == Box(owner, "slots", rank, 0, ROWS[owner], 0, 6)
    (total,) = parts_of(plan, rank, "reduce")
    assert [box.slot for box in total.reads[:-1]] == [(rank - d) % 4 for d in (1, 2, 3)]
    assert total.reads[-1] == Box(rank, "partial", 0, STARTS[rank], STARTS[rank + 1], 0, 6)
    assert total.write == Box(rank, "y", 0, 0, ROWS[rank], 0, 6)


def test_slices_of_k_keep_the_whole_group_in_one_box():
    plan = build(GATHER, "uniform_fused_2d ring")
    (part,) = parts_of(plan, 1, "matmul_1")
    assert part.reads == (
        Box(1, "full", 0, 0, 11, 2, 4), Box(1, "w", 0, 2, 4, 0, 6), Box(1, "sum", 0, 0, 11, 0, 6)
    )  # fmt: skip
    assert part.write == part.reads[2]


@pytest.mark.parametrize("rank", range(4))
def test_a_sum_over_rows_reads_all_of_them_at_once(rank: int):
    wgrad = Problem("all_gather_matmul_wgrad", 11, 6, 8, 4, rows=ROWS)
    (part,) = parts_of(build(wgrad, "sliced ring chunks=2"), rank, "matmul_1")
    assert part.reads == (Box(rank, "full", 0, 0, 11, 4, 8), Box(rank, "dy", 0, 0, 11, 0, 6))
    assert part.write == Box(rank, "dw", 0, 4, 8, 0, 6)
    # blocks without rows are no gap
    sparse = Problem("all_gather_matmul_wgrad", 5, 6, 8, 4, rows=(0, 2, 0, 3))
    plan = build(sparse, "serial")
    few = tuple(Region(name, shards=((1,), (3,))) for name in ("full", "dy"))
    matmul = replace(plan.steps[1], reads=few)
    (part,) = parts_of(replace(plan, steps=(plan.steps[0], matmul)), 0, "matmul")
    assert rows_of(part.reads) == [(0, 5), (0, 5)]


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (("full", "dy"), "contracts over rows, so it takes one box: its part of full on rank 0 is"),
        (
            ("dy", "full"),
            "contracts over rows, so it takes one box: its part of dy on rank 0 is se",
        ),
    ],
)
def test_a_sum_over_rows_of_several_boxes_is_refused(reads: tuple[str, str], message: str):
    plan = build(Problem("all_gather_matmul_wgrad", 11, 6, 6, 4, rows=ROWS), "serial")
    ends = tuple(Region(name, shards=((3,), (0,))) for name in reads)
    split = replace(plan, steps=(plan.steps[0], replace(plan.steps[1], reads=ends)))
    with pytest.raises(PlanError, match=f"step matmul: {message}"):
        bind(split, 0)
    bind(split, 1)  # they follow one another there
    parts = Region("full", chunk=(0, 2)), Region("dy", chunk=(0, 2))
    with pytest.raises(PlanError, match="its part of full on rank 1 is several"):
        bind(replace(plan, steps=(plan.steps[0], replace(plan.steps[1], reads=parts))), 1)


def test_a_collective_is_one_part_even_without_rows():
    problem = Problem("all_gather_matmul", 4, 6, 8, 2, rows=(0, 4))
    for rank in range(2):
        (part,) = parts_of(build(problem, "serial"), rank, "gather")
        assert part.reads == (Box(rank, "x", 0, 0, (0, 4)[rank], 0, 8),)
        assert part.write == Box(rank, "full", 0, 0, 4, 0, 8)


def test_ring_and_xor_peers():
    for peers, target in (("ring", [3, 0, 1, 2]), ("xor", [3, 2, 1, 0])):
        plan = build(GATHER, f"shard_p2p {peers}")
        pushed = [parts_of(plan, rank, "push_3")[0].write.rank for rank in range(4)]
        assert pushed == target
        for rank in range(4):
            posts = [a for b in bind(plan, rank).steps for a in b.posts]
            waits = [a for b in bind(plan, rank).steps for a in b.waits]
            assert {a.rank for a in posts} == {a.rank for a in waits} == set(range(4)) - {rank}


def test_the_opening_barrier_is_found_and_programs_are_cached():
    plan = build(GATHER, "graded 1/3")
    assert bind(plan, 0).opens == 0
    assert bind(plan, 0) is bind(plan, 0)
    assert bind(build(GATHER, "serial"), 0).opens == -1


# --- what is refused

X = Buffer("x", (11, 8), "bfloat16", "input", split=True, holds="own")
FULL = Buffer("full", (11, 8), "bfloat16", "scratch", split=True)
PLAIN = Buffer("plain", (4, 8), "bfloat16", "scratch")
SHORT = Buffer("short", (10, 8), "bfloat16", "scratch", split=True)
CHUNKS = Buffer("chunks", (11, 8), "bfloat16", "scratch", split=True, chunks=2)


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        (Region("x"), Region("y"), "no buffer 'y'"),
        (Region("x"), Region("full", cols=(0, 9)), r"cols \(0, 9\) are outside 0..8"),
        (Region("x"), Region("full", cols=(5, 4)), r"cols \(5, 4\) are outside 0..8"),
        (Region("plain", rows=(-1, 2)), Region("full"), r"rows \(-1, 2\) are outside 0..4"),
        (Region("plain", shards=((0,),)), Region("full"), "plain is not split: it has no shards"),
        (Region("plain", chunk=(0, 2)), Region("full"), "plain is not split: it has no shards"),
        (Region("x", shards=((0,),)), Region("full"), "x holds one block: it has no shards"),
        (Region("full", rows=(0, 2)), Region("full"), "full is split: name blocks by shards"),
        (Region("full", chunk=(2, 2)), Region("full"), "full has no chunk 2 of 2"),
        (Region("full", chunk=(-1, 2)), Region("full"), "full has no chunk -1 of 2"),
        (Region("chunks"), Region("full"), "chunks has no chunk 0 of 1"),
        (Region("full", shards=((1,), (5,))), Region("full"), "full names a shard twice"),
        (Region("full", shards=((1, 1),)), Region("full"), r"peer \(1, 1\) has 2 axes"),
        (Region("short"), Region("full"), "short is split, so it needs 11 rows"),
        (Region("x"), Region("full"), r"shapes \[\(2, 8\)\] -> \(5, 8\) do not fit a move"),
        (Region("full", shards=((0,), (1,))), Region("full"), r"pairs regions of \[2, 4\] blocks"),
    ],
)
def test_a_region_that_does_not_fit_is_refused(read: Region, write: Region, message: str):
    plan = one_step(read, write, X, FULL, PLAIN, SHORT, CHUNKS)
    with pytest.raises(PlanError, match=f"^plan mine, step s: {message}"):
        bind(plan, 0)


def test_a_name_with_a_colon_keeps_its_message():
    plan = replace(one_step(Region("x"), Region("y"), X), family="my: plan", variant="v2: fast")
    with pytest.raises(PlanError, match=r"^plan my: plan v2: fast, step s: no buffer 'y'$"):
        bind(plan, 0)


def test_steps_of_a_wrong_form_are_refused():
    plan = one_step(Region("x"), Region("x"), X, FULL)
    two = replace(plan.steps[0], writes=(Region("x"), Region("x")))
    with pytest.raises(PlanError, match="step s: a move writes one region, got 2"):
        bind(replace(plan, steps=(two,)), 0)
    copy = replace(two, kind="copy", lane="copy")
    with pytest.raises(PlanError, match="step s: copies 1 regions into 2"):
        bind(replace(plan, steps=(copy,)), 0)


def test_ranks_and_xor_peers_outside_the_group_are_refused():
    plan = one_step(Region("x"), Region("x"), X, peers="xor", posts=(Signal(1, (4,)),))
    with pytest.raises(PlanError, match="step s: XOR peer 4 is outside 4 ranks"):
        bind(plan, 0)
    three = replace(plan, problem=Problem("all_gather_matmul", 11, 6, 8, 3, rows=(5, 5, 1)))
    with pytest.raises(PlanError, match="step s: XOR peers need a power of two of ranks, got 3"):
        bind(three, 0)
