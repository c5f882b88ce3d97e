"""`counterpoint tune` and `counterpoint.tune`: on CPU ranks, and with GPUs that are made up."""

from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import a_node_of_four, as_rank_0, example, invoke, refused
from on_ranks import on_ranks
from refusals import wrongly_refused
from rich.console import Console

import counterpoint as cp
from benchmarks.rows import rows_of
from counterpoint.choose.choice import Candidate
from counterpoint.cli import tune as command
from counterpoint.cli.shared import launch
from counterpoint.measure import tune as measuring
from counterpoint.measure.shapes import SHAPES

SHAPE = ("--op", "all_gather_matmul", "--shape", "64,32,48")
TIMES = {"serial": 4e-4, "shard_p2p ring": 2e-4, "graded 2": 3e-4}


run = partial(invoke, "tune")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return a_node_of_four(command, monkeypatch)


def measured(problem: cp.Problem, times: dict[str, float]) -> cp.Choice:
    """A choice by these times."""
    best = min(times, key=times.__getitem__)
    verdicts = {spec: "chosen" if spec == best else "slower" for spec in times}
    table = tuple(
        Candidate(spec, times[spec], "measured", verdicts[spec])
        for spec in sorted(times, key=times.__getitem__)
    )
    machine = cp.preset(f"h200-{problem.ranks}")
    return cp.Choice(problem, machine, best, table, False, "measurement", 1e-4, 1e-4, {})


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Be rank 0 of the four; what each measurement was asked."""
    asked: list[dict[str, Any]] = []

    def measure(problem: cp.Problem, **arguments: Any) -> cp.Choice:
        asked.append({"problem": problem, **arguments})
        arguments["progress"]("timing")
        return measured(problem, dict.fromkeys(arguments["specs"], 2e-4) | {"serial": 3e-4})

    as_rank_0(command, measure, monkeypatch)
    monkeypatch.setattr(command, "known_tiles", lambda *_: {})
    monkeypatch.setattr(command.record, "environment", lambda: {"gpu": "NVIDIA H200"})
    return asked


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_two_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: gpus)
    result = run(code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("tune: GPUs of this machine must be 2 or more, got ")
    assert f"`{command.ON_CPU_RANKS}` tries the command on CPU ranks" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", *SHAPE[:2], "--shape", "8,8,8:9"], "from 1 to 2**40, got '9'"),
        (["--ranks", "2", *SHAPE, "--specs", "graded 2,fast"], "plan must be auto or one of"),
    ],
)  # fmt: skip
def test_what_is_refused_on_cpu_ranks_is_one_line(arguments: list[str], message: str):
    refused("tune", arguments, message)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "--ranks must be at most the 4 GPUs here, got 5"),
        (["--layer", "8B"], "--layer must be a part of one of 70B qkv; 70B gate+up; 405B gate+up;"),
        (["--op", "all_gather_matmul_wgrad"], "--op must be one that has such layers, got"),
        (["--op", "matmul_all_reduse"], "'matmul_all_reduse'; did you mean 'matmul_all_reduce'"),
        (["--op", "all_to_all_matmul", "--shape", "8,8,8"], "experts must be 1 or more, got 0"),
        (["--op", "matmul_reduce_scatter", "--layer", "70B qkv"], "--op must be one that has"),
    ],
)
def test_what_is_refused_on_gpus(arguments: list[str], message: str):
    assert message in run(*arguments, code=2).stderr


def test_ranks_are_given_the_arguments_of_the_command(monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    def started_as(words: list[str]) -> Any:
        started.append(words)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(launch.subprocess, "run", started_as)
    monkeypatch.setattr("sys.argv", ["counterpoint", "tune", *SHAPE])
    assert launch.torchrun(2) == 3
    assert started[0][-7:] == ["-m", "counterpoint", "tune", *SHAPE]
    assert "--nproc-per-node=2" in started[0]


def test_it_starts_a_rank_for_each_gpu(four_gpus: list[int]):
    run("--layer", "70B")
    run(*SHAPE, "--specs", "graded 2", "--ranks", "2", "--rounds", "3")
    assert four_gpus == [4, 2]


def test_layers_are_the_published_ones(rank_0: list[dict[str, Any]]):
    published = [(op, *shape) for op, named in SHAPES.items() for shape in named.values()]

    def tuned(*arguments: str) -> list[tuple[str, int, int, int]]:
        rank_0.clear()
        run(*arguments, "--specs", "graded")
        return [(p.op, p.m, p.n, p.k) for p in (asked["problem"] for asked in rank_0)]

    assert tuned() == published
    assert tuned("--op", "all_gather_matmul") == published[:5]
    assert tuned("--layer", "405b") == [published[2], published[7]]
    assert tuned("--layer", "70B gate+up") == [published[1]], "a whole name is not a part of others"


def test_it_prints_what_was_measured_and_where_it_is_kept(
    rank_0: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    out = tmp_path / "rows.jsonl"
    shape = ("--op", "matmul_reduce_scatter", "--shape", "8192,8192,3584")
    text = run(*shape, "--specs", "graded 2/1/1, shard_p2p", "--out", str(out)).stdout
    (asked,) = rank_0
    assert asked["specs"] == ("graded 2/1/1", "shard_p2p")
    problem = cp.Problem("matmul_reduce_scatter", 8192, 8192, 3584, 4)
    assert asked["problem"] == problem
    assert f"{problem}, predicted for h200-4 from datasheet rates\n" in text
    predicted = cp.choose(problem, cp.preset("h200-4")).serial_s
    (serial,) = (line.split() for line in text.splitlines() if line.startswith("serial "))
    assert serial == ["serial", "300.0", "1.00", f"{predicted * 1e6:.1f}",
                      f"{predicted / 3e-4:.2f}", "slower"]  # fmt: skip
    path = tmp_path / "tuned-nvidia-h200-4.json"
    assert f"They are kept in {path}: delete it to undo." in text
    rows = rows_of(out)
    assert [(row["plan"], row["chosen"]) for row in rows] == [
        ("graded 2/1/1", True), ("shard_p2p", False), ("serial", False),
    ]  # fmt: skip
    assert (
        rows[2] | {"seconds": 3e-4, "device": "cuda", "gpu": "NVIDIA H200", "ranks": 4} == rows[2]
    )
    assert rows[2]["predicted_s"] == pytest.approx(predicted)


def test_on_cpu_ranks_it_says_what_their_times_are_worth(tmp_path: Path):
    """In processes of its own: ranks print, too."""
    from test_cli import run as run_alone

    out = tmp_path / "rows.jsonl"
    cpu = ("--rounds", "2", "--specs", "shard_p2p", "--out", str(out))
    text = run_alone(*command.ON_CPU_RANKS.split()[1:], *cpu)
    words = " ".join(text.split())
    assert words.startswith("On CPU ranks: the plans run, but their times mean nothing for a GPU")
    assert "predicted" not in text and "kept" not in text
    assert f"2 rows added to {out}" in text
    rows = rows_of(out)
    assert sorted(row["plan"] for row in rows) == ["serial", "shard_p2p"]
    assert {row["device"] for row in rows} == {"cpu"}
    assert text.index("M512") < text.index("shard_p2p") < text.index("rows added")


@on_ranks(2)
def test_auto_takes_the_tuned_plan_at_once(rank: int, world_size: int, tmp_path: Path):
    """Tune with made-up times; what "auto" runs before and after, and for another problem."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
        patch.setattr(measuring, "_times", lambda calls, *_: {s: TIMES[s] for s in calls})
        x, w = torch.randn(32, 48), torch.randn(48, 32)

        def steps(x: torch.Tensor) -> set[str]:
            _, timeline = cp.profile(lambda: cp.all_gather_matmul(x, w))
            return {span.label for span in timeline.spans if span.rank == rank}

        assert steps(x) == {"gather", "matmul"}
        y = cp.all_gather_matmul(x, w, plan="serial")
        problem = cp.Problem("all_gather_matmul", 64, 32, 48, world_size, "float32")
        said: list[str] = []
        choice = cp.tune(problem, specs=["serial", *TIMES], rounds=2, progress=said.append)
        assert said == ["preparing 3 plans", "timing 3 plans"], "serial is there once"
        assert "push_1" in steps(x)
        assert steps(x[:16]) == {"gather", "matmul"}, "another problem was not tuned"
        assert torch.equal(cp.all_gather_matmul(x, w), y)
    assert choice.spec == "shard_p2p ring"
    assert [(c.spec, c.basis, c.verdict) for c in choice.table] == [
        ("shard_p2p ring", "measured", "chosen"), ("graded 2", "measured", "slower"),
        ("serial", "measured", "slower"),
    ]  # fmt: skip
    text = choice.explain()
    assert "chosen measured: shard_p2p ring, 200 us, 2.00x serial\n" in text
    assert "a stand-in for CPU ranks, whose times say nothing about a GPU), eager" in text
    assert not list(tmp_path.iterdir()), "times of CPU ranks are not kept"


