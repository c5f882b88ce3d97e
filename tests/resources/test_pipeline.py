"""What waits for what, by every pair of cells; each refusal in full; what a signature must tell.

The group here is nothing but its number of ranks; `test_run_cpu` runs pipelines.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager
from counterpoint.resources.stages import Collective, Compute

RANKS = 4


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)


def pipeline() -> Pipeline:
    return Pipeline(None, "cpu")  # type: ignore[arg-type]


def nothing() -> None:
    pytest.fail("a pipeline that is written is not run")


def waits(made: Pipeline) -> tuple[int | None, ...]:
    """For each stage, the earlier one of the other kind that its step is after."""
    steps = made.plan().steps
    places = {step.name: i for i, step in enumerate(steps)}
    assert all(len(step.after) <= 1 for step in steps)
    return tuple(places[step.after[0]] if step.after else None for step in steps)


def loop(op: str, iterations: int, *, buffers: int = 2) -> Pipeline:
    """A product into source i % buffers, which a collective moves to target i % buffers."""
    made, numel = pipeline(), 8 * RANKS
    a = torch.zeros(numel)
    sources = [torch.zeros(numel) for _ in range(buffers)]
    sizes = {"all_gather": RANKS * numel, "reduce_scatter": numel // RANKS}
    targets = [torch.zeros(sizes.get(op, numel)) for _ in range(buffers)]
    for i in range(iterations):
        source = sources[i % buffers]
        target = source if op == "all_reduce" else targets[i % buffers]
        made.compute(nothing, reads=[a], writes=[source])
        made.collective(op, target, source)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("op", ["all_to_all", "all_gather", "reduce_scatter", "all_reduce"])
def test_waits_of_the_double_buffered_loop(op: str):
    assert waits(loop(op, 4)) == (None, 0, None, 2, 1, 4, 3, 6)


def test_waits_follow_the_buffers():
    assert waits(loop("all_to_all", 3, buffers=1)) == (None, 0, 1, 2, 3, 4)
    assert waits(loop("all_to_all", 3, buffers=3)) == (None, 0, None, 2, None, 4)
    assert waits(pipeline()) == ()


def two(
    computed: Callable[[Tensor], tuple[list[Tensor], list[Tensor]]],
    moved: Callable[[Tensor], tuple[Tensor | None, Tensor | None]],
    *,
    collective_first: bool,
) -> int | None:
    """What the second of two stages waits for, with tensors of one buffer; None: of another."""
    buffer, made = torch.zeros(64, 64), pipeline()
    reads, writes = computed(buffer)
    target, source = moved(buffer)
    if target is None:
        assert source is not None
        target = torch.zeros_like(source)
    source = torch.zeros_like(target) if source is None else source
    if collective_first:
        made.all_to_all(target, source)
    made.compute(nothing, reads=reads, writes=writes)
    if not collective_first:
        made.all_to_all(target, source)
    return waits(made)[1]


def elsewhere() -> Tensor:
    return torch.zeros(4, 64)


@pytest.mark.parametrize("first", [False, True], ids=["compute first", "collective first"])
@pytest.mark.parametrize(
    ("computed", "moved", "meet"),
    [
        # the rows that are written, moved from, moved to
        (lambda b: ([], [b[:4]]), lambda b: (None, b[:4]), True),
        (lambda b: ([b[:4]], [elsewhere()]), lambda b: (b[:4], None), True),
        (lambda b: ([], [b[:4]]), lambda b: (b[:4], None), True),
        (lambda b: ([b[:4]], [elsewhere()]), lambda b: (None, b[:4]), False),
        (lambda b: ([], [b[:4]]), lambda b: (None, b[4:8]), False),
        (lambda b: ([], [b[4:8]]), lambda b: (None, b[:4]), False),
        (lambda b: ([], [b[:5]]), lambda b: (None, b[4:8]), True),
        (lambda b: ([], [b[63, 63:]]), lambda b: (None, b[60:]), True),
        # views: columns have gaps, which belong to them
        (lambda b: ([], [b[:, :2]]), lambda b: (None, b[8:12]), True),
        (lambda b: ([], [b[:8, :2]]), lambda b: (None, b[8:12]), False),
        (lambda b: ([], [b[:8, 63:].t()]), lambda b: (None, b[7:8]), True),
        (lambda b: ([], [b[0].expand(9, 64)]), lambda b: (None, b[1:5]), False),
        (lambda b: ([], [b[0].expand(9, 64)]), lambda b: (None, b[0]), True),
        # other types of one memory, and nothing
        (lambda b: ([], [b.view(torch.uint8)[1]]), lambda b: (None, b[1]), True),
        (lambda b: ([], [b.view(torch.bfloat16)[1]]), lambda b: (None, b[2]), False),
        (lambda b: ([b[:0]], [elsewhere()]), lambda b: (b[:4], None), False),
        # the second of several
        (lambda b: ([], [b[20:21], b[1:2]]), lambda b: (None, b[:4]), True),
        (lambda b: ([b[9:], b[1:2]], [elsewhere()]), lambda b: (b[:4], None), True),
    ],
)
def test_what_meets_waits(computed: Any, moved: Any, meet: bool, first: bool):
    assert two(computed, moved, collective_first=first) == (0 if meet else None)


def test_all_stages_of_random_pipelines_wait_for_what_they_meet():
    """Against every pair of cells: nothing that meets is missed, and rows meet exactly."""
    draw = random.Random(0)
    for _ in range(60):
        made, buffer = pipeline(), torch.zeros(24, 8)
        cells: list[tuple[set[int], set[int]]] = []  # that a stage reads and writes

        def some(strided: bool, buffer: Tensor = buffer) -> Tensor:
            start = draw.randrange(23)
            rows = buffer[start : draw.randint(start + 1, 24)]
            return rows[:, draw.randrange(8) :] if strided else rows

        def of(*tensors: Tensor, buffer: Tensor = buffer) -> set[int]:
            numbers = torch.arange(buffer.numel()).view(24, 8)
            views = [numbers.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]
            return {cell for view in views for cell in view.flatten().tolist()}

        strided = draw.random() < 0.5
        for _ in range(12):
            if draw.random() < 0.5:
                reads, writes = [some(strided), some(strided)], [some(strided)]
                made.compute(nothing, reads=reads, writes=writes)
                cells.append((of(*reads), of(*writes)))
            else:
                rows = some(False)
                made.all_reduce(rows)
                cells.append((of(rows), of(rows)))
        kinds = [isinstance(stage, Compute) for stage in made.stages]
        for i, wait in enumerate(waits(made)):
            (reads, writes), met = cells[i], list[int]()
            for j in range(i):
                if kinds[j] != kinds[i] and (
                    reads & cells[j][1] or writes & (cells[j][0] | cells[j][1])
                ):
                    met.append(j)
            latest = max(met, default=None)
            if strided:
                assert latest is None or (wait is not None and latest <= wait)
            else:
                assert wait == latest
            assert wait is None or kinds[wait] != kinds[i]


def test_stages_keep_their_names_and_order():
    made, x = pipeline(), torch.zeros(8)
    made.compute(nothing, reads=[x], writes=[x])
    made.all_reduce(x, reduction="avg")
    made.compute(nothing, reads=[x], writes=[x], name="norm", kernels=["k"])
    made.all_to_all(torch.zeros(8), x, name="dispatch")
    assert [stage.name for stage in made.stages] == ["compute 0", "all_reduce 1", "norm",
                                                     "dispatch"]  # fmt: skip
    assert [(c.op, c.reduction) for c in made.collectives] == [("all_reduce", "avg"),
                                                               ("all_to_all", "sum")]  # fmt: skip
    norm, reduced = made.stages[2], made.collectives[0]
    assert isinstance(norm, Compute) and norm.kernels == ("k",) and norm.call is nothing
    assert reduced.target is reduced.source is x and reduced.reads == reduced.writes == (x,)
    assert isinstance(made.stages[3], Collective)


def test_the_device_is_that_of_this_process():
    assert Pipeline(None).device == torch.device("cpu")  # type: ignore[arg-type]


X, Y = torch.zeros(8), torch.zeros(8)
WIDE = torch.zeros(8, 8)
META = torch.zeros(8, device="meta")


APART = "target must be apart from source, got in it"
DIVIDED = "source must be of a number of elements that 4 ranks divide, got"


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda p: p.compute(nothing, reads=[X], writes=[]), "compute: writes must be one tensor "
         "or more, got 0; what depends on the stage follows from it"),
        (lambda p: p.compute(nothing, reads=[META], writes=[X], name="norm"),
         "compute: tensors of 'norm' must be on cpu, got meta"),
        (lambda p: p.compute(nothing, reads=[X], writes=[META]),
         "compute: tensors of 'compute 0' must be on cpu, got meta"),
        (lambda p: p.all_reduce(META),
         "all_reduce: tensors of 'all_reduce 0' must be on cpu, got meta"),
        (lambda p: p.all_to_all(WIDE.t(), torch.zeros(8, 8)),
         "all_to_all: tensors must be contiguous, got strides (1, 8) in 'all_to_all 0'"),
        (lambda p: p.all_gather(torch.zeros(32), WIDE[:, 0], name="gather"),
         "all_gather: tensors must be contiguous, got strides (8,) in 'gather'"),
        (lambda p: p.all_to_all(X, Y.double()), "all_to_all: tensors must be of one dtype, got "
         "torch.float32 and torch.float64 in 'all_to_all 0'"),
        (lambda p: p.all_reduce(X, reduction="max"),
         "all_reduce: reduction must be 'sum' or 'avg', got max"),
        (lambda p: p.collective("broadcast", X, Y), "collective: op must be one of all_reduce, "
         "all_gather, reduce_scatter, all_to_all, got 'broadcast'"),
        (lambda p: p.all_to_all(torch.zeros(6), torch.zeros(6)), f"all_to_all: {DIVIDED} 6"),
        (lambda p: p.reduce_scatter(torch.zeros(1), torch.zeros(7)),
         f"reduce_scatter: {DIVIDED} 7"),
        (lambda p: p.all_reduce(torch.zeros(0)), f"all_reduce: {DIVIDED} 0"),
        (lambda p: p.all_gather(torch.zeros(31), X),
         "all_gather: target must be of 32 elements, got 31"),
        (lambda p: p.reduce_scatter(X, Y), "reduce_scatter: target must be of 2 elements, got 8"),
        (lambda p: p.all_to_all(WIDE[0], WIDE[0]), f"all_to_all: {APART}"),
        (lambda p: p.all_gather(WIDE[:4], WIDE[3]), f"all_gather: {APART}"),
    ],
)  # fmt: skip
def test_a_wrong_stage_is_refused_and_not_added(write: Callable[[Pipeline], None], text: str):
    made = pipeline()
    with pytest.raises(InputError) as caught:
        write(made)
    assert str(caught.value) == f"Pipeline.{text}"
    assert made.stages == ()


def test_an_all_reduce_of_two_tensors_is_refused():
    with pytest.raises(InputError, match="target must be"):
        pipeline().collective("all_reduce", torch.zeros(8), torch.ones(8))


def test_neighbours_in_one_buffer_are_apart():
    made = pipeline()
    made.all_to_all(WIDE[:4], WIDE[4:])
    made.all_gather(WIDE[:4], WIDE[4])
    made.reduce_scatter(WIDE[0], WIDE[4:])
    assert len(made.stages) == 3


@pytest.mark.parametrize(
    ("stages", "got"),
    [
        ("", "one without compute stages or collectives"),
        ("c", "one without collectives"),
        ("r", "one without compute stages"),
    ],
)
@pytest.mark.parametrize("op", [None, Eager, Captured])
def test_a_pipeline_of_one_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, stages: str, got: str, op: Any
):
    made = pipeline()
    monkeypatch.setattr(made, "agree", lambda _: None)  # there are no other ranks
    for kind in stages:
        made.compute(nothing, reads=[], writes=[X]) if kind == "c" else made.all_reduce(X)
    with pytest.raises(InputError) as caught:
        op(made) if op else made.check("tune")
    want = "pipeline must be of compute stages and collectives"
    assert str(caught.value) == f"{'run' if op else 'tune'}: {want}, got {got}"
    loop("all_to_all", 1).check("tune")


def written(
    *, rows: int = 8, dtype: torch.dtype = torch.float32, op: Any = "all_reduce",
    reduction: Any = "sum", name: str = "", buffers: int = 2, turned: bool = False,
    reads: int = 1, collective_first: bool = False, more: int = 0,
) -> Pipeline:  # fmt: skip
    """A pipeline with one thing changed at a time."""
    made, weight = pipeline(), torch.zeros(16, 16)
    outs = [torch.zeros(rows, 4, dtype=dtype) for _ in range(buffers)]
    given = [weight.t() if turned else weight, outs[-1], torch.zeros(rows, 4, dtype=dtype)]
    for i in range(2 + more):
        out = outs[i % buffers]

        def move(out: Tensor = out) -> None:
            made.collective(op, out if op == "all_reduce" else torch.zeros_like(out), out,
                            reduction=reduction, name=name)  # fmt: skip

        if collective_first:
            move()
        made.compute(nothing, reads=given[:reads], writes=[*given[reads:2], out])
        if not collective_first:
            move()
    return made


def test_equal_pipelines_have_equal_signatures():
    one, other = written(), written()
    assert one.signature() == other.signature() and one.key() == other.key()
    assert len(one.key()) == 16 and set(one.key()) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 16}, {"dtype": torch.bfloat16}, {"op": "all_to_all"}, {"reduction": "avg"},
        {"name": "sum"}, {"buffers": 1}, {"collective_first": True}, {"more": 1},
        {"turned": True}, {"reads": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_shows_in_the_signature(change: dict[str, Any]):
    assert written(**change).signature() != written().signature()
    assert written(**change).key() != written().key()


def test_the_number_of_ranks_shows_in_the_signature(monkeypatch: pytest.MonkeyPatch):
    made = written()
    here = made.signature()
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    assert made.signature() != here


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"call": X}, "call must be callable, got Tensor; pass lambda: torch.mm(a, b, out=c)"),
        ({"reads": X}, "reads must be a list of tensors, got Tensor"),
        ({"writes": X}, "writes must be a list of tensors, got Tensor"),
        ({"writes": [X, None]}, "writes must be a list of tensors, got list"),
    ],
)
def test_a_stage_of_something_else_is_refused(arguments: dict[str, Any], text: str):
    made = pipeline()
    with pytest.raises(InputError) as caught:
        made.compute(**{"call": nothing, "reads": [], "writes": [X]} | arguments)
    assert str(caught.value) == f"Pipeline.compute: {text}"
    assert not made.stages


def test_a_device_is_what_tensors_say(monkeypatch: pytest.MonkeyPatch):
    made: Any = Pipeline(None, "cpu:0")  # type: ignore[arg-type]
    assert made.device == X.device
    with pytest.raises(InputError, match="memory must be 'peers' or 'library', got 'peer'"):
        made.empty(4, dtype=torch.float32, memory="peer")
    with pytest.raises(InputError, match=r"shape must be whole numbers, got \(torch.Size"):
        made.empty(torch.Size([4]), dtype=torch.float32)
