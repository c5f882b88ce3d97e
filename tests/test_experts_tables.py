"""benchmarks/experts_tables.py: what docs/experts.md says of rows that are made up."""

import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.measure import record

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FACTS = {"table": "experts", "model": "DeepSeek-V3", "tokens": 256, "routing": "skewed", "n": 4096,
         "k": 7168, "experts": 32, "rows": 6000, "weight_bytes": 43e8, "ranks": 4, "gpu":
         "NVIDIA H200", "driver": "1", "torch": "2", "nccl": "3", "multicast": False,
         "date": "2026-11-22", "commit": "abc"}  # fmt: skip
THERE = {"matmul grouped": 650, "matmul looped": 660, "pair grouped": 1000, "in place grouped":
         1100, "communication": 200, "one kernel": 700, "16 senders": 640, "own rank first": 710,
         "rank 0 first on all": 720}  # fmt: skip
BACK = {"matmul grouped": 300, "pair grouped": 400, "in place grouped": 450, "communication": 200,
        "in place grouped, sum": 500, "one kernel": 330, "one kernel, sum": 340}  # fmt: skip


def rows_of(op: str, times: dict[str, int]) -> list[dict[str, Any]]:
    return [FACTS | {"op": op, "arm": arm, "median_s": t * 1e-6, "skew_s": t * 1e-8}
            for arm, t in times.items()]  # fmt: skip


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import experts_tables  # pyright: ignore

    yield experts_tables
    for name in ("experts_tables", "experts_layer", "copies_tables"):
        sys.modules.pop(name, None)


def test_ideal_and_soak(tables: Any, tmp_path: Path):
    soak = {"table": "experts soak", "op": "all_to_all_matmul", "calls": 100000, "eager": 20000,
            "wrong": 0, "ranks": 4, "seconds": 7.2}  # fmt: skip
    rows = [*rows_of("all_to_all_matmul", THERE), *rows_of("matmul_all_to_all", BACK), soak]
    record.append(tmp_path / "experts-4x-h200.jsonl", rows)
    made = tables.sections(tmp_path, tmp_path)
    there, _, back = made["experts"].partition("rows back")
    assert "| in place | ideal, less | one kernel |" in there
    assert "| 1000 | 1100 | 650, 35% | 700 | 30% |" in there
    assert "1 cases: mean 30%, most 30%; the ideal has 35% and 35%" in there
    assert "| 400 | 450 | 300, 25% | 330 |" in back
    assert "16 senders 640" in made["experts-ablation"] and "own" not in made["experts-ablation"]
    assert made["experts-soak"] == (
        "- all_to_all_matmul: 100,000 calls on 4 GPUs in 7 s, 20,000 of them eager, the others "
        "replayed: 0 wrong."
    )


def test_what_was_not_run_is_said(tables: Any, tmp_path: Path):
    assert tables.sections(tmp_path, tmp_path) == {}
    times = {name: t for name, t in THERE.items() if "first" not in name}
    rows = [*rows_of("all_to_all_matmul", times), *rows_of("matmul_all_to_all", BACK)]
    record.append(tmp_path / "experts-4x-h200.jsonl", rows)
    made = tables.sections(tmp_path, tmp_path)
    assert "Not yet run" in made["experts-soak"]
