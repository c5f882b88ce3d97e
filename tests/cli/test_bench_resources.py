"""`counterpoint bench resources`: its options, what it refuses, what it prints."""

import contextlib
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counterpoint.measure.loop import Pair
from counterpoint.measure.sharing import timed
from loop_rows import arm_rows, shape_rows
from rich.console import Console
from typer.testing import CliRunner, Result

from counterpoint.cli import bench_resources as command
from counterpoint.cli import main
from counterpoint.errors import UnsupportedError
from counterpoint.measure import record

PAIR = Pair("cb", "cuBLAS", "all_to_all", scale=8)
TIMES = {"sequential": 20.0, "plain overlap": 16.0, "transport": 11.0, "tuned": 10.5}


def run(*arguments: str, code: int = 0) -> Result:
    environment = {"COLUMNS": "140", "LOCAL_RANK": None, "NCCL_GRAPH_REGISTER": None}
    result = CliRunner().invoke(main.app, ["bench", *arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A node of four with NVML; arguments and NCCL_GRAPH_REGISTER of each torchrun, which does
    nothing."""
    started: list[list[str]] = []

    def torchrun(ranks: int, arguments: list[str]) -> int:
        started.append([str(ranks), os.environ["NCCL_GRAPH_REGISTER"], *arguments])
        return 0

    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(command, "torchrun", torchrun)
    monkeypatch.setattr(command, "nvml", lambda: None)
    return started


@pytest.fixture
def rank_0(four_gpus: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Be rank 0 of the four; what each measurement was asked."""
    asked: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def nccl_group() -> Iterator[tuple[Any, Any]]:
        yield SimpleNamespace(rank=lambda: 0, size=lambda: 4), SimpleNamespace(type="cuda")

    def measure(pair: Pair, **arguments: Any) -> tuple[list[dict[str, Any]], str]:
        asked.append({"pair": pair, **arguments})
        arguments["progress"]("timing")
        joules = {"tuned": 7.4} if arguments["energy"] else None
        rows = [
            row
            for mode in arguments["modes"]
            for row in arm_rows(pair, TIMES, mode=mode, ranks=4, joules=joules)
        ]
        if pair.kernel != "cuBLAS":
            rows += shape_rows(pair, {True: {1: 0.8, 2: 0.75, 9: 0.85}}, ranks=4)
        return rows, f"{pair.label}\noverlap copy_engine [graph]: gained 34 %"

    monkeypatch.setattr(command, "under_torchrun", lambda: True)
    monkeypatch.setattr(command, "nccl_group", nccl_group)
    monkeypatch.setattr(command, "measure", measure)
    return asked


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_two_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: gpus)
    result = run("resources", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("counterpoint bench: needs 2 GPUs or more; torch sees")
    assert "`counterpoint occupancy` predicts without" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gemm", "cb"], "--gemm must be left out with table overlap, got 'cb'; it is an option "
         "of `counterpoint bench resources`"),
        (["overlap", "--budget", "9"], "--budget must be left out with table overlap, got '9.0'"),
        (["--no-energy"], "--energy must be left out with table overlap, got 'False'"),
        (["resources", "--op", "all_gather_matmul"], "--op must be left out with table resources, "
         "got 'all_gather_matmul'; it is an option of `counterpoint bench overlap`"),
        (["resources", "--shapes", "8,8,8"], "--shapes must be left out with table resources"),
        (["resources", "--kernels", "cuBLAS,8x8"], "--kernels must be some of cuBLAS, 64x64x32, "
         "64x64x64, 128x128x64, 128x256x64, got '8x8'"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(arguments: list[str], message: str):
    result = run(*arguments, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: bench: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["flops"], ["resources", "--gemm", "x"],
                                       ["resources", "--budget", "0"],
                                       ["resources", "--rounds", "2"]])  # fmt: skip
def test_values_out_of_range_are_wrong_options(arguments: list[str]):
    run(*arguments, code=2)


def test_without_nvml_it_fails_before_the_search(
    four_gpus: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    def nvml() -> None:
        raise UnsupportedError("energy: needs nvidia-ml-py; pip install nvidia-ml-py")

    monkeypatch.setattr(command, "nvml", nvml)
    assert run("resources", code=1).stderr == (
        "Error: bench: energy: needs nvidia-ml-py; pip install nvidia-ml-py; or leave it out: "
        "--no-energy\n"
    )
    assert four_gpus == []
    run("resources", "--no-energy")
    run("resources", "--mode", "eager")
    assert len(four_gpus) == 2, "eager arms have no energy to read"


def test_it_starts_a_rank_for_each_gpu(four_gpus: list[list[str]]):
    run("resources")
    run("resources", "--gemm", "mb", "--kernels", "64x64x32", "--collective", "all_reduce",
        "--mode", "graph", "--budget", "5", "--rounds", "3", "--suite", "full", "--out", "a.jsonl",
        "--pictures", "out", "--no-energy")  # fmt: skip
    assert four_gpus == [
        ["4", "0", "bench", "resources", "--gemm", "all", "--kernels", "cuBLAS", "--collective",
         "all", "--mode", "all", "--budget", "60.0", "--rounds", "7", "--suite", "smoke"],
        ["4", "0", "bench", "resources", "--gemm", "mb", "--kernels", "64x64x32", "--collective",
         "all_reduce", "--mode", "graph", "--budget", "5.0", "--rounds", "3", "--suite", "full",
         "--out", "a.jsonl", "--pictures", "out", "--no-energy"],
    ]  # fmt: skip


def test_a_rank_is_started_with_what_it_was_asked(
    four_gpus: list[list[str]], rank_0: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    options = ["--gemm", "cb", "--kernels", "64x64x32, cuBLAS", "--budget", "5", "--mode", "graph"]
    monkeypatch.setattr(command, "under_torchrun", lambda: False)
    run("resources", *options)
    monkeypatch.setattr(command, "under_torchrun", lambda: True)
    run("resources", *options)
    first = rank_0.copy()
    rank_0.clear()
    run(*four_gpus[0][3:])
    assert len(first) == len(rank_0) == 4
    for one, other in zip(first, rank_0, strict=True):
        for asked in (one, other):
            del asked["progress"], asked["group"], asked["device"]
        assert one == other


def test_pairs_are_those_asked_for(rank_0: list[dict[str, Any]]):
    def pairs(*arguments: str) -> list[str]:
        rank_0.clear()
        run("resources", *arguments)
        return [asked["pair"].label for asked in rank_0]

    assert pairs() == ["cb cuBLAS + all-to-all", "cb cuBLAS + all-reduce", "mb cuBLAS + all-to-all",
                       "mb cuBLAS + all-reduce"]  # fmt: skip
    assert {asked["pair"].scale for asked in rank_0} == {8}
    wide = ("--gemm", "mb", "--collective", "all_reduce", "--suite", "full")
    assert pairs(*wide, "--kernels", "64x64x32,cuBLAS,64x64x32") == [
        "mb Triton 64x64x32 + all-reduce", "mb cuBLAS + all-reduce",
    ]  # fmt: skip
    assert {asked["pair"].scale for asked in rank_0} == {1}
    assert pairs("--mode", "eager", "--gemm", "cb", "--rounds", "5", "--budget", "9")
    asked = rank_0[0]
    assert (asked["modes"], asked["rounds"], asked["budget_s"]) == (["eager"], 5, 9.0)


def test_it_prints_and_keeps_what_was_measured(rank_0: list[dict[str, Any]], tmp_path: Path):
    out, pictures = tmp_path / "rows.jsonl", tmp_path / "pictures"
    arguments = ["--gemm", "cb", "--kernels", "64x64x32", "--collective", "all_to_all"]
    text = run("resources", *arguments, "--out", str(out), "--pictures", str(pictures)).stdout
    title = (
        "cb Triton 64x64x32 + all-to-all, {}, 1/8 of the size, 4x NVIDIA H200, ideal 10.000 ms\n"
    )
    assert text.index(title.format("graph")) < text.index(title.format("eager"))
    lines = [line.split() for line in text.splitlines()]
    assert lines.count(["transport", "11.000", "31.2%", "1.100", "copy_engine"]) == 2
    assert "overlap copy_engine [graph]: gained 34 %\n" in text, "no markup in it"
    assert len(record.read(out)) == 2 * len(TIMES) + 3
    names = ["arms-eager.png", "arms-graph.png", "shapes.png"]
    assert sorted(path.name for path in pictures.iterdir()) == names
    assert all(f"as a picture: {pictures / name}\n" in text for name in names)


def test_what_could_not_be_had_is_said(
    rank_0: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    refused = {"pair": PAIR.label, "mode": "graph", "arm": "overlap carve_out", "refused": "no way"}
    monkeypatch.setattr(
        command, "measure", lambda pair, **_: ([*arm_rows(pair, TIMES), refused], "why")
    )
    text = run("resources", "--gemm", "cb", "--collective", "all_to_all").stdout
    assert "overlap carve_out: cannot be had: no way\n" in text


def shown(rows: list[dict[str, Any]]) -> list[list[str]]:
    (one,) = timed(rows)
    text = StringIO()
    Console(file=text, width=120).print(command.table_of(one))
    return [line.split() for line in text.getvalue().splitlines()]


def test_the_table_has_room_for_energy_only_where_it_was_read():
    head = ["arm", "ms", "less", "than", "plain", "/", "ideal"]
    lines = shown(arm_rows(PAIR, TIMES, joules={"plain overlap": 8.7, "tuned": 7.4}))
    assert lines[0] == [*head, "J", "a", "GPU", "MHz", "controls"]
    assert ["plain", "overlap", "16.000", "1.600", "8.7", "1755", "overlap"] in lines
    assert ["transport", "11.000", "31.2%", "1.100", "copy_engine"] in lines
    assert shown(arm_rows(PAIR, TIMES))[0] == [*head, "controls"]
