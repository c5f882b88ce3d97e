"""`counterpoint evaluate` with experts: its scenarios, and made rows beside committed ones."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counterpoint.cli.evaluate import candidates, chosen_from
from counterpoint.measure.compare_experts import CALLS, Layer, rows_of
from counterpoint.measure.evaluated import parts_of, scenarios_of, scores_of
from counterpoint.measure.scenarios import EXPERT_TOKENS, expert_scenarios, scenarios
from typer.testing import CliRunner

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import Knowledge, shipped
from counterpoint.cli import evaluate, main
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.timing import Times

ROWS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "evaluate-2x-h200.jsonl"
KINDS = ["serial", "serial fused", "grouped ring", "grouped xor"]


def machine_of(ranks: int) -> Machine:
    machine = shipped("NVIDIA H200", ranks)
    assert machine is not None
    return machine


def made(ranks: int) -> list[dict[str, Any]]:
    """As if each scenario took what is predicted, but 3 % of it less or more in turn."""
    machine, rows = machine_of(ranks), list[dict[str, Any]]()
    for i, each in enumerate(expert_scenarios(ranks)):
        table = by_model(each.problem, machine).table
        took = {c.spec: c.seconds * (0.97, 1.0, 1.03)[(i + j) % 3] for j, c in enumerate(table)}
        serial_s = took.pop("serial")
        took |= {"serial in one kernel": serial_s, "serial for each expert": 2 * serial_s,
                 "compute in one kernel": serial_s / 2, "communication": serial_s / 3}  # fmt: skip
        times = {name: Times((t * CALLS,) * 3, 0.0) for name, t in took.items()}
        layer = Layer(f"{each.model} {each.layer}", each.tokens)
        rows += [row | {"gpu": "NVIDIA H200", "table": "evaluate"}
                 for row in rows_of(each.problem, layer, times, {}, machine, [0, 0])]  # fmt: skip
    return rows


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_scenarios_are_layers_both_ways_at_three_sizes(ranks: int):
    found = expert_scenarios(ranks)
    assert len(found) == len({s.problem for s in found}) == 18
    assert Counter(s.tokens for s in found) == dict.fromkeys(EXPERT_TOKENS, 6)
    assert Counter(s.problem.op for s in found) == {"all_to_all_matmul": 9, "matmul_all_to_all": 9}
    assert [s.name for s in found if s.top == 2 and s.tokens == 256] == [
        "Mixtral-8x7B experts gate+up, 256 tokens", "Mixtral-8x7B experts down, 256 tokens"
    ]  # fmt: skip
    deep = found[0].problem
    assert (deep.m, deep.n, deep.k, deep.experts) == (256 * 8, 4096, 7168, 32)


def test_only_and_part_choose_among_all():
    assert len(chosen_from("1/1", "", 4)) == len(scenarios(4)) + 18
    assert chosen_from("1/1", "experts", 4) == expert_scenarios(4)
    assert {s.model for s in chosen_from("1/1", "mixtral", 4)} == {"Mixtral-8x7B"}
    halves = [chosen_from(f"{i}/2", "experts", 4) for i in (1, 2)]
    assert sorted(s.name for half in halves for s in half) == sorted(
        s.name for s in expert_scenarios(4)
    )


def test_candidates_are_what_auto_weighs():
    for ranks in (2, 4):
        for each in expert_scenarios(ranks):
            assert set(candidates(each.problem, machine_of(ranks), {})) == set(KINDS) - {"serial"}


def test_experts_are_a_group_and_change_no_other_score(tmp_path: Path):
    machine = machine_of(2)
    before = scenarios_of(record.read(ROWS))
    found = [*before, *scenarios_of(made(2))]
    parts, alone = parts_of(found), parts_of(before)
    sizes = {name: len(part) for name, part in parts.items()}
    assert (sizes["all scenarios"], sizes["all but experts"], sizes["experts"]) == (90, 72, 18)
    assert parts["all but experts"] == alone["all scenarios"]
    for name in set(alone) - {"all scenarios"}:
        assert parts[name] == alone[name]
    assert list(parts)[-1] == "models not fitted to"
    scores = {s.way: s for s in scores_of(parts["experts"], machine)}
    for way in ("auto, as it was measured", "the model now, tiles not known", "the static rule"):
        assert scores[way].scenarios == 18, way
    # predictions are 3 % off at most, and so is what follows them
    assert scores["auto, as it was measured"].worst_regret <= 1.03 / 0.97 * 1.03 - 1
    path = tmp_path / "experts.jsonl"
    record.append(path, made(2))
    run = CliRunner().invoke(main.app, ["evaluate", "--rows", str(ROWS), "--rows", str(path)])
    assert run.exit_code == 0, run.output
    for line in ("all scenarios: 90", "all but experts: 72", "experts: 18"):
        assert f"\n{line}\n" in run.stdout
    assert "\nexperts, 2048 tokens or more" not in run.stdout
    run = CliRunner().invoke(main.app, ["evaluate", "--rows", str(path), "--only", "Mixtral"])
    assert "\nexperts: 6\n" in run.stdout and "all scenarios" not in run.stdout


class Always:
    """A function of any arguments that has one result; none is the tiles that nobody knows."""

    def __init__(self, result: object) -> None:
        self.result = {} if result is None else result

    def __call__(self, *_: object) -> object:
        return self.result


class Stopped(Exception):
    """Raised by a measurement that is made up, once it has been asked enough."""


def test_experts_are_measured_by_their_own_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[tuple[Any, Layer, list[str]]] = []

    @contextlib.contextmanager
    def nccl_group() -> Iterator[tuple[Any, Any]]:
        yield SimpleNamespace(rank=lambda: 0, size=lambda: 2), "cuda:0"

    def compared(problem: Any, layer: Layer, specs: list[str], *_: Any, **more: Any) -> list[Any]:
        asked.append((problem, layer, specs))
        assert set(more) == {"group", "device", "rounds", "soak_s"}
        if len(asked) == 18:
            raise Stopped
        return [{"arm": "serial"}]

    def first(specs: list[str], _: object) -> list[list[str]]:
        return [specs, []]

    monkeypatch.setattr(evaluate, "nccl_group", nccl_group)
    monkeypatch.setattr(evaluate, "gather_object", first)
    monkeypatch.setattr(evaluate, "compare_experts", compared)
    workspace, known = SimpleNamespace(knowledge=None), Knowledge(machine_of(2), {})
    for name, result in (("under_torchrun", True), ("workspace_of", workspace),
                         ("knowledge_of", known), ("known_tiles", None)):  # fmt: skip
        monkeypatch.setattr(evaluate, name, Always(result))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(Stopped):
        evaluate.evaluate(rows=[], out=out, picture=None, errors=None, part="1/1", only="experts")
    assert [problem for problem, *_ in asked] == [s.problem for s in expert_scenarios(2)]
    assert asked[0][1] == Layer("DeepSeek-V3 experts gate+up", 256)
    assert set(asked[0][2]) == set(KINDS) - {"serial"}
    assert record.read(out) == [{"arm": "serial", "table": "evaluate"}] * 17
