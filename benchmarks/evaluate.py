"""How often the choice of plans is right, and how far off, at layers of real models.

    counterpoint evaluate                      # measures all candidates, and scores
    counterpoint evaluate --only held-out      # of the scenarios whose score is published
    counterpoint evaluate --rows FILE.jsonl    # scores what was measured

Without experts the arms are those of overlap.py, with experts those of experts.py at equal counts.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks import experts, options, overlap
from benchmarks.declare import Arms, Bench, Benchmark, Case, Section
from benchmarks.evaluated import (
    AS_MEASURED,
    UNSEEN,
    Found,
    Way,
    parts_of,
    points_of,
    read,
    speedups_of,
    ways_of,
)
from benchmarks.pictures import Point, dots, errors, words
from benchmarks.rows import RESULTS, Row, gpus
from benchmarks.scenarios import HELD_OUT, expert_scenarios, held_out, scenarios
from benchmarks.score import RIGHT
from benchmarks.tables import measured, torch_note
from counterpoint.choose.by_rule import RULE
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.machine_of import shipped
from counterpoint.problem import Problem

MANY_TOKENS = 2048  # from which on plans that overlap are worth it
MISSES = 8  # that are listed, the worst first
OFF = 0.2  # a prediction that is off by more is counted
HEAD = ("chosen by", "scenarios", "right", "regret", "worst", "least", "serial /", "shard_p2p /",
        "torch /", "worst at")  # fmt: skip
SPEEDUPS = HEAD[:1] + HEAD[6:9]
# whose pick is drawn: the first of these that there is
DRAWN = ("the model now", "the model now, tiles not known", AS_MEASURED)


def cases(ranks: int) -> list[Case]:
    """Every scenario, the held-out ones last."""
    found: list[Case] = []
    for each in (*scenarios(ranks), *expert_scenarios(ranks), *held_out(ranks)):
        p, layer = each.problem, f"{each.model} {each.layer}"
        case = overlap.case_of(p.op, p.m, p.n, p.k, layer)
        if each.experts is not None:
            case = experts.case_of(p.op, each.experts, each.tokens, "uniform")
        facts = {"m": p.m, "layer": layer, "tokens": each.tokens, "dtype": p.dtype}
        found.append(Case(each.name, {**case.facts, **facts}))
    return found


def arms(case: Case, bench: Bench) -> Arms:
    """Every candidate, and what it is compared with."""
    if "experts" in case.facts:
        return experts.arms(case, bench)
    made = overlap.arms(case, bench)
    calls = {name: call for name, call in made.calls.items() if name != "plan serial"}
    made.calls = calls
    return made


# ---- what is said of it


def cells_of(
    part: Sequence[Found], machine: Machine | None, least_m: int = 0
) -> list[tuple[str, ...]]:
    """A row for each way to choose; with `least_m` its speedups at so many tokens alone."""
    rows: list[tuple[str, ...]] = []
    for way in ways_of(part, machine):
        means = speedups_of(way, part, least_m)
        ratios = tuple(
            f"{means[k]:.2f}" if k in means else "-" for k in ("serial", "shard_p2p", "torch")
        )
        s = way.score
        if least_m:
            rows += [(way.name, *ratios)] if means else []
        elif s is None:
            rows.append((way.name, f"{len(part)}", "-", "-", "-", "-", *ratios, ""))
        else:
            of = f"{s.scenarios}" if s.scenarios == s.asked else f"{s.scenarios} of {s.asked}"
            serial = (f"{s.speedup:.2f}", *ratios[1:])  # of luck too, whose time is none
            regrets = f"{s.mean_regret:.1%}", f"{s.worst_regret:.1%}"
            least = f"{s.least_speedup:.2f}"
            rows.append((s.way, of, f"{s.right:.0%}", *regrets, least, *serial, s.worst))
    return rows


def errors_of(part: Sequence[Found], machine: Machine) -> str:
    """How far predictions of all candidates are off."""
    points = points_of(part, machine)
    worst = max(points, key=lambda point: abs(point.error))
    off = sum(abs(point.error) > OFF for point in points)
    return (
        f"Predictions of {len(points)} times by the model now: off by "
        f"{median(abs(p.error) for p in points):.1%} in the median, {off} by more than {OFF:.0%}, "
        f"at worst {worst.error:+.0%} ({worst.label})."
    )


def misses_of(found: Sequence[Found]) -> str:
    """The picks of auto that were not right, the worst first."""
    lines: list[tuple[float, str]] = []
    for each in found:
        m = each.measured
        if each.picked in m.times and m.times[each.picked] > RIGHT * m.best_s:
            best = min(m.times, key=m.times.__getitem__)
            loss = m.times[each.picked] / m.best_s - 1
            lines.append((loss, f"{m.name}: {each.picked}, {loss:.1%} behind {best}"))
    text = "\n".join(line for _, line in sorted(lines, reverse=True)[:MISSES])
    return f"what auto missed, as it was measured:\n{text}" if text else "auto was right everywhere"


def report(found: Sequence[Found], machine: Machine | None) -> str:
    """Scores of all scenarios and of parts of them, how far predictions are off, and misses."""
    lines = [
        f"{found[0].measured.problem.ranks} GPUs: right is within {RIGHT - 1:.0%} of the fastest "
        "candidate"
    ]
    for name, part in parts_of(found).items():
        lines += ["", f"{name}: {len(part)}", *aligned([HEAD, *cells_of(part, machine)])]
        many = cells_of(part, machine, MANY_TOKENS)
        if many:
            lines += ["", f"{name}, {MANY_TOKENS} tokens or more", *aligned([SPEEDUPS, *many])]
        if machine is not None:
            lines += ["", errors_of(part, machine)]
    return "\n".join([*lines, "", misses_of(found), ""])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their widest cell: longer than a narrow terminal, never cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = [name in ("chosen by", "worst at") for name in rows[0]]
    return [
        "  ".join(cell.ljust(width) if is_left else cell.rjust(width)
                  for cell, width, is_left in zip(row, widths, left, strict=True)).rstrip()
        for row in rows
    ]  # fmt: skip


def committed() -> dict[int, list[Found]]:
    """The scenarios of committed rows."""
    return read(sorted((*RESULTS.glob("evaluate-*.jsonl"), *RESULTS.glob("tiles-*.jsonl"))))


def score_table(part: Sequence[Found], machine: Machine, least_m: int = 0) -> str:
    """Every way to choose; each line is of all rows."""
    head = SPEEDUPS if least_m else HEAD
    lines = [(cells, ()) for cells in cells_of(part, machine, least_m)]
    cases = [each.case for each in part if each.torch_s]
    note = torch_note(cases, overlap.PEER) if cases else ""
    return measured(head, lines, note, also=[row for each in part for row in each.case.rows])


def scores(_: Mapping[int, list[Row]]) -> str:
    """docs/results/choosing.md: what is held out first, then what was looked at before."""
    published: list[str] = []
    before: list[str] = []
    for ranks, found in committed().items():
        where, machine = gpus(ranks, found[0].gpu), shipped(found[0].gpu, ranks)
        assert machine is not None, "the library has measured costs of H200s"
        parts = parts_of(found)
        if HELD_OUT not in parts:
            count = len(held_out(ranks))
            published.append(f"**{where}, {HELD_OUT}: {count} scenarios: not measured.**")
        for name, part in parts.items():
            text = published if name == HELD_OUT else before
            if not name.startswith("all "):
                text += [f"**{where}, {name}: {len(part)} scenarios**",
                         score_table(part, machine)]  # fmt: skip
            if name in (HELD_OUT, UNSEEN):
                text += [f"**{where}, {name}, {MANY_TOKENS} tokens or more**",
                         score_table(part, machine, MANY_TOKENS),
                         errors_of(part, machine)]  # fmt: skip
    return "\n\n".join([*published, *before])


def short_scores(_: Mapping[int, list[Row]]) -> str:
    """Lines for each number of GPUs: what auto took when it was measured, and what the model takes
    now, at what is held out, or else at what was looked at before."""
    lines: list[str] = []
    for ranks, found in committed().items():
        parts = parts_of(found)
        held = HELD_OUT in parts
        part = parts[HELD_OUT if held else UNSEEN]
        ways = {way.name: way for way in ways_of(part, shipped(found[0].gpu, ranks))}
        now = next(name for name in DRAWN if name in ways)
        count = len(held_out(ranks))
        if held:
            what = f"{len(part)} held-out scenarios" + (f" of {count}" if len(part) < count else "")
        else:
            what = (
                f"{len(part)} scenarios of models looked at before (the {count} held-out ones are "
                "not measured)"
            )
        lines.append(f"- {gpus(ranks, found[0].gpu)}, {what}:")
        lines += [
            f"    - {_in_words(ways[name], part)}" for name in dict.fromkeys((AS_MEASURED, now))
        ]
    return "\n".join(lines)


def _in_words(way: Way, part: Sequence[Found]) -> str:
    """A score, and speedups of many tokens."""
    means, s = speedups_of(way, part, MANY_TOKENS), way.score
    assert s is not None, "a way to choose has a score"
    of = "" if s.scenarios == s.asked else f", at the {s.scenarios} where its pick was timed"
    return (
        f"*{way.name}*{of}: within 2 % of the fastest candidate in {s.right:.0%}, "
        f"{s.mean_regret:.1%} slower in the mean, {s.worst_regret:.1%} at worst; from "
        f"{MANY_TOKENS} tokens on {means['serial']:.2f}x serial, {means['torch']:.2f}x torch's "
        f"fused operators{'' if _eager(part) else ' in a graph'}."
    )


def _eager(part: Sequence[Found]) -> bool:
    return any(overlap.PEER in each.case.eager for each in part)


def draw(part: Sequence[Found], path: Path) -> Path:
    """Speedups of the model's pick, of the fastest candidate and of torch's fused operator: a panel
    for each number of tokens, a row for each layer."""
    ranks, gpu = part[0].measured.problem.ranks, part[0].gpu
    ways = {way.name: way.seconds for way in ways_of(part, shipped(gpu, ranks))}
    picks = next((ways[name] for name in DRAWN if name in ways), {})
    panels: dict[str, dict[str, dict[str, float]]] = {}
    marks: dict[str, dict[str, float]] = {}
    some = [each for each in part if not each.measured.problem.experts]
    layers = sorted({words(each.measured.name.rpartition(", ")[0]) for each in some})
    close = [picks[m.problem] <= 1.02 * m.best_s for m, *_ in some if m.problem in picks]
    for each in sorted(some, key=lambda each: each.measured.problem.m):
        m, serial_s = each.measured, each.measured.times["serial"]
        layer, _, tokens = m.name.rpartition(", ")
        times = {
            "torch's fused operator": each.torch_s,
            "counterpoint's pick by the model": picks.get(m.problem, 0.0),
            "counterpoint's fastest plan": m.best_s,
        }
        panel = panels.setdefault(tokens, {layer: {} for layer in layers})
        panel[words(layer)] = {kind: serial_s / t for kind, t in times.items() if t}
        marks.setdefault(tokens, {})[words(layer)] = serial_s / each.longer_s
    return dots(
        panels, path, marks=marks, mark="the longer part alone (an estimate, not a bound)",
        title=f"Picks of the model: {fmean(close):.0%} are the fastest plan or within 2% of it",
        source=f"{ranks}x {gpu}, CUDA graphs; serial is NCCL + cuBLAS",
    )  # fmt: skip


def draw_errors(parts: Mapping[int, Sequence[Found]], path: Path) -> Path:
    """How far predictions are off, for what is held out or models not fitted to, where there are
    any."""
    panels: dict[str, list[Point]] = {}
    said: list[str] = []
    for ranks, found in parts.items():
        machine = shipped(found[0].gpu, ranks)
        if machine is not None:
            name, part = list(parts_of(found).items())[-1]
            panels[f"{ranks} GPUs"] = points_of(part, machine)
            said.append(f"{ranks} GPUs: {name}, {len(part)} scenarios")
    return errors(
        panels, path, title="How far predicted times are from measured ones",
        source=f"{next(iter(parts.values()))[0].gpu}, CUDA graphs; {'; '.join(said)}",
    )  # fmt: skip


def pictures(_: Mapping[int, list[Row]], images: Path) -> None:
    """Speedups of the most GPUs, and errors for each number of them."""
    found = committed()
    draw(next(iter(found.values())), images / "evaluate-speedups.svg")
    draw_errors(found, images / "evaluate-errors.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured, and print scores; 2 where there are no GPUs."""
    args = options.evaluate(sys.argv[1:] if arguments is None else arguments, __doc__ or "")
    if not args.rows:
        from benchmarks.runner import main as measure

        given = ["evaluate", "--out", str(args.out), "--part", args.part, "--cases", args.only]
        if code := measure(given):
            return code
    found = read(args.rows or [args.out], args.only)
    if not found:
        got = ", ".join(map(str, args.rows or [args.out]))
        raise InputError(
            "evaluate",
            "--only",
            want=f"part of the name of a scenario in {got}",
            got=repr(args.only),
        )
    machines = {ranks: shipped(part[0].gpu, ranks) for ranks, part in found.items()}
    for ranks, part in found.items():
        print(report(part, machines[ranks]))
    print(f"the static rule:{RULE.rstrip()}")
    if args.picture is not None:
        print(f"drawn: {draw(next(iter(found.values())), args.picture)}")
    if args.errors is not None and any(machines.values()):
        print(f"drawn: {draw_errors(found, args.errors)}")
    return 0


EVALUATE = Benchmark(
    "evaluate",
    cases,
    arms,
    rounds=7,
    apart=HELD_OUT,
    eager=(overlap.PEER, "auto"),
    soak_s=0.2,
    pictures=pictures,
    short=lambda case: (
        case.name in ("Qwen3-32B gate+up, 2048 tokens", "Qwen3-235B experts down, 1024 tokens")
    ),
    moved=lambda case, ranks: (
        Problem(
            case["op"], case["m"], case["n"], case["k"], ranks, experts=case.facts.get("experts", 0)
        ).link_bytes
    ),
    sections=(
        Section("docs/results/choosing.md", "chooser", short_scores),
        Section("docs/results/choosing.md", "scores", scores),
    ),
)
