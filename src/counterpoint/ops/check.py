"""Arguments that operators share, refused before anything is launched."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.group.ranks import check_group as check_group
from counterpoint.ops.placements import is_distributed, meet
from counterpoint.ops.register import refuse_vmap
from counterpoint.plan.families import families
from counterpoint.plan.steps import Plan
from counterpoint.ranges import MAX_COUNT, Range, misfit, plain

# private: a feature test holds it
_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor  # pyright: ignore
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dense(op: str, **tensors: object) -> None:
    """Refuse what is no tensor of this rank, or one without strides: sparse or nested.

    Raises:
        InputError: names the argument.
        Distributed: it is a DTensor, and the operator takes them.
        UnsupportedError: a transform of torch.func has made a batch of it.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(op, name, want="a Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.is_nested:
            got = "a nested one" if tensor.is_nested else tensor.layout
            raise InputError(op, name, want="a dense tensor", got=got)
        if is_distributed(tensor):
            meet(op, name, tensor)
        if not torch.compiler.is_compiling() and _batched(tensor):
            refuse_vmap(op)


def check_place(op: str, **tensors: Tensor) -> None:
    """Refuse tensors that are on no device that computes here.

    Raises:
        InputError: names the argument.
    """
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(op, name, want="on cpu or cuda", got=tensor.device)


def is_last(dim: object, x: object) -> bool:
    """Whether a dim is the last of x."""
    return type(dim) is int and isinstance(x, Tensor) and x.dim() > 1 and dim in (-1, x.dim() - 1)


def check_tensors(
    op: str, x: Tensor, w: Tensor, bias: Tensor | None, columns: int | None = None, *,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:  # fmt: skip
    """Refuse operands that do not fit one another.

    Args:
        columns: K, where that is not the last dim of x.
        dtypes: of w and of bias, where x has scales.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    check_dense(op, x=x, w=w)
    if bias is not None:
        check_dense(op, bias=bias)
    if dtypes is None and x.dtype not in DTYPES:
        narrow = x.dtype.is_floating_point and x.dtype.itemsize == 1
        fix = "pass a counterpoint.Scaled of it and its scale" if narrow else ""
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype, fix=fix)
    check_place(op, x=x)
    if x.dim() < 2:
        raise InputError(op, "x", want="[rows, ..., K] of 2 or more dims", got=f"{x.dim()}-D")
    if w.dim() != 2:
        raise InputError(op, "w", want="[K, N] of 2 dims", got=f"{w.dim()}-D")
    columns = x.shape[-1] if columns is None else columns
    if w.shape[0] != columns:
        fix = "pass w.t() of a torch.nn.Linear weight"
        shape = tuple(w.shape)
        raise InputError(op, "w", want=f"[K={columns}, N]", got=f"{shape}", fix=fix)
    if bias is not None and tuple(bias.shape) != (w.shape[1],):
        raise InputError(op, "bias", want=f"[N={w.shape[1]}]", got=f"{tuple(bias.shape)}")
    for i, (name, tensor) in enumerate((("w", w), ("bias", bias))):
        if tensor is None:
            continue
        if tensor.dtype != (dtypes[i] if dtypes else x.dtype):
            want = f"{dtypes[i]}, where x has scales" if dtypes else f"{x.dtype} as x"
            raise InputError(op, name, want=want, got=tensor.dtype)
        if tensor.device != x.device:
            raise InputError(op, name, want=f"on {x.device} as x", got=tensor.device)


def check_rows(op: str, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """`rows=` as a list; empty means equal shards.

    Raises:
        InputError: not one count >= 0 for each rank.
    """
    if rows is None:
        return []
    return check_counts(op, "rows", rows, f"{ranks} counts >= 0", ranks)


def check_counts(
    op: str, name: str, counts: object, want: str, number: int, least: int = 0
) -> list[int]:
    """A list of as many counts.

    Raises:
        InputError: something else, or not whole numbers of `least` or more.
    """
    found: Any = plain(counts)
    limits = Range(least, MAX_COUNT)
    if misfit(found, tuple[int, ...], limits, name) is not None or len(found) != number:
        raise InputError(op, name, want=want, got=counts)
    return list(found)


def check_dim(op: str, name: str, dim: int, x: Tensor) -> int:
    """`gather_dim` or `scatter_dim`: a dim of x.

    Raises:
        InputError: x has no such dim.
    """
    dims = x.dim()
    if type(dim) is not int or not -dims <= dim < dims:
        want = f"a dim of x, 0 to {dims - 1}"
        raise InputError(op, name, want=want, got=repr(dim))
    return dim % dims


def is_fake(t: object) -> bool:
    """Whether a tensor has no values, as torch traces with: what ranks know is not asked for."""
    return getattr(t, "fake_mode", None) is not None


def asked_of(**tensors: Tensor | None) -> str:
    """The names of those of which a gradient is asked for: backwards meet, so ranks compare it."""
    if not torch.is_grad_enabled():
        return ""
    return " ".join(name for name, t in tensors.items() if t is not None and t.requires_grad)


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


def check_layer(
    op: str, dtype: torch.dtype | None, device: torch.device | str | None, **flags: object
) -> None:
    """Refuse what no layer's parameters can be of, and flags that are none.

    Raises:
        InputError: names the argument.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(op, name, want="True or False", got=repr(flag))
    if dtype is not None and dtype not in DTYPES:
        raise InputError(op, "dtype", want="bf16, fp16 or fp32", got=dtype)
    check_device(op, device)


def check_device(op: str, device: object) -> None:
    """Refuse what names no device.

    Raises:
        InputError: it does not.
    """
    if device is None or isinstance(device, torch.device):
        return
    try:
        if isinstance(device, str | int) and not isinstance(device, bool):
            torch.device(device)
            return
    except RuntimeError:
        pass
    raise InputError(op, "device", want="a torch.device or its name", got=repr(device))


def check_plan(op: str, plan: object, of: str) -> None:
    """Refuse what is no plan of operator `of`; a spec is read when the sizes are known.

    Raises:
        InputError: there is no such family.
    """
    names = ("auto", *families(of))
    if isinstance(plan, Plan | Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return
    if not isinstance(plan, str) or plan.split()[:1] not in [[name] for name in names]:
        raise InputError(op, "plan", want=f"one of {', '.join(names)}", got=repr(plan))
