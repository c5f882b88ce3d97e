"""Plans to JSON and back; what is refused of a file stands in tests/test_bad_input.py."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from counterpoint.errors import CounterpointError, PlanError
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem

PLAN = build(Problem("all_gather_matmul", 7, 5, 8, 2, rows=(3, 4), bias=True), "graded 1/1")


def test_a_plan_comes_back_equal_and_hashes_alike():
    again = Plan.from_json(to_json(PLAN))
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert to_json(again) == to_json(PLAN)


def test_empty_tuples_come_back():
    plan = Plan(PLAN.problem, "mine", "", "xor", PLAN.buffers, (), ())
    assert Plan.from_json(to_json(plan)) == plan


def test_nothing_is_executed(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("a plan file was executed")

    data = json.loads(to_json(PLAN))
    code = data["plan"]["family"] = "__import__('os').system('false')"
    # the hints of classes are evaluated once
    Plan.from_json(to_json(PLAN))
    monkeypatch.setattr("builtins.eval", never)
    monkeypatch.setattr("builtins.exec", never)
    assert Plan.from_json(json.dumps(data)).family == code


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a plan's JSON there is a whole number."""
    if type(value) is int:
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, (*path, key))


def with_number(data: Any, path: tuple[Any, ...], number: int) -> Any:
    key, *rest = path
    changed = data.copy()
    changed[key] = with_number(data[key], tuple(rest), number) if rest else number
    return changed


VAST = [
    build(Problem("all_gather_matmul", 64, 16, 8, 2), "direct"),
    build(Problem("matmul_reduce_scatter", 64, 16, 8, 2), "shard_p2p"),
    build(Problem("all_to_all_matmul", 64, 16, 8, 2, experts=2), "serial"),
    build(Problem("embedding_bag_all_to_all", 64, ranks=2, tables=((8,), (4,))), "fused"),
    build(Problem("all_gather_attention", 64, 16, 8, 2), "serial"),
]


@pytest.mark.parametrize("plan", VAST, ids=lambda plan: plan.problem.op)
def test_a_number_far_from_reality_is_refused_or_means_nothing(plan: Plan):
    """One at a time: no loop runs so long, and no accepted plan needs more memory."""
    data = json.loads(to_json(plan))
    accepted = 0
    start_s = time.process_time()
    for path in numbers(data):
        for number in (2**31, 2**40, 2**62, 10**30):
            try:
                changed = Plan.from_json(json.dumps(with_number(data, path, number)))
                validate(changed)
            except CounterpointError:
                continue
            accepted += 1
            assert changed.workspace_bytes <= plan.workspace_bytes, path
            assert predicted_s(changed, preset("h200-2")) < 1, path
    assert accepted and time.process_time() - start_s < 20


HUGE = [
    ("all_gather_matmul", {"n": 2**34, "k": 2**34}), ("matmul_reduce_scatter", {"n": 2**20}),
    ("matmul_all_reduce", {"n": 2**34}), ("all_gather_attention", {"n": 2**10, "k": 2**10}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "more"), HUGE)
@pytest.mark.parametrize("spec", ["serial", "shard_p2p"])
def test_a_plan_beyond_any_memory_is_refused_before_it_is_used(
    op: str, more: dict[str, int], spec: str
):
    """Though all its sizes agree: when it is read, and when it is proved."""
    plan = build(Problem(op, **{"m": 2**38, "n": 8, "k": 8, "ranks": 2} | more), spec)
    wants = f"plan {plan.spec}: needs [0-9]+ bytes on a rank, more than any machine has"
    for use in (lambda: Plan.from_json(to_json(plan)), lambda: validate(plan)):
        with pytest.raises(PlanError, match=wants):
            use()


def test_a_plan_of_the_largest_machines_is_read():
    plan = build(Problem("all_gather_matmul", 2**24, 2**14, 2**14, 128), "serial")
    assert Plan.from_json(to_json(plan)) == plan
