"""Attention to the keys and values of all ranks: context parallelism."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops import call
from counterpoint.ops.agreement import Input, left, refused
from counterpoint.ops.call import Operator, Output, Tensors, present
from counterpoint.ops.check import DTYPES, asked_of, autocast, check_dense, check_group, check_place
from counterpoint.ops.plans import backward_plan, plan_key
from counterpoint.ops.register import refuse_double, register
from counterpoint.ops.samples import Sample
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.tensor_parallel.backward import dtype_of

OP = "all_gather_attention"
BACKWARD = f"{OP}_backward"
MAX_HEAD_DIM = 256  # of torch's kernels
SHAPE = "batch, rows of this rank, heads, head dim"
LAYOUTS = ("bshd", "bhsd")
EXCHANGED = 'pass layout="bhsd" if dims are [batch, heads, rows, head dim], else layout="bshd"'
Layout = Literal["bshd", "bhsd"]


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None,
    causal: bool = False, scale: float | None = None, plan: str | Path | Plan = "auto",
    layout: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Attend to the keys of all ranks: y = softmax(scale q concat(k_0, ..., k_n-1)^T) concat(v).

    In place of `all_gather_into_tensor` of k and v and `scaled_dot_product_attention`, where each
    rank has a part of the sequence: context parallelism. Keys and values of peers arrive by copy
    engines while attention over those that are there runs; results are merged in fp32 by their
    log-sum-exp. On a GPU attention is torch's, by cuDNN or else its flash attention; on CPU ranks
    the formula in fp32. Beside its result the call takes memory for the keys and values of at most
    two peers (on 2 ranks of one), and for results that are not merged yet. Differentiable: q, k, v,
    y and its log-sum-exp are saved, and k and v are gathered again beside the gradient's matmuls;
    the gradients of k and v are as reproducible as torch's. Runs on the current stream, and
    captures in a CUDA graph after one call outside of it at the same or a larger size.

    Args:
        q: bf16, fp16, or on CPU fp32, [B, S of this rank, H, D]; S is equal on all ranks. Of a
            batch of more than one q, k and v are copied first.
        k: dtype of q, [B, S of this rank, KV, D]; H is a multiple of KV (grouped queries).
        v: as k.
        group: whose ranks take part, all with the same arguments; the default group if None. CPU
            tensors take a gloo group, CUDA tensors an NCCL group. Its ranks may be on several
            islands, such as hosts.
        causal: a token attends to itself and those before it. S is then two halves, and rank r of n
            has parts r and 2n - 1 - r of 2n equal parts of the sequence, in this order: so all
            ranks have equal work. `torch.cat([x.chunk(2 * n, 1)[i] for i in (r, 2 * n - 1 - r)],
            1)` is the shard of a whole x.
        scale: of q k^T; D**-0.5 if None.
        plan: "auto": chosen by the model; "serial": the library's all-gather, then attention;
            "shard_p2p": a peer's keys and values at a time; or in parts of a shard, "shard_p2p ring
            chunks=2"; a Plan, which is validated once; or a JSON file of one. The backward of
            "auto" and "serial" is chosen in the same way, that of all others overlaps.
        layout: "bshd": the dims are as above; "bhsd": q is [B, H, S of this rank, D], k and v
            [B, KV, S of this rank, D], as for `scaled_dot_product_attention`. None is "bshd", and
            then tensors of fewer rows than heads are refused: they look like the other one.

    Returns:
        As q, in its layout, a new tensor.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        PlanError: `plan` is a Plan that is wrong; nothing was launched.
        UnsupportedError: torch has no attention for such tensors on this GPU, or a gradient of the
            gradient is asked for.
        PeerTimeoutError: as for `all_gather_matmul`.

    Example:
        >>> y = counterpoint.all_gather_attention(q, k, v, causal=True, group=cp)  # doctest: +SKIP
    """
    try:
        return _attended(q, k, v, group, (causal, scale), plan, layout)
    except BaseException as error:
        left(OP, error, group, q)
        raise


def _attended(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None,
    settings: tuple[bool, float | None], plan: str | Path | Plan, layout: Layout | None,
) -> Tensor:  # fmt: skip
    causal, scale = settings
    group = check_group(OP, group)
    try:
        q, k, v = autocast(q, k, v)  # type: ignore[assignment]
        rows_first = _rows_first(layout, q=q, k=k, v=v)
        _check(*rows_first, layout=layout, causal=causal)
        _check_settings(causal, scale)
        spec = plan_key(OP, plan)
    except CounterpointError as error:
        raise refused(error, group, q) from None
    asks = "some" if asked_of(q=q, k=k, v=v) else ""
    y, _ = torch.ops.counterpoint.all_gather_attention(
        *rows_first, causal, scale or 0.0, spec, group.group_name, group.size(),
        layout or "bshd", asks,
    )  # fmt: skip
    return y.permute(BACK[layout])


