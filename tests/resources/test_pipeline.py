"""What follows from the tensors of a pipeline, what is refused, and pipelines on CPU ranks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.measure.tune_resources import check_equal, tune
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager


class FakeGroup(dist.ProcessGroup):
    """A group of four, for what never communicates."""

    def __init__(self) -> None:
        super().__init__(0, 4)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    return Pipeline(FakeGroup(), "cpu")


def nothing() -> None:
    pass


def test_a_double_buffered_loop_waits_for_its_buffers(pipeline: Pipeline):
    a = torch.empty(8, 8)
    outs, targets = torch.empty(2, 8, 8), torch.empty(2, 8, 8)
    for i in range(4):
        pipeline.compute(nothing, reads=[a], writes=[outs[i % 2]])
        pipeline.all_to_all(targets[i % 2], outs[i % 2])
    assert pipeline.waits() == (None, 0, None, 2, 1, 4, 3, 6)


def test_one_buffer_leaves_nothing_to_overlap(pipeline: Pipeline):
    out = torch.empty(8, 8)
    for _ in range(3):
        pipeline.compute(nothing, reads=[], writes=[out])
        pipeline.all_reduce(out)
    assert pipeline.waits() == (None, 0, 1, 2, 3, 4)


def test_every_kind_of_dependence(pipeline: Pipeline):
    x, y, z = torch.empty(3, 16)
    pipeline.compute(nothing, reads=[x], writes=[y])
    pipeline.all_gather(torch.empty(64), y)  # reads what compute wrote
    pipeline.compute(nothing, reads=[], writes=[y[8:]])  # writes what the collective reads
    pipeline.all_to_all(z, x)  # nothing of theirs but x, which is only read
    pipeline.compute(nothing, reads=[z], writes=[torch.empty(1)])  # reads what it wrote
    pipeline.all_to_all(z, x)  # writes what compute reads
    assert pipeline.waits() == (None, 0, 1, None, 3, 4)


def test_neighbours_in_one_allocation_do_not_wait(pipeline: Pipeline):
    whole = torch.empty(8, 8)
    pipeline.compute(nothing, reads=[], writes=[whole[:4]])
    pipeline.all_reduce(whole[4:])
    pipeline.compute(nothing, reads=[], writes=[whole[:, 3]])  # a column, from row 0 to 7
    assert pipeline.waits() == (None, None, 1)


@pytest.mark.parametrize(
    ("add", "text"),
    [
        (lambda p, x: p.compute(nothing, reads=[x], writes=[]), "must be one tensor or more"),
        (lambda p, x: p.compute(nothing, reads=[], writes=[x.to("meta")]), "on cpu, got meta"),
        (lambda p, x: p.all_reduce(x.t()), r"tensors must be contiguous, got strides (1, 8)"),
        (lambda p, x: p.all_gather(x, x.half()), "tensors must be of one dtype"),
        (lambda p, x: p.all_reduce(x, reduction="max"), "must be 'sum' or 'avg', got max"),
        (lambda p, x: p.all_to_all(x, x), "target must be apart from source, got in it"),
        (lambda p, x: p.all_gather(torch.empty(64), x), "target must be of 256 elements, got 64"),
        (lambda p, x: p.reduce_scatter(torch.empty(1), x[0, :6]), "that 4 ranks divide, got 6"),
        (lambda p, x: p.all_reduce(x[:0]), "that 4 ranks divide, got 0"),
        (lambda p, x: p.collective("broadcast", x, x), "op must be one of all_reduce, all_gather"),
    ],
)  # fmt: skip
def test_what_no_collective_can_take_is_refused(
    pipeline: Pipeline, add: Callable[[Pipeline, Tensor], None], text: str
):
    with pytest.raises(InputError) as caught:
        add(pipeline, torch.empty(8, 8))
    assert text in str(caught.value)
    assert pipeline.stages == ()


def test_a_pipeline_needs_both_kinds_of_stages(pipeline: Pipeline):
    with pytest.raises(InputError, match="got one without compute stages or collectives"):
        pipeline.check("tune")
    pipeline.compute(nothing, reads=[], writes=[torch.empty(1)])
    with pytest.raises(
        InputError, match="of compute stages and collectives, got one without collectives"
    ):
        tune(pipeline)
    with pytest.raises(
        InputError, match="of compute stages and collectives, got one without collectives"
    ):
        Eager(pipeline)
    with pytest.raises(
        InputError, match="of compute stages and collectives, got one without collectives"
    ):
        Captured(pipeline)


def test_the_signature_tells_pipelines_apart(pipeline: Pipeline):
    def made(**changes: Any) -> str:
        values: dict[str, Any] = {"rows": 8, "name": "gemm", "dtype": torch.float32, "one": False}
        values |= changes
        p = Pipeline(FakeGroup(), "cpu")
        outs = torch.empty(2, values["rows"], 4, dtype=values["dtype"])
        for i in range(2):
            out = outs[0 if values["one"] else i]
            p.compute(nothing, reads=[], writes=[out], name=values["name"])
            p.all_reduce(out, reduction=values.get("reduction", "sum"))
        return p.key()

    changes = ({"rows": 4}, {"name": "other"}, {"dtype": torch.half}, {"one": True},
               {"reduction": "avg"})  # fmt: skip
    assert made() == made()
    assert len({made(), *(made(**change) for change in changes)}) == 6


def all_collectives(rank: int, world_size: int) -> dict[str, float]:
    """The largest error of each collective against what the ranks' tensors give."""
    group, size = world(), 12
    every = [
        torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world_size)
    ]
    mine, part = every[rank], size // world_size
    parts = slice(rank * part, (rank + 1) * part)
    total = torch.stack(every).sum(0)
    wants = {
        ("all_reduce", "sum"): 2 * total, ("all_reduce", "avg"): 2 * total / world_size,
        ("all_gather", "sum"): 2 * torch.cat(every),
        ("reduce_scatter", "sum"): 2 * total[parts],
        ("reduce_scatter", "avg"): 2 * total[parts] / world_size,
        ("all_to_all", "sum"): 2 * torch.cat([x[parts] for x in every]),
    }  # fmt: skip
    errors: dict[str, float] = {}
    for (op, reduction), want in wants.items():
        for controls in (OFF, SEQUENTIAL):
            pipeline = Pipeline(group)
            doubled = torch.full((size,), torch.nan)
            target = (
                doubled if op == "all_reduce" else pipeline.empty(*want.shape, dtype=mine.dtype)
            )
            pipeline.compute(
                lambda out=doubled: out.copy_(2 * mine), reads=[mine], writes=[doubled]
            )
            pipeline.collective(op, target, doubled, reduction=reduction)  # type: ignore[arg-type]
            with Eager(pipeline, controls) as run:
                for _ in range(3):
                    run()
            errors[f"{op} {reduction} {controls.spec}"] = (target - want).abs().max().item()
    return errors


