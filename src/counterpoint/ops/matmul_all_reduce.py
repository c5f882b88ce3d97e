"""Multiply and sum over ranks, everyone gets the sum: a row-parallel linear layer of decoding."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.ops import agreement, call
from counterpoint.ops.agreement import Input
from counterpoint.ops.check import autocast, check_group, check_tensors
from counterpoint.runtime.fused import fused_memory, in_turn
from counterpoint.runtime.fused_call import FusedCall, aligned
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_collective import Collective
from counterpoint.runtime.launch_fused import (
    MAX_RANKS,
    Fused,
    default_way,
    launch_of,
    reserve,
    where,
)
from counterpoint.runtime.ranks import gather_object, group_of
from counterpoint.runtime.workspace import Workspace, workspace_of

OP = "matmul_all_reduce"
FUSED_ROWS = 64  # more are the matmul library's
DIRECT_BYTES = 16 << 20  # of y; more is the collective library's
INPUTS = (Input("x", "rows"), Input("w", "matrix"), Input("bias", "row"))

call.LIBRARY.define(f"{OP}(Tensor x, Tensor w, Tensor? bias, str plan, str group_name) -> Tensor")


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    plan: str = "auto",
) -> Tensor:
    """Sum the products of all ranks: y = x_0 w_0 + ... + x_{n-1} w_{n-1}, on every rank.

    In place of `matmul` and `all_reduce`. For the few rows of decoding one kernel, which sends each
    tile to its peers as soon as it is computed; for a few more the library's matmul and an
    all-reduce in one kernel of our own. All ranks get the same bits, and the same call gives them
    in every run, if all store w alike. Partial results are rounded to the dtype of x for the way
    (a single row is not), summed in fp32 in a fixed order, and rounded once; of direct, the bias is
    added after that. Captures in a CUDA graph after one eager call of the same or a larger size;
    the calls of a group, replays included, are one after the other in stream order, and so must
    graphs of several groups be. Differentiable; its backward needs no communication.

    Args:
        x: bf16, fp16 or fp32 [M, ..., K], on CPU or CUDA, K the part of this rank.
        w: dtype of x, [K, N] of any strides; pass `weight.t()` of a torch.nn.Linear.
        group: whose ranks take part; None: the default group.
        bias: dtype of x, [N], equal on all ranks; added once.
        plan: "auto": by sizes, see docs/fused.md; "serial": the libraries' matmul and all-reduce;
            "direct": our all-reduce behind the library's matmul; "fused": all in one kernel; or a
            spec such as "fused two_shot 64x64x8 warps=4", its tile of w, stages and warps.
            All but serial need a number of ranks that is a power of 2.

    Returns:
        dtype of x, [M, ..., N], a new tensor.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        UnsupportedError: `plan` is fused and the grid does not fit this GPU.
        PeerTimeoutError: a rank did not come to an earlier call; the group is unusable.

    Example:
        >>> y = counterpoint.matmul_all_reduce(x, w, group=tp)  # doctest: +SKIP
    """
    tensors = (x, w, bias)
    group = check_group(OP, group)
    y, key = call.repeated(OP, tensors, group, plan, None, 0)
    if y is not None:
        return y
    x, w, bias = autocast(x, w, bias)  # type: ignore[assignment]
    check_tensors(OP, x, w, bias)
    if not isinstance(plan, str):
        raise InputError(OP, "plan", want="text", got=type(plan).__name__)
    if plan not in ("auto", "serial", "direct", "fused"):
        Fused.parse(plan)
    if key is None:
        return torch.ops.counterpoint.matmul_all_reduce(x, w, bias, plan, group.group_name)
    ready = prepare((x, w, bias), plan, group)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        call.remember(key, ready)
    return ready((x, w, bias))[0]


def way_of(
    plan: str, m: int, n: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> Fused | Literal["serial", "direct"]:
    """What a plan stands for at this size; "auto" by what was measured on 2 and 4 H200."""
    num_sms = 132  # of an H200, on CPU ranks
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    y_bytes = m * n * dtype.itemsize
    if plan == "auto":
        plan = "serial"
        if device.type == "cuda" and not ranks & (ranks - 1) and 1 < ranks <= MAX_RANKS:
            # a w that is wider than a tile for each SM has two rounds of them: see docs/fused.md
            rows = FUSED_ROWS if n <= 64 * num_sms else FUSED_ROWS // 2
            if m <= rows and dtype.itemsize == 2:
                plan = "fused"
            elif y_bytes <= DIRECT_BYTES and not y_bytes % (4 * ranks):
                plan = "direct"
    if plan == "serial" or not y_bytes:
        return "serial"
    if plan == "direct":
        return "direct" if device.type == "cuda" else "serial"
    if plan == "fused":
        return default_way(m, n, ranks, dtype.itemsize, num_sms)
    return Fused.parse(plan)


class _Serial:
    """A matmul and an all-reduce of the libraries."""

    def __init__(self, workspace: Workspace, plan: str) -> None:
        self.workspace, self.plan = workspace, plan

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        self.workspace.check()
        x, w, bias = _given(tensors)
        if not x.is_cuda:
            agreement.compare(OP, INPUTS, tensors, self.plan, (), self.workspace)
        y = x @ w
        dist.all_reduce(y, group=self.workspace.group)
        return [y if bias is None else y.add_(bias)]


class _Direct:
    """The library's matmul, then an all-reduce in one kernel of our own."""

    def __init__(self, workspace: Workspace, tensors: Sequence[Tensor | None]) -> None:
        self.workspace = workspace
        x, w, _ = _flat(tensors)
        m, n, ranks = x.shape[0], w.shape[1], workspace.group.size()
        if m * n * x.element_size() % (4 * ranks):
            want = f"rows and columns such that {ranks} ranks have 4 bytes or a multiple each"
            raise InputError(OP, "plan", want=want, got=f"direct for [{m}, {n}]")
        self.lanes = lanes_of(workspace)
        tag = self.lanes.register(OP, "direct", (("sum over ranks", tuple(range(ranks))),))
        self.collective = Collective(
            fused_memory(workspace), tag, m * n * x.element_size() // ranks, scatter=True,
            gather=True, dtype=x.dtype, name=OP,
        )  # fmt: skip

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        self.workspace.check()
        x, w, bias = _given(tensors)
        if not torch.cuda.is_current_stream_capturing():
            self.lanes.follow()
            in_turn(x.device)
        own = x @ w
        y = torch.empty_like(own)
        self.collective(own, y)
        return [y if bias is None else y.add_(bias)]


