"""`counterpoint evaluate`: scores of the committed rows, what is refused, and its scenarios."""

import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from statistics import median

import pytest

from benchmarks import evaluate
from benchmarks.evaluated import (
    AS_MEASURED,
    EXPERTS,
    UNSEEN,
    parts_of,
    points_of,
    scenarios_of,
    speedups_of,
    tiles_of,
    ways_of,
)
from benchmarks.experts import MODELS, case_of
from benchmarks.rows import one_form, rows_of
from benchmarks.runner import chosen
from benchmarks.scenarios import (
    EXPERT_TOKENS,
    FITTED,
    HELD_OUT,
    LOOKED_AT,
    TOKENS,
    expert_scenarios,
    held_out,
    scenarios,
)
from counterpoint.choose.by_rule import RULE
from counterpoint.errors import InputError
from counterpoint.machine_of import shipped
from counterpoint.measure.shapes import SHAPES

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = RESULTS / "overlap-4x-h200.jsonl"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    return evaluate.main()


def test_committed_rows_are_scored_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pictures = [tmp_path / "speedups.svg", tmp_path / "errors.svg"]
    assert not run(monkeypatch, "--rows", str(ROWS), "--picture", str(pictures[0]), "--errors",
                   str(pictures[1]))  # fmt: skip
    text = capsys.readouterr().out
    assert "4 GPUs: right is within 2% of the fastest candidate" in text
    for way in ("auto, as it was measured", "the model now", "the static rule", "always ",
                "at random", "best possible", "the longer part alone", "shard_p2p /", "torch /",
                RULE):  # fmt: skip
        assert way in text
    for picture in pictures:
        assert "<svg" in picture.with_stem(f"{picture.stem}-dark").read_text()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bars_of_models_not_fitted_to(ranks: int):
    """40 scenarios of models that nothing was fitted to; see docs/results/choosing.md."""
    found = scenarios_of(rows_of(RESULTS / f"evaluate-{ranks}x-h200.jsonl"))
    tiles = tiles_of(rows_of(RESULTS / "tiles-h200.jsonl"))
    unseen = parts_of([e._replace(tiles=tiles) for e in found])[UNSEEN]
    assert len(unseen) == 40
    machine = shipped("NVIDIA H200", ranks)
    assert machine is not None
    ways = {way.name: way for way in ways_of(unseen, machine)}
    scores = {name: way.score for name, way in ways.items() if way.score}
    constant = max(s.right for name, s in scores.items() if name.startswith("always"))
    for name in ("the model now", "the model now, tiles not known"):
        model = scores[name]
        # on 2 GPUs some picks are plans that were not there when the rows were measured
        assert model.scenarios >= (40 if ranks == 4 else 33) and model.right >= 0.9
        assert model.right >= constant + 0.15
        assert model.mean_regret <= 0.01 and model.least_speedup >= 0.98
        # with tiles and on 4 GPUs 8.2 %, at Qwen3-32B qkv, 2048 tokens
        assert model.worst_regret <= (0.083 if name == "the model now" and ranks == 4 else 0.08)
        means = speedups_of(ways[name], unseen, 2048)
        assert means["serial"] >= 1.3 and means["torch"] >= 1.1
        timed = [e for e in unseen if e.measured.problem in ways[name].seconds]
        assert means["serial"] < speedups_of(ways["best possible"], timed, 2048)["serial"]
    assert scores["the static rule"].right >= 0.81
    errors = [abs(point.error) for point in points_of(unseen, machine)]
    assert median(errors) <= 0.07
    # 6 of 578 on 4 GPUs and 3 of 278 on 2 are off by more than 20 %
    assert sum(error > 0.2 for error in errors) <= 6 and max(errors) <= 0.27


def test_auto_is_better_than_any_constant_and_than_luck():
    """Of what was measured on 4 GPUs: the published shapes and those of few rows."""
    paths = (ROWS, RESULTS / "few-rows-4x-h200.jsonl")
    found = [each for path in paths for each in scenarios_of(rows_of(path))]
    assert len(found) == 30 and all(each.longer_s > 0 and each.torch_s > 0 for each in found)
    ways = ways_of(found, shipped(found[0].gpu, 4))
    scores = {way.name: way.score for way in ways if way.score}
    auto = scores["auto, as it was measured"]
    constant = max(s.right for way, s in scores.items() if way.startswith("always"))
    assert auto.right >= constant + 0.15
    assert scores["at random"].right < constant
    assert auto.worst_regret <= 0.08 and auto.least_speedup >= 0.98


