"""The page of the papers: each claim has a verdict, rows that exist and a command that exists."""

import re
from pathlib import Path

import pytest

from benchmarks import ficco_scores, fused_findings, options, paper_findings, papers, runner
from benchmarks.options import NAMES, PAPER
from benchmarks.paper_findings import Found
from benchmarks.papers import CLAIMS, Claim, lines_of
from benchmarks.rows import RESULTS, Row
from counterpoint.cli.main import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "papers.md"
EVERY = [claim for claims in CLAIMS.values() for claim in claims]
VERDICTS = ("confirmed", "contradicted", "in part", "not testable here", "not measured", "added")


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.apart("make test-all"))]
)
def test_the_page_is_what_the_rows_say(whole: bool, monkeypatch: pytest.MonkeyPatch):
    """Or all of it but what every plan is replayed for."""
    page = PAGE.read_text()
    if whole:
        assert papers.text() in page, "run `make readme`"
        return
    monkeypatch.setattr(ficco_scores, "_of_plans", lambda _: list[list[str]]())
    lines = papers.text().splitlines()
    assert len(lines) > 40 and {*lines} <= {*page.splitlines()}, "run `make readme`"


def test_each_line_has_a_verdict_and_rows_that_are_there():
    lines = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    lines = [cells for cells in lines if cells[0] not in ("| claim", "| ---")]
    assert len(lines) > 25
    for _, _, verdict, rows, _ in lines:
        assert verdict.strip("*").startswith(VERDICTS), verdict
        for file in rows.split(", "):
            assert rows == "-" or (RESULTS / file.strip("`")).exists(), rows


@pytest.mark.parametrize("claim", [c for c in EVERY if c.command], ids=lambda c: c.text[:40])
def test_commands_exist(claim: Claim):
    command, *words = claim.command.split()
    assert command in {each.__name__ for each in COMMANDS}
    if command == "bench":
        asked = options.bench(words)
        assert set(asked.names) <= {*NAMES, *PAPER.values()}
        for name in asked.names:
            assert runner.chosen(runner.declared(name), 2, part=asked.part)


def test_a_number_that_does_not_hold_is_contradicted():
    """Verdicts follow the numbers: here of claims that nobody could meet, or miss."""
    found = paper_findings.up_to()
    assert found.verdict == "in part: not on 2 H100s"
    assert re.match(r"up to \d+\.\d%", found.text) and found.text.count(" on 2 H100s") == 2
    assert paper_findings.verdict_of(False) == "contradicted"
    never = Claim("x", paper_findings.never("not measured"))
    assert lines_of([never]) == ([["x", "-", "**not measured**", "-", "-"]], [])
    assert Found("a", "b").rows == ()


def test_what_was_not_measured_shows_no_number_of_ours():
    for claim in EVERY:
        if lines_of([claim])[0][0][2] == "**not measured**":
            assert not lines_of([claim])[1], claim.text


def test_room_beside_nccl_is_told_where_fewer_threads_do_not_slow_it(
    monkeypatch: pytest.MonkeyPatch,
):
    some = {"pair": "p", "kernel": "64x64x32", "ranks": 2}
    rows = [
        some | {"arm": "priority", "time_ratio": ratio, "nccl_threads": asked, "comm_sm_s": 1.0,
                "comm_threads": threads, "beside_blocks": blocks, "overlap_rate": rate}
        for asked, threads, blocks, ratio, rate in ((0, 544, 0, 0.8, 0.6), (256, 288, 5, 0.7, 0.9))
    ]  # fmt: skip
    # of an all-to-all, that has as many threads as before
    rows += [row | {"pair": "q", "comm_threads": 640, "beside_blocks": 0} for row in rows]
    monkeypatch.setattr(paper_findings, "results", lambda *_, **__: {2: rows})
    together = paper_findings.resident_together()
    assert together.verdict == "confirmed" and "TimeRatio 0.70 and 0.80" in together.text
    assert "5 blocks" in together.text and together.text.endswith("1 Triton pairs")
    assert paper_findings.rates().text.startswith("up to 90% (p, priority), mean 75%")
    rows[1]["comm_sm_s"] = 1.2
    together = paper_findings.resident_together()
    assert together.verdict.startswith("not testable here") and "1.20 times" in together.text
    del rows[1:]
    assert paper_findings.resident_together() == Found("-", "not measured")


