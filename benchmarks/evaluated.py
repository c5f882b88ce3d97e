"""Scenarios of measured rows, and what each way to choose a plan comes to at them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

from benchmarks import overlap
from benchmarks.pictures import Point
from benchmarks.rows import Row, Timed, one_form, rows_of, taken
from benchmarks.scenarios import FITTED, HELD_OUT, LOOKED_AT
from benchmarks.score import Measured, Score, at_random, constants, score
from counterpoint.choose.by_model import by_model
from counterpoint.choose.by_rule import by_rule
from counterpoint.costs import NO_TILES, Tiles
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

CONSTANTS = 3  # that are listed, the best first
SHARD_P2P = ("shard_p2p ring",)
AS_MEASURED = "auto, as it was measured"
UNSEEN, EXPERTS = "models not fitted to, looked at before", "experts, looked at before"


class Found(NamedTuple):
    """One scenario of rows."""

    measured: Measured
    picked: str  # by "auto", where it was measured
    auto_s: float
    longer_s: float  # of compute and communication, each alone
    torch_s: float  # in the mode in which it does better beside auto; 0: not measured
    gpu: str
    tiles: Tiles  # of the matmul library, where rows say them
    case: Timed


class Way(NamedTuple):
    """One way to choose, or a bound.

    Args:
        name: how was chosen.
        seconds: of its picks, where they were measured.
        score: None of what is no choice among candidates.
    """

    name: str
    seconds: Mapping[Problem, float]
    score: Score | None


def scenarios_of(rows: Sequence[Row]) -> list[Found]:
    """What rows say of each shape, in graphs; rows of before the runner too."""
    found: list[Found] = []
    some = [r for r in one_form(rows) if r.get("mode") in ("graph", "eager") and "op" in r]
    for case in taken(some, "op", "m", "n", "k", "ranks", "dtype", "experts"):
        if not case.graph:
            continue
        h, arms_ = case.head, dict(case.graph)
        problem = Problem(h["op"], h["m"], h["n"], h["k"], h["ranks"], h["dtype"],
                          experts=h.get("experts", 0))  # fmt: skip
        seconds = _named(arms_, problem)
        picked = arms_.get("auto", arms_.get("serial", h)).get("pick", "")
        # plans that pull are gone
        gone = {a for a in seconds if a != "serial" and (a in overlap.FIXED or " pull" in a)}
        times = {a: t for a, t in seconds.items() if a not in gone}
        auto_s, torch_s = seconds.get("auto", 0.0), seconds.get(overlap.PEER, 0.0)
        if auto_s and torch_s:
            torch_s = auto_s * case.fair(overlap.PEER, "auto")
        if auto_s:  # the same plan, timed twice, or no candidate of that measurement
            times[picked] = auto_s = fmean((times.get(picked, auto_s), auto_s))
        layer = (h.get("layer") or problem.op).partition(",")[0]
        name = f"{layer}, {h.get('tokens', problem.m)} tokens"
        moved_s = min(seconds[a] for a in ("communication", "copy_engine") if a in seconds)
        known = arms_.get("auto", {}).get("tiles", ())
        found.append(Found(
            Measured(name, problem, times), picked, times.get(picked, 0.0),
            max(seconds["compute"], moved_s), torch_s, h["gpu"],
            {(m, n, k): (height, width) for m, n, k, height, width in known}, case,
        ))  # fmt: skip
    return found


def _named(arms_: Mapping[str, Row], problem: Problem) -> dict[str, float]:
    """Seconds by the names that scores have; arms of experts.py have names of their own."""
    seconds = {arm: row["median_s"] for arm, row in arms_.items()}
    if "serial" in seconds:
        return seconds
    # of one expert rows lie as they have to
    place = "in place" if problem.experts > 1 else "pair"
    some = {a: t for a, t in seconds.items() if "," not in a}
    found = {a.removeprefix("plan "): t for a, t in some.items() if a.startswith("plan ")}
    for name, start in (("compute", "matmul"), ("serial", place), ("fused", "one kernel")):
        found[name] = min(t for a, t in some.items() if a.startswith(start))
    return found | {a: seconds[a] for a in ("communication", "auto") if a in seconds}


def tiles_of(rows: Iterable[Row]) -> Tiles:
    """The matmul library's tiles that rows of table "tiles" say."""
    return {(row["rows"], row["n"], row["k"]): (row["tile"][0], row["tile"][1])
            for row in rows if row.get("table") == "tiles"}  # fmt: skip


def read(paths: Sequence[Path], only: str = "") -> dict[int, list[Found]]:
    """Number of GPUs -> scenarios of files, of a shape in several files the last; most GPUs
    first."""
    rows = [row for path in paths for row in rows_of(path)]
    known = tiles_of(rows)
    shapes = {e.measured.problem: e for path in paths for e in scenarios_of(rows_of(path))}
    found: dict[int, list[Found]] = {}
    for each in shapes.values():
        if only.lower() in each.measured.name.lower():
            each = each._replace(tiles={**known, **each.tiles})
            found.setdefault(each.measured.problem.ranks, []).append(each)
    return {ranks: found[ranks] for ranks in sorted(found, reverse=True)}


