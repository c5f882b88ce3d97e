"""Experts by routes that the host does not read: right against fp64, and what does not fit."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_bodies import small_kernels
from island_bodies import everyone, on_islands, shards
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from routed_bodies import CHOICES, LOCAL, TOP, by_torch, chosen, layer
from torch import Tensor

import counterpoint as cp
from counterpoint.measure.timing import relative_error
from counterpoint.ops import exchange_routes
from counterpoint.runtime import wire
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.ranks import spawn
from counterpoint.runtime.workspace import workspace_of

K, N, HIDDEN = 8, 16, 24


def compare(rank: int, ranks: int, name: str, tokens: int, plan: str, dtype: torch.dtype) -> None:
    """Sums, and all gradients, against fp64 of all ranks' tokens."""
    experts = chosen(name, rank, ranks, tokens)
    weights = shards(rank, tokens, TOP).softmax(1)
    x, up, down, dy = (
        t.to(dtype)
        for t in (
            shards(rank, tokens, K), shards(rank, LOCAL, K, HIDDEN) / 3,
            shards(rank, LOCAL, HIDDEN, N) / 5, shards(rank + 7, tokens, N),
        )
    )  # fmt: skip
    leaves = [t.requires_grad_() for t in (x, up, down, weights)]
    every = ranks * LOCAL
    room = ranks * tokens * TOP + 3
    routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
    assert routes.weights.shape == (room,) and routes.top_k == TOP
    y = layer(x, up, down, routes, plan)
    got = torch.autograd.grad(y, leaves, dy)

    given = [everyone(t.detach().double()) for t in (x, up, down, weights, dy)]
    xs, ws = ([t.requires_grad_() for t in given[i]] for i in (0, 3))
    ups, downs = (torch.cat(given[i]).requires_grad_() for i in (1, 2))
    lists = [each.long() for each in everyone(experts)]
    ys = [by_torch(a, ups, downs, e, b) for a, e, b in zip(xs, lists, ws, strict=True)]
    close(y.detach(), ys[rank].detach(), dtype)
    torch.autograd.backward(ys, given[4])
    own = slice(rank * LOCAL, (rank + 1) * LOCAL)
    assert ups.grad is not None and downs.grad is not None
    wanted = xs[rank].grad, ups.grad[own], downs.grad[own], ws[rank].grad
    for mine, want in zip(got, wanted, strict=True):
        assert want is not None
        close(mine, want, dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    if want.any():
        assert relative_error(got, want) <= 8 * torch.finfo(dtype).eps
    else:
        assert not got.any()


@pytest.mark.parametrize("name", CHOICES)
@on_ranks(2, 4)
def test_a_layer_against_fp64(rank: int, ranks: int, name: str):
    """By what stands in for kernels; of fp32, which they do not take, by plans of the host."""
    with on_islands(rank, ranks), by_reference():
        for tokens in (9, 0):
            compare(rank, ranks, name, tokens, "auto", torch.float32)
            compare(rank, ranks, name, tokens, "auto", torch.float16)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (3, 1)])
@on_ranks()
def test_a_layer_between_islands_against_fp64(rank: int, ranks: int, size: int, name: str):
    """Of fp32, which kernels do not take, ranks tell each other their routes anew."""
    with on_islands(rank, size), by_reference():
        for tokens in (9, 0):
            for plan in ("auto", "serial"):
                compare(rank, ranks, name, tokens, plan, torch.float32)
            for plan in ("auto", "islands", "serial"):
                compare(rank, ranks, name, tokens, plan, torch.float16)


def on_islands_of_three(rank: int, ranks: int) -> None:
    with on_islands(rank, 3):
        for name in CHOICES:
            compare(rank, ranks, name, 9, "auto", torch.float16)
        text = "plan must be for a number of ranks that is a power of two"
        with pytest.raises(cp.InputError, match=text):
            compare(rank, ranks, "uniform", 5, "islands", torch.float16)


def test_a_layer_between_islands_of_three_against_fp64():
    """No kernel waits for peers there: the host does."""
    spawn(on_islands_of_three, 6, timeout_s=300)


@pytest.mark.parametrize("name", ["uniform", "first island", "last rank"])
@on_ranks(4)
def test_every_token_goes_to_each_other_island_once(rank: int, ranks: int, name: str):
    """Whatever its experts: sizes say nothing of routes; forward and backward, there and back."""
    found: list[int] = []
    exchange, tokens, wide = wire.Gloo.exchange, 7, 16

    def counting(self: Any, sent: wire.Messages, *rest: Any) -> None:
        found.extend(block.numel() for block, _ in sent)
        exchange(self, sent, *rest)

    for size in (2, 1):
        with on_islands(rank, size) as islands, by_reference(), pytest.MonkeyPatch.context() as p:
            experts, weights = chosen(name, rank, ranks, tokens), torch.ones(tokens, TOP)
            every, room = ranks * LOCAL, ranks * tokens * TOP
            routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
            x = shards(rank, tokens, wide).half().requires_grad_()
            w = shards(rank, LOCAL, wide, wide).half()
            found.clear()
            p.setattr(wire.Gloo, "exchange", counting)
            layer(x, w, w, routes, "auto").sum().backward()
            assert found == [tokens * wide] * (4 * (islands - 1))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("size", [2, 1])
