"""Our own collectives with all programs of all ranks in turn, in seeded orders."""

from typing import Any

import pytest
import torch
from memories import GUARD, guarded, left, memories, places_of
from planted import take_and_leave
from rankpool import RankPool

from counterpoint.kernels import collectives as kernels
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime import launch_collective

# whether a tensor has a part for each rank before, and after
KINDS = {"reduce_scatter": (True, False), "all_gather": (False, True), "all_reduce": (True, True)}
# elements of a part, call after call: of one size, and of sizes that differ
SAME, MIXED = (70,) * 5, (40, 300, 20, 300, 70)
BLOCK = 32  # words: several for each of two programs


def plan_of(kind: str, part: int, ranks: int, dtype: torch.dtype) -> Plan:
    """The plan with the collective of ours of so many elements a rank."""
    op = f"{kind}_matmul" if kind == "all_gather" else f"matmul_{kind}"
    name = str(dtype).removeprefix("torch.")
    return build(Problem(op, ranks, part, part, ranks, name), "direct")  # type: ignore[arg-type]


def want_of(kind: str, x: torch.Tensor, rank: int) -> torch.Tensor:
    """What rank gets of x [ranks, elements], each rank's own."""
    if kind == "all_gather":
        return x.reshape(-1)
    total = x.float().sum(0).to(x.dtype)
    return total if kind == "all_reduce" else total.view(len(x), -1)[rank]


def errors_of(
    rank: int, world: int, ranks: int, kind: str, dtype: torch.dtype, parts: tuple[int, ...],
    seeds: range, fault: str,
) -> list[str]:  # fmt: skip
    """What went wrong for each seed: a deadlock, or calls that are off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    scatter, gather = KINDS[kind]
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_collective, "BLOCKS", (BLOCK,))
        if fault == "leave":
            patch.setattr(kernels, "take_words", take_and_leave)
        for seed in seeds:
            if fault and any(found):
                break  # it shows
            torch.manual_seed(seed)
            each = memories(ranks, 2 * 2 * ranks * 4 * max(parts) + 4096)
            xs = [torch.randn(ranks, part * (ranks if scatter else 1)).to(dtype) for part in parts]
            ys = [[guarded(part * (ranks if gather else 1), torch.nan, dtype) for _ in range(ranks)]
                  for part in parts]  # fmt: skip

            def run(r: int, each: Any = each, xs: Any = xs, ys: Any = ys) -> None:
                for x, y, part in zip(xs, ys, parts, strict=True):
                    plan = plan_of(kind, part, ranks, dtype)
                    if fault == "halves":  # as large as the call, not as the memory
                        each[r].words.half_bytes = 2 * ranks * part * x.element_size()
                    (bound,) = (b for b in bind(plan, r).steps if b.step.kind == "collective")
                    source, target = (box.buffer for box in (bound.parts[0].reads[0],
                                                             bound.parts[0].write))  # fmt: skip
                    call = launch_collective.action(bound, places_of(each[r], plan), 0)
                    call({source: x[r], target: y[r][GUARD:-GUARD]})

            try:
                Interleaved(seed).run([lambda r=r: run(r) for r in range(ranks)])
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off = [
                (i, r) for i, (x, y) in enumerate(zip(xs, ys, strict=True)) for r in range(ranks)
                if not torch.equal(y[r][GUARD:-GUARD], want_of(kind, x, r))
            ]  # fmt: skip
            wrong = f"calls {off} are off" if off else ""
            if not fault:
                wrong = wrong or left(each[0], [room for y in ys for room in y])
            found.append(wrong)
    return found


@pytest.mark.parametrize("parts", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float16), (4, torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_order_gives_the_result(
    pool: RankPool, kind: str, ranks: int, dtype: torch.dtype, parts: tuple[int, ...]
):
    """No order of programs and stores mixes up calls, of whatever sizes; to the bit."""
    seeds = range(2 if ranks == 4 else 4)
    run = pool.run(errors_of, 1, ranks, kind, dtype, parts, seeds, "", group=False)
    assert run == [[""] * len(seeds)]


@pytest.mark.parametrize(("fault", "parts"), [("leave", SAME), ("halves", MIXED)])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_show(pool: RankPool, kind: str, fault: str, parts: tuple[int, ...]):
    """Words that nobody empties; halves as large as a call, which another one's may overlap."""
    arguments = (2, kind, torch.float32, parts, range(40), fault)
    (found,) = pool.run(errors_of, 1, *arguments, group=False)
    assert any(found)


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
