"""Arguments that operators share, refused before anything is launched."""

from collections.abc import Sequence
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_tensors(op: str, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Refuse operands that do not fit one another.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputError(op, name, want="a Tensor", got=type(tensor).__name__)
        if tensor is not None and tensor.layout != torch.strided:
            raise InputError(op, name, want="a dense tensor", got=tensor.layout)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(op, "x", want="on cpu or cuda", got=x.device)
    if x.dim() < 2:
        raise InputError(op, "x", want="[rows, ..., K] of 2 or more dims", got=f"{x.dim()}-D")
    if w.dim() != 2:
        raise InputError(op, "w", want="[K, N] of 2 dims", got=f"{w.dim()}-D")
    if w.shape[0] != x.shape[-1]:
        fix = "pass w.t() of a torch.nn.Linear weight"
        shape = tuple(w.shape)
        raise InputError(op, "w", want=f"[K={x.shape[-1]}, N]", got=f"{shape}", fix=fix)
    if bias is not None and tuple(bias.shape) != (w.shape[1],):
        raise InputError(op, "bias", want=f"[N={w.shape[1]}]", got=f"{tuple(bias.shape)}")
    for name, tensor in (("w", w), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise InputError(op, name, want=f"{x.dtype} as x", got=tensor.dtype)
        if tensor.device != x.device:
            raise InputError(op, name, want=f"on {x.device} as x", got=tensor.device)


def check_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to use, the default one for None.

    Raises:
        InputError: there is no group, or this rank is not in it.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        fix = "start ranks with torchrun and call torch.distributed.init_process_group"
        raise InputError(op, "group", want="an initialised process group", got=group, fix=fix)
    # a rank outside of a new group gets a placeholder in its place
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(op, "group", want="a ProcessGroup that has this rank", got=group)
    return group


def check_rows(op: str, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """`rows=` as a list; empty means equal shards.

    Raises:
        InputError: not one count >= 0 for each rank.
    """
    if rows is None:
        return []
    try:
        counts = [index(n) for n in rows]
    except TypeError:  # no sequence, or not of whole numbers
        counts = []
    if len(counts) != ranks or min(counts) < 0:
        raise InputError(op, "rows", want=f"{ranks} counts >= 0", got=rows)
    return counts


def check_dim(op: str, name: str, dim: int, x: Tensor) -> int:
    """`gather_dim` or `scatter_dim`: a dim of x but the last.

    Raises:
        InputError: x has no such dim, or it is the one that is contracted.
    """
    dims = x.dim()
    if not isinstance(dim, int) or not -dims <= dim < dims or dim % dims == dims - 1:
        want = f"a dim of x but the last, 0 to {dims - 2}"
        raise InputError(op, name, want=want, got=repr(dim))
    return dim % dims


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors as torch.autocast wants a matmul's: in its dtype, where it is on."""
    first = tensors[0]
    # what is no Tensor is refused by the checks that follow
    device = first.device.type if isinstance(first, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors
    )
