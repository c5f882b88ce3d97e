"""benchmarks/resources.py on CPU ranks: which arms there are, and where each of them runs."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from loop_rows import SMALL
from rank_bodies import world
from rankpool import RankPool

from benchmarks import loop, resources
from benchmarks.declare import Bench
from benchmarks.loop import Pair
from benchmarks.resources import ZERO_CTA
from benchmarks.rows import Row
from counterpoint.measure.timing import rotate
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Eager

SOME = {"sequential": SEQUENTIAL, "plain overlap": OFF, "zero CTA": ZERO_CTA,
        "green context": Controls(green_sms=112)}  # fmt: skip


def test_arms_are_where_they_can_be_had():
    def arms(collective: Any, mode: Any) -> set[str]:
        return {*resources.fixed_arms(Pair("cb", "cuBLAS", collective), mode, ())}

    copies, sums = arms("all_to_all", "graph"), arms("all_reduce", "graph")
    assert copies - sums == {"zero CTA"} and sums < copies
    assert arms("all_to_all", "eager") - copies == {"green context"}
    assert ZERO_CTA.way_in("eager") and SOME["green context"].way_in("eager")


class Library:
    """In the place of memory that is registered with NCCL."""

    def __init__(self, *_: object) -> None:
        self.tensors: list[torch.Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.tensors.append(torch.zeros(shape, dtype=dtype))
        return self.tensors[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor is own for own in self.tensors)


class Able:
    """In the place of `settings.Bench`: has zero-CTA collectives in such memory and nowhere else,
    and no green contexts."""

    def __init__(self, pipeline: Pipeline, mode: str) -> None:
        self.pipeline, self.refused = pipeline, dict[str, str]()

    def __exit__(self, *_: object) -> None:
        pass

    def able(self, controls: Controls) -> bool:
        if controls.green_sms:
            self.refused[controls.spec] = "no green contexts"
        if controls == ZERO_CTA and self.pipeline.zero_cta is None:
            self.refused[controls.spec] = "memory of peers"
        return controls.spec not in self.refused

    def holding(self, spec: str) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, controls: Controls) -> Eager:
        return Eager(self.pipeline, SEQUENTIAL if controls == SEQUENTIAL else OFF)


def small(undo: ExitStack, library: bool) -> None:
    for name, value in SMALL.items():
        undo.enter_context(mock.patch.object(loop, name, value))
    undo.enter_context(mock.patch.object(resources.settings, "Bench", Able))
    some: dict[str, Any] = {
        "rotate": lambda arms, **more: rotate(arms, **more | {"soak_s": 0.0}),
        "carriers": lambda *_: [lambda: None],
    }
    for name, value in some.items():
        undo.enter_context(mock.patch.object(resources, name, value))
    if library:
        undo.enter_context(mock.patch("counterpoint.resources.pipeline.ZeroCta", Library))


def rows_of(rank: int, ranks: int, library: bool) -> tuple[list[Row], dict[str, str]]:
    with ExitStack() as undo:
        small(undo, library)
        bench = Bench(world(), torch.device("cpu"))
        pair = Pair("cb", "cuBLAS", "all_to_all")
        loops, without = resources.loops_of(pair, bench)
        assert len(loops) == 1 + library
        with resources.Homes(loops, "graph") as homes:
            rows = resources.timed(pair.label, homes, SOME, 2, bench)
            if library:
                own: Any = homes.call(ZERO_CTA)
                assert own.pipeline is loops[1].pipeline
                tensors = [t for s in own.pipeline.collectives for t in (s.source, s.target)]
                assert all(map(own.pipeline.zero_cta.holds, tensors)), "what NCCL reads and writes"
        return rows, homes.refused | without


@pytest.mark.parametrize("library", [True, False])
def test_an_arm_runs_where_it_can_or_says_why_not(pool: RankPool, library: bool):
    (rows, refused), *_ = pool.run(rows_of, 2, library)
    timed = {row["arm"]: row for row in rows}
    assert set(timed) == set(SOME) - {"green context"} - (set() if library else {"zero CTA"})
    assert all(row["error"] < 1e-5 and row["median_s"] > 0 for row in rows)
    assert refused.pop("overlap green_sms=112") == "no green contexts"
    if library:
        assert not refused
    else:
        assert "needs NCCL and an NVIDIA GPU, not cpu" in refused[ZERO_CTA.spec]
