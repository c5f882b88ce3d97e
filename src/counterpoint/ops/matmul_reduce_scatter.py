"""Multiply, sum over ranks, keep own rows: the second linear layer under sequence parallelism."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import call
from counterpoint.plan.steps import Plan

OP = "matmul_reduce_scatter"

call.LIBRARY.define(
    f"{OP}(Tensor x, Tensor w, Tensor? bias, str plan, int[] rows, str group_name, "
    "int group_size, int rank) -> Tensor"
)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str | Plan = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Sum the products of all ranks: y_r = rows of rank r of (x_0 w_0 + ... + x_{n-1} w_{n-1}).

    In place of `matmul` and `reduce_scatter_tensor`. Partial results are rounded to the dtype of
    x for the way, summed in fp32 in an order fixed by the plan, and rounded once; the bias is
    added once, after the sum. Streams, graphs and repeated bits: see `all_gather_matmul`.

    Args:
        x: bf16, fp16 or fp32 [M, ..., K], on CPU or CUDA: all rows, K the part of this rank.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear.
        group: whose ranks take part; see `all_gather_matmul`.
        bias: dtype of x, [N]; each rank adds its own to its rows.
        plan: "auto", a family ("serial", "shard_p2p", "graded"), a spec such as
            "graded 1/2/1 ring pieces=2", or a Plan, which is validated once.
        rows: how many of dim 0 of x each rank gets, equal on all ranks; None means equal parts,
            and then the number of ranks must divide dim 0.

    Returns:
        dtype of x, [rows of this rank, ..., N], a new tensor.

    Raises:
        InputError: an argument is wrong; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: a gradient is asked for, or the machine lacks something.
        PeerTimeoutError: as for `all_gather_matmul`.

    Example:
        >>> y = counterpoint.matmul_reduce_scatter(x, w, group=tp)  # doctest: +SKIP
    """
    call.check_tensors(OP, x, w, bias)
    group = call.check_group(OP, group)
    counts = call.check_rows(OP, rows, group.size())
    if counts and sum(counts) != x.shape[0]:
        raise InputError(OP, "rows", want=f"counts that add up to {x.shape[0]}", got=counts)
    if not counts and x.shape[0] % group.size():
        want = f"[M, ..., K] with M a multiple of the {group.size()} ranks"
        fix = "pass rows=, one count per rank"
        raise InputError(OP, "x", want=want, got=tuple(x.shape), fix=fix)
    key = call.plan_key(OP, plan)
    op = torch.ops.counterpoint.matmul_reduce_scatter
    return op(x, w, bias, key, counts, group.group_name, group.size(), group.rank())


def _run(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    rows: list[int],
    group_name: str,
    group_size: int,
    rank: int,
) -> Tensor:
    return call.run(OP, x, w, bias, plan, rows, group_name)


# size and rank are arguments: what a fake looks up in the group is not in the compiler's cache key
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    rows: list[int],
    group_name: str,
    group_size: int,
    rank: int,
) -> Tensor:
    mine = rows[rank] if rows else x.shape[0] // group_size
    return x.new_empty(mine, *x.shape[1:-1], w.shape[1])


call.LIBRARY.impl(OP, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"counterpoint::{OP}", _fake, lib=call.LIBRARY)