def test_collectives_on_cpu_ranks(pool: RankPool):
    for ranks in (2, 3):
        for errors in pool.run(all_collectives, ranks):
            assert len(errors) == 12
            assert max(errors.values()) < 1e-5, errors


def refusals_on_cpu(rank: int, world_size: int) -> list[str]:
    pipeline = Pipeline(world())
    x, y = torch.zeros(2, 4)
    pipeline.compute(nothing, reads=[], writes=[x])
    pipeline.all_to_all(y, x)
    found: list[str] = []
    for call in (
        lambda: tune(pipeline),
        lambda: Eager(pipeline, Controls(priority=True)),
        lambda: Eager(pipeline, Controls(transport="copy_engine")),
        lambda: tune(pipeline, mode="fast"),  # type: ignore[arg-type]
        lambda: tune(pipeline, budget_s=0),
    ):
        try:
            call()
        except (InputError, UnsupportedError) as error:
            found.append(str(error))
    return found


def test_nothing_pretends_to_measure_on_cpu_ranks(pool: RankPool):
    for found in pool.run(refusals_on_cpu, 2):
        measured, priority, copies, mode, budget = found
        assert "needs NVIDIA GPUs for it; the pipeline is on cpu" in measured
        assert "controls must be 'overlap' or 'sequential' on CPU ranks" in priority
        assert "copy_engine: CPU ranks have no copy engines" in copies
        assert "mode must be one of graph, eager, got 'fast'" in mode
        assert "budget_s must be seconds > 0, got 0" in budget


def different(rank: int, world_size: int, what: str) -> str:
    pipeline = Pipeline(world())
    x, y = torch.zeros(2, 8 if what == "sizes" and rank == 1 else 4)
    if what != "stages" or rank == 0:
        pipeline.compute(nothing, reads=[], writes=[x], name="first")
    pipeline.all_to_all(y, x)
    try:
        check_equal(pipeline, (what, rank if what == "arguments" else 0))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "sizes",
            "tune: pipeline must be equal on all ranks, got .*8.* on rank 1, .*4.* on rank 0",
        ),
        ("stages", "got 'all_to_all .*' on rank 1, 'first: compute .*' on rank 0"),
        ("arguments", r"arguments must be equal on all ranks, got \('arguments', 1\) on rank 1"),
        ("nothing", "^$"),
    ],
)
def test_ranks_with_different_pipelines_are_told_so(pool: RankPool, what: str, text: str):
    for said in pool.run(different, 2, what):
        assert re.search(text, said), said
