"""Schedules on a mesh: what is replayed, of which scenarios, and what is said of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from benchmarks import ficco, ficco_tree, mesh_scenarios
from benchmarks import ficco_scores as scores
from benchmarks.declare import Bench
from benchmarks.mesh_scenarios import FITTED, GATHER, HELD_OUT, scenarios
from benchmarks.replay import COMPUTED, OneRank, lane_of, operands_of, program_of
from benchmarks.rows import Row, results
from benchmarks.score import Measured, constants, score
from benchmarks.tables import ROOT
from counterpoint.model.estimate import predicted_s, replayed_s
from counterpoint.model.work import works
from counterpoint.problem import Problem

SMALL = [
    Problem("all_gather_matmul", 256, 48, 64, 8), Problem("matmul_reduce_scatter", 256, 64, 48, 8)
]  # fmt: skip


def test_held_out_scenarios_are_as_they_were_frozen():
    found = [(s.name, s.kind, s.problem.op) for s in scenarios(HELD_OUT)]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    assert (len(found), digest[:16]) == (84, "3f44f8e5a9a60c85")


def test_no_model_is_in_both_halves():
    fitted, held_out = (scenarios(models) for models in (FITTED, HELD_OUT))
    assert not {s.problem for s in fitted} & {s.problem for s in held_out}
    assert len(fitted) + len(held_out) >= 96
    for half in (fitted, held_out):
        assert {s.kind for s in half} == {"dense", "expert", "weights", "context"}
        rows = [s.problem.m for s in half]
        assert min(rows) == 512 and max(rows) == 65536
        assert {s.problem.m < s.problem.k for s in half} == {True, False}
        assert all(s.problem.ranks == mesh_scenarios.RANKS for s in half)


@pytest.mark.parametrize("problem", SMALL, ids=lambda p: p.op)
def test_what_a_rank_computes_runs_by_itself(problem: Problem):
    plans = ficco.plans_of(problem)
    assert {plan.family for plan in plans} >= {"serial", "shard_p2p", *ficco.FINER}
    memory, operands = OneRank(torch.device("cpu")), operands_of(plans, torch.randn)
    operands = {name: tensor.bfloat16() for name, tensor in operands.items()}
    for plan in plans:
        memory.reserve(plan)
    for plan in plans:
        program = program_of(plan, ficco.mesh())
        lane = lane_of(program, memory, operands)
        assert list(lane) == [b.step.name for b in program.steps if b.step.kind in COMPUTED]
        operands["y"].fill_(torch.nan)
        for step in lane.values():
            step()
        assert operands["y"].isnan().all() == (program.steps[-1].step.kind == "collective")


@pytest.mark.parametrize("problem", SMALL, ids=lambda p: p.op)
def test_a_replay_of_predicted_steps_is_the_prediction(problem: Problem):
    mesh = ficco.mesh()
    for plan in ficco.plans_of(problem):
        program = program_of(plan, mesh)
        priced = dict(
            zip((b.step.name for b in program.steps), works(program, mesh, {}), strict=True)
        )
        assert replayed_s(program, mesh, priced) == predicted_s(plan, mesh)
        slow = {n: w._replace(seconds=2 * w.seconds) for n, w in priced.items()}
        assert replayed_s(program, mesh, slow) > predicted_s(plan, mesh)


def test_chunks_of_a_matmul_are_the_matmul():
    x, w = torch.randn(64, 32, dtype=torch.float64), torch.randn(32, 48, dtype=torch.float64)
    for along, dim in (("rows", 0), ("columns", 1)):
        outs: list[Tensor] = []

        def empty(*shape: int, outs: list[Tensor] = outs) -> Tensor:
            outs.append(torch.full(shape, torch.nan, dtype=torch.float64))
            return outs[-1]

        ficco.in_chunks(x, w, along, 4, cast(Bench, SimpleNamespace(empty=empty)))()
        torch.testing.assert_close(torch.cat(outs, dim), x @ w)


# ---- what is said of rows


ROWS = [row for rows in results("ficco").values() for row in rows]


def test_ranks_of_equal_values_are_shared():
    assert scores.ranked([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]


def test_a_replay_is_made_of_what_was_measured():
    row = next(row for row in ROWS if row["question"] == "fit")
    half = {spec: {name: [us / 2, 1.0] for name, (us, _) in steps.items()}
            for spec, steps in row["steps"].items()}  # fmt: skip
    before, after = (ficco.replayed(row | {"steps": steps}) for steps in (row["steps"], half))
    assert set(before) == set(row["steps"]) and min(before.values()) > 0
    assert all(after[spec] < before[spec] for spec in before)
    # links are modelled: no plan is faster than its copies
    problem = Problem(row["op"], row["m"], row["n"], row["k"], row["of_ranks"])
    copies_s = problem.link_bytes / ficco.mesh().costs.copy_bytes_per_s
    assert all(after[f"{name} ring"] > copies_s for name in ficco.FINER)


def test_copies_slow_a_replay_by_as_much_as_the_mesh_has_traffic():
    row = next(row for row in ROWS if row["question"] == "fit")
    slow = {spec: {name: [us, 1.5] for name, (us, _) in steps.items()}
            for spec, steps in row["steps"].items()}  # fmt: skip
    spec = "hetero_fused_1d ring"
    little, much = (ficco.replayed(row | {"steps": slow, "traffic_bytes_per_s": rate})[spec]
                    for rate in (1e12, 1e11))  # fmt: skip
    assert much > little > ficco.replayed(row)[spec]


def test_no_step_that_a_rank_computes_is_priced_by_the_model():
    """A replay takes the model's time of what a row does not have."""
    for row in [row for row in ROWS if row["question"] in ficco.PARTS][::9]:
        problem = Problem(row["op"], row["m"], row["n"], row["k"], row["of_ranks"])
        for spec, steps in row["steps"].items():
            kinds = {b.step.name: b.step.kind for b in ficco.program(problem, spec).steps}
            assert {n for n, kind in kinds.items() if kind in COMPUTED} == set(steps), spec
            assert "fused" not in kinds.values()


