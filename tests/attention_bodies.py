"""Bodies of tests of all_gather_attention, on CPU ranks and on GPUs alike.

Any rank can make the operands of all ranks from their seed, so each computes what it must get.
"""

from typing import Any

import torch
from rank_bodies import device, world
from torch import Tensor

import counterpoint as cp
from counterpoint.measure.timing import relative_error

ROUNDING = 4 * torch.finfo(torch.float32).eps  # sums in fp32 of another order
PLANS = ("auto", "serial", "shard_p2p ring", "shard_p2p ring chunks=2", "shard_p2p chunks=3")


def whole(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v and dy of all ranks; shape: batch, rows of a rank, heads, kv heads, head dim."""
    batch, rows, heads, kv_heads, dim = shape
    draw = torch.Generator().manual_seed(seed)
    drawn = (
        torch.randn(batch, ranks * rows, h, dim, generator=draw)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    return [x.to(dtype).to(device()) for x in drawn]


def mine(x: Tensor, rank: int, ranks: int, causal: bool) -> Tensor:
    """A rank's rows: in order, or two parts of twice as many."""
    if not causal:
        return x.chunk(ranks, 1)[rank]
    return torch.cat([x.chunk(2 * ranks, 1)[i] for i in (rank, 2 * ranks - 1 - rank)], 1)


def attended(
    given: list[Tensor], dtype: torch.dtype, causal: bool, scale: float | None
) -> list[Tensor]:
    """y, dq, dk and dv of all ranks, by plain torch in `dtype`."""
    q, k, v, dy = (t.detach().to(dtype) for t in given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    each = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(each, 2).transpose(1, 2) for t in (k, v))
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, is_causal=causal, scale=scale
    ).transpose(1, 2)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def wrong(
    rank: int, ranks: int, plan: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool,
    scale: float | None = None, seed: int = 0,
) -> list[str]:  # fmt: skip
    """Results that are further from fp64 than twice plain torch's."""
    given = whole(ranks, shape, dtype, seed)
    shards = [mine(t, rank, ranks, causal).clone() for t in given]
    leaves = [t.requires_grad_() for t in shards[:3]]
    y = cp.all_gather_attention(*leaves, group=world(), causal=causal, scale=scale, plan=plan)
    found = [y.detach(), *torch.autograd.grad(y, leaves, shards[3])]
    what = f"{plan} {shape} {dtype} {causal}"
    return _further(found, given, rank, ranks, causal, scale, what)


def _further(
    found: list[Tensor], given: list[Tensor], rank: int, ranks: int, causal: bool,
    scale: float | None, what: str,
) -> list[str]:  # fmt: skip
    """Of y, dq, dk and dv, or the last of them, what is further from fp64 than twice torch's."""
    names, dtype = ("y", "dq", "dk", "dv")[-len(found) :], given[0].dtype
    exact, plain = (attended(given, d, causal, scale)[-len(found) :]
                    for d in (torch.float64, dtype))  # fmt: skip
    problems: list[str] = []
    for name, got, want, other in zip(names, found, exact, plain, strict=True):
        want, other = (mine(t, rank, ranks, causal) for t in (want, other))
        error, limit = relative_error(got, want), 2 * relative_error(other, want) + ROUNDING
        if not error <= limit or got.shape != want.shape:
            problems.append(f"{what}: {name} is off by {error}, {limit}")
    return problems


def gradients_by(
    rank: int, ranks: int, plan: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """dq, dk and dv of a rank by a plan of the backward, where nothing is causal."""
    given = whole(ranks, shape, dtype, seed)
    q, k, v, dy = (mine(t, rank, ranks, False).transpose(0, 1).contiguous() for t in given)
    ops: Any = torch.ops.counterpoint
    group = world().group_name, ranks
    y, lse = ops.all_gather_attention(q, k, v, False, 0.0, "serial", *group)
    found = ops.all_gather_attention_backward([q, k, v, dy, y, lse], False, 0.0, plan, *group)
    return [x.view(like.shape).transpose(0, 1) for x, like in zip(found, (q, k, v), strict=True)]


def wrong_gradients(
    rank: int, ranks: int, plan: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> list[str]:
    """Gradients by a plan of the backward that are further from fp64 than twice plain torch's."""
    given = whole(ranks, shape, dtype, seed)
    found = gradients_by(rank, ranks, plan, shape, dtype, seed)
    return _further(found, given, rank, ranks, False, None, f"{plan} {shape} {dtype}")