ROWS_FIRST = {None: (1, 0, 2, 3), "bshd": (1, 0, 2, 3), "bhsd": (2, 0, 1, 3)}
BACK = {None: (1, 0, 2, 3), "bshd": (1, 0, 2, 3), "bhsd": (1, 2, 0, 3)}


def _rows_first(layout: object, **given: Tensor) -> list[Tensor]:
    """q, k and v as [rows, batch, heads, head dim].

    Raises:
        InputError: there is no such layout, or one of them is no tensor of 4 dims.
    """
    if layout is not None and layout not in LAYOUTS:
        want = f"one of {', '.join(LAYOUTS)}, or None"
        raise InputError(OP, "layout", want=want, got=repr(layout))
    check_dense(OP, **given)
    for name, tensor in given.items():
        if tensor.dim() != 4:
            dims = SHAPE.split(", ")
            order = (0, 2, 1, 3) if layout == "bhsd" else range(4)
            want = f"[{', '.join(dims[i] for i in order)}], of 4 dims"
            raise InputError(OP, name, want=want, got=f"{tensor.dim()}-D")
    return [tensor.permute(ROWS_FIRST[layout]) for tensor in given.values()]  # pyright: ignore[reportArgumentType]


def _check(q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None, causal: object) -> None:
    """Refuse what does not fit, of rows first.

    Raises:
        InputError: names the argument.
    """

    def shown(t: Tensor | Sequence[object]) -> str:
        sizes = list(t.shape) if isinstance(t, Tensor) else list(t)
        return f"({', '.join(str(sizes[i]) for i in BACK[layout])})"

    check_place(OP, q=q)
    dtypes = DTYPES if q.device.type == "cpu" else DTYPES[:2]
    if q.dtype not in dtypes:
        want = "bf16 or fp16" + ", or fp32 on CPU" * (q.device.type == "cpu")
        raise InputError(OP, "q", want=want, got=q.dtype)
    rows, batch, heads, dim = q.shape
    if not 0 < dim <= MAX_HEAD_DIM:
        raise InputError(OP, "q", want=f"of head dim 1 to {MAX_HEAD_DIM}", got=shown(q))
    if causal and rows % 2:
        raise InputError(OP, "q", want="of two halves where it is causal", got=shown(q))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InputError(OP, name, want=f"{q.dtype} as q", got=tensor.dtype)
        if tensor.device != q.device:
            raise InputError(OP, name, want=f"on {q.device} as q", got=tensor.device)
    exchanged = k.shape[1:] == (batch, heads, dim) and k.shape[0] and not rows % k.shape[0]
    fix = EXCHANGED if layout is None and exchanged else ""
    for name, tensor in (("k", k), ("v", v)):
        divides = tensor.shape[2] and not heads % tensor.shape[2]
        if not divides or tensor.shape != (rows, batch, tensor.shape[2], dim):
            want = f"[{shown((rows, batch, f'a divisor of {heads} heads', dim))[1:-1]}]"
            raise InputError(OP, name, want=want, got=shown(tensor), fix=fix)
        if layout is None and 0 < rows < tensor.shape[2]:
            want = f"[{SHAPE}] of as many rows as heads or more where layout is None"
            raise InputError(OP, name, want=want, got=shown(tensor), fix=EXCHANGED)
    if v.shape != k.shape:
        raise InputError(OP, "v", want=f"{shown(k)} as k", got=shown(v))


def _check_settings(causal: object, scale: float | None) -> None:
    """Refuse what they cannot be.

    Raises:
        InputError: names the argument.
    """
    if type(causal) is not bool:
        raise InputError(OP, "causal", want="True or False", got=repr(causal))
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and 0 < scale <= 1e6):
        raise InputError(OP, "scale", want="a number above 0, or None", got=repr(scale))


def _problem(op: str, causal: bool, scale: float, tensors: Tensors, ranks: int) -> Problem:
    q, k, *_ = present(tensors)
    return Problem(
        op, q.shape[0] * ranks, prod(q.shape[1:]), prod(k.shape[1:]), ranks, dtype_of(q),
        head_dim=q.shape[-1], causal=causal, scale=scale,
    )  # fmt: skip


def _flat(x: Tensor) -> tuple[int, int]:
    """Its shape in a plan: all but rows are columns."""
    return x.shape[0], prod(x.shape[1:])


