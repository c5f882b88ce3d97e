"""A layer of experts as torch's own operators have it, and as ours: steps.py says what each way
is."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
from benchmarks.declare import Arms, Bench, Call
from benchmarks.experts import Model
from counterpoint.measure.timing import relative_error

SETS = 3  # of tokens, experts and gradients, in rotation
ROOM = 1.25  # rows that a rank has room for, of the mean, where the host knows no counts
BOTH = "forward + backward"


class Batch(NamedTuple):
    """A rank's tokens, and what comes back in the backward."""

    x: Tensor  # [tokens, hidden]
    experts: Tensor  # int64 [tokens, top]
    weights: Tensor  # fp32 [tokens, top]
    dy: Tensor  # [tokens, hidden]
    counts: Tensor  # int64 [ranks, experts] on the CPU: rows of each rank for each expert


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


class _Exchanged(torch.autograd.Function):
    """all_to_all_single of rows, whose gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, come: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.back = sent, come, group
        y = x.new_empty(sum(come), x.shape[1])
        dist.all_to_all_single(y, x, come, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.apply(dy[0].contiguous(), *ctx.back), None, None, None  # type: ignore[return-value]


def grouped(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows times its weight; in one matmul where the library has such."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        ends = counts.cumsum(0).int().to(x.device, non_blocking=True)
        return F.grouped_mm(x, w, offs=ends)
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.split(counts.tolist()))])


def _own(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[sources, experts of this rank]."""
    return counts.view(group.size(), group.size(), -1)[:, group.rank()]