def grid_rows(many: float, urgent: float) -> list[Row]:
    """A loop of four iterations, 4 s of matmul and 1 s of a collective each."""
    shares = {"overlap": {4: 0.9, 256: 0.2, 4096: many}, "overlap, priority": {4096: urgent}}
    arms = {"sequential": dict.fromkeys((4, 256, 4096), 0.0)} | shares
    return [
        {"pair": "p", "arm": arm, "blocks": blocks, "scale": 1, "iterations": 4, "rounds": 3,
         "median_s": 20.0, "time_ratio": 1 - share * 3 / 20}
        for blocks in (4, 256, 4096) for arm, of in arms.items()
        for share in [of.get(blocks, 0.9)]
    ]  # fmt: skip


def test_overlap_decays_by_what_could_be_hidden(monkeypatch: pytest.MonkeyPatch):
    alone: Row = {"pair": "p", "arm": "sequential", "nccl_threads": 0, "comm_sm_s": 1.0}
    files = {"paper_resources": {2: [alone]}}
    monkeypatch.setattr(paper_findings, "results", lambda name="", **_: files.get(name, {}))
    assert paper_findings.figure().verdict == "not measured"
    files["paper_thread_blocks"] = {2: grid_rows(0.3, 0.7)}
    found = paper_findings.figure()
    assert "90% at 4 and 16, 20% at 256, 30% at 4096 and more blocks" in found.text
    assert found.verdict.startswith("confirmed") and "with priority 70% there" in found.text
    for many, urgent in ((0.95, 0.99), (0.3, 0.2)):  # no decay; priority that brings nothing
        files["paper_thread_blocks"] = {2: grid_rows(many, urgent)}
        assert paper_findings.figure().verdict == "contradicted"


def test_a_claim_holds_on_the_machines_where_it_does():
    assert paper_findings.across({"a": True, "b": True}) == "confirmed"
    assert paper_findings.across({"a": False, "b": False}) == "contradicted"
    assert paper_findings.across({"a": True, "b": False}) == "in part: not on b"


def test_rows_are_in_the_file_of_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    assert papers._file_of("paper_fused") == "-"
    for name in ("paper-fused-2x-h100", "paper-fused-4x-h100", "ficco-1x-h100", "ficco-1x-h200"):
        (tmp_path / f"{name}.jsonl").touch()
    assert papers._file_of("paper_fused") == "`paper-fused-4x-h100.jsonl`"
    assert papers._file_of("ficco") == "`ficco-1x-h200.jsonl`"


def test_stamps_of_blocks(monkeypatch: pytest.MonkeyPatch):
    rows: list[Row] = [
        {"arm": "matmul first", "blocks_per_sm": n, "comm_blocks": 32, "pairs": 4 * beside,
         "blocks_beside": beside, "share_beside": beside / 32, "baseline_over_arm": [ratio, 1, 2],
         "median_s": 2 / ratio}
        for n, beside, ratio in ((7, 0, 1.0), (4, 32, 1.31))
    ]  # fmt: skip
    rows += [
        {"arm": "matmul", "median_s": 1.0},
        {"arm": "collective first", "pairs": 9, "blocks_per_sm": 7, "median_s": 1.8},
    ]
    older = rows[0] | {"blocks_beside": 1}  # measured once more since
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: [older, *rows]})
    assert paper_findings.stamped() == Found(
        "by blocks of a 64x64x32 matmul, launched first, that an SM may hold: blocks of the "
        "all-gather on an SM with one, the share of their time, the speedup over one after the "
        "other: of 7, 0 of 32, 0%, 1.00x; of 4, 32 of 32, 100%, 1.31x. The best shape is 1.18x "
        "faster than the better unshaped order", "confirmed", [*rows[:2], rows[3]],
    )  # fmt: skip
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: rows[:1]})
    assert paper_findings.stamped().verdict == "contradicted"
    monkeypatch.setattr(paper_findings, "results", lambda _: dict[int, list[Row]]())
    assert paper_findings.stamped() == Found("-", "not measured")


