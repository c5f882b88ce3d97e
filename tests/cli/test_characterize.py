"""`counterpoint characterize`: what it prints and keeps, by a measurement that is made up."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import PLACE, a_node_of_four, as_rank_0, invoke

import counterpoint as cp
from benchmarks.rows import rows_of
from counterpoint.choose.known import load
from counterpoint.cli import characterize
from counterpoint.errors import CounterpointWarning

SHEET = cp.preset("h200-4")
MACHINE = replace(
    SHEET, source="measured on 4x NVIDIA H200",
    measured=replace(SHEET.costs, copy_bytes_per_s=378e9, copy_overhead_s=6.25e-6),
)  # fmt: skip
ROW = {"question": "copy", "num_bytes": 1 << 20, "seconds": 9e-6}


run = partial(invoke, "characterize", columns=150)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return a_node_of_four(characterize, monkeypatch)


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Be rank 0 of the four; what the measurement was asked."""
    asked: dict[str, Any] = {}

    def measure(**arguments: Any) -> tuple[cp.Machine, list[dict[str, Any]]]:
        asked.update(arguments)
        arguments["progress"]("matmuls")
        arguments["progress"]("copies")
        return MACHINE, [ROW]

    as_rank_0(characterize, measure, monkeypatch)
    return asked


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_two_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(characterize.torch.cuda, "device_count", lambda: gpus)
    result = run(code=2)
    assert result.stdout == ""
    got = f"{gpus or 'none'} (`counterpoint doctor` says why)"
    assert result.stderr.startswith(
        f"characterize: GPUs of this machine must be 2 or more, got {got}; `counterpoint plan"
    )


def test_it_starts_a_rank_for_each_gpu(four_gpus: list[int]):
    run()
    run("--quick", "--ranks", "2", "--out", "my.json", "--rows", "my.jsonl")
    assert four_gpus == [4, 2]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("ranks", ["1", "5"])
def test_ranks_that_are_not_there(ranks: str):
    message = f"characterize: --ranks must be from 2 to the 4 here, got {ranks}\n"
    assert run("--ranks", ranks, code=2).stderr == message


def test_it_prints_every_constant_and_keeps_the_machine(
    rank_0: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "cache"))
    text = run("--rows", str(tmp_path / "rows.jsonl")).stdout
    assert rank_0["rounds"] == 7
    cells = [line.split() for line in text.splitlines()]
    names = [field.name for field in fields(cp.Costs)]
    assert all(name in {row[0] for row in cells if row} for name in names)
    rate, rest_s = SHEET.costs.copy_bytes_per_s, SHEET.costs.copy_overhead_s
    rows = [row[:4] for row in cells]
    assert ["copy_bytes_per_s", "378", f"{rate / 1e9:.4g}", "GB/s"] in rows
    assert ["copy_overhead_s", "6.25", f"{rest_s * 1e6:.4g}", "us"] in rows
    assert [row[-1] for row in cells if row[1:2] == ["s:"]] == ["matmuls", "copies"]
    path = tmp_path / "cache" / "nvidia-h200-4.json"
    assert f"It is kept in {path}: delete it to undo." in text
    assert load(PLACE, tmp_path / "cache").machine == MACHINE
    assert rows_of(tmp_path / "rows.jsonl") == [ROW]


def test_a_file_of_ones_own_is_what_plan_takes(
    rank_0: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "new" / "mine.json"
    path.parent.mkdir()
    text = run("--quick", "--out", str(path)).stdout
    assert rank_0["rounds"] == 3
    assert f"written to {path}" in text
    assert [p.name for p in path.parent.iterdir()] == ["mine.json"]
    assert not (tmp_path / "cache").exists()
    problem = cp.Problem("all_gather_matmul", 8192, 1280, 8192, 4)
    assert cp.choose(problem, path).machine == MACHINE


def test_a_damaged_file_is_replaced(
    rank_0: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    path = tmp_path / "nvidia-h200-4.json"
    path.write_text("{")
    with pytest.warns(CounterpointWarning, match="is damaged"):
        assert load(PLACE).machine != MACHINE
    run()
    assert load(PLACE).machine == MACHINE


def test_ranks_without_a_gpu_are_measured_under_torchrun(
    rank_0: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    monkeypatch.setattr(characterize.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(characterize, "gloo_group", characterize.nccl_group)
    nic = cp.LinkSpec(name="NIC", bytes_per_s=25e6, latency_s=2e-3)
    with_nic = replace(MACHINE, nic=nic)
    monkeypatch.setattr(characterize, "measure", lambda **_: (with_nic, [ROW]))
    assert "to other islands: 0.025 GB/s, 2000 us" in run().stdout
    assert load(PLACE).machine == with_nic


def test_every_constant_has_a_meaning_and_a_unit():
    names = [field.name for field in fields(cp.Costs)]
    assert list(characterize.meanings()) == names
    assert [name for name, _, _ in characterize.units()] == names
    assert all(meaning.endswith(".") for meaning in characterize.meanings().values())
