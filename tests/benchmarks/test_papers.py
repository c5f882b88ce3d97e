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
        assert rows == "-" or (RESULTS / rows.strip("`")).exists(), rows


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
    assert found.verdict == "confirmed" and re.match(r"up to \d+\.\d%", found.text)
    assert paper_findings.verdict_of(False) == "contradicted"
    never = Claim("x", paper_findings.never("not measured"))
    assert lines_of([never]) == ([["x", "-", "**not measured**", "-", "-"]], [])
    assert Found("a", "b").rows == ()


def test_what_was_not_measured_shows_no_number_of_ours():
    for claim in EVERY:
        if lines_of([claim])[0][0][2] == "**not measured**":
            assert not lines_of([claim])[1], claim.text


def test_rows_of_the_paper_s_experiments_take_the_place_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    some = {"pair": "p", "kernel": "64x64x32", "ranks": 2}
    rows = [
        some | {"arm": "priority", "time_ratio": ratio, "nccl_threads": asked,
                "comm_threads": threads, "beside_blocks": blocks, "overlap_rate": rate}
        for asked, threads, blocks, ratio, rate in ((0, 544, 0, 0.8, 0.6), (256, 288, 5, 0.7, 0.9))
    ]  # fmt: skip
    # of an all-to-all, that has as many threads as before
    rows += [row | {"pair": "q", "comm_threads": 640, "beside_blocks": 0} for row in rows]
    grids = [
        some | {"arm": arm, "blocks": blocks, "time_ratio": ratio}
        for arm, ratios in {"overlap": (0.7, 1.0), "overlap, priority": (0.7, 0.8)}.items()
        for blocks, ratio in zip((66, 4096), ratios, strict=True)
    ]
    files = {"paper_resources": {2: rows}, "paper_thread_blocks": {2: grids}}
    monkeypatch.setattr(paper_findings, "results", lambda name="": files.get(name, {}))
    together = paper_findings.resident_together()
    assert together.verdict == "confirmed" and "TimeRatio 0.70 and 0.80" in together.text
    assert "5 blocks" in together.text and together.text.endswith("1 pairs")
    assert paper_findings.rates().text.startswith("up to 90% (p, priority), mean 75%")
    assert paper_findings.figure() == Found(
        "TimeRatio 0.70 up to 132 blocks, 1.00 at 4096; there 0.80 with priority", "confirmed",
        grids,
    )  # fmt: skip
    files["paper_resources"][2] = rows[:1]
    assert paper_findings.resident_together().verdict == "not measured"


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
         "blocks_beside": beside, "share_beside": beside / 32, "baseline_over_arm": [ratio, 1, 2]}
        for n, beside, ratio in ((7, 0, 1.0), (4, 32, 1.31))
    ]  # fmt: skip
    rows += [{"arm": "matmul", "median_s": 1.0}, {"arm": "collective first", "pairs": 9}]
    older = rows[0] | {"blocks_beside": 1}  # measured once more since
    monkeypatch.setattr(paper_findings, "results", lambda _: {2: [older, *rows]})
    assert paper_findings.stamped() == Found(
        "by blocks of a 64x64x32 matmul, launched first, that an SM may hold: blocks of the "
        "all-gather on an SM with one, the share of their time, the speedup over one after the "
        "other: of 7, 0 of 32, 0%, 1.00x; of 4, 32 of 32, 100%, 1.31x", "confirmed", rows[:2],
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
             "median_s": seconds, "skew_s": skew}
            for arm, (seconds, skew) in arms.items()
        ]  # fmt: skip

    late = {f"{order}, {n} % late": (1.0, 0.01 * n * k) for n in (0, 10)
            for order, k in (("own first", 0.7), ("remote first", 0.1))}  # fmt: skip
    some = [*rows("order of remote tasks", **late),
            *rows("programs", **{"lookup + all-to-all": (2.0, 0), "4 programs per SM": (1.6, 0),
                                 "8 programs per SM": (1.0, 0),
                                 "a program per task": (1.25, 0)}),
            *rows("slices", **{"1 slices": (1.1, 0), "4 slices": (1.0, 0)})]  # fmt: skip
    monkeypatch.setattr(paper_findings, "results", lambda name="": {2: some})
    order = fused_findings.order_of_tasks()
    assert order.verdict == "confirmed"
    assert "one rank 10 % late: ranks end 7.0% apart with own tasks first, 1.0%" in order.text
    assert "4: 1.25x, 8: 2.00x; by a grid with a program per task: 1.60x" in (
        fused_findings.occupancy_cost().text
    )
    assert fused_findings.slices().text == "of 1, 4, 4 are fastest, 1.100x over one"
    monkeypatch.setattr(paper_findings, "results", lambda name="": dict[int, list[Row]]())
    for read in (fused_findings.order_of_tasks, fused_findings.occupancy_cost,
                 fused_findings.slices):  # fmt: skip
        assert read() == Found("-", "not measured")
