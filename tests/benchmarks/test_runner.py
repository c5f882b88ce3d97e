"""The one runner on CPU ranks: what is wrong is refused and not timed, what is slow is seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_bodies import world
from rankpool import RankError, RankPool

from benchmarks import options, runner
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case
from benchmarks.rows import kind_of, taken
from counterpoint.errors import CounterpointError, InputError
from counterpoint.measure import timing
from counterpoint.measure.timing import Times, relative_error, settled

CASE = Case("one shape", {"m": 8})
WRONG = {
    "nothing is written": lambda x, y, rank: y,
    "rows of another rank": lambda x, y, rank: torch.mm(x.roll(1, 0), x.t(), out=y),
    "no number": lambda x, y, rank: y.fill_(torch.nan),
    "off on one rank": lambda x, y, rank: torch.mm(x, x.t(), out=y).mul_(1 + 0.1 * (rank == 1)),
}


def declared(planted: str, clock: list[float] | None = None) -> Benchmark:
    """x x^T by torch, a part of it, an arm that cannot be had on rank 1, and a planted arm."""

    def arms(case: Case, bench: Bench) -> Arms:
        x = bench.normal(case["m"], 4, dtype=torch.float32)
        y = torch.empty(case["m"], case["m"])

        def serial(_: int) -> torch.Tensor:
            if clock:
                clock[0] += 1e-3
            return torch.mm(x, x.t(), out=y)

        def slow(_: int) -> torch.Tensor:
            if clock:  # late on rank 1 alone
                clock[0] += 1e-3 * (1 + 2 * bench.rank)
            return serial(0)

        def half(_: int) -> torch.Tensor:
            return serial(0)[:4]

        calls: dict[str, Any] = {
            "serial": serial,
            "slow": slow,
            "half": half,
            "missing": "no such engine" if bench.rank else serial,
        }
        if planted:
            calls[planted] = lambda _: WRONG[planted](x, y, bench.rank)
        want = x.double() @ x.double().t()
        return Arms(
            calls, lambda _, got: [relative_error(got, want)], parts=("half",), outputs=(y,),
            about={"slow": {"pick": "late"}}, facts={"found": "here"},
        )  # fmt: skip

    return Benchmark(
        "planted", lambda _: [CASE], arms, rounds=6, eager=("serial", "slow"),
        short=lambda case: case["m"] < 8, moved=lambda case, ranks: case["m"] * ranks,
    )  # fmt: skip


def rows_of(rank: int, ranks: int, planted: str, folder: str) -> list[dict[str, Any]]:
    said: list[str] = []
    bench = Bench(world(), torch.device("cpu"), say=said.append)
    out = Path(folder) / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        clock = [0.0]  # of this rank: only arms move it on
        patch.setattr(timing.time, "perf_counter", lambda: clock[0])
        rows = runner.run(declared(planted, clock), [CASE], bench, out, said.append)
    assert "without missing: no such engine" in said
    assert any("one shape: eager: serial" in text for text in said)
    return rows


def test_a_slow_arm_is_as_slow_as_on_its_slowest_rank(pool: RankPool, tmp_path: Path):
    first, second = pool.run(rows_of, 2, "", str(tmp_path))
    assert [(r["arm"], r.get("median_s")) for r in first] == [
        (r["arm"], r.get("median_s")) for r in second
    ]
    (case,) = taken(first, "case")
    assert case.s("serial") == pytest.approx(1e-3) and case.s("slow") == pytest.approx(4e-3)
    assert case.fastest(("serial", "slow")) == "serial" and "half" in case
    row = case.eager["slow"]
    assert row["baseline_over_arm"] == pytest.approx((0.25,) * 3) and row["pick"] == "late"
    assert row["skew_s"] == pytest.approx(2e-3) and row["rounds"] == 6
    assert 0 < row["error"] < 1e-6 and "error" not in case.eager["half"]
    assert row["plain_eager_s"] == pytest.approx(4e-3)
    for name, value in (("table", "planted"), ("m", 8), ("found", "here"), ("bytes", 16),
                        ("ranks", 2), ("case", "one shape")):  # fmt: skip
        assert row[name] == value
    assert {"torch", "commit", "date", "sm_clock_mhz", "p20_s", "p80_s"} <= set(row)
    assert {"arm": "missing", "refused": "no such engine"}.items() <= first[0].items()
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["arm"] for r in written] == [r["arm"] for r in first], "rank 0 alone writes"


def graph_rows(rank: int, ranks: int) -> list[dict[str, Any]]:
    """Graphs of eight calls: each call waits for rank 1, which ends the last one by itself."""
    clock, bench = [0.0], Bench(world(), torch.device("cpu"))

    def late(_: int) -> None:
        clock[0] += 1e-3

    def eight(call: Call, calls: int, _: Any) -> tuple[Any, None]:
        def replay() -> None:
            for i in range(calls):
                call(i)
            clock[0] += 0.5e-3 * rank

        return replay, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: clock[0])
        patch.setattr(runner, "captured", eight)
        bench.on_gpu = True
        bench.meet = lambda: None
        arms = Arms({"serial": late}, lambda *_: [0.0])
        return runner.measured(Benchmark("eight", lambda _: [CASE], lambda *_: arms), CASE, bench)


def test_ranks_end_a_graph_apart_not_each_of_its_calls(pool: RankPool):
    (row,), _ = pool.run(graph_rows, 2)
    assert (row["mode"], row["calls_per_graph"]) == ("graph", 8)
    assert row["median_s"] == pytest.approx(8.5e-3 / 8) and row["skew_s"] == pytest.approx(0.5e-3)


@pytest.mark.parametrize("planted", WRONG)
def test_what_is_wrong_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path, planted: str):
    with pytest.raises(RankError) as raised:
        pool.run(rows_of, 2, planted, str(tmp_path))
    text = str(raised.value)
    assert text.count(f"WrongResultError: planted one shape, {planted}: off by") == 2
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    (wrong,) = (row for row in written if row["arm"] == planted)
    assert "median_s" not in wrong and wrong["refused"].startswith("off by")
    assert {r["arm"] for r in written if "median_s" in r} == {"serial", "slow", "half"}


def test_a_baseline_that_is_off_is_refused(pool: RankPool):
    assert pool.run(baseline_is_off, 2) == ["planted, serial: off by inf against fp64, at most"] * 2


def baseline_is_off(rank: int, ranks: int) -> str:
    bench = Bench(world(), torch.device("cpu"))
    arms = Arms({"serial": lambda _: None}, lambda *_: [torch.nan if rank else 0.0])
    try:
        runner.checked("planted", arms, {"serial": lambda _: None}, bench)
    except CounterpointError as error:
        return str(error).rpartition(" ")[0]
    return ""


def test_rounds_at_another_clock_do_not_count():
    assert settled([1980, 1965, 1200, 1980]) == [0, 1, 3]
    assert settled([0, 1980, 1980]) == [0, 1, 2], "a rank whose clock is not known"
    assert settled([1000, 2000, 3000, 4000]) == [0, 1, 2, 3], "no clock is usual"
    assert Times((2.0, 4.0, 3.0), 0.0).ratio_of(Times((1.0, 2.0, 3.0), 0.0))[0] == 0.5


def test_cases_that_the_command_line_asks_for():
    benchmark = declared("")
    assert runner.chosen(benchmark, 2) == [CASE]
    for asked, says in (
        ({"short": True}, "--cases must be part of one of: one shape"),
        ({"only": "other"}, "--cases must be part of one of: one shape"),
        ({"part": "2/1"}, "--part must be such as"),
        ({"shapes": "1,2,3"}, "--shapes must be left out with planted"),
    ):
        with pytest.raises(InputError, match=says):
            runner.chosen(benchmark, 2, **asked)
    overlap = runner.declared("overlap")
    own = runner.chosen(overlap, 2, shapes="64,32,16:128,32,16", only="reduce", part="2/2")
    assert [case.name for case in own] == ["matmul_reduce_scatter 128,32,16"]
    with pytest.raises(InputError, match="numbers such as"):
        runner.chosen(overlap, 2, shapes="64,32")


@pytest.mark.parametrize("name", options.NAMES)
def test_each_benchmark_has_cases_of_which_few_are_short(name: str):
    benchmark = runner.declared(name)
    cases = benchmark.cases(2)
    short = [case for case in cases if benchmark.short(case)]
    assert 0 < len(short) <= 4 and len({case.name for case in cases}) == len(cases)
    assert all(benchmark.moved(case, 2) >= 0 for case in cases)


def test_without_gpus_it_says_so(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InputError, match="bench: GPUs of this machine must be 2 or more, got "):
        runner.main(["decode"])
    assert runner.main(["soak", "--list"]) == 0
    assert "all_to_all_matmul" in capsys.readouterr().out.splitlines()
    with pytest.raises(InputError, match="NAME must be one of overlap, few_rows"):
        runner.main(["overlaps"])


def test_a_folder_gets_a_file_for_each():
    assert runner.file_of("few_rows", Path("out"), 2) == Path("out/few-rows-2x-cpu.jsonl")
    assert runner.file_of("few_rows", Path("a.jsonl"), 2) == Path("a.jsonl")
    assert runner.file_of("few_rows", None, 2) is None
    assert kind_of("NVIDIA H100 80GB HBM3") == "h100"
    assert kind_of("NVIDIA A100-SXM4-80GB") == "a100"
