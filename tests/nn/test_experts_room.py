"""ExpertParallelMLP with default arguments: room for all rows, uneven tokens, and no host waits."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_bodies import small_kernels
from island_bodies import CPU, everyone, on_islands
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
import counterpoint.nn.experts as nn_experts
from counterpoint.ops import room_for_rows
from counterpoint.runtime.workspace import workspace_of

FEATURES, HIDDEN, LOCAL, TOP = 16, 8, 3, 2
DTYPE = torch.bfloat16


@contextmanager
def rooms() -> Iterator[list[int | None]]:
    """What calls of layers exchange routes with, as max_rows."""
    found: list[int | None] = []
    exchange = nn_experts.exchange_routes

    def counted(*args: Any, **more: Any) -> cp.Routes:
        found.append(more["max_rows"])
        return exchange(*args, **more)

    with pytest.MonkeyPatch.context() as patch, by_reference():
        patch.setattr(nn_experts, "exchange_routes", counted)
        yield found


def layer_of(ranks: int, **options: Any) -> cnn.ExpertParallelMLP:
    torch.manual_seed(0)
    return cnn.ExpertParallelMLP(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, **options)


def inputs(rank: int, ranks: int, tokens: int, kind: str) -> tuple[Tensor, ...]:
    """x, experts, weights and the gradient of the result, of one rank."""
    torch.manual_seed(100 * tokens + rank)
    every = ranks * LOCAL
    experts = torch.rand(tokens, every).argsort(1)[:, :TOP]
    if kind == "one rank":  # as many rows as can come
        experts = every - LOCAL + torch.rand(tokens, LOCAL).argsort(1)[:, :TOP]
    x, dy = torch.randn(tokens, FEATURES).to(DTYPE), torch.randn(tokens, FEATURES).to(DTYPE)
    return x, experts, torch.rand(tokens, TOP).softmax(1), dy


def ours(layer: Any, x: Tensor, experts: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    """The result, and the gradients of x, weights, gate_up and down."""
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = layer(leaves[0], experts, leaves[1])
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *layer.parameters()], dy)]


def by_torch(layer: Any, dtype: torch.dtype, *given: Tensor) -> list[Tensor]:
    """The same of all ranks' tokens and experts, on each rank."""
    rank = dist.get_rank()
    gate_ups, downs = (torch.cat(everyone(p.detach())).to(dtype) for p in layer.parameters())
    lists = [[t.to(dtype) for t in everyone(t)] for t in given]
    xs, weights = ([t.requires_grad_() for t in lists[i]] for i in (0, 2))
    leaves = gate_ups.requires_grad_(), downs.requires_grad_()
    ys: list[Tensor] = []
    for x, experts, each in zip(xs, lists[1], weights, strict=True):
        gate, up = torch.einsum("tf,ehf->teh", x, gate_ups).chunk(2, -1)
        every = torch.einsum("teh,efh->tef", F.silu(gate) * up, downs)
        chosen = every.gather(1, experts.long()[..., None].expand(-1, -1, FEATURES))
        ys.append((each[..., None] * chosen).sum(1))
    torch.autograd.backward(ys, lists[3])
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    grads = [xs[rank].grad, weights[rank].grad, *(w.grad[own] for w in leaves)]  # type: ignore[index]
    return [ys[rank].detach(), *grads]  # type: ignore[list-item]


def off(gots: list[Tensor], nears: list[Tensor], wants: list[Tensor]) -> list[str]:
    """What is further from fp64 than twice torch in the same dtype."""
    eps = torch.finfo(gots[0].dtype).eps
    found: list[str] = []
    names = ("y", "dx", "dweights", "dgate_up", "ddown")
    for name, got, near, want in zip(names, gots, nears, wants, strict=True):
        most = float(want.abs().max()) if want.numel() else 0.0
        error, bound = (float((t.double() - want).abs().max()) if want.numel() else 0.0
                        for t in (got, near))  # fmt: skip
        bound = 2 * bound + 4 * eps * most
        if got.shape != want.shape or not error <= bound:
            found.append(f"{name} {tuple(got.shape)}: {error:.1e} over {bound:.1e}")
    return found