def test_a_shape_measured_again_counts_once_as_it_was_last():
    rows = rows_of(ROWS)
    head = (rows[0]["op"], rows[0]["m"], rows[0]["n"], rows[0]["k"])
    again = [r | {"median_s": 2 * r["median_s"]} for r in rows
             if (r["op"], r["m"], r["n"], r["k"]) == head and r["arm"] != "serial"]  # fmt: skip
    again.append(next(r for r in rows if r["arm"] == "serial" and r["mode"] == "graph"))
    first, last = scenarios_of(rows)[0], scenarios_of([*rows, *again])[0]
    assert last.auto_s == 2 * first.auto_s
    assert last.measured.times["serial"] == first.measured.times["serial"]


def test_scenarios_are_real_layers_none_of_them_twice():
    for ranks in (2, 4, 8):
        found = scenarios(ranks)
        assert len(found) == len({s.problem for s in found}) >= 64
        assert Counter(s.problem.m for s in found) == dict.fromkeys(TOKENS, len(found) // 4)
        assert sum(FITTED in s.name for s in found) == 16
        assert sum(not any(m in s.name for m in (FITTED, LOOKED_AT)) for s in found) >= 32
    published = {shape[1:] for shapes in SHAPES.values() for shape in shapes.values()}
    assert published <= {(s.problem.n, s.problem.k) for s in scenarios(4)}


def test_scenarios_with_experts_are_equal_counts_of_the_same_layers():
    found = expert_scenarios(4)
    assert len(found) == 2 * len(MODELS) * len(EXPERT_TOKENS) and all(s.top > 1 for s in found)
    deep = found[0].problem
    assert (deep.m, deep.n, deep.k, deep.experts) == (256 * 8, 4096, 7168, 32)
    cases = {case.name: case for case in evaluate.cases(4)}
    assert len(cases) == len(scenarios(4)) + len(found) + len(held_out(4))
    for each in found:
        case, p = cases[each.name], each.problem
        assert (case["m"], case["n"], case["k"], case["experts"]) == (p.m, p.n, p.k, p.experts)
        assert case["routing"] == "uniform"


def test_held_out_scenarios_are_as_they_were_frozen():
    """A score of what was chosen afterwards would be none: do not mend the digest."""
    found = [held_out(ranks) for ranks in (2, 4)]
    facts = ("op", "m", "n", "k", "ranks", "dtype", "experts")
    text = repr([[(s.name, *(getattr(s.problem, fact) for fact in facts)) for s in some]
                 for some in found])  # fmt: skip
    assert sha256(text.encode()).hexdigest()[:16] == "570e5bf52aefd924"
    assert all(len(some) == len({s.name for s in some}) >= 40 for some in found)
    assert not held_out(8)


def test_held_out_scenarios_run_only_where_they_are_asked_for():
    names = {only: [case.name for case in chosen(evaluate.EVALUATE, 2, only=only)]
             for only in ("", "experts", HELD_OUT, f"{HELD_OUT} Qwen2.5-7B")}  # fmt: skip
    assert [len(found) for found in names.values()] == [72 + 18, 18, 56, 8]
    assert not any(name.startswith(HELD_OUT) for name in (*names[""], *names["experts"]))


def test_held_out_shapes_are_in_no_other_rows_and_no_other_list():
    held = {(s.problem.n, s.problem.k) for ranks in (2, 4) for s in held_out(ranks)}
    looked_at = {(s.problem.n, s.problem.k) for ranks in (2, 4)
                 for s in (*scenarios(ranks), *expert_scenarios(ranks))}  # fmt: skip
    for path in RESULTS.rglob("*.jsonl"):
        looked_at |= {(row["n"], row["k"]) for row in one_form(rows_of(path))
                      if {"n", "k"} <= row.keys()
                      and row["table"] != "ficco"  # measured after the score
                      and not str(row.get("layer")).startswith(HELD_OUT)}  # fmt: skip
    assert len(looked_at) > 20 and not held & looked_at


def test_scores_of_what_is_held_out_are_published_where_there_are_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    rows = rows_of(RESULTS / "evaluate-2x-h200.jsonl")
    before = scenarios_of(rows)
    # other layers, so that their problems are others too
    some = [row | {"k": row["k"] + 64, "layer": f"{HELD_OUT} {row['layer']}"}
            for row in rows if "GPT-OSS" in row["layer"]]  # fmt: skip
    held = scenarios_of(some)
    assert parts_of([*before, *held]) == parts_of(before) | {HELD_OUT: held}
    assert parts_of(held) == {HELD_OUT: held}
    monkeypatch.setattr(evaluate, "committed", lambda: {2: before})
    assert evaluate.scores({}).startswith("**2 H200s, held-out: 56 scenarios: not measured.**")
    assert "before (the 56 held-out ones are not measured):" in evaluate.short_scores({})
    monkeypatch.setattr(evaluate, "committed", lambda: {2: [*before, *held]})
    text, line = evaluate.scores({}), evaluate.short_scores({})
    assert text.startswith("**2 H200s, held-out: 8 scenarios**") and "not measured" not in text
    assert f"**2 H200s, {UNSEEN}: 40 scenarios**" in text
    auto = next(way.score for way in ways_of(held, None) if way.name == AS_MEASURED)
    assert auto is not None
    head, measured, now = line.splitlines()
    assert head == "- 2 H200s, 8 held-out scenarios of 56:"
    assert measured.startswith(f"    - *{AS_MEASURED}*: within 2 %")
    assert f"in {auto.right:.0%}, {auto.mean_regret:.1%} slower" in measured
    assert now.startswith("    - *the model now")


def rows_of_experts(ranks: int) -> list[dict]:
    """As the runner writes them: one kernel is fastest, then the plan."""
    rows: list[dict] = []
    model = MODELS[0]
    for op in ("all_to_all_matmul", "matmul_all_to_all"):
        case = case_of(op, model, 1024, "uniform")
        facts = {**case.facts, "m": 8192, "layer": f"{model.name} {op}", "dtype": "bfloat16",
                 "ranks": ranks, "gpu": "NVIDIA H200", "mode": "graph", "table": "evaluate",
                 "pick": "grouped ring"}  # fmt: skip
        times = {
            "matmul looped": 700,
            "matmul grouped": 690,
            "communication": 200,
            "pair looped": 900,
            "in place looped": 1000,
            "in place grouped": 990,
            "in place grouped, sum": 500,
            "one kernel": 800,
            "plan grouped ring": 820,
        }
        rows += [facts | {"arm": arm, "median_s": t * 1e-6} for arm, t in times.items()]
    return rows


def test_experts_are_a_group_and_change_no_other_score():
    before = scenarios_of(rows_of(RESULTS / "evaluate-2x-h200.jsonl"))
    more = scenarios_of(rows_of_experts(2))
    first = more[0]
    assert first.measured.times == pytest.approx(
        {"serial": 990e-6, "fused": 800e-6, "grouped ring": 820e-6}
    )
    assert first.longer_s == pytest.approx(690e-6) and first.picked == "grouped ring"
    parts, alone = parts_of([*before, *more]), parts_of(before)
    assert len(parts[EXPERTS]) == 2 and parts["all but experts"] == alone["all looked at before"]
    for name in set(alone) - {"all looked at before"}:
        assert parts[name] == alone[name]
    scores = {w.name: w.score for w in ways_of(parts[EXPERTS], shipped("NVIDIA H200", 2))}
    auto = scores[AS_MEASURED]
    assert auto is not None and auto.worst_regret == pytest.approx(0.025)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="--only must be part of the name of a scenario in "):
        run(monkeypatch, "--rows", str(ROWS), "--only", "GPT-9")
    with pytest.raises(InputError, match="--part must be left out with --rows"):
        run(monkeypatch, "--rows", str(ROWS), "--part", "1/4")
    with pytest.raises(InputError, match="GPUs of this machine must be 2 or more, got none"):
        run(monkeypatch)