def test_other_links_change_what_is_replayed_and_no_pick():
    meshes = scores.meshes()
    row = next(row for row in ROWS if row["question"] == "fit" and row["m"] > 4096)
    assumed = ficco.replayed(row)
    found = {what: ficco.replayed(row, where, contention=contention)
             for what, (where, contention) in meshes.items()}  # fmt: skip
    assert found.pop("nothing") == assumed
    for what, times in found.items():
        slower = {spec.split()[0] for spec in times if times[spec] > assumed[spec]}
        faster = {spec.split()[0] for spec in times if times[spec] < assumed[spec]}
        kinds = {"serial"} if what.startswith("collectives") else {*ficco.FINER}
        changed = slower if any(w in what for w in ("slower", "twice", "60%")) else faster
        assert kinds <= changed and (not slower or not faster), what
    lines = scores.other_links([row], scores.FITTED_TO).splitlines()
    assert len(lines) == 2 + len(meshes) and lines[2].startswith("| nothing | ")


def test_what_is_held_out_was_scored_once():
    """Its first score is the published one: a rule or a model that changes has no second."""
    page = (ROOT / "docs/results/ficco.md").read_text()
    _, _, first = page.partition("**Held out, as first scored**")
    first, _, _ = first.partition("**Fitted to**")
    right = {"the paper's rule, reconstructed": 31, "our rule": 93, "the model": 94}
    for name, share in right.items():
        assert f"\n| {name} | {share}% |" in first


def _gathers(part: str, rows: Sequence[Row]) -> list[Measured]:
    return [m for m in scores.scenarios_of(rows, part)[0] if m.problem.op == GATHER]


def test_a_tree_of_static_sizes_is_grown_where_one_may_fit():
    fit = _gathers(scores.FITTED_TO, ROWS[::3])
    tree = ficco_tree.grown(fit, 1)
    assert isinstance(tree, ficco_tree.Split)
    for m in fit:
        is_below = ficco_tree.SIZES[tree.size](m.problem) < tree.at
        assert ficco_tree.pick(tree, m.problem) == (tree.below if is_below else tree.above)
    scored = [ficco_tree.scored(partial(ficco_tree.pick, ficco_tree.grown(fit, depth)), fit).right
              for depth in (0, 1, 3)]  # fmt: skip
    assert scored[0] <= scored[1] <= scored[2] and scored[0] < scored[2]
    bad = ficco_tree.of_sizes(fit, fit, lambda _: "hetero_unfused_1d")[0]
    assert "+- " in bad[1]


def test_the_trees_that_are_published(thorough: bool):
    if not thorough:  # all scenarios are replayed
        page = (ROOT / "docs/results/papers.md").read_text()
        assert "82% (" in page and "76% (" in page and "73% (" in page
        return
    fit, unseen = (_gathers(part, ROWS) for part in ficco.PARTS)
    found = ficco_tree.by_depth(fit, unseen)
    assert [*found] == [1, 2, 3] and (len(fit), len(unseen)) == (42, 51)
    assert [round(seen.right, 2) for _, seen in found.values()] == [0.82, 0.76, 0.73]
    assert [round(own.right, 2) for own, _ in found.values()] == [0.74, 0.81, 0.88]
    tree = ficco_tree.grown(fit, 1)
    assert ficco_tree.told(tree) == "M below 2896: `uniform_fused_2d`, else `hetero_fused_1d`"
    few, many = (replace(fit[0].problem, m=m, rows=()) for m in (1024, 8192))
    assert ficco_tree.pick(tree, few) == "uniform_fused_2d"
    assert ficco_tree.pick(tree, many) == "hetero_fused_1d"
    bad = ficco_tree.of_sizes(fit, unseen, lambda _: "hetero_unfused_1d")[0]
    assert bad[2].startswith("confirmed") and "+- 12%" in bad[1]


def test_every_scenario_has_rows_of_all_schedules():
    for part, models in ficco.PARTS.items():
        rows = [row for row in ROWS if row["question"] == part]
        assert [row["scenario"] for row in rows] == [s.name for s in scenarios(models)]
        assert all({"serial", *scores.FINER} <= set(row["steps"]) for row in rows)


def test_choices_meet_their_bars_where_they_may_be_fitted(thorough: bool):
    some = ROWS if thorough else ROWS[::3]
    measured, tiles = scores.scenarios_of(some, scores.FITTED_TO)
    found = scores.ways(measured, tiles)
    right = {name: score(name, found[name], measured).right
             for name in (scores.BEST, scores.MODEL, scores.OUR_RULE)}  # fmt: skip
    always = max(each.right for each in constants(measured))
    assert right[scores.BEST] == 1
    assert right[scores.MODEL] >= 0.95 and right[scores.OUR_RULE] >= 0.95
    assert right[scores.OUR_RULE] >= always + 0.1


def test_the_tables_have_every_way_and_every_loss():
    fitted = [row for row in ROWS if row["question"] == scores.FITTED_TO][::6]
    text = scores.score_table(fitted, scores.FITTED_TO)
    assert f"| {len(fitted)} scenarios |" in text and "| best possible | 100% |" in text
    assert "\n| the paper's rule, reconstructed | " in text and "\n| always `" in text
    lines = scores.loss_table(ROWS).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 3 * 5 + 2 * 4