@on_ranks(2)
def test_serial_stays_unless_a_plan_is_faster_by_more_than_noise(rank: int, world_size: int):
    with pytest.MonkeyPatch.context() as patch:
        times = {"serial": 1e-3, "graded 2": 0.995e-3}
        patch.setattr(measuring, "_times", lambda calls, *_: {s: times[s] for s in calls})
        problem = cp.Problem("all_gather_matmul", 64, 32, 48, world_size)
        choice = cp.tune(problem, group=dist.group.WORLD, specs=["graded 2"])
    verdicts = {c.spec: c.verdict for c in choice.table}
    assert choice.spec == "serial"
    too_close = "not 1% faster than serial: measurements may be so far off"
    assert verdicts == {"graded 2": too_close, "serial": "chosen"}


@on_ranks(3)
def test_all_ranks_have_the_same_times(rank: int, world_size: int):
    problem = cp.Problem("matmul_reduce_scatter", 60, 32, 48, world_size)
    choice = cp.tune(problem, specs=["shard_p2p"], rounds=3)
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, (choice.spec, choice.table))
    assert found == found[:1] * world_size
    assert {c.spec for c in choice.table} == {"serial", "shard_p2p"}


@on_ranks(2)
def test_problems_that_cannot_be_tuned(rank: int, world_size: int) -> list[str]:
    problem = cp.Problem("all_gather_matmul", 60, 32, 48, world_size)
    return wrongly_refused(cp.tune, {}, [
        ({"problem": replace(problem, ranks=3, rows=())},
         "group must be of 3 ranks as the problem, got 2 ranks"),
        ({"problem": replace(problem, splits=(16, 16))},
         "problem must be of one weight, got all_gather_matmul M60 N16+16"),
    ])  # fmt: skip


def test_a_table_without_predictions_has_no_room_for_them_and_is_what_help_shows():
    text, lines = StringIO(), example("tune")[1]
    times = {"direct": 3873.3e-6, "serial": 6626.8e-6}
    choice = measured(cp.Problem("all_gather_matmul", 512, 256, 256, 2), times)
    Console(file=text, width=80).print(command._table(choice, {}))
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert [line for line in lines if line.split() not in rows] == []
