"""Norms of rows that are there: what is asked for, checked; by torch, by a kernel, and backward."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu.device_limits import capability_of, refused_on
from counterpoint.norms import kernel_add_norm
from counterpoint.ops.check import DTYPES, check_dense, check_place
from counterpoint.ops.register import once, register
from counterpoint.ops.scaled import result_of
from counterpoint.run.launch import Grid, Launch, aligned

FP8 = torch.float8_e4m3fn
FP8_MAX, LEAST = kernel_add_norm.FP8_MAX.value, kernel_add_norm.LEAST.value
FP8_CAPABILITY = (8, 9)
GIVEN = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "scale_ptr", "y_ptr", "h_ptr",
         "scales_ptr")  # fmt: skip
NAMES = ("x", "residual", "weight", "bias", "scale")  # tensors of a norm, in order
MAX_BLOCK = 1 << 14  # columns of a row that one program holds
QUANTIZED = {"": 0, "tensor": kernel_add_norm.STATIC.value, "rows": kernel_add_norm.BY_ROW.value}

Kind = Literal["rms", "layer"]


class Norm(NamedTuple):
    """What is asked for beside tensors.

    Args:
        kind: "rms" or "layer".
        eps: added to the mean square.
        fp8: whether the result is; without a tensor of one scale, by rows.
    """

    kind: Kind
    eps: float
    fp8: bool = False

    def quantized(self, scale: object) -> Literal["", "tensor", "rows"]:
        """Whose scale an fp8 result has, as `Problem` says it."""
        return ("rows" if scale is None else "tensor") if self.fp8 else ""


def norm_of(op: str, kind: Kind, eps: object, x: Tensor, out_dtype: object, scale: object) -> Norm:
    """What is asked for, checked.

    Raises:
        InputError: `eps`, `out_dtype` or `scale` is wrong.
        UnsupportedError: the GPU has no fp8.
    """
    if type(eps) not in (int, float) or not 0 <= eps < inf:  # type: ignore[operator]
        raise InputError(op, "eps", want="a number >= 0", got=eps)
    if out_dtype not in (None, FP8, result_of(x)):
        want = f"{FP8}, or {result_of(x)} {_as_x(x)}"
        raise InputError(op, "out_dtype", want=want, got=out_dtype)
    fp8 = out_dtype == FP8
    if scale is not None:
        if not fp8:
            want = f"None without out_dtype={FP8}"
            raise InputError(op, "scale", want=want, got=type(scale).__name__)
        check_dense(op, scale=scale)
        assert isinstance(scale, Tensor)
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device:
            want = f"1 number, torch.float32 on {x.device} as x"
            got = f"{tuple(scale.shape)}, {scale.dtype} on {scale.device}"
            raise InputError(op, "scale", want=want, got=got)
    if fp8 and x.is_cuda and not torch.version.hip:
        capability = capability_of(x.device)
        if tuple(map(int, capability.split("."))) < FP8_CAPABILITY:
            least = ".".join(map(str, FP8_CAPABILITY))
            raise UnsupportedError(f"{op}: fp8 needs compute capability {least}, got {capability}")
    return Norm(kind, float(eps), fp8)  # type: ignore[arg-type]


def refuse_gradient(op: str, norm: Norm, **tensors: Tensor | None) -> None:
    """Refuse a gradient of an fp8 result: it has none.

    Raises:
        InputError: names a tensor that requires one.
    """
    for name, tensor in tensors.items() if norm.fp8 and torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            want = "without requires_grad: an fp8 result has no gradient"
            fix = "call it in torch.no_grad()"
            raise InputError(op, name, want=want, got="a tensor that requires one", fix=fix)


def _as_x(x: Tensor) -> str:
    """Why a dtype is wanted."""
    return "as x" if result_of(x) == x.dtype else "where x has scales"


def check_like(op: str, x: Tensor, shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Refuse what is not of the dtype and device of sums of x.

    That is a residual of `shape`, and rows of its columns.

    Raises:
        InputError: names the argument.
    """
    for name, tensor in tensors.items():
        if tensor is None and not name.endswith("weight"):
            continue
        check_dense(op, **{name: tensor})
        assert tensor is not None
        if tensor.dtype != result_of(x) or tensor.device != x.device:
            got = f"{tensor.dtype} on {tensor.device}"
            want = f"{result_of(x)} on {x.device} {_as_x(x)}"
            raise InputError(op, name, want=want, got=got)
        want = tuple(shape) if name == "residual" else (shape[-1],)
        if tuple(tensor.shape) != want:
            text = f"{want}" if name == "residual" else f"[N={shape[-1]}]"
            raise InputError(op, name, want=text, got=tuple(tensor.shape))


