"""Embedding bags and another group's collective, launched in turned order on GPUs of few SMs.

The kernel reserves no SMs: it has to end beside a collective that waits with the programs it has,
whichever of the two a rank launches first.
"""

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from embedding_cases import expected, problem_of, random_bags
from memories import GUARD, guarded, memories, places_of
from planted import is_last_when_all_are_there, waiting_kernel
from rankpool import RankPool

from counterpoint.kernels import embedding_all_to_all as kernels
from counterpoint.ops.embedding_kernels import Bags, prepare
from counterpoint.plan import embedding_bag_all_to_all as plans
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.runtime import launch
from counterpoint.runtime.launch import Site

DIMS, BATCH = ((16,), (8,)), (5, 4)
SLOTS = 3  # blocks that are on a GPU at once; the collective takes two and leaves one


def errors_of(rank: int, world: int, seeds: range, resident: bool) -> list[str]:
    """For each seed a deadlock or rows that are off; "" if nothing."""
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    class FewSlots(Interleaved):
        """Blocks of a rank start in the order of launches, each as a slot is free."""

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.queues: dict[str, deque[Any]] = {}
            self.running: dict[str, list[Any]] = {}

        def _start(self, program: Any) -> Any:
            if program.place is None:
                return super()._start(program)
            gpu = program.name[: len("rank 0")]
            self.queues.setdefault(gpu, deque()).append(program)
            return program

        def _turn(self) -> None:
            for gpu, queue in self.queues.items():
                running = [p for p in self.running.get(gpu, []) if not p.ended]
                while queue and len(running) < SLOTS:
                    running.append(super()._start(queue.popleft()))
                    self.idle = 0
                self.running[gpu] = running
            super()._turn()

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED_BLOCKS", 2 * SLOTS)  # more than fit
        patch.setattr(plans, "POOLING", (("else", "64x2x4"),))
        if resident:
            patch.setattr(kernels, "is_last", is_last_when_all_are_there)
        plan = build(problem_of(DIMS, BATCH), "fused")
        p = plan.problem
        for seed in seeds:
            if resident and any(found):
                break  # it shows
            each = memories(2, 1 << 14)
            bags = [random_bags(d, p.m, seed=seed + r, longest=3) for r, d in enumerate(p.tables)]
            ys = [guarded(p.rows[r] * p.n, torch.nan) for r in range(2)]
            words = [torch.zeros(SLOTS, dtype=torch.int32) for _ in range(2)]
            stop = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]

            def pools(r: int, each: Any = each, bags: Any = bags, ys: Any = ys) -> None:
                site = Site(bind(plan, r).steps[0], places_of(each[r], plan), 0)
                b = bags[r]
                given: Any = Bags(b.tables, b.indices, b.offsets, None, True, False, {}, None)
                prepare(site)({"bags": given, "y": ys[r][GUARD:-GUARD]})

            def collects(r: int, words: Any = words, stop: Any = stop) -> None:
                waiting_kernel[(SLOTS - 1,)](words[r], words[1 - r], stop[r])

            # two streams of each rank: rank 0 launches one of them first, rank 1 the other
            bodies = [partial(pools, 0), partial(collects, 0), partial(collects, 1),
                      partial(pools, 1)]  # fmt: skip
            names = ["rank 0", "rank 0", "rank 1", "rank 1"]
            try:
                together(FewSlots(seed), bodies, names)
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
                continue
            off = [r for r in range(2) if not torch.allclose(
                ys[r][GUARD:-GUARD].view(-1, p.n).double(), expected(bags, p, r, mean=False),
                atol=1e-5)]  # fmt: skip
            found.append(f"ranks {off} are off" if off else "")
    return found


def together(run: Any, bodies: list[Any], names: list[str]) -> None:
    """Streams of ranks, each of the name of its rank; the earlier of a rank launches first."""
    start, kept = run._start, iter(names)

    def named(program: Any) -> Any:
        if program.place is None:
            program.name = next(kept)
        return start(program)

    run._start = named
    launched: dict[str, int] = {}
    ordered: list[Any] = []
    for i, name in enumerate(names):
        turn = launched[name] = launched.get(name, -1) + 1

        def body(i: int = i, name: str = name, turn: int = turn) -> None:
            while turn and not run.queues.get(name) and not run.running.get(name):
                run._give_way()  # until the first of the rank is launched
            bodies[i]()

        ordered.append(body)
    run.run(ordered)


def test_both_end_whichever_is_launched_first(pool: RankPool):
    (found,) = pool.run(errors_of, 1, range(6), False, group=False, timeout_s=120)
    assert found == [""] * 6


def test_a_kernel_whose_programs_all_wait_would_not(pool: RankPool):
    """Of such a grid, more programs than there is room for hang: what a reserve is for."""
    (found,) = pool.run(errors_of, 1, range(6), True, group=False, timeout_s=120)
    assert any("deadlock" in text for text in found)