def _by_expert(mine: Tensor, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which row of those sorted by source is row i of those sorted by expert; and the inverse."""
    expert = torch.arange(mine.shape[1]).repeat(len(mine)).to(device, non_blocking=True)
    sizes = mine.flatten().to(device, non_blocking=True)
    by = expert.repeat_interleave(sizes, output_size=rows).argsort(stable=True)
    back = torch.empty_like(by)
    back[by] = torch.arange(rows, device=device)
    return by, back


def in_torch(
    b: Batch, gate_up: Tensor, down: Tensor, group: dist.ProcessGroup, *, known: bool
) -> Tensor:
    """The layer as it is usually written, forward.

    Args:
        b: the tokens.
        gate_up: [experts of this rank, 2 ffn, hidden].
        down: [experts of this rank, hidden, ffn].
        group: of the ranks.
        known: take the counts that the batch has; else ranks tell each other, and the host waits.
    """
    ranks, (tokens, top) = group.size(), b.experts.shape
    ids, order = b.experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = b.counts
    if not known:
        edges = torch.arange(ranks * len(down) + 1, device=ids.device)
        counts = cp.exchange_counts(torch.searchsorted(ids, edges).diff(), group=group).cpu()
    mine = _own(counts, group)
    sent, come = counts[group.rank()].view(ranks, -1).sum(1).tolist(), mine.sum(1).tolist()
    rows = _Exchanged.apply(
        _Rows.apply(b.x, order // top, places.view(tokens, top)), come, sent, group
    )
    several = len(down) > 1
    by, back = _by_expert(mine, sum(come), order.device) if several else (order, order)
    if several:
        rows = _Rows.apply(rows, by, back[:, None])
    gate, up = grouped(rows, gate_up.transpose(1, 2), mine.sum(0)).chunk(2, -1)
    y = grouped(F.silu(gate) * up, down.transpose(1, 2), mine.sum(0))
    if several:
        y = _Rows.apply(y, back, by[:, None])
    y = _Rows.apply(_Exchanged.apply(y, sent, come, group), places, order[:, None])
    return torch.bmm(b.weights.to(y.dtype)[:, None], y.view(tokens, top, -1))[:, 0]


def batch_of(tokens: int, model: Model, dtype: torch.dtype, bench: Bench) -> Batch:
    """Each token names `top` different experts, all equally likely."""
    num_experts = bench.ranks * model.experts
    score = torch.rand(tokens, num_experts, device=bench.device, generator=bench.draw)
    top, experts = score.topk(model.top)
    own = experts.flatten().bincount(minlength=num_experts)
    counts = cp.exchange_counts(own, group=bench.group).cpu()
    x, dy = (bench.normal(tokens, model.hidden, dtype=dtype) for _ in range(2))
    return Batch(x, experts, top / top.sum(1, keepdim=True), dy, counts)


def ways_of(
    model: Model, tokens: int, gate_up: Tensor, down: Tensor, bench: Bench
) -> dict[str, Callable[[Batch], Tensor]]:
    """The layer each way, on the same weights."""
    ranks, local = bench.ranks, model.experts
    # no rank can get more than all rows of all tokens that name different experts
    room = min(int(ROOM * tokens * model.top), ranks * tokens * min(local, model.top))
    options: dict[str, dict[str, Any]] = {
        "fused": {"max_rows": room}, "default": {}, "serial": {"plan": "serial"}
    }  # fmt: skip
    ways: dict[str, Callable[[Batch], Tensor]] = {}
    for name, more in options.items():
        layer = cnn.ExpertParallelMLP(model.hidden, model.ffn, ranks * local, group=bench.group,
                                      device="meta", dtype=gate_up.dtype, **more)  # fmt: skip
        layer.gate_up, layer.down = gate_up, down  # type: ignore[assignment]
        ways[name] = lambda b, layer=layer: layer(b.x, b.experts, b.weights)
    for name, known in (("torch", False), ("torch, counts", True)):
        ways[name] = partial(in_torch, gate_up=gate_up, down=down, group=bench.group, known=known)
    return ways


def experts_arms(model: Model, tokens: int, dtype: torch.dtype, bench: Bench) -> Arms:
    """Results and gradients of tokens, their experts' weights, and both weights of each expert."""
    batches = [batch_of(tokens, model, dtype, bench) for _ in range(SETS)]

    def weight(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(bench.normal(*shape, scale=shape[-1] ** -0.5, dtype=dtype))

    gate_up = weight(model.experts, 2 * model.ffn, model.hidden)
    down = weight(model.experts, model.hidden, model.ffn)

    def forward(i: int, way: Callable[[Batch], Tensor]) -> Tensor:
        with torch.no_grad():
            return way(batches[i % SETS])

    def both(i: int, way: Callable[[Batch], Tensor]) -> tuple[Tensor, ...]:
        b = batches[i % SETS]
        b = b._replace(x=b.x.detach().requires_grad_(), weights=b.weights.detach().requires_grad_())
        y = way(b)
        return y.detach(), *torch.autograd.grad(y, (b.x, b.weights, gate_up, down), b.dy)

    calls: dict[str, Call] = {}
    for name, way in ways_of(model, tokens, gate_up, down, bench).items():
        calls[f"forward, by {name}"] = partial(forward, way=way)
        calls[f"{BOTH}, by {name}"] = partial(both, way=way)
    want = exact(batches[0], gate_up, down, bench)

    def check(_: str, got: tuple[Tensor, ...]) -> list[float]:
        return [relative_error(a, b) for a, b in zip(got, want, strict=True)]

    calls |= sides(batches[0], gate_up, down, bench)
    rows = [int(_own(b.counts, bench.group).sum()) for b in batches]
    return Arms(calls, check, baseline=f"{BOTH}, by torch", limit=0.05, nan_bytes=8 << 30,
                parts=[name for name in calls if not name.startswith(BOTH)],
                facts={"tokens": tokens, "rows": rows, "sets": SETS})  # fmt: skip


def exact(b: Batch, gate_up: Tensor, down: Tensor, bench: Bench) -> tuple[Tensor, ...]:
    """Result and gradients by `in_torch` in fp64: what is off there is off from the module too."""
    leaves = [t.detach().double().requires_grad_() for t in (b.x, b.weights, gate_up, down)]
    b = b._replace(x=leaves[0], weights=leaves[1], dy=b.dy.double())
    y = in_torch(b, leaves[2], leaves[3], bench.group, known=True)
    return y.detach(), *torch.autograd.grad(y, leaves, b.dy)


def sides(b: Batch, gate_up: Tensor, down: Tensor, bench: Bench) -> dict[str, Call]:
    """The grouped matmuls alone, and the all-to-alls alone, of a forward and of both."""
    ranks, mine, dtype = bench.ranks, _own(b.counts, bench.group), b.x.dtype
    sent, come = b.counts[bench.rank].view(ranks, -1).sum(1).tolist(), mine.sum(1).tolist()
    out = bench.normal(sum(sent), gate_up.shape[2], dtype=dtype)
    rows = bench.normal(sum(come), gate_up.shape[2], dtype=dtype)
    wide = bench.normal(sum(come), gate_up.shape[1], dtype=dtype)
    narrow = wide[:, : down.shape[2]].contiguous()
    leaves = [t.detach().requires_grad_() for t in (rows, narrow, gate_up, down)]

    def matmuls(_: int, *, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            first = grouped(leaves[0], leaves[2].transpose(1, 2), mine.sum(0))
            second = grouped(leaves[1], leaves[3].transpose(1, 2), mine.sum(0))
        if backward:
            torch.autograd.grad((first, second), leaves, (wide, rows))

    @torch.no_grad()
    def exchanges(_: int, *, times: int) -> None:
        for _ in range(times):
            dist.all_to_all_single(rows, out, come, sent, group=bench.group)
            dist.all_to_all_single(out, rows, sent, come, group=bench.group)

    return {
        "matmuls, by forward": partial(matmuls, backward=False),
        f"matmuls, by {BOTH}": partial(matmuls, backward=True),
        "exchanges, by forward": partial(exchanges, times=1),
        f"exchanges, by {BOTH}": partial(exchanges, times=2),
    }
