"""Forward and backward of a sequence-parallel gated MLP, three ways.

    serial  gathers and scatters by the library, nothing overlapped, what was gathered is gathered
again async   the usual form: the gather beside dgrad, the reduce-scatter beside wgrad, by the
library ours    this library's operators, with `plan="auto"`

All save their shards only; activations are the same torch code in all. The MLP is cut over the
ranks that there are, so on fewer than 8 GPUs each has more of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import counterpoint as cp
from benchmarks.declare import Arms, Bench, Benchmark, Case, Section, all_gather, reduce_scatter
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error

Mlp = Callable[[Tensor, Tensor, Tensor, Bench], Tensor]
LAYERS = {"Llama-3-70B MLP": (8192, 8192, 28672),
          "half its ffn, as on twice the ranks": (8192, 8192, 14336),
          "Llama-3-70B MLP, 2048 tokens": (2048, 8192, 28672)}  # fmt: skip


def case_of(m: int, hidden: int, ffn: int, layer: str = "") -> Case:
    """A gated MLP over all ranks: m tokens, hidden columns, ffn columns inside."""
    return Case(f"{layer} {m},{hidden},{ffn}".strip(), {"m": m, "hidden": hidden, "ffn": ffn,
                                                        "layer": layer})  # fmt: skip


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [case_of(*sizes, layer) for layer, sizes in LAYERS.items()]


def gated(h: Tensor) -> Tensor:
    """SwiGLU: h holds gate and up side by side."""
    gate, up = h.chunk(2, -1)
    return functional.silu(gate) * up


def gather(x: Tensor, bench: Bench, *, later: bool = False) -> tuple[Tensor, Any]:
    """All rows, and what to wait for where `later`."""
    full = x.new_empty(x.shape[0] * bench.ranks, x.shape[1])
    return full, all_gather(full, x, group=bench.group, async_op=later)


def scatter(x: Tensor, bench: Bench, *, later: bool = False) -> tuple[Tensor, Any]:
    """This rank's rows of the sum, and what to wait for where `later`."""
    mine = x.new_empty(x.shape[0] // bench.ranks, x.shape[1])
    if later and bench.on_gpu:
        return mine, reduce_scatter(mine, x, group=bench.group, async_op=True)
    bench.reduce_scatter(mine, x)
    return mine, None


class Gathered(torch.autograd.Function):
    """gather(x) w^T by the library; `overlap` as the usual asynchronous form does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bench: Bench, overlap: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bench, ctx.overlap = bench, overlap
        return gather(x, bench)[0] @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        full, gathered = gather(x, ctx.bench, later=ctx.overlap)
        partial = dy @ weight
        if gathered is not None:
            gathered.wait()
        dx, scattered = scatter(partial, ctx.bench, later=ctx.overlap)
        dw = dy.t() @ full
        if scattered is not None:
            scattered.wait()
        return dx, dw, None, None


class Scattered(torch.autograd.Function):
    """Rows of the sum of x w^T by the library; nothing to overlap dy's gather with as usual."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bench: Bench) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bench = bench
        return scatter(x @ weight.t(), bench)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        full = gather(dy.contiguous(), ctx.bench)[0]
        return full @ weight, full.t() @ x, None


def by_library(overlap: bool) -> Mlp:
    """The MLP by the library's collectives."""
    return lambda x, up, down, bench: Scattered.apply(
        gated(Gathered.apply(x, up, bench, overlap)), down, bench
    )  # fmt: skip


def ours(x: Tensor, up: Tensor, down: Tensor, bench: Bench) -> Tensor:
    """The operators of this library."""
    h = gated(cp.all_gather_matmul(x, up.t(), group=bench.group))
    return cp.matmul_reduce_scatter(h, down.t(), group=bench.group)


WAYS: dict[str, Mlp] = {"serial": by_library(False), "async": by_library(True), "ours": ours}


def arms(case: Case, bench: Bench) -> Arms:
    """Result and gradients of x and both weights, each way."""
    m, hidden, width = case["m"], case["hidden"], case["ffn"] // bench.ranks
    x = bench.normal(m // bench.ranks, hidden, scale=hidden**-0.5).requires_grad_()
    up = bench.normal(2 * width, hidden, scale=hidden**-0.5).requires_grad_()
    down = bench.normal(hidden, width, scale=width**-0.5).requires_grad_()
    dy = bench.normal(m // bench.ranks, hidden, scale=hidden**-0.5)

    def step(mlp: Mlp) -> tuple[Tensor, ...]:
        y = mlp(x, up, down, bench)
        return y.detach(), *torch.autograd.grad(y, (x, up, down), dy)

    want = wanted(x, up, down, dy, bench)

    def check(_: str, got: tuple[Tensor, ...]) -> list[float]:
        return [relative_error(a, b) for a, b in zip(got, want, strict=True)]

    calls = {name: lambda _, mlp=mlp: step(mlp) for name, mlp in WAYS.items()}
    about = {name: {"saved_bytes": saved_bytes(mlp, (x, up, down), bench)}
             for name, mlp in WAYS.items()}  # fmt: skip
    memory = list(workspace_of(bench.group, bench.device).num_bytes())
    return Arms(calls, check, limit=2e-2, about=about, facts={"workspace_bytes": memory},
                nan_bytes=8 * m * max(hidden, width))  # fmt: skip


def wanted(x: Tensor, up: Tensor, down: Tensor, dy: Tensor, bench: Bench) -> tuple[Tensor, ...]:
    """y and the gradients in fp32: their rounding is nothing beside that of bf16."""
    whole, up, down = (
        t.detach().float().requires_grad_() for t in (bench.whole(x.detach()), up, down)
    )
    partial = gated(whole @ up.t()) @ down.t()
    y = scatter(partial.detach(), bench)[0]
    dwhole, dup, ddown = torch.autograd.grad(
        partial, (whole, up, down), gather(dy.float(), bench)[0]
    )
    return y, scatter(dwhole, bench)[0], dup, ddown


def saved_bytes(mlp: Mlp, inputs: tuple[Tensor, ...], bench: Bench) -> int:
    """Activation bytes that autograd keeps for the backward, weights left out."""
    kept: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in inputs[1:]}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mlp(*inputs, bench)
    return sum(kept.values())


def _over(way: str) -> Callable[[Timed], str]:
    return lambda case: f"**{case.s(way) / case.s('ours'):.2f}**"


def _plain(case: Timed, name: str) -> str:
    return ms(case.eager.get(name, case.main[name])["plain_eager_s"])


def _memory(case: Timed) -> str:
    return " + ".join(f"{n / 2**20:.0f}" for n in case.main["ours"]["workspace_bytes"])


COLUMNS = (
    Column("tokens, hidden, ffn", lambda c: "{m}, {hidden}, {ffn} ({layer})".format(**c.head)),
    arm("serial", ms), arm("async", ms, "usual async"), arm("ours", ms),
    Column("serial / ours", _over("serial")), Column("async / ours", _over("async")),
    Column("eager serial, async, ours", lambda c: ", ".join(_plain(c, name) for name in WAYS)),
    Column("saved MiB, each arm",
           lambda c: ", ".join(f"{c.main[name]['saved_bytes'] / 2**20:.0f}" for name in WAYS)),
    Column("ours: symmetric + scratch MiB", _memory),
)  # fmt: skip


def training_table(rows: list[Row]) -> str:
    """Forward and backward, as CUDA graphs."""
    return table(COLUMNS, taken(rows, "m", "hidden", "ffn"))


TRAINING = Benchmark(
    "training", cases, arms, unit="ms", calls=2, rounds=15, soak_s=0.7, eager=tuple(WAYS),
    short=lambda case: case["m"] == 2048, own=lambda shape, _: [case_of(*shape)],
    moved=lambda case, ranks: 10 * case["m"] * case["hidden"] * (ranks - 1) // ranks,
    sections=(Section("docs/results/training.md", "training", by_machine(training_table)),),
)  # fmt: skip
