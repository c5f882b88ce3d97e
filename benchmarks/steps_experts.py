"""Steps of a layer of experts, of tokens whose experts are known: the router is the same for all.

    fused          cnn.ExpertParallelMLP, counts on the device: the host waits for nothing
    fused, host    the same, counts that the host waits for at each call, as plan="auto" has it
    serial         the same with plan="serial": the libraries, and our passes between them
    torch          all_to_all_single, grouped matmuls, permutations by index_select, bmm
    torch, counts  the same, counts that the host has known before: no wait, no exchange of them

Backward: gradients of tokens, weights of their experts, and both weights of each expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts_layer import Model
from steps_dlrm import Steps
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.errors import CounterpointError
from counterpoint.measure.timing import nan_behind, relative_error
from counterpoint.ops.experts_serial import products, weight_gradient

Arm = Callable[[int], object]
SETS = 3  # of tokens, experts and gradients, in rotation
ROOM = 1.25  # rows that a rank has room for, of the mean, where the host knows no counts
NAN_BYTES = 8 << 30  # of memory that is full of NaN before a check


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


class _Grouped(torch.autograd.Function):
    """Each expert's rows times its weight, the library's grouped matmul in all three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counts: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.counts, ctx.group = counts, group
        return products(x, w, _own(counts, group).sum(0))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, w), counts, group = ctx.saved_tensors, ctx.counts, ctx.group
        dw = weight_gradient(x, dy[0], counts, w, group.group_name, group.size())
        return products(dy[0], w.transpose(1, 2), _own(counts, group).sum(0)), dw, None, None


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
        gate_up: [experts of this rank, 2 ffn, hidden].
        down: [experts of this rank, hidden, ffn].
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
    rows = _Rows.apply(b.x, order // top, places.view(tokens, top))
    rows = _Exchanged.apply(rows, come, sent, group)
    several = len(down) > 1
    by, back = _by_expert(mine, sum(come), order.device) if several else (order, order)
    if several:
        rows = _Rows.apply(rows, by, back[:, None])
    gate, up = _Grouped.apply(rows, gate_up.transpose(1, 2), counts, group).chunk(2, -1)
    y = _Grouped.apply(F.silu(gate) * up, down.transpose(1, 2), counts, group)
    if several:
        y = _Rows.apply(y, back, by[:, None])
    y = _Exchanged.apply(y, sent, come, group)
    y = _Rows.apply(y, places, order[:, None]).view(tokens, top, -1)
    return torch.bmm(b.weights.to(y.dtype)[:, None], y)[:, 0]


def batch_of(
    tokens: int, model: Model, dtype: torch.dtype, draw: torch.Generator, group: dist.ProcessGroup
) -> Batch:
    """Each token names `top` different experts, all equally likely."""
    device, num_experts = draw.device, group.size() * model.experts

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=draw).to(dtype)

    score = torch.rand(tokens, num_experts, device=device, generator=draw)
    top, experts = score.topk(model.top)
    own = experts.flatten().bincount(minlength=num_experts)
    counts = cp.exchange_counts(own, group=group).cpu()
    x, dy = normal(tokens, model.hidden), normal(tokens, model.hidden)
    return Batch(x, experts, top / top.sum(1, keepdim=True), dy, counts)


