"""benchmarks/sharing_tables.py: what docs/sharing.md says of rows, in folders of their own."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from counterpoint.measure.loop import Pair
from loop_rows import arm_rows, shape_rows

from counterpoint.measure import record
from counterpoint.resources.controls import WAYS_IN

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location(
    "sharing_tables", ROOT / "benchmarks" / "sharing_tables.py"
)
assert spec is not None and spec.loader is not None
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

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
def results(tmp_path: Path) -> Path:
    """Eight GPUs with three pairs, two with one."""
    eight = [
        *arm_rows(CUBLAS, TIMES, joules={"plain overlap": 10.0, "transport": 8.0}),
        *arm_rows(CUBLAS, TIMES | {"tuned": 12.0}, mode="eager"),
        *arm_rows(OTHER, TIMES | {"tuned": 15.0}),
        *shape_rows(TRITON, RATIOS),
        *arm_rows(TRITON, {"sequential": 20.0, "plain overlap": 17.0, "carve-out only": 16.0,
                           "carve-out, priority": 15.2, "tuned": 10.7}),
        {"arm": "overlap green_sms=8", "mode": "graph", "pair": CUBLAS.label, "refused": "no",
         "table": "resources"},
    ]  # fmt: skip
    record.append(tmp_path / "resources-8x-h200.jsonl", eight)
    record.append(tmp_path / "resources-2x-h200.jsonl", arm_rows(CUBLAS, TIMES, ranks=2))
    return tmp_path


@pytest.fixture
def eight(results: Path) -> list[dict[str, Any]]:
    return record.read(results / "resources-8x-h200.jsonl")


def test_bars_hide_nothing_and_bold_what_meets_them(eight: list[dict[str, Any]]):
    text = tables.bars_table(eight)
    assert cells(text, CUBLAS.label) == [
        "10.00", "**1.050**", "1.06", "copy_engine pieces=4", "1.600",
        "34.4 % (27.1 % to 40.3 %)", "1.029..1.092",
    ]  # fmt: skip
    kept = cells(text, f"{CUBLAS.label}, SM collectives kept")
    assert kept[:5] == ["11.00", "1.100", "1.08", "priority delay=10us", "1.455"]
    assert cells(text, OTHER.label)[1:3] == ["1.500", "1.04"]
    assert cells(text, TRITON.label)[1:3] == ["1.070", "1.06"]
    assert len(text.splitlines()) == 2 + 4, "bars without rows are left out"


def test_arms_that_do_not_apply_are_dashes(eight: list[dict[str, Any]]):
    graph, eager = tables.arms_table(eight).split("\n\n")
    assert cells(graph, "graph: pair") == [*tables.ARMS, "ideal"]
    assert cells(graph, CUBLAS.label) == [
        "20.00", "16.00", "14.00", "-", "-", "-", "-", "-", "10.70", "**10.50**", "10.00",
    ]  # fmt: skip
    assert cells(graph, TRITON.label)[5] == "16.00"
    assert "**10.70**" in cells(eager, CUBLAS.label)
    assert TRITON.label not in eager


def test_no_arm_is_in_no_table(eight: list[dict[str, Any]]):
    graph = tables.others_table(eight).split("\n\n")[0]
    others = ["budget", "tuned, SM collectives", "carve-out, priority"]
    assert cells(graph, "graph: pair") == ["plain overlap", *others, "tuned", "ideal"]
    assert cells(graph, CUBLAS.label) == ["16.00", "21.00", "12.10", "-", "**10.50**", "10.00"]


def test_energy_and_what_copies_save(eight: list[dict[str, Any]]):
    text = tables.energy_table(eight)
    assert cells(text, CUBLAS.label) == [
        "-", "10.0 J, 560 W, 1755 MHz", "8.00 J, 560 W, 1755 MHz", "-",
    ]  # fmt: skip
    assert OTHER.label not in text, "its energy was not read"
    assert text.endswith(
        "geometric mean 0.80 of 1 pair, from 0.80 (cb cuBLAS + all-to-all) to 0.80 (cb cuBLAS + "
        "all-to-all)."
    )


def test_shaping_beside_the_carve_out_and_priority(eight: list[dict[str, Any]]):
    assert cells(tables.shaping_table(eight), TRITON.label) == [
        "0.850", "0.780 (2)", "0.800", "**0.750**", "0.760 (2)", "0.760", "0.550",
    ]  # fmt: skip


def test_summary_has_the_worst_pair_too(eight: list[dict[str, Any]]):
    # geometric mean of 10.5 / 16, 15 / 16 and 10.7 / 17
    assert tables.summary(eight) == (
        "tuned takes 27.1 % less time than plain overlap, geometric mean of 3 pairs in a graph; at "
        "best 37.1 % with cb Triton 64x64x32 + all-reduce (the ideal pipeline 41.2 %), at worst "
        "6.2 % with mb cuBLAS + all-reduce (the ideal pipeline 37.5 %)."
    )


def test_sections_are_those_of_the_page_and_name_their_machine(results: Path):
    made = tables.sections(results)
    page = (ROOT / "docs" / "sharing.md").read_text()
    assert sorted(made) == sorted(re.findall(r"<!-- (\S+):start -->\n", page))
    assert sorted(made) == sorted(re.findall(r"<!-- (\S+):end -->\n", page))
    for name in ("bars", "arms", "others"):
        assert made[name].index("**8 GPUs**") < made[name].index("**2 GPUs**")
        assert "2x NVIDIA H200, bf16, driver 580.1, torch 2.11.0" in made[name]
        assert "NCCL 2.28.9, NVLink multicast off" in made[name]
    assert "**2 GPUs**" not in made["energy"] + made["shaping"], "there is nothing to say"
    assert [line[:9] for line in made["summary"].splitlines()] == ["- 8 GPUs:", "- 2 GPUs:"]


def test_questions_and_decisions_stand_beside_the_loops(results: Path):
    facts = {"table": "sharing", "ranks": 2, "gpu": "NVIDIA H200", "date": "d", "commit": "c"}
    asked = [
        {"question": "E", "behind": "NCCL", "cluster": [4, 1, 1], "starts_s": 934e-6,
         "next_starts_s": 935e-6, "ends_s": 933e-6},
        {"question": "F", "blocks": 132, "blocks_left": 128, "missing": 0.0049},
        *({"question": "G", "arm": arm, "median_s": ms * 1e-3}
          for arm, ms in {"matmul": 1.4, "sm": 1.5, "sm beside": 1.8}.items()),
        {"question": "G", "arm": "zero_cta", "refused": "NVLS is on"},
    ]  # fmt: skip
    decided = [
        {"table": "decisions", "pair": "a pair", "controls": f"overlap {spec}", "median_s": ms,
         "search_s": 4.0, "commit": "c"}
        for spec, ms in (("priority", 1.0), ("priority", 1.0), ("delay=5us", 1.1))
    ]  # fmt: skip
    before = tables.sections(results)
    assert before["questions"] == before["decisions"] == ""
    record.append(results / "resources-2x-h200.jsonl", decided)
    record.append(results / "sharing-2x-h200.jsonl", [{**row, **facts} for row in asked])
    made = tables.sections(results)
    assert "| NCCL | 4 | 934.0 us | 935.0 us | 933.0 us |" in made["questions"]
    assert "128 of its 132 blocks: 0.49% of the result is missing" in made["questions"]
    assert "| sm | 1.50 ms | 1.80 ms |" in made["questions"]
    assert (
        "3 searches of a pair, the longest 4.0 s: priority (2), delay=5us (1)" in made["decisions"]
    )
    assert "differ by 10.0%" in made["decisions"]
    assert {k: v for k, v in made.items() if k not in ("questions", "decisions")} == {
        k: v for k, v in before.items() if k not in ("questions", "decisions")
    }


def test_the_short_table_has_the_pairs_of_cublas(results: Path, tmp_path: Path):
    text = tables.short_table(results)
    assert cells(text, "cb + all-to-all")[:4] == ["20.00", "16.00", "**10.50**", "10.00"]
    assert "64x64x32" not in text and "8x NVIDIA H200" in text
    assert tables.short_table(tmp_path / "none") == ""


def test_without_rows_only_the_controls_are_told(tmp_path: Path):
    assert list(tables.sections(tmp_path)) == ["controls"]
    assert tables.draw(tmp_path, tmp_path) == []


def test_the_controls_in_the_docs_are_those_of_the_code():
    text = tables.controls_table()
    assert [line.split("`")[1] for line in text.splitlines()[2:]] == list(WAYS_IN)
    assert f"<!-- controls:start -->\n{text}\n<!--" in (ROOT / "docs" / "sharing.md").read_text()


def test_pictures_are_of_the_largest_node(results: Path, tmp_path: Path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "sharing-arms-4x.png").touch()
    (images / "overlap.png").touch()
    drawn = tables.draw(results, images)
    assert [path.name for path in drawn] == ["sharing-arms-8x.png", "sharing-ratios-8x.png"]
    assert sorted(images.iterdir()) == sorted([images / "overlap.png", *drawn])
    made = tables.sections(results)
    named = made["arms-picture"] + made["shaping-picture"]
    assert re.findall(r"images/([\w.-]+)", named) == [path.name for path in drawn]


def test_a_number_of_gpus_without_a_sweep_has_no_picture_of_one(results: Path):
    path = results / "resources-8x-h200.jsonl"
    rows = [row for row in record.read(path) if row["arm"] != "shapes"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tables.sections(results)
    assert (made["shaping"], made["shaping-picture"]) == ("", "")