class _InOneKernel:
    """The fused kernel on a GPU, compiled on all ranks."""

    def __init__(self, way: Fused, workspace: Workspace, tensors: Sequence[Tensor | None]) -> None:
        self.workspace, self.way = workspace, way
        x, w, bias = _flat(tensors)
        self.memory = fused_memory(workspace)
        reserve(way, self.memory, x.shape[0], w.shape[1], x.element_size())
        self.lanes = lanes_of(workspace)
        ranks = tuple(range(workspace.group.size()))
        self.tag = self.lanes.register(OP, way.spec, (("sum over ranks", ranks),))
        launch = partial(launch_of, way, self.memory, where(self.memory), self.tag)
        self.call = FusedCall(launch, way.spec, OP)
        self.call.compile(x, w, bias, x.new_empty(x.shape[0], w.shape[1]))

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        self.workspace.check()
        given: Any = tensors[0]
        x, w, bias = _flat(tensors)
        if not torch.cuda.is_current_stream_capturing():
            self.lanes.follow()
            in_turn(x.device)
        y = x.new_empty(*given.shape[:-1], w.shape[1])
        self.call(x, w, bias, y.view(-1, w.shape[1]))
        return [y]


class _OnCpuRanks:
    """What the kernel computes, by torch and gloo: its roundings, in one order on all ranks.

    gloo ends the process of a rank whose peer sends another size, and does not say who is missing:
    so each call is compared first.
    """

    def __init__(self, workspace: Workspace, plan: str) -> None:
        self.workspace, self.plan = workspace, plan

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        self.workspace.check()
        x, w, bias = _given(tensors)
        agreement.compare(OP, INPUTS, tensors, self.plan, (), self.workspace)
        single = prod(x.shape[:-1]) == 1  # a single row travels in fp32
        own = (x.float() @ w.float()).to(torch.float32 if single else x.dtype)
        parts = [torch.empty_like(own) for _ in range(self.workspace.group.size())]
        dist.all_gather(parts, own, group=self.workspace.group)
        total = torch.stack(parts).float().sum(0)
        return [(total if bias is None else total + bias.float()).to(x.dtype)]