def made(
    model: Model, tokens: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> Steps:
    """Build the layer each way, check results and gradients, and return what to time.

    Args:
        model: sizes; experts are those of a rank.
        tokens: of a rank.
        dtype: of tokens and experts.

    Raises:
        CounterpointError: a result or gradient is further off than twice that of "torch".
    """
    ranks, local = group.size(), model.experts
    draw = torch.Generator(device).manual_seed(group.rank())
    batches = [batch_of(tokens, model, dtype, draw, group) for _ in range(SETS)]

    def weight(*shape: int) -> torch.nn.Parameter:
        scale = shape[-1] ** -0.5
        return torch.nn.Parameter(torch.randn(shape, device=device, generator=draw).mul_(scale)
                                  .to(dtype))  # fmt: skip

    gate_up = weight(local, 2 * model.ffn, model.hidden)
    down = weight(local, model.hidden, model.ffn)
    mean = tokens * model.top
    # no rank can get more than all rows of all tokens that name different experts
    room = min(int(ROOM * mean), ranks * tokens * min(local, model.top))
    options: dict[str, dict[str, Any]] = {
        "fused": {"max_rows": room}, "fused, host": {}, "serial": {"plan": "serial"}
    }  # fmt: skip
    ways: dict[str, Callable[[Batch], Tensor]] = {}
    for name, more in options.items():
        layer = cnn.ExpertParallelMLP(model.hidden, model.ffn, ranks * local, group=group,
                                      device="meta", dtype=dtype, **more)  # fmt: skip
        layer.gate_up, layer.down = gate_up, down
        ways[name] = lambda b, layer=layer: layer(b.x, b.experts, b.weights)
    for name, known in (("torch", False), ("torch, counts", True)):
        ways[name] = partial(in_torch, gate_up=gate_up, down=down, group=group, known=known)

    def forward(i: int, way: Callable[[Batch], Tensor]) -> Tensor:
        with torch.no_grad():
            return way(batches[i % SETS])

    def both(i: int, way: Callable[[Batch], Tensor]) -> tuple[Tensor, ...]:
        b = batches[i % SETS]
        b = b._replace(x=b.x.detach().requires_grad_(), weights=b.weights.detach().requires_grad_())
        y = way(b)
        return y.detach(), *torch.autograd.grad(y, (b.x, b.weights, gate_up, down), b.dy)

    errors = _checked(both, ways, batches, gate_up, down, group)
    arms: dict[tuple[str, str], Arm] = {}
    for name, way in ways.items():
        arms["forward", name] = lambda i, way=way: forward(i, way)
        arms["forward + backward", name] = lambda i, way=way: both(i, way)
    arms |= parts(batches[0], gate_up, down, group)
    rows = [int(_own(b.counts, group).sum()) for b in batches]
    facts = {
        "model": model.name, "size": tokens, "tokens": tokens, "hidden": model.hidden,
        "ffn": model.ffn, "experts": local, "top": model.top, "rows": rows, "room": room,
        "sets": SETS,
    }  # fmt: skip
    return Steps(arms, errors, facts)


def parts(
    b: Batch, gate_up: Tensor, down: Tensor, group: dist.ProcessGroup
) -> dict[tuple[str, str], Arm]:
    """The grouped matmuls alone, and the all-to-alls alone, of a forward and of both."""
    ranks, counts, mine = group.size(), b.counts, _own(b.counts, group)
    sent, come = counts[group.rank()].view(ranks, -1).sum(1).tolist(), mine.sum(1).tolist()
    each, where = mine.sum(0), (group.group_name, group.size())
    out = torch.randn(sum(sent), gate_up.shape[2], device=b.x.device).to(b.x.dtype)
    rows = torch.randn(sum(come), gate_up.shape[2], device=b.x.device).to(b.x.dtype)
    wide = torch.randn(sum(come), gate_up.shape[1], device=b.x.device).to(b.x.dtype)
    narrow = wide[:, : down.shape[2]].contiguous()

    @torch.no_grad()
    def matmuls(_: int, *, backward: bool) -> None:
        products(rows, gate_up.transpose(1, 2), each)
        products(narrow, down.transpose(1, 2), each)
        if backward:
            products(rows, down, each)
            weight_gradient(narrow, rows, counts, down.transpose(1, 2), *where)
            products(wide, gate_up, each)
            weight_gradient(rows, wide, counts, gate_up.transpose(1, 2), *where)

    @torch.no_grad()
    def exchanges(_: int, *, times: int) -> None:
        for _ in range(times):
            dist.all_to_all_single(rows, out, come, sent, group=group)
            dist.all_to_all_single(out, rows, sent, come, group=group)

    return {
        ("matmuls", "forward"): lambda i: matmuls(i, backward=False),
        ("matmuls", "forward + backward"): lambda i: matmuls(i, backward=True),
        ("exchanges", "forward"): lambda i: exchanges(i, times=1),
        ("exchanges", "forward + backward"): lambda i: exchanges(i, times=2),
    }


def _checked(
    both: Callable[[int, Callable[[Batch], Tensor]], tuple[Tensor, ...]],
    ways: dict[str, Callable[[Batch], Tensor]], batches: list[Batch], gate_up: Tensor,
    down: Tensor, group: dist.ProcessGroup,
) -> dict[str, float]:  # fmt: skip
    """The worst error of result and gradients, by way, of the worst rank.

    Against `in_torch` in fp64: what is off there by more than rounding is off from the module too.
    """
    last = len(batches) - 1  # what is left of another set would be seen
    b = batches[last]
    leaves = [t.detach().double().requires_grad_() for t in (b.x, b.weights, gate_up, down)]
    exact = b._replace(x=leaves[0], weights=leaves[1], dy=b.dy.double())
    y = in_torch(exact, leaves[2], leaves[3], group, known=True)
    want = (y.detach(), *torch.autograd.grad(y, leaves, exact.dy))
    del y, leaves, exact
    found: dict[str, list[float]] = {}
    for name in sorted(ways, key=lambda name: name != "torch"):
        both(0, ways[name])
        nan_behind(b.x.device, NAN_BYTES)
        got = both(last, ways[name])
        worst = torch.tensor([relative_error(a, b) for a, b in zip(got, want, strict=True)],
                             device=b.x.device)  # fmt: skip
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        found[name] = worst.tolist()
        limits = [2 * e for e in found["torch"]]
        if not all(e <= limit for e, limit in zip(found[name], limits, strict=True)):
            raise CounterpointError(
                f"experts, {name}: y, dx, dweights, dgate_up, ddown off by {found[name]}, "
                f"torch's by {found['torch']}"
            )
    return {name: max(each) for name, each in found.items()}
