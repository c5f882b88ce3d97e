"""Pipelines on CPU ranks: every collective, exactly; what is refused, and on which ranks."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.measure.tune_resources import tune
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager

NUM_CALLS = 6  # of one pipeline: what a call leaves behind shows in the next one
ROWS, COLS, K = 12, 5, 7  # rows that two, three and four ranks divide


def integers(rank: int, call: int, half: int, *sizes: int) -> Tensor:
    """So small that products and their sums are exact; others for each rank, call and buffer."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * call + half)
    return torch.randint(-9, 10, sizes, generator=generator).float()


def expected(op: str, reduction: str, rank: int, products: list[Tensor]) -> Tensor:
    """Of what each rank has computed, in fp64 and rounded once."""
    part = ROWS // len(products)
    mine = slice(rank * part, (rank + 1) * part)
    total = torch.stack(products).sum(0) / (len(products) if reduction == "avg" else 1)
    found = {
        "all_reduce": total,
        "reduce_scatter": total[mine],
        "all_gather": torch.cat(products),
        "all_to_all": torch.cat([product[mine] for product in products]),
    }
    return found[op].float()


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("op", "reduction"),
    [
        ("all_reduce", "sum"),
        ("all_reduce", "avg"),
        ("reduce_scatter", "sum"),
        ("reduce_scatter", "avg"),
        ("all_gather", "sum"),
        ("all_to_all", "sum"),
    ],
)
@on_ranks(1, 2, 3, 4)
def test_loops_of_every_collective(rank: int, ranks: int, op: str, reduction: str) -> list[str]:
    """The double-buffered loop with each of both controls; says which call of which is off."""
    both = (OFF, SEQUENTIAL)
    return [text for controls in both for text in wrong_calls(rank, ranks, op, reduction, controls)]


def wrong_calls(
    rank: int, ranks: int, op: str, reduction: str, controls: Controls
) -> Iterator[str]:
    pipeline = Pipeline(world())
    a, b = torch.empty(2, ROWS, K), torch.empty(K, COLS)
    sources = torch.empty(2, ROWS, COLS)
    rows = {"all_gather": ROWS * ranks, "reduce_scatter": ROWS // ranks}.get(op, ROWS)
    targets = sources if op == "all_reduce" else torch.empty(2, rows, COLS)
    sums = torch.empty(2, COLS)
    for i in range(4):
        half = i % 2
        pipeline.compute(
            lambda h=half: torch.mm(a[h], b, out=sources[h]),
            reads=[a, b], writes=[sources[half]],
        )  # fmt: skip
        pipeline.collective(op, targets[half], sources[half], reduction=reduction)  # type: ignore[arg-type]
        pipeline.compute(
            lambda h=half: torch.sum(targets[h], 0, out=sums[h]),
            reads=[targets[half]], writes=[sums[half]],
        )  # fmt: skip
    with Eager(pipeline, controls) as run:
        for call in range(NUM_CALLS):
            b.copy_(integers(9, call, 0, K, COLS))
            for half in range(2):
                a[half] = integers(rank, call, half, ROWS, K)
                targets[half] = sums[half] = torch.nan
            run()
            for half in range(2):
                products = [(integers(r, call, half, ROWS, K) @ b).double() for r in range(ranks)]
                same = torch.equal(targets[half], expected(op, reduction, rank, products))
                same &= torch.equal(sums[half], targets[half].sum(0))
                if op != "all_reduce":
                    same &= torch.equal(sources[half], products[rank].float())
                if not same:
                    yield f"{op} {reduction} {controls.spec}, call {call}, buffer {half}"


@on_ranks(2)
def test_stages_run_in_the_order_written(rank: int, ranks: int):
    """Compute runs in the order written, whatever it touches."""
    seen: list[str] = []
    pipeline, x = Pipeline(world()), torch.zeros(ranks)
    for name in ("first", "second", "third"):
        pipeline.compute(lambda name=name: seen.append(name), reads=[], writes=[torch.zeros(1)])
        pipeline.all_reduce(x)
    run = Eager(pipeline)
    for _ in range(2):
        run()
    assert seen == ["first", "second", "third"] * 2


@on_ranks(2)
def test_stages_may_allocate_and_differentiate(rank: int, ranks: int):
    """Attention and its gradient: each stage makes what it needs, and differentiates."""
    pipeline = Pipeline(world())
    draw = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=draw) for _ in range(3))
    outs, grads = torch.empty(2, 48), torch.empty(2, 48)
    sums = torch.empty(2, 48)

    def attend(half: int) -> None:
        mine = q.detach().requires_grad_()
        out = torch.nn.functional.scaled_dot_product_attention(mine, k + half, v)
        (grad,) = torch.autograd.grad(out.square().sum(), mine)
        outs[half].copy_(out.detach().flatten())
        grads[half].copy_(grad.flatten())

    for half in (0, 1):
        pipeline.compute(
            lambda half=half: attend(half), reads=[q, k, v], writes=[outs[half], grads[half]]
        )
        pipeline.all_to_all(sums[half], outs[half])
    Eager(pipeline)()
    got, wanted = (sums.clone(), grads.clone()), (outs.clone(), grads.clone())
    for half in (0, 1):
        attend(half)
        dist.all_to_all_single(sums[half], outs[half])
    assert torch.equal(got[0], sums) and torch.equal(wanted[0], outs) and torch.equal(got[1], grads)