def check_rows_of(op: str, x: Tensor) -> None:
    """Refuse x that has no rows of one column or more.

    Raises:
        InputError: it has none.
    """
    check_dense(op, x=x)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    check_place(op, x=x)
    if x.dim() < 2 or not x.shape[-1]:
        want = "[rows, ..., N] of 2 or more dims and 1 or more columns"
        raise InputError(op, "x", want=want, got=tuple(x.shape))


# ---- by torch


def by_torch(norm: Norm, given: Mapping[str, Tensor | None]) -> list[Tensor]:
    """The rows normalised, h, and scales by rows: the kernel's roundings."""
    x, residual, weight, bias, scale = (given.get(name) for name in NAMES)
    assert x is not None and weight is not None
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    centred, inverse = _centred(norm, h.float())
    y = centred * inverse * weight.float()
    y = y if bias is None else y + bias.float()
    h = h.clone() if h is x else h
    if not norm.fp8:
        return [y.to(x.dtype), h]
    scales = scale
    if scales is None:
        scales = y.abs().amax(-1, keepdim=True).clamp(min=LEAST) / FP8_MAX
    y = (y / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return [y, h] if scale is not None else [y, h, scales]


def _centred(norm: Norm, h: Tensor) -> tuple[Tensor, Tensor]:
    """h without its mean where it is a LayerNorm's, and what its rows are multiplied by."""
    if norm.kind == "layer":
        h = h - _means(h)
    return h, torch.rsqrt(_means(h.square()) + norm.eps)


def _means(h: Tensor) -> Tensor:
    """Of each row; of one long row alone torch would sum parts in threads, in another order."""
    rows = h.reshape(-1, h.shape[-1])
    some = rows.expand(2, -1).contiguous() if len(rows) == 1 else rows
    return some.mean(-1)[: len(rows)].view(*h.shape[:-1], 1)


def gradients(
    norm: Norm, h: Tensor, weight: Tensor, dy: Tensor | None, dh: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of what was added up to h, of the weight and of a bias; in fp32, rounded once."""
    if dy is None:
        return dh, None, None
    dy, h = once(dy), once(h)
    centred, inverse = _centred(norm, h.float())
    unit, wide = centred * inverse, dy.float()
    scaled = wide * weight.float()
    dx = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if norm.kind == "layer":
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * inverse
    dx = dx if dh is None else dx + once(dh).float()
    dweight, dbias = (t.flatten(0, -2).sum(0).to(weight.dtype) for t in (wide * unit, wide))
    return dx.to(h.dtype), dweight, dbias


def run_by_torch(norm: Norm, given: Mapping[str, Tensor | None], results: Sequence[Tensor]) -> None:
    """As `run`."""
    for target, found in zip(results, by_torch(norm, given), strict=True):
        target.copy_(found)


# ---- by the kernel without peers


def run(norm: Norm, given: Mapping[str, Tensor | None], results: Sequence[Tensor]) -> None:
    """Into `results`, all of them 2-D: the rows normalised, h, and scales by rows."""
    x = given["x"]
    assert x is not None
    if x.is_cuda and refused_on(x.device):
        return run_by_torch(norm, given, results)
    y, h, *scales = results
    tensors = ready_for_kernel(given, y)
    there = tuple(name for name in NAMES if given.get(name) is not None)
    dtypes = tuple(t.dtype for t in (*tensors, y, h, *(scales or [y])))
    launch = launch_of(norm, there, (x.shape[0], x.shape[1]), dtypes, x.device)
    launch(*tensors, y, h, *(scales or [y]))
    return None


def ready_for_kernel(given: Mapping[str, Tensor | None], missing: Tensor) -> list[Tensor]:
    """Its tensors as the kernels take them; `missing` stands for those that are not there."""
    found: list[Tensor] = []
    for name in NAMES:
        tensor = given.get(name)
        tensor = missing if tensor is None else tensor.contiguous()
        found.append(tensor if aligned(tensor) else tensor.clone())
    return found


def flags_of(norm: Norm, there: Sequence[str]) -> dict[str, Any]:
    """Arguments that both kernels have.

    Args:
        there: names of the tensors that are given.
    """
    quantized = norm.quantized("scale" if "scale" in there else None)
    return {
        "eps": norm.eps, "LAYER": norm.kind == "layer", "HAS_RESIDUAL": "residual" in there,
        "HAS_BIAS": "bias" in there, "FP8": QUANTIZED[quantized],
    }  # fmt: skip


@lru_cache(maxsize=1024)
def launch_of(
    norm: Norm, there: tuple[str, ...], shape: tuple[int, int], dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Launch:  # fmt: skip
    """The kernel, with a program for each row: a server has ever other numbers of them."""
    rows, n = shape
    return compiled(norm, there, n, dtypes, device).over(rows)


@lru_cache(maxsize=256)
def compiled(
    norm: Norm, there: tuple[str, ...], n: int, dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Launch:  # fmt: skip
    """The kernel for rows of that many columns, compiled."""
    block = min(1 << (n - 1).bit_length(), MAX_BLOCK)
    fixed = flags_of(norm, there) | {"N": n, "WHOLE": n <= block, "BLOCK": block}
    grid = Grid(1, reserve=False, each=True)
    options = {"num_warps": max(1, min(16, block // 512)), **kernel_add_norm.OPTIONS}
    launch = Launch(
        kernel_add_norm.add_norm_kernel, GIVEN, fixed, grid, device, "add_norm", options
    )
    return launch.compile(*dtypes)


# ---- as an operator of torch's


def _run(*arguments: Any) -> list[Tensor]:
    norm, given = _of(arguments)
    x = given["x"]
    assert x is not None
    results = empty_results(norm, x, given["scale"])
    if x.numel():
        call = run if x.is_cuda else run_by_torch
        rows = {name: None if t is None else t.contiguous().flatten(0, -2) if t.dim() > 1 else t
                for name, t in given.items()}  # fmt: skip
        call(norm, rows, [t.flatten(0, -2) for t in results])
    return results


def _of(arguments: Sequence[Any]) -> tuple[Norm, dict[str, Tensor | None]]:
    """Of the operator's arguments."""
    *tensors, kind, eps, fp8 = arguments
    return Norm(kind, eps, fp8), dict(zip(NAMES, tensors, strict=True))


def empty_results(norm: Norm, x: Tensor, scale: Tensor | None) -> list[Tensor]:
    """Results without values."""
    found = [x.new_empty(x.shape, dtype=FP8 if norm.fp8 else None), x.new_empty(x.shape)]
    if norm.quantized(scale) == "rows":
        found.append(x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
    return found


def _fake(*arguments: Any) -> list[Tensor]:
    norm, given = _of(arguments)
    x = given["x"]
    assert x is not None
    return empty_results(norm, x, given["scale"])


def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """What `backward` needs, of an operator whose first arguments are those of the norm."""
    norm, given = _of(inputs[:8])
    ctx.norm, ctx.there = norm, [given[name] is not None for name in NAMES]
    ctx.num_others = len(inputs) - len(NAMES)
    ctx.save_for_backward(output[1], given["weight"])


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradient of the sum is that of each rank's own x: it is the same on all ranks."""
    h, weight = ctx.saved_tensors
    dx, dweight, dbias = gradients(ctx.norm, h, weight, *grads[:2])
    _, residual, _, bias, _ = ctx.there
    own = dx, dx if residual else None, dweight, dbias if bias else None, None
    return *own, *([None] * ctx.num_others)


register("add_norm", _run, _fake, backward, save)