@on_ranks(4)
def test_kernels_between_islands_against_fp64(rank: int, ranks: int, size: int, name: str):
    """Interpreted, on islands of 2 ranks and of 1."""
    with on_islands(rank, size), small_kernels():
        for tokens in (9, 0):
            compare(rank, ranks, name, tokens, "islands", torch.float16)


@pytest.mark.parametrize("name", CHOICES)
@on_ranks(2)
def test_kernels_against_fp64(rank: int, ranks: int, name: str):
    """Interpreted."""
    with on_islands(rank, ranks), small_kernels():
        for tokens in (9, 0):
            compare(rank, ranks, name, tokens, "fused", torch.float16)


def rows_written(op: Callable[[], Tensor], columns: int) -> int:
    """How many rows of that many fp16 numbers peers and this rank have put into its memory."""
    workspace = workspace_of(world(), torch.device("cpu"))
    op()  # memory is there
    dist.barrier()
    memory = fused_memory(workspace).turns.memory
    assert memory is not None
    bits = memory.local()[: memory.num_bytes // (4 * columns) * 4 * columns].view(torch.int16)
    bits.fill_(-23131)  # no small integer
    dist.barrier()
    op()
    dist.barrier()
    return int((bits.view(-1, columns) != -23131).any(1).sum())


@pytest.mark.parametrize("name", ["uniform", "zipf"])
@on_ranks(2)
def test_a_token_goes_to_another_rank_once(rank: int, ranks: int, name: str):
    """Rows on the wire are the tokens that have experts there, and they come back."""
    local, tokens = 4, 12
    with on_islands(rank, ranks), small_kernels():
        experts = chosen(name, rank, ranks, tokens, local)
        weights = torch.ones(tokens, TOP)
        every, room = ranks * local, ranks * tokens * TOP
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        x, w = torch.ones(tokens, 16).half(), torch.ones(local, 16, 16).half()
        h = cp.all_to_all_matmul(x, w, counts=routes)
        there = rows_written(lambda: cp.all_to_all_matmul(x, w, counts=routes), 16)
        back = rows_written(lambda: cp.matmul_all_to_all(h, w, counts=routes), 16)
        once = [(each // local == rank).any(1).sum() for each in everyone(experts)]
        reached = sum((experts // local == d).any(1).sum() for d in range(ranks))
        assert (there, back) == (sum(once), reached)
        assert there < routes.counts.view(ranks, ranks, local)[:, rank].sum(), "some go once"


@on_ranks(2)
def test_what_does_not_fit_is_said_on_all_ranks(rank: int, ranks: int):
    with on_islands(rank, ranks):
        experts, weights = chosen("last rank", rank, ranks, 5), torch.ones(5, TOP)
        every, full = ranks * LOCAL, ranks * 5 * TOP
        text = f"max_rows must be >= {full}, what rank {ranks - 1} gets, got {full - 4}, 4 fewer"
        with pytest.raises(cp.InputError, match=text):
            cp.exchange_routes(experts, weights, num_experts=every, max_rows=full - 4)
        wrong = experts + (rank == 1) * every
        with pytest.raises(cp.InputError, match=r"experts must be 0 to 3, got . to . on rank 1"):
            cp.exchange_routes(wrong, weights, num_experts=every, max_rows=full)
        with pytest.raises(cp.InputError, match=r"experts must be .tokens, 1 to 4, all experts."):
            many = torch.zeros(5, 5, dtype=torch.int64)
            cp.exchange_routes(many, torch.ones(5, 5), num_experts=every, max_rows=full)
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=full)
        x, w = shards(rank, 6, K), shards(rank, LOCAL, K, N)
        with pytest.raises(cp.InputError, match=r"x must be .5, K., as the routes say, got .6, 8"):
            cp.all_to_all_matmul(x, w, counts=routes)
        with pytest.raises(cp.InputError, match=rf"x must be .{full}, K., as the routes say"):
            cp.matmul_all_to_all(x, w, counts=routes)
        for plan in ("grouped", "islands"):
            with pytest.raises(cp.InputError, match="plan must be auto, fused or serial"):
                cp.all_to_all_matmul(x[:5], w, counts=routes, plan=plan)


@on_ranks(4)
def test_what_does_not_fit_is_said_on_all_islands(rank: int, ranks: int):
    with on_islands(rank, 2), by_reference():
        experts, weights = chosen("last rank", rank, ranks, 5), torch.ones(5, TOP)
        every, full = ranks * LOCAL, ranks * 5 * TOP
        text = f"max_rows must be >= {full}, what rank {ranks - 1} gets, got {full - 4}, 4 fewer"
        with pytest.raises(cp.InputError, match=text):
            cp.exchange_routes(experts, weights, num_experts=every, max_rows=full - 4)
        few = slice(0, 4 if rank == 2 else 5)
        with pytest.raises(cp.InputError, match="tokens must be equal on all ranks"):
            cp.exchange_routes(experts[few], weights[few], num_experts=every, max_rows=full)
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=full)
        x, w = shards(rank, 5, K), shards(rank, LOCAL, K, N)
        with pytest.raises(cp.InputError, match="plan must be auto, islands or serial"):
            cp.all_to_all_matmul(x, w, counts=routes, plan="fused")
        with pytest.raises(cp.InputError, match="plan must be for 16-bit numbers"):
            cp.all_to_all_matmul(x, w, counts=routes, plan="islands")


@pytest.mark.parametrize("missing", [5, 70])
@on_ranks(4)
def test_too_many_rows_on_one_island_spoil_all_results_on_all(
    rank: int, ranks: int, missing: int
) -> list[str]:
    """Kernels say so, as on GPUs, where the host reads no routes; also of more tokens than rows."""
    found, tokens = list[str](), 6
    with on_islands(rank, 2), small_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_routes, "_look", lambda *_: None)
        experts, weights = chosen("last rank", rank, ranks, tokens), torch.ones(tokens, TOP)
        every, room = ranks * LOCAL, ranks * tokens * TOP - missing
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        x, w = shards(rank, tokens, 16).half(), shards(rank, LOCAL, 16, 16).half()
        for op in (cp.all_to_all_matmul, cp.matmul_all_to_all):
            dispatches = op is cp.all_to_all_matmul
            given = x if dispatches else torch.zeros(room, 16).half()
            y = op(given, w, counts=routes, plan="islands")
            rows = y[: int(routes.counts[:, rank * LOCAL :][:, :LOCAL].sum())] if dispatches else y
            if not rows.isnan().all():
                found.append(f"{op.__name__}: results are numbers")
            memory = fused_memory(workspace_of(world(), torch.device("cpu")))
            want = rf"{op.__name__}: .* for ranks \[{ranks - 1}\].*, got {missing} fewer at an"
            if not re.match(want, text := str(memory.dropped())):
                found.append(text)
            memory.over.zero_()
    return found


@pytest.mark.parametrize("size", [2, 1])
@on_ranks(2)
def test_the_dispatcher_fakes_and_compilers(rank: int, ranks: int, size: int):
    """opcheck of each operator, with gradients where it has them; and one graph of a layer."""
    with on_islands(rank, size) as islands, by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports warn
        ops: Any = torch.ops.counterpoint
        where, room, every = (world().group_name, ranks), ranks * 7 * TOP, ranks * LOCAL
        experts, weights = chosen("uniform", rank, ranks, 7), shards(rank, 7, TOP).requires_grad_()
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        which, each = routes[:3], routes.weights.detach()
        x, up = shards(rank, 7, K).half(), shards(rank, LOCAL, K, HIDDEN).half()
        h = torch.zeros(room, HIDDEN).half()
        x, up, h, each = (t.requires_grad_() for t in (x, up, h, each))
        down = shards(rank, LOCAL, HIDDEN, N).half().requires_grad_()
        calls = [
            (ops.exchange_routes, (experts, weights, every, room, islands, False, *where)),
            (ops.weights_back, (each.detach(), *which[1:], 7, TOP, True, *where)),
            (ops.matmul_all_to_all_routed, (h, down, *which, each, None, 7, TOP, "auto", *where)),
        ]
        for op, given in calls:
            assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}

        def whole(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
            return layer(x, up, down, routes, "fused" if islands == 1 else "islands")

        traced = torch.compile(whole, backend="aot_eager", fullgraph=True)
        for name in ("uniform", "skewed"):
            leaves = [t.detach().requires_grad_() for t in (x, weights)]
            ids = chosen(name, rank, ranks, 7)
            got, want = (
                (
                    y := fn(leaves[0], leaves[1], ids),
                    *torch.autograd.grad(y.square().sum(), (*leaves, up, down)),
                )
                for fn in (traced, whole)
            )
            torch.testing.assert_close(got, want)
