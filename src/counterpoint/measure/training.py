"""Forward and backward of a sequence-parallel MLP, three ways, on GPUs.

    serial  gathers and scatters by NCCL, nothing overlapped, what was gathered is gathered again
    async   the usual form: the gather beside dgrad, the reduce-scatter beside wgrad, by NCCL
    ours    this library's operators, with `plan="auto"`

All save their shards only; activations are the same torch code in all. Checked against fp32 first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.timing import Arm, captured, relative_error, rotate
from counterpoint.ops.all_gather_matmul import all_gather_matmul
from counterpoint.ops.matmul_reduce_scatter import matmul_reduce_scatter
from counterpoint.runtime import compute
from counterpoint.runtime.workspace import workspace_of

Group = dist.ProcessGroup
Mlp = Callable[[Tensor, Tensor, Tensor, Group], Tensor]


@dataclass(frozen=True)
class MlpCase:
    """A gated MLP over all ranks: m tokens, hidden columns, ffn columns inside."""

    m: int
    hidden: int
    ffn: int
    layer: str = ""


def gated(h: Tensor) -> Tensor:
    """SwiGLU: h holds gate and up side by side."""
    gate, up = h.chunk(2, -1)
    return functional.silu(gate) * up


def gather(x: Tensor, group: Group, *, later: bool = False) -> tuple[Tensor, Any]:
    """All rows, and what to wait for where `later`."""
    full = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    return full, compute.all_gather(full, x, group=group, async_op=later)


def scatter(x: Tensor, group: Group, *, later: bool = False) -> tuple[Tensor, Any]:
    """This rank's rows of the sum, and what to wait for where `later`."""
    mine = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return mine, compute.reduce_scatter(mine, x, group=group, async_op=later)


class Column(torch.autograd.Function):
    """gather(x) w^T by NCCL; `overlap` as the usual asynchronous form does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, overlap: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.overlap = group, overlap
        return gather(x, group)[0] @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        full, gathered = gather(x, ctx.group, later=ctx.overlap)
        partial = dy @ weight
        if ctx.overlap:
            gathered.wait()
        dx, scattered = scatter(partial, ctx.group, later=ctx.overlap)
        dw = dy.t() @ full
        if ctx.overlap:
            scattered.wait()
        return dx, dw, None, None


class Row(torch.autograd.Function):
    """Rows of the sum of x w^T by NCCL; nothing to overlap dy's gather with in the usual form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return scatter(x @ weight.t(), group)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        full = gather(dy.contiguous(), ctx.group)[0]
        return full @ weight, full.t() @ x, None


def serial(x: Tensor, up: Tensor, down: Tensor, group: Group) -> Tensor:
    """One thing after another."""
    return Row.apply(gated(Column.apply(x, up, group, False)), down, group)  # type: ignore[no-any-return]


def asynchronous(x: Tensor, up: Tensor, down: Tensor, group: Group) -> Tensor:
    """Gather beside dgrad, reduce-scatter beside wgrad."""
    return Row.apply(gated(Column.apply(x, up, group, True)), down, group)  # type: ignore[no-any-return]


def ours(x: Tensor, up: Tensor, down: Tensor, group: Group) -> Tensor:
    """The operators of this library."""
    h = gated(all_gather_matmul(x, up.t(), group=group))
    return matmul_reduce_scatter(h, down.t(), group=group)


ARMS: dict[str, Mlp] = {"serial": serial, "async": asynchronous, "ours": ours}


def compare_training(
    case: MlpCase,
    *,
    group: Group,
    device: torch.device,
    rounds: int = 15,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Check and time forward + backward; all ranks call this.

    Returns:
        A row for each arm, as a graph and eager; equal on all ranks, times in seconds.

    Raises:
        CounterpointError: a gradient is off by more than twice that of the serial way.
    """
    ranks, rank = group.size(), group.rank()
    width = case.ffn // ranks
    generator = torch.Generator(device).manual_seed(100 + rank)

    def normal(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5
        return (torch.randn(shape, device=device, generator=generator) * scale).bfloat16()

    x = normal(case.m // ranks, case.hidden).requires_grad_()
    up = normal(2 * width, case.hidden).requires_grad_()
    down = normal(case.hidden, width).requires_grad_()
    dy = normal(case.m // ranks, case.hidden)
    inputs = (x, up, down)

    def step(mlp: Mlp) -> tuple[Tensor, ...]:
        y = mlp(x, up, down, group)
        return y, *torch.autograd.grad(y, inputs, dy)

    progress("checking")
    errors = _errors(step, inputs, dy, group)
    saved = {name: _saved_bytes(mlp, inputs, group) for name, mlp in ARMS.items()}
    progress("capturing")
    graphs: dict[str, Arm] = {}
    kept: list[torch.cuda.CUDAGraph] = []
    for name, mlp in ARMS.items():
        graphs[name], graph = captured(lambda _, mlp=mlp: step(mlp), 2)
        kept.append(graph)
    progress("timing")
    times = rotate(graphs, group=group, device=device, rounds=rounds, soak_s=0.7)
    clock = record.sm_clock_mhz()
    eager: dict[str, Arm] = {name: (lambda mlp=mlp: step(mlp)) for name, mlp in ARMS.items()}
    plain = rotate(eager, group=group, device=device, rounds=rounds, soak_s=0.1, backlog_cycles=1)
    facts = {
        "table": "training", "layer": case.layer, "m": case.m, "hidden": case.hidden,
        "ffn": case.ffn, "dtype": "bfloat16", "ranks": ranks, "sm_clock_mhz": clock,
        "workspace_bytes": list(workspace_of(group, device).num_bytes()),
    } | record.environment()  # fmt: skip
    return [
        {"arm": name, "median_s": t.median_s / 2, "p20_s": t.quantile_s(2) / 2,
         "p80_s": t.quantile_s(8) / 2, "plain_eager_s": plain[name].median_s,
         "error": errors[name], "saved_bytes": saved[name], **facts}
        for name, t in times.items()
    ]  # fmt: skip


def _saved_bytes(mlp: Mlp, inputs: tuple[Tensor, ...], group: Group) -> int:
    """Activation bytes that autograd keeps for the backward, weights left out."""
    kept: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in inputs[1:]}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x, up, down = inputs
        mlp(x, up, down, group)
    return sum(kept.values())


def _errors(
    step: Callable[[Mlp], tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    dy: Tensor,
    group: Group,
) -> dict[str, float]:
    """The worst error of y and the gradients against fp32 products, by arm, of the worst rank."""
    x, up, down = (t.detach().float().requires_grad_() for t in inputs)
    whole, _ = gather(x.detach(), group)
    whole = whole.requires_grad_()
    partial = gated(whole @ up.t()) @ down.t()
    y = scatter(partial.detach(), group)[0]
    grad, _ = gather(dy.float(), group)
    dwhole, dup, ddown = torch.autograd.grad(partial, (whole, up, down), grad)
    want = (y, scatter(dwhole, group)[0], dup, ddown)
    del partial, whole, dwhole
    errors: dict[str, float] = {}
    for name, mlp in ARMS.items():
        got = step(mlp)
        worst = max(relative_error(a, b) for a, b in zip(got, want, strict=True))
        error = torch.tensor(worst, device=dy.device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX, group=group)
        errors[name] = error.item()
        if not errors[name] <= 2 * errors["serial"]:
            raise CounterpointError(
                f"training {name}: error {errors[name]:.2e}, serial has {errors['serial']:.2e}"
            )
    return errors
