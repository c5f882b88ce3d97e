"""fp8 operands with their scales: what a call takes, and what it refuses."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops.agreement import refused
from counterpoint.ops.check import autocast, check_dense, check_dim, check_tensors, is_last
from counterpoint.problem import SCALE_BLOCK
from counterpoint.run.scaled import FP8

RESULT = torch.bfloat16
MICRO = "mxfp8 and nvfp4 need a GPU of compute capability 10.0, and are not supported"


class Scaled(NamedTuple):
    """An fp8 tensor and its scales: what stands there is data * scale.

    As x and w of `all_gather_matmul`, `matmul_reduce_scatter`, `matmul_all_reduce`, and of this one
    with a norm behind it, both with scales of one kind:

    - per tensor: a scale [] or [1] each, of each rank its own; those of a gather are taken as per
      row and column.
    - per row of x and column of w: [rows, ..., 1] and [1, N].
    - per block: 128 numbers of a row of x, [rows, ..., K/128]; 128x128 of w, [K/128, N/128], the
      latter rounded up. K is a multiple of 128. On GPUs of compute capability 9.0.

    Scales of a gathered x travel with its rows. Results are bf16, accumulated in fp32; partial
    results of a sum over ranks travel in bf16, are summed in fp32 and rounded once. Has no
    gradient: see `counterpoint.nn.to_fp8`. On CPU ranks x and w are multiplied in
    fp32.

    Refused are the batch-invariant mode, lists of weights but for gate and up of an activation, and
    plans that cut K or N, "fused", and of a gather "direct".

    Attributes:
        data: x: float8_e4m3fn, or, not with scales of blocks, float8_e5m2. w: float8_e4m3fn
            [K, N], stored column by column, as `weight.t()` is; else it is copied first. K and N
            are multiples of 16.
        scale: fp32, on the device of `data`.

    Example:
        >>> x = cp.Scaled(x_fp8, x_scale)  # doctest: +SKIP
        >>> y = cp.all_gather_matmul(x, cp.Scaled(w_fp8, w_scale), group=tp)  # doctest: +SKIP
    """

    data: Tensor
    scale: Tensor


Scales = tuple[Tensor | None, Tensor | None]  # of x, of w; both or none
NO_SCALES: Scales = (None, None)


def apart(op: str, x: Any, w: Any, group: Any) -> tuple[Tensor, Tensor, Scales]:
    """x, w, and the scales of both.

    Raises:
        InputError: one has scales, the other has none, or w is several; the ranks of `group` hear.
    """
    for name, one, other in (("w", w, "x"), ("x", x, "w")):
        if not isinstance(one, Scaled):
            got = type(one).__name__
            error = InputError(op, name, want=f"one counterpoint.Scaled, as {other} is", got=got)
            raise refused(error, group, x.data if isinstance(x, Scaled) else x)
    left, right = cast(Scaled, x), cast(Scaled, w)
    return left.data, right.data, (_flat(left.scale), _flat(right.scale))


def _flat(scale: Any) -> Any:
    return scale.view(1) if isinstance(scale, Tensor) and scale.dim() == 0 else scale


def by_rows(x: Any, w: Any, scales: Scales) -> Scales:
    """Scales per tensor as per row of x and column of w: that of a rank travels with its rows."""
    x_scale, w_scale = scales
    one = all(isinstance(t, Tensor) and t.shape == (1,) for t in scales)
    if not one or x_scale is None or w_scale is None or w.dim() != 2 or not x.dim():
        return scales
    return x_scale.expand(*x.shape[:-1], 1), w_scale.expand(1, w.shape[1])


def along(
    op: str, place: tuple[str, int], x: Any, w: Any, group: Any,
    call: Callable[[Scaled, int], Tensor],
) -> Tensor:  # fmt: skip
    """The call of x and w with a dim of x moved to the front, and back in the result.

    Args:
        place: the name of the argument, and the dim.
        call: of what has been moved, and which dim it was.

    Raises:
        InputError: it is the last one, or x has no such dim; the ranks of `group` hear it.
    """
    data, _, scales = apart(op, x, w, group)
    scale: Any = scales[0]
    name, dim = place
    try:
        check_dense(op, **{"x": data, "x.scale": scale})
        if is_last(dim, data):
            want = "another dim than the last, where x has scales"
            raise InputError(op, name, want=want, got=dim)
        dim = check_dim(op, name, dim, data)
    except CounterpointError as error:
        raise refused(error, group, data) from None
    if scale.dim() == data.dim():
        scale = scale.movedim(dim, 0)
    return call(Scaled(data.movedim(dim, 0), scale), dim).movedim(0, dim)


def checked(
    op: str, x: Tensor, w: Tensor, added: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Scales]:
    """x, w, bias and scales as they are multiplied: in the dtype of autocast, but for fp8.

    Args:
        added: bias, and the scales of x and of w.

    Raises:
        InputError: they do not fit one another.
    """
    bias, x_scale, w_scale = added
    if x_scale is None or w_scale is None:
        x, w, bias = autocast(x, w, bias)  # type: ignore[assignment]
        check_tensors(op, x, w, bias)
        return x, w, bias, NO_SCALES
    _check(op, x, w, bias, x_scale, w_scale)
    return x, w, bias, (x_scale, w_scale)


def _check(
    op: str, x: Tensor, w: Tensor, bias: Tensor | None, x_scale: Tensor, w_scale: Tensor
) -> None:
    """Refuse fp8 operands that do not fit one another, or their scales."""
    check_dense(op, **{"x": x, "w": w, "x.scale": x_scale, "w.scale": w_scale})
    if x.dtype not in FP8:
        fix = MICRO if "float4" in str(x.dtype) else ""
        want = "float8_e4m3fn or float8_e5m2, where it has scales"
        raise InputError(op, "x", want=want, got=x.dtype, fix=fix)
    check_tensors(op, x, w, bias, dtypes=(torch.float8_e4m3fn, RESULT))
    for name, scale in (("x.scale", x_scale), ("w.scale", w_scale)):
        if scale.dtype != torch.float32:
            fix = MICRO if scale.dtype.itemsize == 1 else ""
            raise InputError(op, name, want="float32", got=scale.dtype, fix=fix)
        if scale.device != x.device:
            raise InputError(op, name, want=f"on {x.device} as x", got=scale.device)
    (k, n), kind = w.shape, kind_of(w, w_scale)
    if not kind:
        want = f"[1], [1, N={n}], or [K/128={ceil(k / SCALE_BLOCK)}, N/128={ceil(n / SCALE_BLOCK)}]"
        raise InputError(op, "w.scale", want=want, got=tuple(w_scale.shape))
    last = {"row": 1, "block": ceil(k / SCALE_BLOCK)}
    wanted = (1,) if kind == "tensor" else (*x.shape[:-1], last[kind])
    if x_scale.shape != wanted:
        want = f"{wanted}, as w has scales per {kind}"
        raise InputError(op, "x.scale", want=want, got=tuple(x_scale.shape))
    given = (("x", x), ("w", w), ("bias", bias), ("x.scale", x_scale), ("w.scale", w_scale))
    for name, tensor in given if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            fix = "take the layers of counterpoint.nn and to_fp8, or detach it"
            want = "without requires_grad: fp8 operands have no gradient"
            raise InputError(op, name, want=want, got="a tensor that requires one", fix=fix)


def check_alike(op: str, w_scales: Sequence[Tensor | None]) -> None:
    """Refuse scales of several weights of one shape that are not of one kind.

    Raises:
        InputError: they are not.
    """
    shapes = [None if scale is None else tuple(scale.shape) for scale in w_scales]
    if shapes[0] != shapes[-1]:
        raise InputError(op, "w.scale", want="of one shape, gate and up", got=shapes)


def kind_of(w: Tensor, w_scale: Tensor) -> str:
    """`Problem.scales` of scales of w of that shape; "": of none."""
    k, n = w.shape
    blocks = ceil(k / SCALE_BLOCK), ceil(n / SCALE_BLOCK)
    shapes: dict[tuple[int, ...], str] = {(1,): "tensor", (1, n): "row", blocks: "block"}
    return shapes.get(tuple(w_scale.shape), "")


def result_of(x: Tensor) -> torch.dtype:
    """The dtype of results, and of partial ones."""
    return RESULT if x.dtype in FP8 else x.dtype


def of_problem(x: Tensor, w: Tensor, scales: Sequence[Tensor | None]) -> dict[str, Any]:
    """What a Problem says of dtypes and scales."""
    found: dict[str, Any] = {"dtype": str(result_of(x)).removeprefix("torch.")}
    w_scale = scales[-1] if scales else None
    if w_scale is not None:
        found |= {"scales": kind_of(w, w_scale), "x_dtype": str(x.dtype).removeprefix("torch.")}
    return found
