"""What model/embedding.py predicts of embedding bags against rows of benchmarks/embedding.py.

    python benchmarks/embedding_prediction.py [--rows FILE.jsonl ...] [--fit]

A line for each case; errors of each time; how often the way that is predicted to be the faster one
is, and what that costs. `--fit` finds the constants anew, by what they are off in the squares of
logarithms, and says them; nothing is written. Of BEFORE, whose kernel is not the present one, only
the lookup and the three passes count.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

from counterpoint.choose.known import shipped
from counterpoint.embedding_problem import EmbeddingProblem
from counterpoint.measure import record
from counterpoint.model.embedding import FITTED, Fitted, Predicted, predict

RESULTS = Path(__file__).parent / "results"
BEFORE = RESULTS / "embedding_4x_before.jsonl"
ROWS = (*sorted(RESULTS.glob("embedding-*x-h200.jsonl")), BEFORE)
FUSED = ("fused", "fused copy")
RIGHT = 1.02  # of the faster way's time
STEPS = (0.3, 0.1, 0.03, 0.01)  # by which a constant is changed


@dataclass(frozen=True)
class Case:
    """A case's problem, with outputs of its own and with a copy, and its measured seconds."""

    name: str
    own: EmbeddingProblem
    copied: EmbeddingProblem
    seconds: dict[str, float]


def cases_of(rows: Sequence[dict[str, Any]]) -> list[Case]:
    """One for each case of the table."""
    found: dict[str, Case] = {}
    for row in rows:
        if row["table"] != "embedding":
            continue
        if row["case"] not in found:
            dims = tuple((row["d"],) * tables for tables in row["tables"])
            own = EmbeddingProblem(dims, row["batch"], indices_of(row), out=True)
            found[row["case"]] = Case(row["case"], own, replace(own, out=False), {})
        found[row["case"]].seconds[row["arm"]] = row["median_s"]
    return list(found.values())


def read(paths: Sequence[Path]) -> list[Case]:
    """The cases of all files."""
    found: list[Case] = []
    for path in paths:
        cases = cases_of(record.read(path))
        if path.name == BEFORE.name:
            for case in cases:
                for arm in FUSED:
                    del case.seconds[arm]
        found += cases
    return found


def indices_of(row: dict[str, Any]) -> tuple[int, ...]:
    """Of each rank; rows that do not say are of the grid, or of MLPerf's tables as shared there."""
    if "indices" in row:
        return tuple(row["indices"])
    if row["case"].startswith("MLPerf"):
        from embedding import MLPERF_POOLING, shards  # of torch: only where there are such rows

        owners = shards(row["ranks"])
        return tuple(row["batch"] * sum(MLPERF_POOLING[t] for t in own) for own in owners)
    return tuple(row["batch"] * row["pooling"] * tables for tables in row["tables"])


def times(case: Case, guess: Callable[[EmbeddingProblem], Predicted]) -> dict[str, Any]:
    """(predicted, measured) seconds of each arm that is predicted."""
    own, s = guess(case.own), case.seconds
    found = {"lookup": (own.lookup_s, s["lookup"]), "serial": (own.serial_s, s["lookup cat"])}
    if "fused" in s:
        found["fused"] = own.fused_s, s["fused"]
        found["fused copy"] = guess(case.copied).fused_s, s["fused copy"]
    return found


def squares(cases: Sequence[Case], guess: Callable[[EmbeddingProblem], Predicted]) -> float:
    """What constants are fitted to be small in."""
    return sum(log(p / m) ** 2 for case in cases for p, m in times(case, guess).values())


def refitted(cases: Sequence[Case], guess: Callable[..., Predicted]) -> Fitted:
    """The constants, each changed in turn as long as that helps."""
    best, least = FITTED, squares(cases, lambda p: guess(p, FITTED))
    for step in STEPS:
        helped = True
        while helped:
            helped = False
            for name, value in asdict(best).items():
                for factor in (1 + step, 1 / (1 + step)):
                    tried = replace(best, **{name: value * factor})
                    found = squares(cases, lambda p, tried=tried: guess(p, tried))
                    if found < least - 1e-6:
                        best, least, helped = tried, found, True
    return best


def choices(cases: Sequence[Case], guess: Callable[[EmbeddingProblem], Predicted]) -> list[float]:
    """Time of the way taken over the faster one's, with outputs of their own and with a copy."""
    found: list[float] = []
    for case in cases:
        for problem, arm in zip((case.own, case.copied), FUSED, strict=True):
            if arm not in case.seconds:
                continue
            ours, serial = case.seconds[arm], case.seconds["lookup cat"]
            taken = ours if guess(problem).fused else serial
            found.append(taken / min(ours, serial))
    return found


def said(cases: Sequence[Case], guess: Callable[[EmbeddingProblem], Predicted]) -> str:
    """The table, errors, and how often right."""
    all_times = [times(case, guess) for case in cases]
    arms = ("lookup", "serial", *FUSED)
    lines = ["microseconds, predicted / measured      " + "".join(f"{a:>19}" for a in arms)]
    for case, each in zip(cases, all_times, strict=True):
        cells = [f"{p * 1e6:9.0f} /{m * 1e6:8.0f}" for p, m in each.values()]
        lines.append(f"{case.own.ranks} GPUs, {case.name:34}" + "".join(cells))
    for arm in arms:
        pairs = [each[arm] for each in all_times if arm in each]
        off = [exp(abs(log(p / m))) - 1 for p, m in pairs]
        lines.append(f"{arm}: off by {median(off):.1%} in the median, {max(off):.1%} at worst")
    over = choices(cases, guess)
    right = sum(ratio <= RIGHT for ratio in over)
    lines.append(
        f"auto: within {RIGHT - 1:.0%} of the faster way in {right} of {len(over)}; "
        f"{mean(over) - 1:.2%} slower in the mean, {max(over) - 1:.1%} at worst"
    )
    return "\n".join(lines)


def main() -> None:
    """Say how far off predictions are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", default=ROWS)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    cases = read(args.rows)
    machines = {n: shipped("NVIDIA H200", n) for n in {case.own.ranks for case in cases}}

    def guess(problem: EmbeddingProblem, fitted: Fitted = FITTED) -> Predicted:
        machine = machines[problem.ranks]
        assert machine is not None, f"no costs of {problem.ranks}x H200"
        return predict(problem, machine, fitted)

    if args.fit:
        fitted = refitted(cases, guess)
        print("\n".join(f"    {name}: float = {v:.3g}" for name, v in asdict(fitted).items()))
        print(said(cases, lambda p: guess(p, fitted)))
        print("\nas they are:")
    print(said(cases, guess))


if __name__ == "__main__":
    main()
