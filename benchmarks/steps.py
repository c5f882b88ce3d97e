"""Whole steps, forward and backward: a DLRM and layers of experts, fused and unfused.

DLRM, the model of benchmarks/dlrm.py (all but its tables is the same code), without an optimizer,
and "step" with Adagrad: of dense gradients, or fused, row-wise, of the tables of "fused":

    fused    bags and their all-to-all in one kernel, into outputs of their own
    torch    a torch.nn.EmbeddingBag for each table, all_to_all_single, cat
    lookup   our batched lookup and its gradient (`plan="serial"`), all_to_all_single, cat

Experts, of tokens whose experts are known:

    fused          cnn.ExpertParallelMLP with max_rows: counts on the device, no host waits
    default        the same with default arguments: by routes, with room for all rows
    fused, host    the same, counts that the host waits for at each call; of earlier runs
    serial         the same with plan="serial": the libraries, and our passes between them
    torch          all_to_all_single, grouped matmuls, permutations by index_select, bmm
    torch, counts  the same, counts that the host has known before: no wait, no exchange of them

Calls are single, batches take turns; the host is some 15 ms ahead when an arm begins, so that what
it takes to enqueue a step shows only where an arm waits for the GPU. Beside each: its compute alone
and its communication alone, the shorter of which is what hiding can save at most."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

import counterpoint.nn as cnn
from benchmarks import dlrm
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.experts import MODELS, Model
from benchmarks.pictures import bars, place, shown
from benchmarks.rows import Row, Timed, taken
from benchmarks.steps_experts import experts_arms
from benchmarks.tables import measured, ms
from counterpoint.measure.timing import relative_error

DLRM, BOTH, STEP = "DLRM-DCNv2", "forward + backward", "step"
SETS = 3  # batches in rotation
EXACT = 2**-9  # a relative error as small as that is of rounding to bf16 alone
# in the order of columns; those that are not ours
UNFUSED = {DLRM: ("torch", "lookup"), "experts": ("torch", "torch, counts", "serial")}
OURS = {DLRM: ("fused",), "experts": ("fused, host", "default", "fused")}


def cases(_: int) -> list[Case]:
    """Samples of all ranks; tokens of a rank."""
    samples = [Case(f"DLRM, {n} samples", {"model": DLRM, "size": n}) for n in (16384, 65536)]
    return samples + [
        Case(f"{model.name}, {tokens} tokens a rank",
             {"model": model.name, "size": tokens, **model._asdict()} | {"model": model.name})
        for model in MODELS for tokens in (1024, 4096)
    ]  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """What is timed, each by the number of a batch, by "what, by way"."""
    if case["model"] != DLRM:
        model = Model(*(case[field] for field in ("name", *Model._fields[1:])))
        return experts_arms(model, case["size"], torch.bfloat16, bench)
    return dlrm_arms(dlrm.LARGE._replace(batch=case["size"]), torch.bfloat16, bench)


def dlrm_tables(
    s: dlrm.Sizes, dtype: torch.dtype, bench: Bench
) -> tuple[cnn.ShardedEmbeddingBags, dict[str, nn.Module]]:
    """The tables of this rank each way, with equal weights."""
    owners, _ = dlrm.balanced(bench.ranks)
    rows = [(min(n, s.rows), s.dim) for n in dlrm.ROWS]
    plans = ("fused" if bench.on_gpu else "auto", "serial")
    bags, serial = (
        cnn.ShardedEmbeddingBags(rows, owners=owners, plan=plan, device=bench.device, dtype=dtype)
        for plan in plans
    )
    for weight, other in zip(bags.weights, serial.weights, strict=True):
        nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)
        other.data.copy_(weight.data)
    return bags, {
        "fused": dlrm.InOneCall(s, bags, bench.device),
        "torch": dlrm.InThree(s, bags, bench.device),
        "lookup": dlrm.InOneCall(s, serial, bench.device),
    }


def dlrm_arms(s: dlrm.Sizes, dtype: torch.dtype, bench: Bench) -> Arms:
    """The model three times, with equal weights.

    Args:
        s: sizes.
        dtype: of tables, and of activations by autocast.
        bench: this rank.
    """
    torch.manual_seed(bench.rank)
    bags, tables = dlrm_tables(s, dtype, bench)
    dense = dlrm.Dense(s).to(bench.device)
    ways = {n: dlrm.Training(s, t, copy.deepcopy(dense), dtype) for n, t in tables.items()}
    steps = stepping(s, dense, dtype, bench)
    batches = [dlrm.batch_of(s, bags.own, seed, bench.device) for seed in range(SETS)]
    first, torch_s = batches[0], dlrm.InThree(s, bags, bench.device)
    exact = dlrm.Training(s, copy.deepcopy(torch_s).double(), copy.deepcopy(dense).double(),
                          torch.float32)  # fmt: skip
    exact.forward_backward(first._replace(features=first.features.double()))
    want = gradients(exact)
    with torch.no_grad():
        pooled = torch_s.pooled(first.indices)

    def alone(call: Callable[[Any], Tensor]) -> Call:
        return torch.no_grad()(lambda i: call(batches[i % SETS]))

    calls: dict[str, Call] = {
        "pooling, by torch": alone(lambda b: torch_s.pooled(b.indices)),
        "exchange": alone(lambda _: torch_s.exchanged(pooled)),
    }
    for name, way in ways.items():
        calls |= {
            f"tables, by {name}": alone(lambda b, way=way: way.tables(b.indices)),
            f"forward, by {name}": alone(way.forward),
            f"{BOTH}, by {name}": lambda i, way=way: way.forward_backward(batches[i % SETS]),
            f"{STEP}, by {name}": lambda i, way=steps[name]: way.step(batches[i % SETS]),
        }

    def check(name: str, _: Tensor) -> list[float]:
        # each table by itself: one of few rows is little of the norm of all
        found = gradients(ways[name.partition(", by ")[2]])
        return [relative_error(a, b) for a, b in zip(found, want, strict=True)]

    facts = {"batch": s.batch, "dim": s.dim, "rows": s.rows,
             "pooled": dlrm.balanced(bench.ranks)[1],
             "bottom": s.bottom, "cross": s.cross, "top": s.top, "sets": SETS}  # fmt: skip
    return Arms(calls, check, baseline=f"{BOTH}, by torch", floor=2 * EXACT, limit=0.2, facts=facts,
                parts=[name for name in calls if not name.startswith(BOTH)])  # fmt: skip


def stepping(
    s: dlrm.Sizes, dense: dlrm.Dense, dtype: torch.dtype, bench: Bench
) -> dict[str, dlrm.Training]:
    """The ways once more, with tables that change."""
    bags, tables = dlrm_tables(s, dtype, bench)
    bags.fuse_optimizer(cnn.RowWiseAdagrad(s.lr, eps=1e-4, scale=1 / bench.ranks))
    each = tables.items()
    return {n: dlrm.Training(s, t, copy.deepcopy(dense), dtype) for n, t in each}


def gradients(training: Any) -> list[Tensor]:
    """Of each table, as many on all ranks, and of all else as one vector."""
    dense = torch.cat([p.grad.flatten() for p in training.dense.parameters()])
    tables = [p.grad for p in training.tables.parameters()]
    # ranks have other numbers of tables; what they lack is not off
    return [*tables, *[torch.ones(1, device=dense.device)] * (MOST_TABLES - len(tables)), dense]


MOST_TABLES = 26
NOTE = (
    "Times are milliseconds of the slowest rank in eager calls. All ways of a size ran in one "
    "randomised rotation."
)
STEP_NOTE = " A step of *fused* has row-wise Adagrad in the tables' backward, the others torch's."


# ---- what is said of the rows


class Step:
    """One step of one model at one size: what its ways take, and its two sides alone."""

    def __init__(self, case: Timed, what: str) -> None:
        self.head, self.rows, self.what = case.head, case.rows, what
        self.kind = DLRM if case.head["model"] == DLRM else "experts"
        split = {arm: arm.partition(", by ")[::2] for arm in case.main}
        self.seconds = {way: case.s(arm) for arm, (w, way) in split.items() if w == what}
        if self.kind == DLRM:
            # the bound is that of the forward
            pooling = case.fastest(arm for arm, (w, _) in split.items() if w == "pooling")
            sides = case.s(pooling), case.s("exchange")
        else:
            sides = case.s(f"matmuls, by {what}"), case.s(f"exchanges, by {what}")
        self.compute_s, self.communication_s = sides
        self.label = f"{case.head['model']}, {case.head['size']}, {what}"
        self.bound_s = min(sides)  # what hiding saves at most
        self.unfused_s = min(self.seconds[way] for way in UNFUSED[self.kind])
        self.fused_s = self.seconds["fused"]

    def over(self, way: str) -> float:
        """Time of that way, or of the fastest that is not ours, over that of ours."""
        return (self.seconds[way] if way else self.unfused_s) / self.fused_s


def steps_of(rows: Sequence[Row]) -> list[Step]:
    """Their steps, in the order of the rows."""
    return [
        Step(case, what)
        for case in taken(rows, "model", "size")
        for what in ("tables", "forward", BOTH, STEP)
        if f"{what}, by fused" in case
    ]


def _than(steps: Sequence[Step], way: str = "") -> str:
    return f"{geometric_mean(s.over(way) for s in steps):.2f}"


def step_table(steps: Sequence[Step], kind: str) -> str:
    """Milliseconds of every step."""
    sides = ("pooling", "all-to-all, concat") if kind == DLRM else ("matmuls", "all-to-alls")
    others = [way for way in (*UNFUSED[kind], *OURS[kind][:-1]) if way in steps[0].seconds]
    head = [
        f"model, {'samples' if kind == DLRM else 'tokens of a rank'}, step",
        *others,
        "**fused**",
        "torch / fused",
        "fastest / fused",
        "saved",
        *sides,
        "saved / shorter",
    ]
    lines: list[tuple[list[str], list[Row]]] = []
    for s in steps:
        saved_s = s.unfused_s - s.fused_s
        lines.append(([
            s.label, *(ms(s.seconds[way]) for way in others), f"**{ms(s.fused_s)}**",
            f"{s.over('torch'):.2f}", f"{s.over(''):.2f}", ms(saved_s), ms(s.compute_s),
            ms(s.communication_s), f"{saved_s / s.bound_s:.0%}",
        ], s.rows))  # fmt: skip
    texts: list[str] = []
    for what in dict.fromkeys(s.what for s in steps):
        some = [s for s in steps if s.what == what]
        worst = min(s.over("") for s in some)
        texts.append(
            f"{what}: torch / fused {_than(some, 'torch')}, the fastest that is not fused / fused "
            f"{_than(some)} (least {worst:.2f})"
        )
    note = NOTE + STEP_NOTE * any(s.what == STEP for s in steps)
    return measured(head, lines, f"{note} Geometric means: {'; '.join(texts)}.")


def section(found: Mapping[int, list[Row]]) -> str:
    """docs/results/training.md."""
    parts = [shown("steps", "Speedup of whole training steps, by model, tokens and direction")]
    for ranks, rows in found.items():
        parts.append(f"**{ranks} GPUs**")
        steps = steps_of(rows)
        for kind in UNFUSED:
            if some := [s for s in steps if s.kind == kind]:
                parts.append(step_table(some, kind))
    return "\n\n".join(parts)


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """How much faster than the fastest that is not fused, of the most GPUs."""
    rows = next(iter(found.values()))
    steps = [s for s in steps_of(rows) if s.what != "tables"]
    mean = geometric_mean(s.over("") for s in steps)
    bars(
        {
            s.label.replace(", f", " samples, f" if s.kind == DLRM else " tokens, f"): {
                "the fastest that is not fused": s.unfused_s,
                "serial: torch's own operators": s.seconds["torch"],
                "counterpoint": s.fused_s,
            }
            for s in steps
        },
        images / "steps.svg",
        title=f"Whole steps: {mean:.2f}x over the fastest that is not fused, in the mean",
        source=f"{place(rows)}, eager",
    )


STEPS = Benchmark(
    "steps", cases, arms, unit="ms", calls=0, rounds=11, every_eager=True, soak_s=0.2,
    backlog_cycles=30_000_000, pictures=pictures,
    short=lambda case: case.name in ("DLRM, 16384 samples", "Qwen3-235B, 1024 tokens a rank"),
    sections=(Section("docs/results/training.md", "steps", section),),
)  # fmt: skip