def prepare(tensors: Sequence[Tensor | None], plan: str, group: dist.ProcessGroup) -> call.Runnable:
    """Check, choose and compile; collective at the first call with these facts.

    Raises:
        InputError: the ranks disagree, or memory would have to grow while a graph is captured.
        PeerTimeoutError: a peer did not answer; the group is unusable.
    """
    x, w, _ = _given(tensors)
    workspace = workspace_of(group, x.device)
    workspace.check()
    key = (OP, plan, call.facts(tensors))
    ready: call.Runnable | None = workspace.code.get(key)
    if ready is None or agreement.checking():
        agreement.compare(OP, INPUTS, tensors, plan, (), workspace)
    if ready is not None:
        return ready
    m, n = prod(x.shape[:-1]), w.shape[1]
    way = way_of(plan, m, n, group.size(), x.dtype, x.device)
    if way == "serial" or not x.shape[-1]:
        ready = _Serial(workspace, plan)
    elif x.is_cuda:
        ready = _by_words(way, tensors, workspace, falls_back=plan == "auto")
        if isinstance(ready, _Serial) and torch.cuda.is_current_stream_capturing():
            return ready  # for want of memory in this capture: an eager call will have it
    else:
        ready = _OnCpuRanks(workspace, plan)
    workspace.remember(key, ready)
    return ready


def _by_words(
    way: Fused | Literal["direct"], tensors: Sequence[Tensor | None], workspace: Workspace,
    *, falls_back: bool,
) -> call.Runnable:  # fmt: skip
    """Compiled on all ranks, or serial on all of them where one cannot and `falls_back`."""
    capturing = torch.cuda.is_current_stream_capturing()
    ready, problem = None, ""
    try:
        if way == "direct":
            ready = _Direct(workspace, tensors)
        else:
            ready = _InOneKernel(way, workspace, tensors)
    except (UnsupportedError, InputError) as error:
        # memory that would have to grow within a capture does so on all ranks
        if not falls_back or (isinstance(error, InputError) and not capturing):
            raise
        problem = str(error)
    # a rank that still compiles is late for all: they go on together
    everyone = [problem] if capturing else gather_object(problem, workspace.group)
    return _Serial(workspace, "auto") if ready is None or any(everyone) else ready


def _given(tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
    x, w, bias = tensors
    assert x is not None
    assert w is not None
    return x, w, bias


def _flat(tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
    """As the kernel takes them: x [M, K] and the bias without gaps, x at a multiple of 16."""
    x, w, bias = _given(tensors)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    x = x if aligned(x) else x.clone()
    return x, w, bias if bias is None else bias.contiguous()


def _run(x: Tensor, w: Tensor, bias: Tensor | None, plan: str, group_name: str) -> Tensor:
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return _run(x, w, bias, plan, group_name)
    return prepare((x, w, bias), plan, group_of(group_name))((x, w, bias))[0]


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, plan: str, group_name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, *_ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of this rank's own x and w: dy is the same on all ranks."""
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dy @ w.t() if need_x else None
    dw = x.flatten(0, -2).t() @ dy.flatten(0, -2) if need_w else None
    db = dy.flatten(0, -2).sum(0) if ctx.has_bias and need_bias else None
    return dx, dw, db, None, None


call.LIBRARY.impl(OP, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"counterpoint::{OP}", _fake, lib=call.LIBRARY)
torch.library.register_autograd(
    f"counterpoint::{OP}", _backward, setup_context=_save, lib=call.LIBRARY
)
