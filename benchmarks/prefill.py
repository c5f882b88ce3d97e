"""matmul_all_reduce of a prefill's many rows against the libraries: down projections of models.

The arms of decode.py, with every plan that "auto" weighs; and the forward with its backward, which
is two matmuls without communication, ours and the libraries'. The shapes that tell most come first.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks import decode
from benchmarks.choice import candidates
from benchmarks.declare import Arms, Bench, Benchmark, Case, Section
from benchmarks.decode import ALONE, TORCH, over_torch, pick
from benchmarks.epilogue import MODELS as LLAMA
from benchmarks.epilogue import SHARES
from benchmarks.pictures import dots, place
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, both_modes, by_machine, ms, sizes, table, torch_note
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

MODELS = {**LLAMA, "Qwen3-32B": (5120, 25600)}  # hidden size, F
ROWS = (2048, 256, 16384)
BOTH = "forward + backward"
FIXED = ("serial", "matmul", "auto", *TORCH)  # arms that are not one of the plans weighed


def case_of(m: int, n: int, k: int, model: str = "", width: str = "") -> Case:
    """One shape: N and K of one rank, whose share of F makes the width, such as "TP8"."""
    made = decode.case_of(m, n, k, f"{model} {width}".strip())
    return replace(made, facts={**made.facts, "width": width})


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    widths = sorted(SHARES, reverse=True)
    return [case_of(m, hidden, f // tp, model, f"TP{tp}")
            for m, tp, (model, (hidden, f)) in product(ROWS, widths, MODELS.items())]  # fmt: skip


class Summed(torch.autograd.Function):
    """x w summed over ranks by the library; its gradients as torch.mm has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        y = x @ w
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy @ w.t(), x.t() @ dy, None


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one shape; with backward they return y and the gradients of x and of w."""
    m, n, k, group = case["m"], case["n"], case["k"], bench.group
    x, weights = decode.operands(case, bench)
    specs = candidates(Problem("matmul_all_reduce", m, n, k, bench.ranks), bench)
    found = decode.forward(x, weights, ("auto", *specs), bench)
    dy = bench.normal(m, n)
    dist.broadcast(dy, 0, group=group)  # of a y that all ranks have
    leaf, leaves = x.detach().requires_grad_(), [w.detach().requires_grad_() for w in weights]

    def both(i: int, way: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        w = leaves[i % len(leaves)]
        y = way(leaf, w)
        return y.detach(), *torch.autograd.grad(y, (leaf, w), dy)

    summed: Callable[..., Tensor] = Summed.apply
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "serial": lambda x, w: summed(x, w, group),
        "auto": lambda x, w: cp.matmul_all_reduce(x, w, group=group),
    }
    calls = {f"{name}, {BOTH}": partial(both, way=way) for name, way in ways.items()}
    dx, dw = dy.double() @ weights[0].double().t(), x.double().t() @ dy.double()

    def check(name: str, got: Any) -> list[float]:
        if name not in calls:
            return list(found.check(name, got))
        off = [relative_error(a, b) for a, b in zip(got[1:], (dx, dw), strict=True)]
        # the largest, and not a number where one is none
        return torch.tensor([*found.check(name, got[0]), *off]).amax(0, keepdim=True).tolist()

    return replace(found, calls={**found.calls, **calls}, check=check)


# ---- what is said of the rows


def best(case: Timed) -> str:
    """The fastest of our plans by name."""
    plans = [name for name in case.main if name not in FIXED and BOTH not in name]
    fastest = case.fastest(plans) if plans else "auto"
    return f"{ms(case.s(fastest))} {fastest}"


def over(case: Timed, behind: str = "") -> float:
    """Speedup of auto over cuBLAS and NCCL."""
    return case.s(f"serial{behind}") / case.s(f"auto{behind}")


def over_with_backward(case: Timed) -> float:
    """The same of the forward and the backward."""
    return over(case, f", {BOTH}")


COLUMNS = (
    Column("layer", lambda c: c.head["layer"]), sizes("m", "n", "k"), arm("matmul", ms),
    arm("serial", ms, "+ NCCL (serial)"), both_modes(TORCH[0], ms, "+ torch one-shot"),
    both_modes(TORCH[1], ms, "+ torch two-shot"), arm("auto", ms, bold=True),
    Column("its plan", pick), Column("best plan measured", best),
    Column("serial / auto", lambda c: f"**{over(c):.2f}**"),
    Column("torch / auto", lambda c: f"**{over_torch(c):.2f}**"),
    Column("serial / auto with backward", lambda c: f"**{over_with_backward(c):.2f}**"),
)  # fmt: skip
RATIOS: dict[str, Callable[[Timed], float]] = {
    "serial / auto": over, "the better of torch's / auto": over_torch,
    "serial / auto with backward": over_with_backward,
}  # fmt: skip


def ordered(rows: list[Row]) -> tuple[list[Timed], list[str]]:
    """The shapes by width, model and rows; and the widths."""
    found = taken(rows, "m", "n", "k")
    widths = sorted({c.head["width"] for c in found}, reverse=True)
    found.sort(key=lambda c: (widths.index(c.head["width"]), c.head["layer"], c.head["m"]))
    return found, widths


def means(width: str, some: list[Timed]) -> str:
    """What the shapes of one width say together."""
    texts: list[str] = []
    for name, of in RATIOS.items():
        each = [of(case) for case in some]
        texts.append(f"{name} {geometric_mean(each):.2f} (least {min(each):.2f})")
    return f"{width}, geometric means of {len(some)} shapes: {', '.join(texts)}."


def prefill_table(rows: list[Row]) -> str:
    """Every shape by width and model, and the means of each width."""
    found, widths = ordered(rows)
    by = {width: [c for c in found if c.head["width"] == width] for width in widths}
    note = (
        "Milliseconds a call, in a graph with weights in rotation, all arms of a shape in one "
        "randomised rotation; N and K of one rank, of down projections. With backward: y and the "
        f"gradients of x and of w. {torch_note(found, *TORCH)}"
    )
    several = [means(width, some) for width, some in by.items() if width]
    return table(COLUMNS, found, " ".join([note, *several]))


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Ours and torch's over serial at every shape, a panel for each width, of the most GPUs."""
    rows = next(iter(found.values()))
    shapes, widths = ordered(rows)
    panels: dict[str, dict[str, dict[str, float]]] = {width: {} for width in widths}
    marks: dict[str, dict[str, float]] = {width: {} for width in widths}
    for c in shapes:
        width = c.head["width"]
        label = f"{c.head['layer'].removesuffix(f' {width}')}, {c.head['m']} tokens"
        panels[width][label] = {
            "the better of torch's all-reduces": over(c) / over_torch(c),
            "counterpoint": over(c),
        }
        marks[width][label] = c.s("serial") / c.s("matmul")
    dots(
        panels,
        images / "prefill.svg",
        marks=marks,
        mark=ALONE,
        title=f"Prefill: matmul + all-reduce, {geometric_mean(map(over, shapes)):.2f}x over "
              "serial in the mean",
        source=f"{place(rows)}; TP8: as one of 8 GPUs holds it; serial is cuBLAS + NCCL",
    )  # fmt: skip


PREFILL = Benchmark(
    "prefill", cases, arms, unit="ms", calls=2, rounds=7, soak_s=0.1,
    short=lambda case: case["layer"] == "8B TP8" and case["m"] == 2048,
    moved=decode.DECODE.moved, own=lambda shape, _: [case_of(*shape)],
    sections=(
        Section("docs/results/tensor_parallel.md", "prefill", by_machine(prefill_table)),
    ),
    pictures=pictures,
)  # fmt: skip
