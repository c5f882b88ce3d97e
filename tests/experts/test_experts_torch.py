"""The operators of experts under torch: gradients, opcheck, compile, autocast, checkpointing."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from drawing import Draw
from expert_bodies import by_torch, filled, tables, whole, wrong_gradients
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import counterpoint as cp

K, N = 5, 7
SUMS = ((4, 3), (4, 1), (0, 3), (4, 0))  # tokens, and rows of each


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "forward, backward", "fp16 fp32")
@pytest.mark.drawn(4)
@pytest.mark.parametrize("known_on", ["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "plan", ["auto", "serial", "fused", "grouped 1/1", "grouped chunks=2", "grouped 2 chunks=2"]
)
@on_ranks()
def test_gradients(rank: int, ranks: int, plan: str, known_on: str, draw: Draw) -> list[str]:
    """And results: a step of training, also with rows that are kept and sums over tokens."""
    found: list[str] = []
    # what one kernel takes: sums are exact in fp16, but for the last rounding
    dtype = {"fused": torch.float16, "serial": torch.bfloat16}.get(plan, torch.float32)
    sizes = (8, 16, dtype) if plan == "fused" else (K, N, dtype)
    plan = plan.replace("fused", "auto") if ranks == 3 else plan  # which takes powers of 2
    with by_torch(known_on):
        for i, (name, counts) in enumerate(tables(ranks, 2).items()):
            for back, stored, also in draw(
                [*product((False, True), ("kn", "nk"), (False, True))], 3, name
            ):
                given = whole(counts, *sizes, stored=stored, back=back)
                tokens = SUMS[(i + (stored == "nk")) % len(SUMS)]
                wrong = wrong_gradients(rank, given, plan, known_on == "device", also, tokens)
                found += [f"{name} {stored}: {text}" for text in wrong]
    return found


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "double backward", "refused")
@on_ranks(2)
def test_gradients_that_are_not_asked_for(rank: int, ranks: int):
    """Whose gradient nobody asks for has none, and nothing is kept for it."""
    counts = tables(ranks, 2)["uneven"]
    good: list[bool] = []
    for op, back in ((cp.all_to_all_matmul, False), (cp.matmul_all_to_all, True)):
        given = whole(counts, K, N, torch.float32, back=back)
        grads: list[list[Tensor | None]] = []
        for needs in ((True, True), (True, False), (False, True)):
            x, w = (
                t.detach().requires_grad_(need)
                for t, need in zip((given.xs[rank], given.ws[rank]), needs, strict=True)
            )
            op(x, w, counts=counts).square().sum().backward()
            grads.append([x.grad, w.grad])
        (dx, dw), (only_x, no_w), (no_x, only_w) = grads
        assert dx is not None and dw is not None and only_x is not None and only_w is not None
        good += [torch.equal(dx, only_x), torch.equal(dw, only_w), no_x is None, no_w is None]
        x, w = given.xs[rank].requires_grad_(), given.ws[rank].requires_grad_()
        y = op(x, w, counts=counts)
        first = torch.autograd.grad(y.square().sum(), w, create_graph=True)[0]
        with pytest.raises(cp.UnsupportedError, match="double backward"):
            first.sum().backward()
        good.append(True)
    assert good == [True] * 10


def layer(
    x: Tensor, up: Tensor, down: Tensor, index: Tensor, weights: Tensor, counts: Any
) -> Tensor:
    """What a user compiles."""
    h = torch.relu(cp.all_to_all_matmul(x, up, counts=counts))
    return cp.matmul_all_to_all(h, down, counts=counts, sum_of=(index, weights))


def of_layer(rank: int, ranks: int, name: str) -> tuple[list[Tensor], Any]:
    counts = tables(ranks, 2)[name]
    given = whole(counts, K, N, torch.float32)
    x, up = given.xs[rank], given.ws[rank]
    down, t = torch.randn(2, N, 3), sum(counts[rank])
    shape = (4 if t else 0, 2)
    tensors = [x, up, down, torch.randint(max(t, 1), shape), torch.randn(shape)]
    for i in (0, 1, 2, 4):
        tensors[i] = tensors[i].detach().requires_grad_()
    return tensors, counts


def gradients(fn: Any, tensors: list[Tensor], counts: Any) -> list[Tensor]:
    y = fn(*tensors, counts)
    needed = [t for t in tensors if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), needed)]


@pytest.mark.shows(
    "all_to_all_matmul matmul_all_to_all", "compiled forward, compiled backward", "fp32"
)
@on_ranks(2)
def test_compiled_with_lists(rank: int, ranks: int):
    """Tables differ from call to call; what is traced is traced once for all but their sums."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports warn
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for name in ("uneven", "sparse"):
            tensors, counts = of_layer(rank, ranks, name)
            got, want = (gradients(fn, tensors, counts) for fn in (traced, layer))
            torch.testing.assert_close(got, want)


