"""Gather the rows of all ranks and multiply: the first linear layer under sequence parallelism."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import call
from counterpoint.plan.steps import Plan

OP = "all_gather_matmul"

call.LIBRARY.define(
    f"{OP}(Tensor x, Tensor w, Tensor? bias, str plan, int[] rows, str group_name, int group_size)"
    " -> Tensor"
)


def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str | Plan = "auto",
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Multiply the gathered x: y = concat(x_0, ..., x_{n-1}) w + bias.

    In place of `all_gather_into_tensor` and `matmul`. Accumulates in fp32. Runs on the current
    stream and is done in stream order; captures in a CUDA graph after one call outside of it at
    the same or a larger size. The same plan and shape give the same bits in every run.

    Args:
        x: bf16, fp16 or fp32 [rows of this rank, ..., K], on CPU or CUDA; the dims between are
            those of a 3-D activation. Where it is not contiguous it is copied first.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear.
        group: whose ranks take part, all with the same arguments; the default group if None. CPU
            tensors take a gloo group of one host, CUDA tensors an NCCL group of one node.
        bias: dtype of x, [N], added once.
        plan: "auto", a family ("serial", "shard_p2p", "graded", "uniform_fused_2d",
            "uniform_fused_1d"), a spec such as "graded 1/1/2 ring push", or a Plan, which is
            validated once.
        rows: dim 0 of x on each rank, equal on all ranks; None means that all are equal.

    Returns:
        dtype of x, [sum of rows, ..., N], a new tensor.

    Raises:
        InputError: an argument is wrong; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: a gradient is asked for, or the machine lacks something.
        PeerTimeoutError: a rank did not come within COUNTERPOINT_TIMEOUT_S (30). On a GPU it is
            raised by the next call, or by `counterpoint.check`.

    Example:
        >>> y = counterpoint.all_gather_matmul(x_shard, w, group=tp)  # doctest: +SKIP
    """
    call.check_tensors(OP, x, w, bias)
    group = call.check_group(OP, group)
    counts = call.check_rows(OP, rows, group.size())
    if counts and x.shape[0] != counts[group.rank()]:
        want = f"[{counts[group.rank()]}, ..., K] as rows[{group.rank()}] says"
        raise InputError(OP, "x", want=want, got=tuple(x.shape))
    key = call.plan_key(OP, plan)
    op = torch.ops.counterpoint.all_gather_matmul
    return op(x, w, bias, key, counts, group.group_name, group.size())


def _run(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    rows: list[int],
    group_name: str,
    group_size: int,
) -> Tensor:
    return call.run(OP, x, w, bias, plan, rows, group_name)


# the size is an argument: what a fake looks up in the group is not in the compiler's cache key
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    rows: list[int],
    group_name: str,
    group_size: int,
) -> Tensor:
    gathered = sum(rows) if rows else x.shape[0] * group_size
    return x.new_empty(gathered, *x.shape[1:-1], w.shape[1])


call.LIBRARY.impl(OP, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"counterpoint::{OP}", _fake, lib=call.LIBRARY)
