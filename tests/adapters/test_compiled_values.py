"""What a rewrite must not take to be equal: values before and behind a cast, and those of ranks."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from compiled import overlap_pass, quick
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import counterpoint as cp
from counterpoint.adapters.graph.axes import cast_to
from counterpoint.errors import CounterpointWarning, InputError
from counterpoint.measure.timing import relative_error

M, K, N = 6, 8, 12
F8, I32, I8 = torch.float8_e4m3fn, torch.int32, torch.int8
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def functional(name: str) -> Any:
    """One of torch's, whose names end otherwise before torch 2.13."""
    return getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")


gathered, scattered = functional("all_gather"), functional("reduce_scatter")


def operands(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and a bias of this rank."""
    generator = torch.Generator().manual_seed(rank + 1)
    shapes = (M, K), (K, N), (N,)
    return tuple(3 * torch.randn(*shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def compared(call: Callable[..., Any], *given: Tensor) -> tuple[str, str]:
    """What is wrong with a compiled call; and what was done with its last collective."""
    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CounterpointWarning)
        want = call(*given)
        with quick(overlap) as backend:
            got = torch.compile(call, backend=backend, fullgraph=True)(*given)
    found = overlap.reports[-1].found[-1]
    wrong = got.dtype != want.dtype or relative_error(got.double(), want.double()) > 1e-5
    return f"{got}, not {want}" if wrong else "", found.operator or found.reason


def test_casts_that_keep_every_value_are_none():
    """Behind a wider one, one cast is left of two."""
    assert cast_to((BF16, F32), BF16) == (BF16,)
    assert cast_to((F32, F64), BF16) == (F32, BF16)
    assert cast_to((F32, BF16), F32) == (F32, BF16, F32)
    assert cast_to((F16, BF16), F16) == (F16, BF16, F16)
    assert cast_to((BF16, I32), BF16) == (BF16, I32, BF16)
    assert cast_to((F32, F8), F32) == (F32, F8, F32)
    assert cast_to((F32,), F32) == (F32,)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("casts", [
    (I32, F32), (torch.bool, F32), (F8, F32), (F64, F32), (BF16, I32, F32), (I8, F8, F32),
    (torch.uint8, F16, F32), (I32,), (F64, I32, torch.bool, F32),
], ids=lambda casts: " ".join(str(dtype).removeprefix("torch.") for dtype in casts))  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
@on_ranks(2)
def test_casts_between_a_gather_and_its_matmul(
    rank: int, ranks: int, casts: tuple[torch.dtype, ...], turned: bool
) -> list[str]:
    group = world()

    def cast(x: Tensor, w: Tensor) -> Tensor:
        full = gathered(x, 0, group)
        for dtype in casts:
            full = full.to(dtype).view(-1, K)
        w = w.to(casts[-1])
        return w.t() @ full.t() if turned else full @ w

    x, w, _ = operands(rank)
    wrong, done = compared(cast, x.abs() if torch.uint8 in casts else x, w)
    good = "all_gather_matmul" if casts[-1] == F32 else "int32 is no dtype of the operators"
    return [wrong] * bool(wrong) + [done] * (done != good)


@on_ranks(2)
def test_readers_that_cast_otherwise(rank: int, ranks: int) -> list[str]:
    group = world()

    def cast(x: Tensor, w: Tensor) -> Tensor:
        full = gathered(x, 0, group)
        return full @ w + full.to(I32).to(F32) @ w

    x, w, _ = operands(rank)
    wrong, done = compared(cast, x, w)
    good = "it is read in a wider dtype, or in several"
    return [wrong] * bool(wrong) + [done] * (done != good)


@on_ranks(2)
def test_a_sum_over_no_dims_is_one_over_all(rank: int, ranks: int) -> list[str]:
    group = world()

    def total(x: Tensor, w: Tensor) -> Tensor:
        full = gathered(x, 0, group)
        return full @ w + torch.ops.aten.sum.dim_IntList(full.to(I32).to(F32), [])

    x, w, _ = operands(rank)
    return [text for text in compared(total, x, w)[:1] if text]


def columns(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    return scattered(y, "sum", 1, group)


def rows(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    return scattered(y, "sum", 0, group)


def mean_of_rows(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    return scattered(y, "avg", 0, group)


def everyone(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_reduce(y, "sum", group)


def mean(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_reduce(y, "avg", group)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("reduce", [columns, rows, mean_of_rows, everyone, mean])
@on_ranks(2)
def test_a_bias_that_differs_by_rank(
    rank: int, ranks: int, reduce: Callable[..., Tensor]
) -> list[str]:
    """Divided by the ranks or not, cast or of two matmuls: each rank's own counts."""
    group, found = world(), list[str]()

    def shared(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reduce(torch.addmm(b / ranks, x, w), group)

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reduce(torch.addmm(b, x, w), group)

    def of_two(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = torch.addmm(b / ranks, x, w) + torch.addmm(b.sin(), x.cos(), w)
        return reduce(y, group)

    def rounded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reduce(torch.addmm(b.to(I32) / ranks, x, w), group)

    def equal(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        b = collectives.wait_tensor(collectives.all_reduce(b, "max", group))
        return reduce(torch.addmm(b.view(1, -1).view(-1) / ranks, x, w), group)

    def of_rank(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reduce(torch.addmm(torch.arange(N) * (rank + 1.0) / ranks, x, w), group)

    for call in (shared, whole, of_two, rounded, equal, of_rank):
        wrong, done = compared(call, *operands(rank))
        if wrong or "matmul" not in done or " " in done:
            found.append(f"{call.__name__}: {done}: {wrong}")
    return found


@on_ranks(2)
def test_a_bias_on_one_rank_alone_is_refused_on_all(rank: int, ranks: int) -> list[str]:
    """At a first call; and where ranks have called the operator without one before."""
    wrong: list[str] = []
    for biased, reduce, products in ((0, everyone, 1), (0, columns, 1), (1, rows, 2)):
        group: Any = dist.new_group([*range(ranks)])

        def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            y = x @ w if b is None else torch.addmm(b, x, w)
            return reduce(y + x.cos() @ w if products == 2 else y, group)  # noqa: B023

        x, w, b = operands(rank)
        with torch.no_grad(), by_reference(), quick(overlap_pass()) as backend:
            call = torch.compile(layer, backend=backend)
            for warm in (False, True):
                if warm:
                    call(x, w, None)
                try:
                    call(x, w, b if rank == biased else None)
                    cp.check(group)
                    found = "nothing"
                except InputError as error:
                    found = str(error)
            if not re.search(r"op must be .*row-parallel bias", found):
                wrong.append(f"{reduce.__name__} {products}, {warm=}: {found}")
    return wrong


@on_ranks(2)
def test_a_replicated_bias_is_added_as_it_is(rank: int, ranks: int):
    """A DTensor is known to be equal on all ranks: nothing more is reduced."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (ranks,))
    layer = nn.Sequential(nn.Linear(K, N))
    parallelize_module(layer, mesh, {"0": RowwiseParallel(output_layouts=Shard(0))})
    x, seen = torch.randn(M, K).chunk(ranks, 1)[rank].clone(), list[str]()

    class Seen:
        def __call__(self, graph: torch.fx.Graph) -> None:
            overlap(graph)
            seen.extend(str(node.target) for node in graph.nodes)

    overlap: Any = overlap_pass()
    for grad in (False, True):
        seen.clear()
        with torch.set_grad_enabled(grad), by_reference(), quick(Seen()) as backend:  # type: ignore[arg-type]
            got = torch.compile(layer, backend=backend)(x)
            torch.testing.assert_close(got, layer(x))
        assert any("matmul_reduce_scatter" in name for name in seen)
        # the gradient of the bias is one sum
        assert sum("all_reduce" in name for name in seen) == grad, seen


@pytest.mark.parametrize("plan", ["serial", "fused one_shot", "fused two_shot"])
@on_ranks(2)
def test_a_norm_of_what_differs_by_rank(rank: int, ranks: int, plan: str):
    """Each rank adds and scales by its own, by kernels too: what travels is the sum alone."""
    generator = torch.Generator().manual_seed(rank)
    x, residual = torch.randn(2, 4, 64, generator=generator)
    weight, bias = torch.randn(2, 64, generator=generator)
    y, h = cp.all_reduce_layer_norm(x, residual, weight, bias, plan=plan)
    total = x.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(h, total + residual)
    torch.testing.assert_close(y, nn.functional.layer_norm(h, (64,), weight, bias, 1e-5))


@pytest.mark.parametrize("read", ["view", "as_strided", "part", "dtype", "result"])
@on_ranks(2)
def test_results_lie_as_they_were_traced(rank: int, ranks: int, read: str) -> list[str]:
    """Columns are scattered as rows of the transposed product, whose strides are others."""
    group, strides = world(), list[tuple[int, ...]]()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        y = scattered((x @ w).view(2, M // 2, N), "sum", 2, group)
        if read == "view":
            return y.view(2, -1) * 2
        if read == "as_strided":
            return y.as_strided((y.numel(),), (1,)) * 2
        if read == "part":
            return y[:, 1:].as_strided((2, 3), (N, 1), 1) * 2
        if read == "dtype":
            return y.view(torch.int32).view(-1) // 2
        return y

    x, w, _ = operands(rank)
    wrong, done = compared(layer, x, w)
    with torch.no_grad(), by_reference():
        strides.append(layer(x, w).stride())
        with quick(overlap_pass()) as backend:
            strides.append(torch.compile(layer, backend=backend)(x, w).stride())
    differ = [f"strides {strides}"] * (strides[0] != strides[1])
    return [wrong] * bool(wrong) + [done] * (done != "matmul_reduce_scatter") + differ
