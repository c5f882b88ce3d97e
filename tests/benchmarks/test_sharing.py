"""benchmarks/sharing.py: what docs/results/sharing.md says of rows."""

from pathlib import Path

import pytest
from loop_rows import arm_rows, shape_rows

from benchmarks import sharing
from benchmarks.loop import Pair
from benchmarks.rows import Row

CUBLAS = Pair("cb", "cuBLAS", "all_to_all")
OTHER = Pair("mb", "cuBLAS", "all_reduce")
TRITON = Pair("cb", "64x64x32", "all_reduce")
TIMES = {"sequential": 20.0, "plain overlap": 16.0, "priority": 14.0, "budget": 21.0,
         "transport": 10.7, "tuned": 10.5, "tuned, SM collectives": 12.1}  # fmt: skip
RATIOS = {False: {1: 0.9, 2: 0.78, 9: 0.85}, True: {1: 0.8, 2: 0.76, 9: 0.75}}


def cells(text: str, start: str) -> list[str]:
    """Of the one line of a table that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.fixture
def eight() -> list[Row]:
    """Eight GPUs with three pairs."""
    return [
        *arm_rows(CUBLAS, TIMES, joules={"plain overlap": 10.0, "transport": 8.0}),
        *arm_rows(CUBLAS, TIMES | {"tuned": 12.0}, mode="eager"),
        *arm_rows(OTHER, TIMES | {"tuned": 15.0}),
        *shape_rows(TRITON, RATIOS),
        *arm_rows(TRITON, {"sequential": 20.0, "plain overlap": 17.0, "carve-out only": 16.0,
                           "carve-out, priority": 15.2, "tuned": 10.7}),
        {"arm": "overlap green_sms=8", "mode": "graph", "pair": CUBLAS.label, "refused": "no",
         "table": "resources"},
    ]  # fmt: skip


def test_bars_hide_nothing_and_bold_what_meets_them(eight: list[Row]):
    text = sharing.bars(eight)
    assert cells(text, CUBLAS.label) == [
        "10.00", "**1.050**", "1.06", "copy_engine chunks=4", "1.600",
        "1.52 (1.37 to 1.68)", "1.029..1.092",
    ]  # fmt: skip
    kept = cells(text, f"{CUBLAS.label}, SM collectives kept")
    assert kept[:5] == ["11.00", "1.100", "1.08", "priority delay=10us", "1.455"]
    assert cells(text, OTHER.label)[1:3] == ["1.500", "1.04"]
    assert cells(text, TRITON.label)[1:3] == ["1.070", "1.06"]
    assert len([line for line in text.splitlines() if line[:1] == "|"]) == 2 + 4, (
        "bars without rows are left out"
    )


def test_arms_that_do_not_apply_are_dashes(eight: list[Row]):
    graph, _, eager, said = sharing.by_mode(eight, sharing.ARMS).split("\n\n")
    assert said.endswith("commit abc1234 (2026-11-21). Graph registration off.")
    # no pair has another arm
    arms = ["sequential", "plain overlap", "priority", "carve-out only", "transport", "tuned"]
    assert cells(graph, "graph: pair") == [*arms, "parts alone"]
    assert [arm for arm in sharing.ARMS if arm in arms] == arms
    assert cells(graph, CUBLAS.label) == [
        "20.00", "16.00", "14.00", "-", "10.70", "**10.50**", "10.00",
    ]  # fmt: skip
    assert cells(graph, TRITON.label)[3] == "16.00"
    assert "**10.70**" in cells(eager, CUBLAS.label)
    assert TRITON.label not in eager


def test_no_arm_is_in_no_table(eight: list[Row]):
    graph = sharing.others(eight).split("\n\n")[0]
    others = ["budget", "tuned, SM collectives", "carve-out, priority"]
    assert cells(graph, "graph: pair") == ["plain overlap", *others, "tuned", "parts alone"]
    assert cells(graph, CUBLAS.label) == ["16.00", "21.00", "12.10", "-", "**10.50**", "10.00"]


def test_energy_and_what_copies_save(eight: list[Row]):
    text = sharing.energy(eight)
    assert cells(text, CUBLAS.label) == ["10 J, 560 W, 1755 MHz", "8 J, 560 W, 1755 MHz"]
    assert OTHER.label not in text, "its energy was not read"
    assert text.endswith(
        "geometric mean 0.80 of 1 pairs, from 0.80 (cb cuBLAS + all-to-all) to 0.80 (cb cuBLAS + "
        "all-to-all)."
    )


def test_shaping_beside_the_carve_out_and_priority(eight: list[Row]):
    assert cells(sharing.shaping(eight), TRITON.label) == [
        "1.18", "1.28 (2)", "1.25", "**1.33**", "1.32 (2)", "1.32", "1.82",
    ]  # fmt: skip


def test_summary_has_the_worst_pair_too(eight: list[Row]):
    # geometric mean of 16 / 10.5, 16 / 15 and 17 / 10.7
    assert sharing.summary({8: eight}) == (
        "- 8 H200s: plain overlap / tuned, in a graph: geometric mean 1.37 of 3 pairs, from 1.07 "
        "with mb cuBLAS + all-reduce (its parts alone 1.60) to 1.59 with cb Triton 64x64x32 + "
        "all-reduce (its parts alone 1.70)."
    )


def test_pictures(eight: list[Row], tmp_path: Path):
    sharing.pictures({8: eight}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        f"sharing-{name}-{theme}.svg" for name in ("arms", "ratios") for theme in ("light", "dark")
    }
