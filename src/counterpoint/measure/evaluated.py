"""Rows of measured scenarios, and what each way to choose a plan comes to at them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from counterpoint.choose.by_model import by_model
from counterpoint.choose.by_rule import by_rule
from counterpoint.choose.score import Measured, Score, at_random, constants, score
from counterpoint.costs import NO_TILES, Tiles
from counterpoint.machine import Machine
from counterpoint.measure.compare import AUTO, FIXED, TORCH_SYMM_MEM
from counterpoint.measure.scatter import Point
from counterpoint.measure.scenarios import FITTED, LOOKED_AT
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.problem import Problem

CONSTANTS = 3  # that are listed, the best first
MANY_TOKENS = 2048  # from which on plans that overlap are worth it
SHARD_P2P = ("shard_p2p ring", "shard_p2p ring push")
Row = Mapping[str, Any]


class Found(NamedTuple):
    """One scenario of a file of rows."""

    measured: Measured
    picked: str  # by "auto", where it was measured
    auto_s: float
    ideal_s: float
    torch_s: float  # 0: not measured
    gpu: str
    tiles: Tiles  # of the matmul library, where rows say them


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
    """What rows of `compare` say of each shape, in graphs."""
    shapes: dict[Problem, dict[str, Row]] = {}
    for row in rows:
        if row.get("mode") == "graph" and "op" in row:
            problem = Problem(row["op"], row["m"], row["n"], row["k"], row["ranks"], row["dtype"],
                              experts=row.get("experts", 0))  # fmt: skip
            arms = shapes.setdefault(problem, {})
            if row["arm"] in arms:  # measured once more: times of two rotations do not compare
                arms.clear()
            arms[row["arm"]] = row
    found: list[Found] = []
    for problem, arms in shapes.items():
        seconds = {arm: row["median_s"] for arm, row in arms.items()}
        times = {a: t for a, t in seconds.items() if a == "serial" or a not in FIXED}
        layer = (arms["serial"].get("layer") or problem.op).partition(",")[0]
        name = f"{layer}, {arms['serial'].get('tokens', problem.m)} tokens"
        moved_s = min(seconds[a] for a in ("communication", "copy_engine") if a in seconds)
        ideal_s = max(seconds["compute"], moved_s)
        picked = arms[AUTO if AUTO in arms else "serial"].get("pick", "")
        if AUTO in arms:  # the same plan, timed twice, or no candidate of that measurement
            times[picked] = fmean((times.get(picked, seconds[AUTO]), seconds[AUTO]))
        known = arms.get(AUTO, {}).get("tiles", ())
        tiles = {(m, n, k): (height, width) for m, n, k, height, width in known}
        torch_s, gpu = seconds.get(TORCH_SYMM_MEM, 0.0), arms["serial"]["gpu"]
        measured = Measured(name, problem, times)
        auto_s = times.get(picked, 0.0)
        found.append(Found(measured, picked, auto_s, ideal_s, torch_s, gpu, tiles))
    return found


def tiles_of(rows: Iterable[Row]) -> Tiles:
    """The matmul library's tiles that rows of table "tiles" say."""
    return {(row["rows"], row["n"], row["k"]): (row["tile"][0], row["tile"][1])
            for row in rows if row.get("table") == "tiles"}  # fmt: skip


def parts_of(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Those that the chooser was made with, those of models that it was not, and experts."""
    experts = [each for each in found if each.measured.problem.experts]
    others = [each for each in found if not each.measured.problem.experts]
    if not others:
        return {"experts": experts}
    fitted = [each for each in others if FITTED in each.measured.name]
    seen = (FITTED, LOOKED_AT, "Llama-3", "70B", "405B")  # and by older names
    unseen = [each for each in others if not any(m in each.measured.name for m in seen)]
    parts = {"all scenarios": list(found), "all but experts": others if experts else [],
             f"{FITTED}, fitted to": fitted, "experts": experts,
             "models not fitted to": unseen}  # fmt: skip
    return {
        name: part for name, part in parts.items() if part and (part == unseen or len(part) > 1)
    }


def ways_of(found: Sequence[Found], machine: Machine | None) -> list[Way]:
    """Auto as it was, the model and the rule as they are, what needs no chooser, and bounds."""
    of = {each.measured.problem: each for each in found}
    measured = [each.measured for each in found]
    picks: dict[str, Callable[[Found], str]] = {}
    if any(each.picked for each in found):
        picks["auto, as it was measured"] = lambda f: f.picked
    if machine is not None:
        if any(each.tiles for each in found):
            picks["the model now"] = lambda f: _by_model(f, machine, f.tiles)
        picks["the model now, tiles not known"] = lambda f: _by_model(f, machine, NO_TILES)
        picks["the static rule"] = lambda f: _by_rule(f, machine)
    ways: list[Way] = []
    for name, pick in picks.items():
        specs = {each.measured.problem: pick(each) for each in found}
        times = {p: t for p, spec in specs.items() if (t := of[p].measured.times.get(spec))}
        ways.append(Way(name, times, score(name, lambda m, s=specs: s[m.problem], measured)))
    for each in constants(measured)[:CONSTANTS]:
        spec = each.way.removeprefix("always ")
        always = {m.problem: m.times.get(spec, m.times["serial"]) for m in measured}
        ways.append(Way(each.way, always, each))
    ways.append(Way("at random", {}, at_random(measured)))
    ways.append(Way("best possible", {m.problem: m.best_s for m in measured}, None))
    ways.append(Way("ideal", {p: each.ideal_s for p, each in of.items()}, None))
    return ways


def scores_of(found: Sequence[Found], machine: Machine | None) -> list[Score]:
    """The scores of `ways_of`."""
    return [way.score for way in ways_of(found, machine) if way.score]


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
    return [
        Point(f"{spec}, {each.measured.name}", " ".join(spec.split()[:2])
              if spec.startswith("serial") else spec.split()[0],
              predicted_s(build(each.measured.problem, spec, machine), machine, tiles=each.tiles),
              seconds)
        for each in found
        for spec, seconds in each.measured.times.items()
    ]  # fmt: skip


def _by_model(each: Found, machine: Machine, tiles: Tiles) -> str:
    return by_model(each.measured.problem, machine, tiles=tiles).spec


def _by_rule(each: Found, machine: Machine) -> str:
    """What the rule says, as it was measured: a rule may name sizes that a spec leaves out."""
    p = each.measured.problem
    spec = by_rule(p, machine).spec
    if spec in each.measured.times:
        return spec
    same = (s for s in each.measured.times if build(p, s, machine).spec == spec)
    return next(same, spec)