def test_a_short_search_that_is_behind_is_named(monkeypatch: pytest.MonkeyPatch):
    times = {"priority": 1.0, "shaping": 0.9, "tuned": 0.99}
    rows: list[Row] = [{"case": case, "arm": arm, "mode": "graph", "median_s": s * scale}
                       for case, scale in (("mb", 1.0), ("cb", 2.0)) for arm, s in times.items()
                       if (case, arm) != ("cb", "shaping")]  # fmt: skip
    rows += [{"case": "mb", "arm": "shapes", "mode": "graph", "median_s": 0.1}] * 2
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: rows})
    assert "In 1 of 2 cases" in paper_findings.behind()
    assert "10% at most (mb)." in paper_findings.behind()
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: rows[3:]})
    assert paper_findings.behind() == ""


def test_bags_between_islands(monkeypatch: pytest.MonkeyPatch):
    rows: list[Row] = [{"op": op, "case": op + case, "arm": arm, "mode": "eager", "median_s": s}
                       for op in ("embedding_bag_all_to_all", "all_gather_matmul")
                       for case, ours in (("", 0.6), (", larger", 0.7))
                       for arm, s in (("serial", 1.0), ("auto", ours))]  # fmt: skip
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: rows})
    found = fused_findings.between_nodes()
    assert found.text.startswith("30% to 40% of 2 cases") and found.rows == rows[:4]
    monkeypatch.setattr(paper_findings, "results", lambda _: dict[int, list[Row]]())
    assert fused_findings.between_nodes() == Found("-", "not measured")


def test_rows_of_the_fused_experiments(monkeypatch: pytest.MonkeyPatch):
    def rows(experiment: str, **arms: tuple[float, float]) -> list[Row]:
        return [
            {"experiment": experiment, "arm": arm.replace("_", " "), "mode": "graph",
             "median_s": seconds, "skew_s": skew, "calls_per_graph": 8,
             "late_s": 0.01 * int(arm.split(", ")[1].split()[0]) if ", " in arm else 0.0}
            for arm, (seconds, skew) in arms.items()
        ]  # fmt: skip

    late = {f"{order}, {n} % late": (1.0, 0.01 * n * k) for n in (2, 5, 10)
            for order, k in (("own first", 0.1), ("remote first", 7.9))}  # fmt: skip
    some = [*rows("order of remote tasks", **late),
            *rows("programs", **{"lookup + all-to-all": (2.0, 0), "4 programs per SM": (1.6, 0),
                                 "8 programs per SM": (1.0, 0),
                                 "a program per task": (1.25, 0)}),
            *rows("slices", **{"1 slices": (1.1, 0), "4 slices": (1.0, 0)})]  # fmt: skip
    monkeypatch.setattr(paper_findings, "results", lambda name="": {2: some})
    order = fused_findings.order_of_tasks()
    assert order.verdict.startswith("in part: the order works")
    assert "of 8 calls, the other one's lead is 99% at 2 %, 99% at 5 %, 99% at 10 %" in order.text
    assert fused_findings.occupancy_cost().verdict.startswith("in part: it wins")
    assert fused_findings.slices().verdict == "in part: inside a node"
    assert "4: 1.25x, 8: 2.00x; by a grid with a program per task: 1.60x" in (
        fused_findings.occupancy_cost().text
    )
    assert fused_findings.slices().text.endswith("of 1, 4, 4 are fastest, 1.100x over one")
    monkeypatch.setattr(paper_findings, "results", lambda name="": dict[int, list[Row]]())
    for read in (fused_findings.order_of_tasks, fused_findings.occupancy_cost,
                 fused_findings.slices):  # fmt: skip
        assert read() == Found("-", "not measured")
