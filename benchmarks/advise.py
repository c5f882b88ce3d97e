"""What `cp.advise` says of FSDP2 steps of sizes that no other table has, and what came true.

Before any arm is timed, each rank's trace of three steps as torch runs them is read: what they lose
to communication, and what `cp.overlap` would save by measured cases of other sizes. Then three arms
of the benchmark fsdp take turns: as is; computation alone, the bound; ours.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import counterpoint as cp
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.fsdp import AS_IS, COMPUTE, OURS, Lab, case_of, rotated, timed_ms
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table

STEPS = 3
SETTLES_MS = 1500
SCORING = 2  # each is of sizes that were not looked at before; the first one led to changes


def cases(_: int) -> list[Case]:
    """Sizes that neither gains.json nor an earlier scoring has."""
    return [
        case_of("eager", 2560), case_of("eager", 5120), case_of("eager", 7168),
        case_of("compiled", 3072), case_of("compiled", 5120), case_of("eager", 10240),
    ]  # fmt: skip


def advised(step: Callable[[], Tensor], bench: Bench) -> Row:
    """What advice on all ranks' traces says, in milliseconds; nothing without GPUs."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(bench.gathered(own)[0])
        path = folder / f"rank{bench.rank}.json"
        bench.meet()
        if bench.on_gpu:  # clocks fall, as in a training run; equally often on all ranks
            (step_ms,) = bench.most([timed_ms(step, bench)])
            for _ in range(int(SETTLES_MS / step_ms)):
                step()
        bench.meet()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * bench.on_gpu]
        with profile(activities=activities) as profiler:
            for number in range(STEPS):
                with record_function(f"ProfilerStep#{number}"):
                    step()
            if bench.on_gpu:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        bench.meet()
        try:
            report = cp.advise(*(folder / f"rank{r}.json" for r in range(bench.ranks)))
        except cp.InputError:  # no GPU ran
            return {}
        finally:
            bench.meet()
    first = report.losses[0]
    saves_s = [
        each.saves_s or 0.0
        for each in report.remedies
        if "counterpoint.overlap(model)" in each.line
    ]
    parts = {"exposed": first.exposed_s, "late": first.late_s, "packing": first.packing_s,
             "slowed": first.slowed_s, "lost": first.lost_s, "launching": first.idle_s["launching"],
             "step": first.time_s, "saves": sum(saves_s)}  # fmt: skip
    return {f"advised_{name}_ms": round(seconds * 1e3, 3) for name, seconds in parts.items()}


def rows(case: Case, bench: Bench) -> list[Row]:
    """Advice first, then times of the three arms."""
    torch._dynamo.reset()
    lab = Lab(case, bench)
    arms = lab.arms()
    facts = advised(arms[AS_IS][2], bench)
    bench.say(f"{case.name}: {facts}")
    slowest = rotated({name: arms[name] for name in (AS_IS, COMPUTE, OURS)}, case, bench)
    del lab, arms
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return [
        {
            "arm": name, "mode": "eager", "median_s": median(of) / 1e3,
            "rounds_ms": [round(t, 3) for t in of],
            "baseline_over_arm": median(a / b for a, b in zip(slowest[AS_IS], of, strict=True)),
            "scoring": SCORING, **facts,
        }
        for name, of in slowest.items()
    ]  # fmt: skip


def _lost(case: Timed) -> str:
    """What advice says is lost to communication, over what computation alone takes less."""
    said = case.head["advised_lost_ms"]
    true = (case.s(AS_IS) - case.s(COMPUTE)) * 1e3
    return f"{said:.1f} of {true:.1f} ({said / true - 1:+.0%})"


def _saved(case: Timed) -> str:
    said, true = case.head["advised_saves_ms"], (case.s(AS_IS) - case.s(OURS)) * 1e3
    return f"{said:.1f} of {true:.1f} ({said / true - 1:+.0%})"


COLUMNS = (
    Column("scoring", lambda c: str(c.head["scoring"])),
    Column("step, tokens a rank", lambda c: str(c.head["case"])),
    arm(AS_IS, ms), arm(COMPUTE, ms), arm(OURS, ms),
    Column("lost: advice, true", _lost), Column("saved by overlap: advice, true", _saved),
)  # fmt: skip


def advise_table(found: list[Row]) -> str:
    """Steps of FSDP2, in milliseconds."""
    return table(COLUMNS, taken(found, "scoring", "case"))


ADVISE = Benchmark(
    "advise", cases, rows=rows, unit="ms", short=lambda case: case.name == "eager 2560",
    own=lambda shape, _: [case_of("eager", *shape)],
    sections=(Section("docs/advise.md", "advise", by_machine(advise_table)),),
)  # fmt: skip
