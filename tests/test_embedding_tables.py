"""benchmarks/embedding_tables.py: what docs/embedding.md says of rows."""

import importlib.util
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location(
    "embedding_tables", ROOT / "benchmarks" / "embedding_tables.py"
)
assert spec is not None and spec.loader is not None
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

TIMES = {"bags cat": 3.0, "bags permute": 2.9, "lookup cat": 2.1, "lookup permute": 2.0,
         "fused": 1.0, "fused copy": 1.5, "lookup": 0.9, "gather 4096x4x4": 0.8,
         "gather 2048x8x4": 0.75, "store 4096 in turn": 0.5, "store 4096 at once": 0.6}  # fmt: skip


def rows_of(case: str, batch: int, pooling: int, fused: float) -> list[dict[str, Any]]:
    facts = {
        "table": "embedding", "case": case, "batch": batch, "pooling": pooling, "ranks": 4,
        "best_serial": "lookup permute", "gpu": "H200", "driver": "1", "torch": "2", "triton": "3",
        "nccl": "4", "way": "2048x8x4", "registers": 64, "spills": 0,
        "multicast": False, "date": "2026-11-21", "commit": "abc",
    }  # fmt: skip
    times = TIMES | {"fused": fused}
    timed = ("bags cat", "lookup cat", "fused", "fused copy")
    return [facts | {"arm": arm, "median_s": t * 1e-3, "host_s": 1e-4 if arm in timed else None}
            for arm, t in times.items()]  # fmt: skip


def test_sections_and_picture(tmp_path: Path):
    soak = {"table": "embedding soak", "calls": 9000, "wrong": 0, "ranks": 4, "seconds": 3.2}
    rows = [*rows_of("A, batch 4096", 4096, 1, 1.6), *rows_of("B, batch 65536", 65536, 20, 1.0),
            soak]  # fmt: skip
    (tmp_path / "embedding-4x-h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    made = tables.sections(tmp_path)
    assert set(made) == {"embedding", "embedding-host", "embedding-soak", "embedding-picture"}
    text = made["embedding"]
    # sqrt(0.8 * 0.5) = 0.632; the floor is 0.75 of which B takes 1.0
    assert "36.8% less time" in text and "at best 50.0%, at worst 20.0%" in text
    assert "75% of the floor from 16384 bags on" in text and "0.83 of the rate" in text
    assert "| 1 | 1 | 20% | 20% | 20% |" in text and "| 20 | 1 | 50% | 50% | 50% |" in text
    assert "| B, batch 65536 | 2.900 | 2.000 | lookup permute | **1.000** | 50% |" in text
    assert (
        "9,000 calls on 4 GPUs" in made["embedding-soak"] and "0 differ" in made["embedding-soak"]
    )
    tables.draw(tmp_path, tmp_path)
    assert (tmp_path / "embedding-4x.png").stat().st_size > 1000


def test_nothing_is_said_without_rows(tmp_path: Path):
    assert tables.sections(tmp_path) == {}
    tables.draw(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())
