"""A layer of experts by torch's own operators, forward; autograd has the backward.

Rows go by all_to_all_single, whose split sizes the host has to know."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Bench
from benchmarks.expert_tensors import Model


class Batch(NamedTuple):
    """A rank's tokens, and what comes back in the backward."""

    x: Tensor  # [tokens, hidden]
    experts: Tensor  # int64 [tokens, top]
    weights: Tensor  # fp32 [tokens, top]
    dy: Tensor  # [tokens, hidden]
    counts: Tensor  # int64 [ranks, experts]: rows of each rank for each expert
    known: Tensor  # the same on the CPU


def batch_of(tokens: int, model: Model, dtype: torch.dtype, bench: Bench) -> Batch:
    """Each token names `top` different experts, all equally likely."""
    num_experts = bench.ranks * model.experts
    score = torch.rand(tokens, num_experts, device=bench.device, generator=bench.draw)
    top, experts = score.topk(model.top)
    own = experts.flatten().bincount(minlength=num_experts)
    counts = cp.exchange_counts(own, group=bench.group)
    x, dy = (bench.normal(tokens, model.hidden, dtype=dtype) for _ in range(2))
    return Batch(x, experts, top / top.sum(1, keepdim=True), dy, counts, counts.cpu())


class _Rows(torch.autograd.Function):
    """x[index]; the gradient of a row is the sum of those at `back`, [rows of x, times taken]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        rows = dy[0].index_select(0, back.flatten())
        if back.shape[1] > 1:
            rows = rows.view(*back.shape, -1).sum(1)  # accumulates in fp32
        return rows, None, None


class Exchanged(torch.autograd.Function):
    """all_to_all_single of rows, whose gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, come: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.back = sent, come, group
        y = x.new_empty(sum(come), x.shape[1])
        dist.all_to_all_single(y, x, come, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchanged.apply(dy[0].contiguous(), *ctx.back), None, None, None  # type: ignore[return-value]


def grouped(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows times its weight, in one matmul where the library has such.

    Args:
        x: [rows, K]; those behind the last expert's give nothing that is to be read.
        w: [experts, K, N].
        counts: [experts], where x is: rows of each.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, w, offs=counts.cumsum(0, dtype=torch.int32))
    sizes = counts.tolist()
    parts = x.split([*sizes, len(x) - sum(sizes)])[:-1]
    products = torch.cat([rows @ w[e] for e, rows in enumerate(parts)])
    return F.pad(products, (0, 0, 0, len(x) - len(products)))


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by expert through their experts."""
    gate, up = grouped(x, gate_up.transpose(1, 2), counts).chunk(2, -1)
    return grouped(F.silu(gate) * up, down.transpose(1, 2), counts)


def own_of(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[sources, experts of this rank]."""
    return counts.view(group.size(), group.size(), -1)[:, group.rank()]


def splits_of(known: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Rows that this rank gets from each rank, and rows that it sends to each."""
    sent = known[group.rank()].view(group.size(), -1).sum(1)
    return own_of(known, group).sum(1).tolist(), sent.tolist()


def _by_expert(mine: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which row of those sorted by source is row i of those sorted by expert; and the inverse."""
    expert = torch.arange(mine.shape[1], device=mine.device).repeat(len(mine))
    by = expert.repeat_interleave(mine.flatten(), output_size=rows).argsort(stable=True)
    return by, _inverse(by)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def in_torch(
    b: Batch, gate_up: Tensor, down: Tensor, group: dist.ProcessGroup, *, known: bool
) -> Tensor:
    """The layer as it is usually written.

    Args:
        b: the tokens.
        gate_up: [experts of this rank, 2 ffn, hidden].
        down: [experts of this rank, hidden, ffn].
        group: of the ranks.
        known: take the counts that the batch has; else ranks tell each other, and the host waits.
    """
    tokens, top = b.experts.shape
    ids, order = b.experts.flatten().sort(stable=True)
    places, counts, on_host = _inverse(order), b.counts, b.known
    if not known:
        edges = torch.arange(group.size() * len(down) + 1, device=ids.device)
        counts = cp.exchange_counts(torch.searchsorted(ids, edges).diff(), group=group)
        on_host = counts.cpu()
    mine, (come, sent) = own_of(counts, group), splits_of(on_host, group)
    rows = Exchanged.apply(
        _Rows.apply(b.x, order // top, places.view(tokens, top)), come, sent, group
    )
    several = len(down) > 1
    by, back = _by_expert(mine, sum(come)) if several else (order, order)
    if several:
        rows = _Rows.apply(rows, by, back[:, None])
    y = swiglu_mlp(rows, gate_up, down, mine.sum(0))
    if several:
        y = _Rows.apply(y, back, by[:, None])
    y = _Rows.apply(Exchanged.apply(y, sent, come, group), places, order[:, None])
    return torch.bmm(b.weights.to(y.dtype)[:, None], y.view(tokens, top, -1))[:, 0]