def lost_in_a_pipeline(rank: int, ranks: int) -> tuple[list[str], weakref.ref[Pipeline]]:
    """The last rank makes the pipeline, and does not come to its second call; others try twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_TIMEOUT_S", "1")
        pipeline = exchange()
        run = Eager(pipeline)
        run()
    dist.barrier()
    comes = rank < ranks - 1
    return [said(lambda _: run(), pipeline) for _ in range(2) if comes], weakref.ref(pipeline)


@on_ranks(3)
def test_a_rank_that_does_not_come_to_a_collective_is_named(rank: int, ranks: int):
    """Others hear of it at each call, and the pipeline goes when nobody holds it."""
    errors, pipeline = lost_in_a_pipeline(rank, ranks)
    gc.collect()
    assert pipeline() is None, "an error that is kept holds no memory"
    assert len(set(errors)) == (rank < ranks - 1)
    want = "PeerTimeoutError: pipeline: rank 2 did not take part in 'all_to_all 1'"
    assert rank or errors[0].startswith(want), errors


@on_ranks(3)
def test_memory_of_a_pipeline(rank: int, ranks: int):
    """Memory of a pipeline is zero, of the shape asked for, and open to peers."""
    pipeline = Pipeline(world())
    half = pipeline.empty(3, 5, dtype=torch.bfloat16)
    bytes_ = pipeline.empty(7, dtype=torch.uint8)
    assert (tuple(half.shape), half.dtype, half.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    assert tuple(bytes_.shape) == (7,) and not half.any() and not bytes_.any()
    memory, _ = pipeline.symmetric
    assert memory.local().data_ptr() == half.data_ptr()
    dist.barrier()
    memory.peer((rank + 1) % ranks).view(torch.bfloat16)[14] = 1.0 + rank
    dist.barrier()
    assert half[2, 4].item() == 1.0 + (rank - 1) % ranks


Call = Callable[[Pipeline], object]


def said(call: Call, pipeline: Pipeline) -> str:
    """The error of a call, with its kind; of ours, since others are failures."""
    try:
        call(pipeline)
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def exchange(group: dist.ProcessGroup | None = None) -> Pipeline:
    """One product and its all-to-all."""
    pipeline, (x, y) = Pipeline(group or world()), torch.zeros(2, 12)
    pipeline.compute(lambda: x.add_(1), reads=[x], writes=[x])
    pipeline.all_to_all(y, x)
    return pipeline


@on_ranks(2)
def test_memory_that_no_rank_can_have(rank: int, ranks: int):
    pipeline = Pipeline(world())
    text = "InputError: allocate: num_bytes must be >= 1 and equal on all ranks, got"
    for size, got in ((4 + rank, [4, 5]), (0, [0, 0])):
        found = said(lambda p, n=size: p.empty(n, dtype=torch.uint8), pipeline)
        assert found == f"{text} {got}" and pipeline.symmetric == []


@on_ranks(1)
def test_no_memory_of_nccl_on_cpu_ranks(rank: int, ranks: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        pipeline = Pipeline(world())
        text = said(lambda p: p.empty(4, dtype=torch.uint8, memory="library"), pipeline)
    assert text.startswith("UnsupportedError: zero_cta: ")


@on_ranks(2)
def test_controls_and_graphs_of_gpus_are_refused_on_cpu_ranks(rank: int, ranks: int):
    pipeline = exchange()
    want = "InputError: run: controls must be 'overlap' or 'sequential' on CPU ranks, got "
    for words in ("priority", "blocks_per_sm=2", "carve_out", "delay=5us", "chunks=2",
                  "num_sms=100", "green_sms=8", "copy_engine", "zero_cta chunks=4",
                  "max_ctas=8"):  # fmt: skip
        spec = f"overlap {words}"
        text = said(lambda p, s=spec: Eager(p, Controls.parse(s)), pipeline)
        assert text.startswith(f"{want}'{spec}'"), (spec, text)
    assert said(Captured, pipeline).startswith("UnsupportedError: ")


def tune_here(rank: int, ranks: int, odd: int, what: str) -> str:
    """`tune` with a pipeline that differs on rank `odd`."""
    differs = rank == odd
    pipeline = Pipeline(world())
    rows = 24 if differs and what == "sizes" else 12
    x, y, z = torch.zeros(3, rows)
    pipeline.compute(lambda: None, reads=[x], writes=[x], name="norm")
    if what == "alone" and differs:
        return said(tune, pipeline)
    pipeline.all_to_all(y, x, name="dispatch" if differs and what == "names" else "")
    extra = 2 if differs and what == "more" else 0
    for _ in range(extra):
        pipeline.compute(lambda: None, reads=[z], writes=[z])
    if differs and what == "order":
        pipeline.compute(lambda: None, reads=[z], writes=[y])
    elif what == "order":
        pipeline.compute(lambda: None, reads=[y], writes=[z])
    budget_s = 5.0 if differs and what == "arguments" else 60.0
    return said(lambda p: tune(p, budget_s=budget_s), pipeline)


def test_tune_needs_gpus(pool: RankPool):
    text = "tune: measures, and needs NVIDIA GPUs for it; the pipeline is on cpu"
    assert pool.run(tune_here, 2, -1, "") == [f"UnsupportedError: {text}"] * 2


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("sizes", ("'norm: compute (24,)", "'norm: compute (12,)")),
        ("names", ("'dispatch: all_to_all ", "'all_to_all 1: all_to_all ")),
        ("more", ("'compute 2: compute ", "'nothing'")),
        ("arguments", ("5.0", "60.0")),
    ],
)
@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 2)])
def test_ranks_that_differ_are_named_on_all(
    pool: RankPool, ranks: int, odd: int, what: str, parts: tuple[str, str]
):
    texts = pool.run(tune_here, ranks, odd, what)
    assert len(set(texts)) == 1
    arg = "arguments" if what == "arguments" else "pipeline"
    assert texts[0].startswith(f"InputError: tune: {arg} must be equal on all ranks, got ")
    theirs, first = texts[0].split(f" on rank {odd}, ")
    assert parts[0] in theirs and parts[1] in first and first.endswith(" on rank 0")


def test_a_rank_without_collectives_is_named_on_all(pool: RankPool):
    """Its peers must not be left waiting: they are told as well."""
    texts = pool.run(tune_here, 2, 1, "alone")
    assert all(text.startswith("InputError: tune: pipeline must be ") for text in texts)


@on_ranks(2)
def test_memory_that_copies_need_is_part_of_the_signature(rank: int, ranks: int):
    """Equal pipelines, one whose target is open to peers, one whose target is not."""
    found: list[str] = []
    for open_ in (False, True):
        pipeline, x = Pipeline(world()), torch.zeros(12)
        y = pipeline.empty(12, dtype=x.dtype) if open_ else torch.zeros(12)
        pipeline.compute(lambda: None, reads=[], writes=[x])
        pipeline.all_to_all(y, x)
        pipeline.agree("tune")
        found.append(pipeline.signature())
    assert len(set(found)) == 2


@on_ranks(2)
def test_ranks_whose_pipelines_differ_are_told(rank: int, ranks: int):
    """Of several stages too many the first is named; running another one is refused as well."""
    pipeline, x = exchange(), torch.zeros(12)
    for name in ("one more", "and another") if rank else ():
        pipeline.compute(lambda: None, reads=[x], writes=[x], name=name)
    text = said(pipeline.agree, "tune")  # type: ignore[arg-type]
    assert "'one more: compute" in text, text
    pipeline = Pipeline(world())
    pipeline.compute(lambda: None, reads=[], writes=[x])
    pipeline.all_reduce(x, reduction="avg" if rank else "sum")
    text = said(Eager, pipeline)
    assert text.startswith("InputError: run: pipeline must be equal on all ranks"), text
    assert "avg" in text and "sum" in text


@on_ranks(2)
def test_a_stage_added_later_is_not_left_out_silently(rank: int, ranks: int):
    pipeline = exchange()
    run = Eager(pipeline)
    pipeline.compute(lambda: None, reads=[], writes=[torch.zeros(1)])
    text = said(lambda _: run(), pipeline)
    assert "InputError: run: pipeline must be of " in text and "make another Eager" in text
