"""Plans to JSON and back, and files that somebody has had their hands on."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

PLAN = build(Problem("all_gather_matmul", 7, 5, 8, 2, rows=(3, 4), bias=True), "graded 1/1")


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(to_json(PLAN))
    change(data)
    return json.dumps(data)


def refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^plan plan file: {message}"):
        Plan.from_json(text)


def test_a_plan_comes_back_equal_and_hashes_alike():
    again = Plan.from_json(to_json(PLAN))
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert to_json(again) == to_json(PLAN)


def test_empty_tuples_come_back():
    plan = Plan(PLAN.problem, "mine", "", "xor", PLAN.buffers, (), ())
    assert Plan.from_json(to_json(plan)) == plan


@pytest.mark.parametrize("text", ["", "{", "nonsense", "{'format': 1}", to_json(PLAN)[:-1]])
def test_what_is_not_json_is_refused(text: str):
    refused(text, "not JSON: ")


@pytest.mark.parametrize(
    "text",
    ["null", "3", "[]", "{}", '"counterpoint-plan-2"', '{"format": "counter"}', '{"format": 1}'],
)
def test_another_format_is_refused(text: str):
    refused(text, "the field 'format' must be 'counterpoint-plan-2'$")


@pytest.mark.parametrize("number", [1, 3])
def test_a_file_of_another_version_says_what_to_do(number: int):
    text = damaged(lambda data: data.update(format=f"counterpoint-plan-{number}"))
    got = f"got 'counterpoint-plan-{number}': build the plan again"
    refused(text, f"the field 'format' must be 'counterpoint-plan-2', {got}$")


def step(data: dict[str, Any]) -> dict[str, Any]:
    return data["plan"]["steps"][0]


def buffer(data: dict[str, Any]) -> dict[str, Any]:
    return data["plan"]["buffers"][0]


def put(place: Callable[[dict[str, Any]], dict[str, Any]], key: str, value: Any) -> Any:
    return lambda data: place(data).__setitem__(key, value)


def the_plan(data: dict[str, Any]) -> dict[str, Any]:
    return data["plan"]


def the_problem(data: dict[str, Any]) -> dict[str, Any]:
    return data["plan"]["problem"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("plan"), "plan must be Plan, got 'None'"),
        (lambda d: d["plan"].pop("lanes"), "plan must be Plan, got "),
        (put(the_plan, "extra", 1), "plan must be Plan, got "),
        (put(the_plan, "family", 3), "plan.family must be str, got '3'"),
        (put(the_plan, "peers", "mesh"), "plan.peers must be .*Literal.*'ring'.*, got 'mesh'"),
        (put(the_plan, "steps", {}), r"plan.steps must be .*Step.*, got '\{\}'"),
        (lambda d: step(d).pop("waits"), r"plan.steps\[0\] must be Step, got "),
        (put(step, "color", "red"), r"plan.steps\[0\] must be Step, got "),
        (put(step, "kind", "exec"), r"plan.steps\[0\].kind must be .*, got 'exec'"),
        (put(step, "after", "open"), r"plan.steps\[0\].after must be .*, got 'open'"),
        (put(step, "after", [1]), r"plan.steps\[0\].after\[0\] must be str, got '1'"),
        (put(step, "posts", [[1, []]]), r"plan.steps\[0\].posts\[0\] must be Signal"),
        (put(step, "posts", [{"slot": True, "at": [1]}]), r".*posts\[0\].slot must be int"),
        (put(step, "posts", [{"slot": 1.0, "at": [1]}]), r".*posts\[0\].slot must be int"),
        (put(step, "posts", [{"slot": 1, "at": ["1"]}]), r".*posts\[0\].at\[0\] must be int"),
        (put(step, "args", [["bias"]]), r"plan.steps\[0\].args\[0\] must be .*, got "),
        (put(step, "args", [["bias", None]]), r".*args\[0\]\[1\] must be .*, got 'None'"),
        (put(step, "args", [["bias", True]]), r".*args\[0\]\[1\] must be .*, got 'True'"),
        (put(buffer, "space", "disk"), r"plan.buffers\[0\].space must be .*, got 'disk'"),
        (put(buffer, "split", 1), r"plan.buffers\[0\].split must be bool, got '1'"),
        (put(buffer, "pieces", None), r"plan.buffers\[0\].pieces must be int, got 'None'"),
        (put(buffer, "shape", [7]), r"plan.buffers\[0\].shape must be .*, got "),
        (put(buffer, "shape", [7, 8, 9]), r"plan.buffers\[0\].shape must be .*, got "),
        (put(buffer, "shape", ["7", 8]), r"plan.buffers\[0\].shape\[0\] must be .*, got '7'"),
        (put(step, "spins", 1), r"plan.steps\[0\].spins must be bool, got '1'"),
        (put(the_problem, "m", True), "plan.problem.m must be int, got 'True'"),
        (put(the_problem, "m", -7), "all_gather_matmul: m must be 0 or more, got -7"),
        (put(the_problem, "op", "eval"), "Problem: op must be one of .*, got 'eval'"),
        (put(the_problem, "op", "counterpoint.cli"), "Problem: op must be one of .*"),
        (put(the_problem, "op", ["all_gather_matmul"]), "plan.problem.op must be str, got"),
        (put(the_problem, "rows", [3, 5]), "all_gather_matmul: rows must be 2 counts"),
        (put(the_problem, "splits", [2, 3]), "all_gather_matmul: splits must be empty: only"),
        (put(the_problem, "splits", 5), "plan.problem.splits must be .*, got '5'"),
    ],
)  # fmt: skip
def test_the_message_names_the_place(change: Callable[[dict[str, Any]], object], message: str):
    refused(damaged(change), message)


def test_a_literal_is_not_met_by_an_equal_value_of_another_type():
    # a list or a dict is no Literal, and must not be looked up as one
    refused(damaged(put(step, "kind", ["copy"])), r"plan.steps\[0\].kind must be")
    refused(damaged(put(step, "kind", {"copy": 1})), r"plan.steps\[0\].kind must be")


def test_a_long_value_is_cut():
    with pytest.raises(PlanError) as error:
        Plan.from_json(damaged(put(the_plan, "peers", "x" * 10_000)))
    assert len(str(error.value)) < 300


def test_nesting_without_end_is_refused():
    refused("[" * 100_000, "not JSON: ")
    refused("1" * 10_000, "not JSON: ")


def test_nothing_is_executed(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("a plan file was executed")

    monkeypatch.setattr("builtins.eval", never)
    monkeypatch.setattr("builtins.exec", never)
    code = "__import__('os').system('false')"
    assert Plan.from_json(damaged(put(the_plan, "family", code))).family == code
    refused(damaged(put(the_plan, "peers", code)), "plan.peers must be")
    refused(damaged(put(step, "__class__", "Plan")), r"plan.steps\[0\] must be Step")
