"""Kernels whose payload is its own flag, with all programs of all ranks in turn, in any order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from memories import GUARD, guarded, left, memories, places_of
from rankpool import RankPool
from turns import Scene, all_right, plant, shown

from counterpoint.kernels import collectives
from counterpoint.norms import kernel_all_reduce_norm, launch_norm
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.run import launch_collective
from counterpoint.run.launch import Site
from counterpoint.tensor_parallel import kernel_matmul_all_reduce, launch_fused_sum

BLOCK = 32  # words of a collective: several for each of two programs
# whether a tensor has a part for each rank before, and after
KINDS = {"reduce_scatter": (True, False), "all_gather": (False, True), "all_reduce": (True, True)}
# sizes of calls without a meeting between them: of one size, and of sizes that differ
SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    # elements of a part
    "collective": {"same": (70,) * 5, "mixed": (40, 300, 20, 300, 70)},
    # rows and columns, more rows than programs
    "norm": {"same": ((3, 24),) * 4, "mixed": ((1, 8), (5, 40), (2, 8), (5, 40), (1, 24))},
    # M (of each owner where it scatters) and N
    "sum": {"same": ((3, 32),) * 4, "mixed": ((1, 16), (4, 48), (2, 16), (4, 48), (1, 32))},
}  # fmt: skip


class Call(NamedTuple):
    """A call of all ranks.

    Args:
        half_bytes: a half of the words that it needs.
        run: on a rank, with the rank's memory.
        rooms: of its results, of each rank.
        off: ranks whose results are off.
    """

    half_bytes: int
    run: Callable[[int, Any], None]
    rooms: list[torch.Tensor]
    off: Callable[[], list[int]]


def inside(room: torch.Tensor, *shape: int) -> torch.Tensor:
    return room[GUARD:-GUARD].view(shape)


def site(plan: Plan, rank: int, memory: Any) -> Site:
    return Site(bind(plan, rank).steps[0], places_of(memory, plan), 0)


def collective(kind: str, ranks: int, part: int) -> Call:
    """To the bit; of a plan of three steps, the collective alone."""
    (scatter, gather), dtype = KINDS[kind], torch.float16 if ranks == 2 else torch.float32
    op, name = f"{kind}_matmul" if kind == "all_gather" else f"matmul_{kind}", str(dtype)[6:]
    plan = build(Problem(op, ranks, part, part, ranks, name), "direct")  # type: ignore[arg-type]
    x = torch.randn(ranks, part * (ranks if scatter else 1)).to(dtype)
    rooms = [guarded(part * (ranks if gather else 1), torch.nan, dtype) for _ in range(ranks)]
    total = x.float().sum(0).to(dtype)
    wants = total.view(ranks, -1) if not gather else [total if scatter else x.view(-1)] * ranks

    def run(r: int, memory: Any) -> None:
        (bound,) = (b for b in bind(plan, r).steps if b.step.kind == "collective")
        source, target = (box.buffer for box in (bound.parts[0].reads[0], bound.parts[0].write))
        call = launch_collective.action(bound, places_of(memory, plan), 0)
        call({source: x[r], target: inside(rooms[r], -1)})

    def off() -> list[int]:
        return [r for r, room in enumerate(rooms) if not torch.equal(inside(room, -1), wants[r])]

    return Call(2 * ranks * part * x.element_size(), run, rooms, off)


def norm(shots: str, ranks: int, size: tuple[int, int]) -> Call:
    m, n = size
    problem = Problem("all_reduce_norm", m, n, ranks=ranks, dtype="float16", residual=True, eps=1.0)
    plan = build(problem, f"fused {shots} warps=4")
    x, residual = torch.randn(ranks, m, n).half(), torch.randn(m, n).half()
    rooms = [guarded(m * n, torch.nan, torch.float16) for _ in range(2 * ranks)]
    want = x.float().sum(0).half() + residual
    normal = torch.nn.functional.rms_norm(want.double(), (n,), eps=1.0)

    def run(r: int, memory: Any) -> None:
        y, h = (inside(room, m, n) for room in rooms[2 * r : 2 * r + 2])
        operands = {"x": x[r], "residual": residual, "y": y, "h": h, "weight": torch.ones(n).half()}
        launch_norm.prepare(site(plan, r, memory))(operands)

    def off() -> list[int]:
        ys, hs = ([inside(room, m, n) for room in rooms[i::2]] for i in range(2))
        return [
            r for r, (y, h) in enumerate(zip(ys, hs, strict=True))
            if not torch.equal(h, want) or not bool(((y - normal).abs() < 2e-3).all())
        ]  # fmt: skip

    return Call(plan.num_bytes("words") // 2, run, rooms, off)


def product(shots: str, ranks: int, size: tuple[int, int]) -> Call:
    m, n = size
    k, scatters = 16, shots == "scatter"
    op, rows = ("matmul_reduce_scatter", m * ranks) if scatters else ("matmul_all_reduce", m)
    dtype = torch.float16 if scatters else torch.float32
    problem = Problem(op, rows, n, k, ranks, str(dtype)[6:])  # type: ignore[arg-type]
    plan = build(problem, f"fused {shots} 16x16x1 warps=4")
    x, w = torch.randn(ranks, rows, k).to(dtype), torch.randn(ranks, k, n).to(dtype)
    rooms = [guarded(m * n, torch.nan, dtype) for _ in range(ranks)]
    whole = (x.double() @ w.double()).sum(0)
    wants = whole.chunk(ranks) if scatters else [whole] * ranks

    def run(r: int, memory: Any) -> None:
        operands = {"x": x[r], "w": w[r], "y": inside(rooms[r], m, n)}
        launch_fused_sum.prepare(site(plan, r, memory))(operands)

    def off() -> list[int]:
        """All ranks hold the same bits, too, where all have the whole sum."""
        bound = 0.1 if scatters else 1e-4
        ys = [inside(room, m, n) for room in rooms]
        return [
            r for r, (y, want) in enumerate(zip(ys, wants, strict=True))
            if not bool(((y - want).abs() < bound).all()) or not (scatters or torch.equal(y, ys[0]))
        ]  # fmt: skip

    return Call(plan.num_bytes("words") // 2, run, rooms, off)


CALLS: dict[str, Callable[[str, int, Any], Call]] = {
    "collective": collective, "norm": norm, "sum": product,
}  # fmt: skip


def scene(
    patch: pytest.MonkeyPatch, seed: int, fault: str, family: str, kind: str, ranks: int, sizes: str
) -> Scene:
    """Several calls on one memory; of the fault "halves" halves are as large as the call."""
    patch.setattr(launch_collective, "BLOCKS", (BLOCK,))
    plant(patch, fault, kernel_all_reduce_norm, collectives, kernel_matmul_all_reduce)
    calls = [CALLS[family](kind, ranks, size) for size in SIZES[family][sizes]]
    each = memories(ranks, 2 * max(call.half_bytes for call in calls) + 4096)

    def run(r: int) -> None:
        for call in calls:
            if fault == "halves":
                each[r].words.half_bytes = call.half_bytes
            call.run(r, each[r])

    def off() -> list[Any]:
        return [(i, r) for i, call in enumerate(calls) for r in call.off()]

    return Scene(each, run, off, [room for call in calls for room in call.rooms])


SHOTS = [(f, kind) for f in ("norm", "sum") for kind in ("one_shot", "two_shot")]
EVERY = [*(("collective", kind) for kind in KINDS), *SHOTS, ("sum", "scatter")]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("sizes", ["same", "mixed"])
@pytest.mark.parametrize(("ranks", "seed"), [*((2, s) for s in range(4)), (4, 0), (4, 1)])
@pytest.mark.parametrize(("family", "kind"), EVERY)
def test_every_order_gives_the_result(
    pool: RankPool, family: str, kind: str, ranks: int, seed: int, sizes: str
):
    all_right(pool, scene, seed, family, kind, ranks, sizes)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("family", "kind", "fault"),
    [*((*each, "take_and_leave") for each in EVERY if each[1] != "scatter"),
     *(("collective", kind, "halves") for kind in KINDS),
     # what a small call has not yet read, a larger one of a faster peer would overwrite
     ("norm", "two_shot", "halves"), ("sum", "two_shot", "halves"),
     ("norm", "one_shot", "same_epoch"), ("sum", "one_shot", "same_epoch")],
)  # fmt: skip
def test_planted_faults_show(pool: RankPool, family: str, kind: str, fault: str):
    """Words that nobody empties; halves as large as a call; an epoch that does not count.

    Two shots need no second half: who has the sums knows that the peers have taken its tiles.
    """
    of_sum = family == "sum" and fault != "halves"
    text = "" if not of_sum else "nobody can go on" if fault == "same_epoch" else "are off"
    sizes = "mixed" if fault == "halves" else "same"
    found = shown(pool, scene, fault, text, family, kind, 2, sizes, seeds=6 if of_sum else 40)
    if family == "sum" and fault == "same_epoch":  # a word that another overwrote never comes
        assert "take_words:" in found and "rank 0, program" in found


def test_what_is_left_behind_shows():
    for name, place, what in (("turns", GUARD - 1, "guard"), ("flags", -1, "guard"),
                              ("words", GUARD, "word")):  # fmt: skip
        (memory,) = memories(1, 256)
        assert left(memory, [guarded(3, 0.0)]) == ""
        memory.kept[name][0][place] = 0.0
        assert what in left(memory, [])
    room = guarded(3, 0.0)
    room[-GUARD] = 0.0
    assert "guard" in left(memories(1, 256)[0], [room])