@on_ranks(2)
def test_compiled_with_a_device_known_table(rank: int, ranks: int):
    """A table of which the host knows nothing is an input like others: compiled once."""
    torch._dynamo.utils.counters.clear()
    with by_torch("device"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        def padded(x: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
            h = torch.relu(cp.all_to_all_matmul(x, up, counts=counts, max_rows=50))
            return cp.matmul_all_to_all(h, down, counts=counts, max_rows=40)

        traced = torch.compile(padded, backend="aot_eager", fullgraph=True)
        for name in ("uneven", "even", "sparse"):
            (x, up, down, *_), counts = of_layer(rank, ranks, name)
            given = [filled(x, 40), up, down]
            t, dy = len(x), torch.randn(40, 3)
            results: list[list[Tensor]] = []
            for fn in (traced, padded):
                y = fn(*given, torch.tensor(counts))
                results.append([y.detach()[:t], *torch.autograd.grad(y, given, dy)])
            torch.testing.assert_close(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_the_dispatcher_and_fakes(rank: int, ranks: int):
    """opcheck of each operator, with gradients where it has them."""
    (x, up, down, index, weights), counts = of_layer(rank, ranks, "uneven")
    table, name = torch.tensor(counts), world().group_name
    assert torch.equal(cp.exchange_counts(table[rank]), table)
    where = ("auto", name, ranks)
    ops: Any = torch.ops.counterpoint
    y = cp.all_to_all_matmul(x, up, counts=counts).detach().requires_grad_()
    t, r = len(x), len(y)
    calls = [
        (ops.all_to_all_matmul, (x, up, table, r, True, True, True, False, *where)),
        (ops.all_to_all_matmul, (x, up.detach(), table, r + 2, False, False, False, True, *where)),
        (ops.matmul_all_to_all, (y, down, table, None, t, True, False, *where)),
        (ops.matmul_all_to_all_sum, (y, down, table, index, weights, t, True, True, *where)),
        (ops.exchange_counts, (table[rank], name, ranks)),
        (ops.experts_weight_gradient, (y.detach(), y.detach(), table, True, name, ranks)),
    ]
    for op, given in calls:
        assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}


@on_ranks(1, 2)
def test_contexts(rank: int, ranks: int):
    """Autocast, activation checkpointing, inference mode, memory of its own."""
    tensors, counts = of_layer(rank, ranks, "uneven")
    want = gradients(layer, tensors, counts)
    again = gradients(lambda *args: checkpoint(layer, *args, use_reentrant=False), tensors, counts)
    torch.testing.assert_close(again, want)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(*tensors, counts)
        x, up = tensors[:2]
        half = cp.all_to_all_matmul(x.bfloat16(), up.bfloat16(), counts=counts)
        assert torch.equal(half, cp.all_to_all_matmul(x, up, counts=counts))
    assert y.dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(layer(*tensors, counts), want[0])
        y, rows = cp.all_to_all_matmul(tensors[0], tensors[1], counts=counts, return_rows=True)
    places = {t.untyped_storage().data_ptr() for t in (y, rows, *tensors) if t.numel()}
    assert len(places) == sum(t.numel() > 0 for t in (y, rows, *tensors))
