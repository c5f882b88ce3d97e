"""SwiGLU between the two matmuls of experts, as operators: by a kernel on GPUs, else by torch."""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.kernels.swiglu import swiglu_gradient_kernel, swiglu_kernel
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.plan.fused_sum import padded
from counterpoint.runtime.device_limits import refused_on
from counterpoint.runtime.launch import Grid, Launch, aligned

BLOCK_N = 512  # columns at a time
OPTIONS = {"num_warps": 2}  # 16 bytes of 16-bit numbers for each thread


def swiglu(gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    """silu(gate) * up of the rows that there are, in fp32, rounded once.

    Args:
        gate_up: bf16, fp16 or fp32 [room, 2 N], gate before up.
        counts: int32 or int64 [ranks, E], rows of each rank for each expert. None, or elsewhere
            than gate_up: there are as many rows as there is room.
        rank: this one, whose experts have these rows.

    Returns:
        dtype of gate_up, [room, N]; on a GPU rows beyond those of `counts` are not written, and
        those of gate_up and of the gradient neither read nor written.
    """
    if counts is not None and counts.device != gate_up.device:  # the host has sized gate_up by it
        counts = None
    return torch.ops.counterpoint.swiglu(gate_up, counts, rank)


def _run(gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    if gate_up.is_cuda and not refused_on(gate_up.device):
        y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        into(y, (gate_up,), counts, rank)
        return y
    gate, up = (half.to(_wide(gate_up)) for half in gate_up.chunk(2, -1))
    return (F.silu(gate) * up).to(gate_up.dtype)


def _run_gradient(dy: Tensor, gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    if dy.is_cuda and not refused_on(dy.device):
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        into(dgate_up, (dy, gate_up), counts, rank)
        return dgate_up
    gate, up = (half.to(_wide(gate_up)) for half in gate_up.chunk(2, -1))
    share = gate.sigmoid()
    dgate = dy * up * share * (1 + gate * (1 - share))
    return torch.cat((dgate, dy * gate * share), -1).to(gate_up.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def into(target: Tensor, given: tuple[Tensor, ...], counts: Tensor | None, rank: int) -> None:
    """By the kernel: y of (gate_up,), or the gradient of (dy, gate_up).

    Args:
        target: without gaps, on a multiple of 16 bytes.
    """
    if not target.numel():
        return
    tensors = [t.contiguous() for t in given]
    table = tensors[0] if counts is None else counts.contiguous()
    tensors = [t if aligned(t) else t.clone() for t in (*tensors, table)]
    n = given[-1].shape[1] // 2
    shape = None if counts is None else tuple(counts.shape)
    dtypes = tuple(t.dtype for t in (*tensors, target))
    with torch.cuda.device(target.device) if target.is_cuda else nullcontext():
        _launch(dtypes, shape, rank, n, target.device)(*tensors, target, len(target))


@lru_cache(maxsize=1024)
def _launch(
    dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...] | None, rank: int, n: int,
    device: torch.device,
) -> Launch:  # fmt: skip
    """The kernel, compiled for tensors like these; programs that are resident share the rows."""
    ranks, experts = counts or (1, 1)
    fixed = {
        "E": experts, "rank": rank, "N": n, "WORLD": ranks, "EXPERTS": padded(experts // ranks),
        "COUNTED": counts is not None, "BLOCK_N": min(BLOCK_N, padded(n)),
    }  # fmt: skip
    kernel: Any = swiglu_kernel if len(dtypes) == 3 else swiglu_gradient_kernel
    given = tuple(name for name in kernel.arg_names if name not in fixed)
    # no reserve of SMs: nothing waits in it
    grid = Grid(None, reserve=False)
    return Launch(kernel, given, fixed, grid, device, "swiglu", OPTIONS).compile(*dtypes, 0)


def _fake(gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_gradient(dy: Tensor, gate_up: Tensor, counts: Tensor | None, rank: int) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, counts, ctx.rank = inputs
    ctx.save_for_backward(gate_up, counts)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, counts = ctx.saved_tensors
    return torch.ops.counterpoint.swiglu_gradient(dy, gate_up, counts, ctx.rank), None, None


register(
    "swiglu(Tensor gate_up, Tensor? counts, int rank) -> Tensor",
    _run, _fake, _backward, _save, meets=False,
)  # fmt: skip
register(
    "swiglu_gradient(Tensor dy, Tensor gate_up, Tensor? counts, int rank) -> Tensor",
    _run_gradient, _fake_gradient, refuse_double_matmul, meets=False,
)  # fmt: skip