TOKENS = {"equal": (8, 8, 8, 8), "uneven": (5, 21, 0, 2), "one has all": (0, 7, 0, 0),
          "none": (0, 0, 0, 0)}  # fmt: skip


@pytest.mark.parametrize("plan", ["auto", "fused", "routed"])
@on_ranks(2, 4)
def test_it_has_room_for_all_rows_of_as_many_tokens_as_ranks_bring(
    rank: int, ranks: int, plan: str
) -> list[str]:
    """Against fp64; and bits of two runs are equal."""
    found: list[str] = []
    with on_islands(rank, ranks), rooms() as asked:
        layer = layer_of(ranks, plan=plan)
        for name, tokens in TOKENS.items():
            for kind in ("drawn", "one rank"):
                given = inputs(rank, ranks, tokens[rank], kind)
                gots, again = (ours(layer, *given) for _ in range(2))
                near, want = (by_torch(layer, d, *given) for d in (DTYPE, torch.float64))
                found += [f"{name} {kind}: {text}" for text in off(gots, near, want)]
                if not all(torch.equal(*pair) for pair in zip(gots, again, strict=True)):
                    found.append(f"{name} {kind}: bits of two runs")
        most = (8, 22, 7, 0)  # 21 tokens are a multiple of 2
        wants = [max(1, ranks * n * TOP) for n in most for _ in range(4)]
        if asked != wants:
            found.append(f"room for {asked}, not for {wants}")
        if "give max_rows" in repr(layer):
            found.append(repr(layer))
    return found


@on_ranks(2)
def test_kernels_with_room_for_all_rows_of_uneven_tokens(rank: int, ranks: int) -> list[str]:
    """Interpreted, which multiplies no bf16."""
    found: list[str] = []
    with on_islands(rank, ranks), small_kernels():
        layer = layer_of(ranks).half()
        for tokens in ((3, 9), (4, 0)):
            x, experts, weights, dy = inputs(rank, ranks, tokens[rank], "drawn")
            given = x.half(), experts, weights, dy.half()
            gots = ours(layer, *given)
            near, want = (by_torch(layer, d, *given) for d in (torch.float16, torch.float64))
            found += off(gots, near, want)
        assert len(layer._fits) == 2  # pyright: ignore[reportPrivateUsage]
    return found


@on_ranks(2)
def test_logits_and_any_dims(rank: int, ranks: int):
    """Without a gradient; as the layer that is told how many rows come."""
    with on_islands(rank, ranks), rooms() as asked, torch.no_grad():
        layer = layer_of(ranks)
        x = torch.randn(2, 3 + rank, FEATURES).to(DTYPE)
        logits = torch.randn(2, 3 + rank, ranks * LOCAL)
        y = layer(x, logits=logits, top_k=TOP)
        assert asked == [ranks * 8 * TOP]
        layer.plan = "serial"
        torch.testing.assert_close(y, layer(x, logits=logits, top_k=TOP), rtol=2e-2, atol=1e-2)
        assert y.shape == x.shape and len(asked) == 1
        with torch.autocast("cpu", DTYPE):
            layer.float().plan = "auto"
            half = layer(x.float(), logits=logits, top_k=TOP)
        assert len(asked) == 2
        torch.testing.assert_close(y, half, rtol=2e-2, atol=1e-2)


@on_ranks(2)
def test_a_compiled_layer_is_told_how_many_rows_come(rank: int, ranks: int):
    """In one graph, of other numbers of tokens."""
    with on_islands(rank, ranks), rooms() as asked, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        layer = layer_of(ranks)
        given = inputs(rank, ranks, 5 + rank, "drawn")
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        gots, wants = ours(traced, *given), by_torch(layer, torch.float64, *given)
        assert not asked and not off(gots, ours(layer, *given), wants)


