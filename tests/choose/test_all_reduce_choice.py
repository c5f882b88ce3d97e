"""matmul_all_reduce is chosen for, explained and predicted like every operator."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from plan_cases import AR

import counterpoint as cp
from benchmarks.rows import rows_of
from counterpoint.choose.by_rule import WORTHWHILE_S
from counterpoint.tensor_parallel.plan_fused_sum import FEW_ROWS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = ("serial", "direct", "fused")
Times = dict[str, float]


def measured(ranks: int, shards: int = 8) -> dict[cp.Problem, Times]:
    """Seconds of a call in a graph, by problem and arm: of layers that are cut for `shards`."""
    found: dict[cp.Problem, Times] = defaultdict(dict)
    for row in rows_of(RESULTS / f"decode-{ranks}x-h200.jsonl"):
        cut = row.get("shards", 8) == shards
        if cut and row["table"] == "decode" and row.get("mode") == "graph" and row["arm"] in ARMS:
            problem = cp.Problem(AR, row["m"], row["n"], row["k"], row["ranks"])
            found[problem][row["arm"]] = row["median_s"]
    return found


@pytest.mark.parametrize("by", ["model", "rule"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_chosen_was_near_the_fastest(ranks: int, by: str):
    rows = measured(ranks)
    few = [problem for problem in rows if problem.m <= FEW_ROWS]
    assert len(few) == 16 and {p.m for p in few} == {1, 8, 32, 64}
    taken: set[str] = set()
    for problem, times in rows.items():
        family = cp.choose(problem, f"h200-{ranks}", by=by).plan.family  # type: ignore[arg-type]
        assert times[family] <= 1.05 * min(times.values()), f"{problem}: {family}"
        taken.add(family)
    assert taken == {"direct", "fused"}


@pytest.mark.parametrize(("by", "missed"), [("model", set[Any]()), ("rule", {(64, 9216)})])
def test_of_layers_cut_for_2_the_rule_misses_one(by: Any, missed: set[Any]):
    """By 9 %; the chooser's constants were read off layers that are cut for 8."""
    lost: dict[tuple[int, int], float] = {}
    rows = measured(2, shards=2)
    for problem, times in rows.items():
        family = cp.choose(problem, "h200-2", by=by).plan.family
        lost[problem.m, problem.k] = times[family] / min(times.values()) - 1
    assert len(rows) == 15
    assert {case for case, share in lost.items() if share > 0.05} == missed
    assert sum(lost.values()) / len(lost) <= 0.015


@pytest.mark.parametrize("ranks", [2, 4])
def test_predictions_are_near_what_was_measured(ranks: int):
    """Serial's is not: how small sums are sent is the library's secret."""
    for problem, times in measured(ranks).items():
        predicted = {c.spec: c.seconds for c in cp.choose(problem, f"h200-{ranks}").table}
        for arm in {"direct", "fused"} & set(predicted):
            assert predicted[arm] == pytest.approx(times[arm], rel=0.16), f"{problem}: {arm}"
        assert predicted["serial"] == pytest.approx(times["serial"], rel=0.3), str(problem)


def test_the_choice_and_the_timeline_say_what_runs():
    problem = cp.Problem(AR, 32, 8192, 3584, 4, bias=True)
    choice = cp.choose(problem)
    assert choice.spec == "fused" and choice.plan.spec == "fused two_shot 64x64x8 warps=4"
    assert [c.spec for c in choice.table] == ["fused", "direct", "serial"]
    text = choice.explain()
    assert text.startswith(f"{problem}\non h200-4 (measured rates: ")
    assert f"chosen predicted: fused, {choice.seconds * 1e6:.0f} us, " in text
    assert "matmuls alone" in text and "simulated    chosen" in text
    for spec, kinds in (("serial", ["matmul", "collective", "move"]), ("fused", ["fused"]),
                        ("direct", ["matmul", "collective", "move"])):  # fmt: skip
        plan = cp.build(problem, spec)
        timeline = cp.estimate(plan, choice.machine)
        assert [s.kind for s in timeline.spans if s.rank == 3] == kinds
        seconds = next(c.seconds for c in choice.table if c.spec == spec)
        assert timeline.end_s == pytest.approx(seconds)
        cp.validate(plan)


def test_what_is_large_overlaps():
    """Sums of more than 16 MiB."""
    for ranks in (2, 3, 4):
        problem = cp.Problem(AR, 8192, 8192, 3584, ranks)
        for by, family in (("model", "running_sum"), ("rule", "shard_p2p")):
            choice = cp.choose(problem, f"h200-{ranks}", by=by)
            assert choice.plan.family == family, choice.explain()


def test_ranks_or_shares_that_our_kernels_do_not_take_are_the_library_s():
    for problem in (cp.Problem(AR, 64, 8192, 3584, 3), cp.Problem(AR, 65, 7, 3584, 4)):
        for by in ("model", "rule"):
            choice = cp.choose(problem, "h200-4", by=by)
            assert [c.spec for c in choice.table] == ["serial"], problem


def test_the_rule_takes_few_rows_in_one_kernel_and_more_in_two():
    # more columns than a tile for each SM: two rounds of tiles
    for n, few in ((8192, 64), (16384, 32)):
        for rows, family in ((few, "fused"), (few + 1, "direct"), (512, "direct")):
            choice = cp.choose(cp.Problem(AR, rows, n, 3584, 4), "h200-4", by="rule")
            assert choice.plan.family == family
            assert "the rule takes" in choice.table[1].verdict
    long = cp.choose(cp.Problem(AR, 1024, 8192, 3584, 4), "h200-4", by="rule")
    assert min(long.compute_s, long.comm_s) > WORTHWHILE_S and long.spec == "direct"
