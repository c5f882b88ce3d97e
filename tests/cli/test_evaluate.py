"""`counterpoint evaluate`: scores of the committed rows, what is refused, and its scenarios."""

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from counterpoint.choose.known import shipped
from counterpoint.cli import evaluate, main
from counterpoint.cli.evaluate import candidates, chosen_from, scenarios_of, scores_of
from counterpoint.measure import record
from counterpoint.measure.scenarios import FIT, TOKENS, scenarios
from counterpoint.measure.shapes import SHAPES

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = RESULTS / "overlap-4x-h200.jsonl"


def run(*arguments: str, code: int = 0) -> Result:
    environment = {"COLUMNS": "170", "LOCAL_RANK": None}
    result = CliRunner().invoke(main.app, ["evaluate", *arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


def test_committed_rows_are_scored_and_drawn(tmp_path: Path):
    text = run("--rows", str(ROWS), "--picture", str(tmp_path / "e.svg")).stdout
    assert "4 ranks: right is within 2% of the fastest candidate" in text
    for way in ("auto, as it was measured", "the model now", "the static rule", "always ",
                "at random"):  # fmt: skip
        assert way in text
    assert "<svg" in (tmp_path / "e.svg").read_text()


def test_auto_is_better_than_any_constant_and_than_luck():
    """Of what was measured on 4 GPUs: the published shapes and those of few rows."""
    paths = (ROWS, RESULTS / "few-rows-4x-h200.jsonl")
    found = [each for path in paths for each in scenarios_of(record.read(path))]
    assert len(found) == 30 and all(each.ideal_s > 0 and each.torch_s > 0 for each in found)
    scores = {s.way: s for s in scores_of(found, shipped(found[0].gpu, 4))}
    auto = scores["auto, as it was measured"]
    constant = max(s.right for way, s in scores.items() if way.startswith("always"))
    assert auto.right >= constant + 0.15 > scores["at random"].right
    assert auto.worst_regret <= 0.08 and auto.least_speedup >= 0.98


def test_a_shape_measured_again_counts_once_as_it_was_last():
    rows = record.read(ROWS)
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
        assert sum(s.model == FIT for s in found) <= 16
    published = {shape[1:] for shapes in SHAPES.values() for shape in shapes.values()}
    assert published <= {(s.problem.n, s.problem.k) for s in scenarios(4)}


def test_parts_make_the_whole():
    parts = [chosen_from(f"{i}/3", "llama", 4) for i in (1, 2, 3)]
    assert sorted(s.name for part in parts for s in part) == sorted(
        s.name for s in scenarios(4) if "Llama" in s.name
    )


def test_every_plan_that_auto_weighs_is_a_candidate():
    problem = scenarios(4)[-1].problem
    specs = candidates(problem, shipped("NVIDIA H200", 4), {})
    assert len(specs) > 5 and "serial" not in specs and not any(" pull" in s for s in specs)
    assert set(specs) <= set(candidates(problem, None, {})) | {"serial direct", "serial fused"}


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    empty = tmp_path / "rows.jsonl"
    empty.write_text("")
    assert "--rows must be rows of" in run("--rows", str(empty), code=1).stderr
    monkeypatch.setattr(evaluate.torch.cuda, "device_count", lambda: 0)
    assert "`--rows FILE` scores what was measured" in run(code=2).stderr
    monkeypatch.setattr(evaluate.torch.cuda, "device_count", lambda: 4)
    assert "part must be such as \"1/4\", got '5/4'" in run("--part", "5/4", code=1).stderr
    assert "--only must be part of a scenario" in run("--only", "GPT-7", code=1).stderr


def test_it_starts_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []
    monkeypatch.setattr(evaluate.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        evaluate, "torchrun", lambda ranks, words: started.append([str(ranks), *words]) or 0
    )
    run("--part", "1/4", "--out", "e.jsonl")
    assert started == [["4", "evaluate", "--out", "e.jsonl", "--part", "1/4"]]