@on_ranks(2)
def test_what_has_no_room_is_told_how_many_rows_come(rank: int, ranks: int) -> list[str]:
    """Of memory of one rank that is short, of fp32, and of sizes that no one kernel takes."""
    found: list[str] = []
    with on_islands(rank, ranks), rooms() as asked, pytest.MonkeyPatch.context() as patch:
        layer = layer_of(ranks)
        free = 60_000 if rank else 2**40
        patch.setattr(room_for_rows, "_free_bytes", Mock(return_value=free))
        for tokens in (5 + 8 * rank, 3):  # 13 * 2 * 2 rows of 864 bytes are 45 kB, of 20 tokens 69
            given = inputs(rank, ranks, tokens, "drawn")
            gots = ours(layer, *given)
            near, want = (by_torch(layer, d, *given) for d in (DTYPE, torch.float64))
            found += off(gots, near, want)
        assert asked == [52, 12] and "max_rows=None, plan='auto'" in repr(layer)
        layer(*inputs(rank, ranks, 20, "drawn")[:3])
        patch.setattr(room_for_rows, "_free_bytes", Mock(return_value=2**40))  # too late
        layer(*inputs(rank, ranks, 20, "drawn")[:3])
        said = "plan='auto', short of memory for all rows of [20] tokens: give max_rows"
        assert len(asked) == 2 and said in repr(layer)
        x, experts, weights, _ = given
        layer.float()(x.float(), experts, weights)
        narrow = cnn.ExpertParallelMLP(10, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        narrow(x[:, :10], experts, weights)
        assert len(asked) == 2
    return found


@on_ranks(2)
def test_who_does_not_come_is_named(rank: int, ranks: int):
    group: Any = dist.new_group()
    layer = layer_of(ranks, group=group)
    x, experts, weights, _ = inputs(rank, ranks, 5, "drawn")
    with by_reference():
        layer(x, experts, weights)
        workspace_of(group, CPU).timeout_s = 0.5
        if rank == 0:
            text = "ExpertParallelMLP: rank 1 did not come to compare its arguments within"
            with pytest.raises(cp.PeerTimeoutError, match=text):
                layer(x, experts, weights)
    dist.barrier()


@on_ranks(2)
def test_what_one_rank_refuses_all_hear_of(rank: int, ranks: int):
    """And the group works on."""
    with on_islands(rank, ranks), by_reference():
        layer = layer_of(ranks)
        x, experts, weights, _ = inputs(rank, ranks, 5, "drawn")
        want = layer(x, experts, weights)
        with pytest.raises(cp.InputError, match=r"x must be \[..., 16\], got \(5, 15\)"):
            layer(x[:, rank:], experts, weights)
        dist.barrier()
        assert torch.equal(layer(x, experts, weights), want)


@on_ranks(2)
def test_other_layers_are_refused_on_all_ranks(rank: int, ranks: int):
    """And the group works on."""
    with on_islands(rank, ranks), by_reference():
        layers = layer_of(ranks), cnn.ExpertParallelMLP(FEATURES, 16, ranks * LOCAL, dtype=DTYPE)
        x, experts, weights, _ = inputs(rank, ranks, 5, "drawn")
        layers[0](x, experts, weights)
        text = "hidden must be equal on all ranks, 8 as on rank 0, got 16 on rank 1"
        with pytest.raises(cp.InputError, match=f"^ExpertParallelMLP: {text}"):
            layers[rank](x, experts, weights)
        layers[1](x, experts, weights)


@on_ranks(2)
def test_no_expert_is_refused_by_every_plan(rank: int, ranks: int):
    """What routes have for none is no expert of a layer, on whichever way its rows go."""
    x, experts, weights, _ = inputs(rank, ranks, 5, "drawn")
    experts[0, 0] = 2**31 - 1
    drops = {"max_rows": 100, "capacity": "drop"}
    for options in ({"plan": "serial"}, {"plan": "routed"}, drops):
        with by_reference(), pytest.raises(cp.InputError, match="experts must be 0 to 5, got"):
            layer_of(ranks, **options)(x, experts, weights)
