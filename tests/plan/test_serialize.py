"""Plans to JSON and back; what is refused of a file stands in tests/test_bad_input.py."""

import json

import pytest

from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
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
