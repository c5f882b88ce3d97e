"""Whole steps, forward and backward: recommenders and layers of experts, fused and unfused.

A DLRM of benchmarks/dlrm.py (all but its tables is the same code), without an optimizer; "step"
with Adagrad of dense gradients, "step, fused update" with row-wise Adagrad of tables in the
backward, the same update in all ways:

    fused    bags and their all-to-all in one kernel, into outputs of their own
    torch    a torch.nn.EmbeddingBag for each table, all_to_all_single, cat
    lookup   our batched lookup and its gradient (`plan="serial"`), all_to_all_single, cat

Experts, of tokens whose experts are known:

    default        cnn.ExpertParallelMLP with default arguments: by routes, with room for all rows
    fused          the same with max_rows: counts on the device, no host waits
    serial         the same with plan="serial": the libraries, and our passes between them
    torch          all_to_all_single, grouped matmuls, permutations by index_select, bmm
    torch, counts  the same, counts that the host has known before: no wait, no exchange of them
    torchtitan     the layer as torchtitan writes it: see titan.py

Steps are captured in CUDA graphs, but for those in which the host takes part: it waits for counts,
or says where new gradients of tables lie. All are called singly, too, the host some 15 ms ahead
when an arm begins, so that what it takes to enqueue a step shows only where an arm waits for the
GPU. Batches take turns. Beside each: its compute alone and its communication alone,
the shorter of which is what hiding can save at most."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import torch

from benchmarks import dlrm
from benchmarks.declare import Arms, Bench, Benchmark, Case, Section
from benchmarks.expert_tensors import MODELS, Model
from benchmarks.pictures import bars, place, shown
from benchmarks.rows import Row, Timed, gpus_of, taken
from benchmarks.steps_dlrm import IN_BACKWARD, STEP, dlrm_arms
from benchmarks.steps_experts import BOTH, experts_arms
from benchmarks.tables import measured, ms

DLRM, PAPER = "DLRM-DCNv2", "DLRM of the paper"
SIZES = {DLRM: dlrm.LARGE, PAPER: dlrm.PAPER}
TOKENS = (256, 1024, 4096, 2048)  # of a rank
# ways in the order of columns: those that are not ours, of which the first are torch's layer, ours
TORCHS = {"DLRM": ("torch",), "experts": ("torch", "torchtitan")}
UNFUSED = {"DLRM": ("torch", "lookup"),
           "experts": ("torch", "torchtitan", "torch, counts", "serial")}  # fmt: skip
OURS = {"DLRM": ("fused",), "experts": ("fused, host", "default", "fused")}


def dlrm_case(model: str, samples: int, named: str) -> Case:
    """Samples of all ranks."""
    name = {DLRM: "DLRM", PAPER: "paper's DLRM"}[model] + f", {samples} samples"
    name += ", Zipf" if named == "zipf" else ""
    return Case(name, {"model": model, "size": samples, "named": named})


def cases(_: int) -> list[Case]:
    """Samples of all ranks; tokens of a rank."""
    sizes = ((DLRM, 16384), (DLRM, 65536), (DLRM, 32768), (PAPER, dlrm.PAPER.batch))
    found = [dlrm_case(*size, named) for size in sizes for named in ("uniform", "zipf")]
    return found + [
        Case(f"{model.name}, {tokens} tokens a rank",
             {"model": model.name, "size": tokens, **model._asdict()} | {"model": model.name})
        for model in MODELS for tokens in TOKENS
    ]  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """What is timed, each by the number of a batch, by "what, by way"."""
    if case["model"] in SIZES:
        sizes = SIZES[case["model"]]._replace(batch=case["size"])
        return dlrm_arms(sizes, torch.bfloat16, bench, case["named"])
    model = Model(*(case[field] for field in ("name", *Model._fields[1:])))
    return experts_arms(model, case["size"], torch.bfloat16, bench)


NOTE = (
    "Times are milliseconds of the slowest rank. All ways of a size ran in one randomised rotation."
)


# ---- what is said of the rows


class Step:
    """One step of one model at one size, in graphs or eager: what its ways take, and its sides.

    Attributes:
        ours: the way that is held against others: the one with default arguments if there is one.
    """

    def __init__(self, case: Timed, what: str, mode: str) -> None:
        arms = {arm: row["median_s"] for arm, row in case.modes[mode].items()}
        self.head, self.rows, self.what, self.mode = case.head, case.rows, what, mode
        self.kind = "DLRM" if case.head["model"] in SIZES else "experts"
        split = {arm: arm.rpartition(", by ")[::2] for arm in arms}
        self.seconds = {way: arms[arm] for arm, (w, way) in split.items() if w == what}
        if self.kind == "DLRM":
            # the bound is that of the forward
            pooling = [t for arm, t in arms.items() if arm.startswith("pooling")]
            sides = [min(pooling), arms["exchange"]]
        else:
            sides = [arms[f"{side}, by {what}"] for side in ("matmuls", "exchanges")]
        self.named = ", Zipf" if case.head.get("named") == "zipf" else ""
        self.label = f"{case.head['model']}, {case.head['size']}{self.named}, {what}"
        self.bound_s = min(sides)  # what hiding saves at most
        self.ours = "default" if "default" in self.seconds else "fused"
        self.fastest = self._least(UNFUSED[self.kind])
        self.torch = self._least(TORCHS[self.kind])

    def _least(self, ways: Sequence[str]) -> str:
        """The fastest of these ways; "" where there is none, as where all hosts wait."""
        return min((w for w in ways if w in self.seconds), key=self.seconds.__getitem__, default="")

    def over(self, way: str, ours: str = "") -> float:
        """Time of a way over that of ours; NaN where one of them is missing."""
        return self.seconds.get(way, torch.nan) / self.seconds.get(ours or self.ours, torch.nan)


def steps_of(rows: Sequence[Row]) -> list[Step]:
    """Their steps, in the order of the rows; of each size in graphs first."""
    return [
        Step(case, what, mode)
        for case in taken(rows, "case")
        for mode in ("graph", "eager") if mode in case.modes
        for what in ("tables", "forward", BOTH, STEP, IN_BACKWARD)
        if f"{what}, by fused" in case.modes[mode]
    ]  # fmt: skip


def _ours(steps: Sequence[Step]) -> list[str]:
    """The ways of ours that any of these steps of one kind has, in the order of columns."""
    return [way for way in OURS[steps[0].kind] if any(way in s.seconds for s in steps)]


def _mean(ratios: Iterable[float]) -> str:
    """Geometric mean, and least, of those that are there."""
    some = [r for r in ratios if r == r]
    return f"{geometric_mean(some):.2f}x (least {min(some):.2f}x)" if some else "-"


def _said(steps: Sequence[Step]) -> str:
    """Means over steps of one kind."""
    texts: list[str] = []
    for ours in _ours(steps):
        theirs = (("torch", [s.over(s.torch, ours) for s in steps]),
                  ("the fastest unfused", [s.over(s.fastest, ours) for s in steps]))  # fmt: skip
        texts += [f"{ours} over {name} {_mean(each)}" for name, each in theirs
                  if any(ratio == ratio for ratio in each)]  # fmt: skip
    return f"{steps[0].what}: {', '.join(texts)}"


def step_table(steps: Sequence[Step]) -> str:
    """Milliseconds of steps of one kind, in one mode."""
    ours = _ours(steps)
    what = "samples" if steps[0].kind == "DLRM" else "tokens of a rank"
    head = [f"model, {what}, step", "torch", "fastest unfused", *(f"**{way}**" for way in ours),
            "speedup over torch", "over the fastest", "saved / shorter part"]  # fmt: skip
    lines: list[tuple[list[str], list[Row]]] = []
    for s in steps:
        saved_s = s.seconds[s.fastest] - s.seconds[s.ours]
        of = "" if s.ours == ours[0] else f" {s.ours}"
        lines.append(([
            s.label, ms(s.seconds[s.torch]) if s.torch else "-",
            f"{ms(s.seconds[s.fastest])} {s.fastest}",
            *(f"**{ms(s.seconds[way])}**" if way in s.seconds else "-" for way in ours),
            f"{s.over(s.torch):.2f}x{of}" if s.torch else "-", f"{s.over(s.fastest):.2f}x{of}",
            f"{saved_s / s.bound_s:.0%}",
        ], s.rows))  # fmt: skip
    texts = [_said([s for s in steps if s.what == what])
             for what in dict.fromkeys(s.what for s in steps)]  # fmt: skip
    return measured(head, lines, f"{NOTE} Geometric means: {'; '.join(texts)}.")


MODES = {"graph": "CUDA graphs", "eager": "single calls"}


def section(found: Mapping[int, list[Row]]) -> str:
    """docs/results/training.md."""
    parts = [shown("steps", "Times of whole training steps, eager, each way")]
    for rows in found.values():
        steps = steps_of(rows)
        for kind, (mode, title) in product(UNFUSED, MODES.items()):
            if some := [s for s in steps if (s.kind, s.mode) == (kind, mode)]:
                parts += [f"**{gpus_of(rows)}, {kind}, {title}**", step_table(some)]
    return "\n\n".join(parts)


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """How much faster than the fastest that is not fused, of the most GPUs: of whole steps alone,
    forward, backward and the update where there is one."""
    rows = next(iter(found.values()))
    unit = {"DLRM": "samples", "experts": "tokens"}
    eager = [s for s in steps_of(rows) if s.mode == "eager"]
    updated = any(s.what == IN_BACKWARD for s in eager)
    whole = {"DLRM": IN_BACKWARD if updated else BOTH, "experts": BOTH}
    steps = [s for s in eager if s.what == whole[s.kind]]
    over = [s.over(s.fastest) for s in steps]
    mean, least = geometric_mean(over), min(over)
    bars(
        {
            f"{s.head['model']}, {s.head['size']} {unit[s.kind]}{s.named}, {s.what}": {
                "the fastest that is not fused": s.seconds[s.fastest],
                "serial: torch's own operators": s.seconds["torch"],
                "counterpoint": s.seconds[s.ours],
            }
            for s in steps
        },
        images / "steps.svg",
        title=f"Whole steps: {mean:.2f}x over the fastest that is not fused, {least:.2f}x at least",
        source=f"{place(rows)}, eager",
    )


STEPS = Benchmark(
    "steps", cases, arms, unit="ms", calls=1, rounds=11, every_eager=True, soak_s=0.2,
    backlog_cycles=30_000_000, pictures=pictures,
    short=lambda case: case.name in ("DLRM, 16384 samples", "Qwen3-235B, 256 tokens a rank"),
    sections=(Section("docs/results/training.md", "steps", section),),
)  # fmt: skip
