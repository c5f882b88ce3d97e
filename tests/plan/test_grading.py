"""Sizes of groups: they add up, and follow the machine where the answer is known."""

import pytest

from counterpoint.plan.families import build
from counterpoint.plan.steps import Region
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules.grading import MAX_GROUPS, compositions, graded_groups
from counterpoint.schedules.makespan import gather_s, scatter_s

H200 = preset("h200-8")
PREDICT = {"all_gather_matmul": gather_s, "matmul_reduce_scatter": scatter_s}


def groups_of(op: str, *sizes: int) -> tuple[int, ...]:
    return graded_groups(Problem(op, *sizes), H200, PREDICT[op])


@pytest.mark.parametrize("ranks", range(1, 13))
def test_compositions_are_all_ways_to_cut(ranks: int):
    cuts = list(compositions(ranks))
    assert len(set(cuts)) == len(cuts)
    assert all(sum(groups) == ranks and min(groups) > 0 for groups in cuts)
    if ranks <= 8:
        assert len(cuts) == 2 ** (ranks - 1)
    else:
        assert max(len(groups) for groups in cuts) == MAX_GROUPS


@pytest.mark.parametrize("ranks", [33, 64, 100, 1024])
def test_candidates_of_many_ranks_stay_in_the_thousands(ranks: int):
    cuts = list(compositions(ranks))
    assert len(set(cuts)) == len(cuts) <= 5000
    assert all(sum(groups) == ranks and min(groups) > 0 for groups in cuts)


@pytest.mark.parametrize("op", PREDICT)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("size", [0, 1, 127, 4096])
def test_groups_add_up_to_the_ranks(op: str, ranks: int, size: int):
    groups = groups_of(op, size * ranks, size, size, ranks)
    assert sum(groups) == ranks
    assert min(groups) > 0


@pytest.mark.parametrize("groups", list(compositions(4)))
def test_own_shard_is_gathered_first_and_once(groups: tuple[int, ...]):
    spec = f"graded {'/'.join(map(str, groups))}"
    plan = build(Problem("all_gather_matmul", 32, 8, 8, 4), spec)
    own = [s for s in plan.steps if s.kind == "matmul" and (0,) in s.writes[0].shards]
    assert [s.name for s in own] == ["matmul_0"]
    # alone it is read where the user has it; no copy is made of it
    kept = [s for s in plan.steps if s.name == "keep"]
    assert (own[0].reads[0] == Region("x")) == (groups[0] == 1) == (not kept)


@pytest.mark.parametrize("groups", list(compositions(4)))
def test_own_rows_are_scattered_last_and_stay(groups: tuple[int, ...]):
    spec = f"graded {'/'.join(map(str, groups))}"
    plan = build(Problem("matmul_reduce_scatter", 32, 8, 8, 4), spec)
    matmuls = [s for s in plan.steps if s.kind == "matmul"]
    assert [(0,) in s.writes[0].shards for s in matmuls] == [False] * (len(groups) - 1) + [True]
    assert all((0,) not in s.reads[0].shards for s in plan.steps if s.kind == "copy")


@pytest.mark.parametrize("op", PREDICT)
def test_a_large_problem_is_cut_and_a_small_one_is_not(op: str):
    # each cut costs a launch, and there is less than a wave to hide behind
    assert len(groups_of(op, 256, 1024, 1024, 8)) <= 2
    assert len(groups_of(op, 16384, 8192, 8192, 8)) >= 3


def test_of_equal_plans_the_fewest_groups():
    assert groups_of("all_gather_matmul", 0, 0, 0, 8) == (8,)
