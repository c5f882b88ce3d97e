"""choose: which machine a name or a file stands for, and what is refused."""

import doctest
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from counterpoint import machine as describing
from counterpoint.choose import choose as choosing
from counterpoint.choose.by_model import by_model
from counterpoint.choose.by_rule import by_rule
from counterpoint.choose.choose import Level, choose
from counterpoint.choose.known import Place, save_machine
from counterpoint.errors import InputError
from counterpoint.machine_of import machine_of
from counterpoint.model.estimate import estimate
from counterpoint.plan.families import build
from counterpoint.presets import preset
from counterpoint.problem import Problem

PROBLEM = Problem("all_gather_matmul", 8192, 7168, 8192, 4)


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    monkeypatch.setattr("counterpoint.machine_of.SHIPPED", folder)
    return folder


def test_both_levels_are_reached():
    machine = preset("h200-4")
    for eager in (False, True):
        assert choose(PROBLEM, machine, eager=eager) == by_model(PROBLEM, machine, eager=eager)
        rule = choose(PROBLEM, machine, by="rule", eager=eager)
        assert rule == by_rule(PROBLEM, machine, eager=eager)
        assert (rule.basis, rule.eager) == ("rule", eager)


def test_a_name_a_file_a_machine_or_nothing(tmp_path: Path):
    machine = preset("h200-4")
    assert machine_of("choose", machine) is machine
    assert machine_of("choose", "mi300x-8") == preset("mi300x-8")
    assert choose(PROBLEM).machine == machine
    assert choose(replace(PROBLEM, ranks=8, rows=())).machine.name == "h200-8"
    slow = replace(machine, name="mine", measured=replace(machine.costs, copy_bytes_per_s=40e9))
    path = save_machine(slow, Place(gpu="NVIDIA H200", ranks=4), tmp_path)
    alone = tmp_path / "alone.json"
    alone.write_text(slow.to_json())
    plan = build(PROBLEM, "graded", slow)
    for where in (path, str(path), alone, slow.to_json(), path.read_text()):
        choice = choose(PROBLEM, where)
        assert choice.machine == slow
        assert "measured rates" in choice.explain()
        assert build(PROBLEM, "graded", where) == plan
        assert estimate(plan, where) == estimate(plan, slow)
    # a machine has more GPUs than there are ranks
    assert choose(PROBLEM, "h200-8").machine.num_devices == 8


def test_a_name_stands_for_what_was_measured_on_such_a_machine(shipped: Path):
    base = preset("h200-4")
    measured = replace(base, measured=replace(base.costs, kernel_s=9e-6), source="measured")
    save_machine(measured, Place(gpu="NVIDIA H200", ranks=4), shipped)
    assert machine_of("choose", "h200-4") == measured
    assert machine_of("choose", "h200-8").measured == measured.measured
    assert machine_of("choose", "h200-2") == preset("h200-2")
    assert machine_of("choose", "h100-4") == preset("h100-4")
    assert machine_of("choose", base) is base


@pytest.mark.parametrize("name", ["v100-8"])
def test_an_unknown_machine_lists_those_that_exist(name: str):
    want = "one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8"
    with pytest.raises(
        InputError, match=f"name must be {want}, or these with 1 to 8 GPUs .*, got '{name}'"
    ):
        choose(PROBLEM, name)


def test_a_level_that_is_none():
    with pytest.raises(InputError, match="choose: by must be model or rule, got 'measurement'"):
        choose(PROBLEM, by="measurement")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["h200-1", "h200-3"])
def test_a_machine_with_fewer_gpus_than_ranks(name: str):
    want = "a machine of 4 GPUs or more, as the problem has ranks"
    for by in ("model", "rule"):
        with pytest.raises(InputError, match=f"choose: machine must be {want}, got {name}"):
            choose(PROBLEM, name, by=by)
    with pytest.raises(InputError, match=r"a machine of 16 GPUs or more, .* got h200-8"):
        choose(replace(PROBLEM, ranks=16, rows=()))


TEXT = "text must be JSON written by Machine.to_json, got "
CONTENTS = {
    "missing": (None, "No such file or directory"),
    "no text": (b"\xff", "'utf-8' codec"),
    "no JSON": (b"h200-4", f"{TEXT}no JSON"),
    "a list": (b"[]", f"{TEXT}a machine that is no object"),
    "no machine": (b"{}", f"{TEXT}a machine without name, device, link, num_devices"),
    "no such machine": (b'{"machine": "h200-4"}', f"{TEXT}a machine that is no object"),
    "too deep": (b"[" * 100_000, f"{TEXT}no JSON"),
    "unit slip": (
        preset("h200-4").to_json().replace("450000000000.0", "450").encode(),
        "LinkSpec NVLink 4, NVSwitch: bytes_per_s must be a number from 1e+06 to 1e+15, got 450",
    ),
}


@pytest.mark.parametrize(("content", "text"), CONTENTS.values(), ids=CONTENTS)
def test_a_file_of_something_else(tmp_path: Path, content: bytes | None, text: str):
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_bytes(content)
    want = f"choose: machine must be a file of a machine, got {path}: {text}"
    for where in (path, str(path)):
        with pytest.raises(InputError) as caught:
            choose(PROBLEM, where)
        assert str(caught.value).startswith(want)


@pytest.mark.parametrize("module", [choosing, describing])
def test_the_example_runs(module: ModuleType):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("by", ["model", "rule"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_fewer_ranks_than_gpus_of_a_mesh_have_the_links_between_them(ranks: int, by: Level):
    problem = Problem("all_gather_matmul", 15 * 1024, 1024, 4096, ranks)
    eight, few = preset("mi300x-8"), preset(f"mi300x-{ranks}")
    measured = (replace(each, measured=each.costs) for each in (eight, few))
    for pair in ((eight, few), measured):
        found, want = (choose(problem, machine, by=by) for machine in pair)
        assert found.spec == want.spec and found.serial_s == pytest.approx(want.serial_s)
        # no less than its bytes take over the links there are
        assert found.serial_s > problem.link_bytes / few.link.bytes_per_s