def parts_of(found: Sequence[Found]) -> dict[str, list[Found]]:
    """By what was known of them when the chooser was made; last what is held out, which no other
    part has in it."""
    held = [each for each in found if each.measured.name.startswith(HELD_OUT)]
    before = [each for each in found if not each.measured.name.startswith(HELD_OUT)]
    parts = _looked_at(before) if before else {}
    return parts | ({HELD_OUT: held} if held else {})


def _looked_at(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Those that the chooser was made with, those of models that it was not, and experts."""
    with_experts = [each for each in found if each.measured.problem.experts]
    without = [each for each in found if not each.measured.problem.experts]
    if not without:
        return {EXPERTS: with_experts}
    fitted = [each for each in without if FITTED in each.measured.name]
    seen = (FITTED, LOOKED_AT, "Llama-3", "70B", "405B")  # and by older names
    unseen = [each for each in without if not any(m in each.measured.name for m in seen)]
    parts = {"all looked at before": list(found),
             "all but experts": without if with_experts else [],
             f"{FITTED}, fitted to": fitted, EXPERTS: with_experts, UNSEEN: unseen}  # fmt: skip
    return {n: part for n, part in parts.items() if part and (part == unseen or len(part) > 1)}


def ways_of(found: Sequence[Found], machine: Machine | None) -> list[Way]:
    """Auto as it was, the model and the rule as they are, what needs no chooser, and bounds."""
    of = {each.measured.problem: each for each in found}
    measured = [each.measured for each in found]
    picks: dict[str, Callable[[Found], str]] = {}
    if any(each.picked for each in found):
        picks[AS_MEASURED] = lambda f: f.picked
    if machine is not None:
        if any(each.tiles for each in found):
            picks["the model now"] = lambda f: (
                by_model(f.measured.problem, machine, tiles=f.tiles).spec
            )
        picks["the model now, tiles not known"] = lambda f: (
            by_model(f.measured.problem, machine, tiles=NO_TILES).spec
        )
        picks["the static rule"] = lambda f: _by_rule(f, machine)
    ways: list[Way] = []
    for name, pick in picks.items():
        specs = {each.measured.problem: pick(each) for each in found}
        times = {p: t for p, spec in specs.items() if (t := of[p].measured.times.get(spec))}
        if times:
            ways.append(Way(name, times, score(name, lambda m, s=specs: s[m.problem], measured)))
    for each in constants(measured)[:CONSTANTS]:
        spec = each.way.removeprefix("always ")
        always = {m.problem: m.times.get(spec, m.times["serial"]) for m in measured}
        ways.append(Way(each.way, always, each))
    ways.append(Way("at random", {}, at_random(measured)))
    ways.append(Way("best possible", {m.problem: m.best_s for m in measured}, None))
    return [*ways, Way("the longer part alone", {p: each.longer_s for p, each in of.items()}, None)]


def _by_rule(each: Found, machine: Machine) -> str:
    """What the rule says, as it was measured: a rule may name sizes that a spec leaves out."""
    spec = by_rule(each.measured.problem, machine).spec
    if spec in each.measured.times:
        return spec
    plans = {s: _built(each.measured.problem, s, machine) for s in each.measured.times}
    return next((s for s, plan in plans.items() if plan and plan.spec == spec), spec)


def _built(problem: Problem, spec: str, machine: Machine) -> Plan | None:
    """A plan; None where the library has it no longer."""
    try:
        return build(problem, spec, machine)
    except InputError:
        return None


def speedups_of(way: Way, found: Sequence[Found], least_m: int = 0) -> dict[str, float]:
    """Geometric means of serial, shard_p2p and torch's fused operators over a way's times.

    With `least_m` of scenarios with so many tokens or more, those with experts left out. Each
    where both were measured; what has none is left out.
    """
    ratios: dict[str, list[float]] = {"serial": [], "shard_p2p": [], "torch": []}
    for each in found:
        p, times = each.measured.problem, each.measured.times
        if p.m < least_m or p not in way.seconds or (least_m and p.experts):
            continue  # rows of experts are not tokens
        bases = {"serial": times["serial"], "torch": each.torch_s}
        bases["shard_p2p"] = next((times[spec] for spec in SHARD_P2P if spec in times), 0.0)
        for name, base_s in bases.items():
            if base_s:
                ratios[name].append(base_s / way.seconds[p])
    return {name: geometric_mean(each) for name, each in ratios.items() if each}


def points_of(found: Sequence[Found], machine: Machine) -> list[Point]:
    """Predicted and measured time of every candidate."""
    points: list[Point] = []
    for each in found:
        for spec, seconds in each.measured.times.items():
            if plan := _built(each.measured.problem, spec, machine):
                family = " ".join(spec.split()[: 1 + spec.startswith("serial")])
                points.append(
                    Point(
                        f"{spec}, {each.measured.name}",
                        family,
                        predicted_s(plan, machine, tiles=each.tiles),
                        seconds,
                    )
                )
    return points