def _sums(q: Tensor) -> tuple[int, int]:
    """The shape of the log-sum-exp: a number for each row and head of a batch."""
    return q.shape[0], q.shape[1] * q.shape[2]


@cache
def forward_of(causal: bool, scale: float, layout: str = "bshd", asks: str = "") -> Operator:
    """With these settings.

    Args:
        layout: of the caller's tensors.
        asks: whether a gradient is asked for: "" or "some".
    """

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        q, *_ = present(tensors)
        return Output("y", _flat(q)), Output("lse", _sums(q), transposed=True)

    return Operator(
        OP, tuple(Input(name, "heads") for name in "qkv"),
        lambda tensors, rows, ranks: _problem(OP, causal, scale, tensors, ranks), outputs,
        settings=(("causal", causal), ("scale", scale)),
        compares=(("layout", layout), ("requires_grad", asks or "nothing")),
    )  # fmt: skip


@cache
def backward_of(causal: bool, scale: float) -> Operator:
    """Its gradients; its tensors: q, k, v, dy, y, lse."""

    def outputs(tensors: Tensors, rows: Sequence[int], ranks: int, rank: int) -> tuple[Output, ...]:
        shapes = map(_flat, present(tensors))
        return tuple(Output(f"d{name}", next(shapes)) for name in "qkv")

    inputs = (*(Input(name, "heads") for name in ("q", "k", "v", "dy", "y")), Input("lse", "given"))
    return Operator(
        BACKWARD, inputs,
        lambda tensors, rows, ranks: _problem(BACKWARD, causal, scale, tensors, ranks), outputs,
        settings=(("causal", causal), ("scale", scale)),
    )  # fmt: skip


# the first of their ops
forward_of(False, 0.0)
backward_of(False, 0.0)


def _run(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, plan: str, group_name: str,
    *where: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, *around = where
    y, lse = call.run(forward_of(causal, scale, *around), (q, k, v), plan, (), group_name)
    return y.view(q.shape), lse


# the size is an argument: what a fake looks up in the group is not in the compiler's cache key
def _fake(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, plan: str, group_name: str,
    *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = _sums(q)
    return q.new_empty(q.shape), q.new_empty(columns, rows, dtype=torch.float32).t()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.plan, *ctx.where, _, _ = inputs
    y, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, y, lse)


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, y, lse = ctx.saved_tensors
    plan = backward_plan(OP, ctx.plan)
    dq, dk, dv = torch.ops.counterpoint.all_gather_attention_backward(
        [q, k, v, dy, y, lse], ctx.causal, ctx.scale, plan, *ctx.where
    )
    return dq, dk, dv, *[None] * 7


def _run_backward(
    given: list[Tensor], causal: bool, scale: float, plan: str, group_name: str, group_size: int
) -> list[Tensor]:
    found = call.run(backward_of(causal, scale), given, plan, (), group_name)
    return [d.view(t.shape) for d, t in zip(found, given[:3], strict=True)]


def _fake_backward(
    given: list[Tensor], causal: bool, scale: float, plan: str, group_name: str, group_size: int
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in given[:3]]


def _flops(q: Any, k: Any, *rest: Any, **_: Any) -> int:
    """As torch counts its own, causal or not."""
    return 4 * prod(q) * k[0] * rest[5]


def _flops_of_backward(given: Any, *rest: Any, **_: object) -> int:
    return 10 * prod(given[0]) * given[1][0] * rest[-1]


register(OP, _run, _fake, _backward, _save, flops=_flops)
register(BACKWARD, _run_backward, _fake_backward, refuse_double, flops=_flops_of_backward)


def sample(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """Calls on random tensors of one batch: see samples.py."""
    p, rows = problem, problem.rows[group.rank()]

    def drawn(columns: int) -> Tensor:
        x = torch.randn(rows, 1, columns // p.head_dim, p.head_dim, device=device)
        return x.to(getattr(torch, p.dtype))

    q, k, v, dy = (drawn(columns) for columns in (p.n, p.k, p.k, p.n))
    forward = forward_of(p.causal, p.scale)
    y, lse = call.prepare(forward, (q, k, v), "serial", (), group)((q, k, v))
    operator, tensors = forward, (q, k, v)
    if p.op == BACKWARD:
        operator = backward_of(p.causal, p.scale)
        tensors = (q, k, v, dy, y.view(q.shape), lse)

    def call_of(spec: str) -> Callable[[int], object]:
        def one(_: int) -> object:
            return call.prepare(operator, tensors, spec, (), group)(tensors)

        one(0)
        return one

    return Sample(1, call_of)
