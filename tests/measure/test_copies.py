"""What benchmarks/copies.py times, without a GPU: where copies go, and what its rows become."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counterpoint.measure.copies import COUNTS, SIZES, Direction

from counterpoint.measure import copies, record

ROOT = Path(__file__).parents[2]
BASE = 1 << 40


def bench(rank: int, ranks: int) -> Any:
    """A rank's part of the benchmark, on paper: rank r's memory begins at r * BASE."""
    made: Any = copies._Copies.__new__(copies._Copies)
    made.rank, made.ranks = rank, ranks
    made.others = copies.ring(rank, ranks)
    made.target = SimpleNamespace(buffer_ptrs=[r * BASE for r in range(ranks)])
    made.source = SimpleNamespace(buffer_ptrs=[r * BASE + BASE // 2 for r in range(ranks)])
    return made


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_slot_is_written_once_by_who_is_said_to(ranks: int, direction: Direction):
    count, size = 2 * ranks + 1, 4096
    written = Counter[tuple[int, int]]()
    for rank in range(ranks):
        for i, copy in enumerate(bench(rank, ranks).copies(size, count, direction)):
            to, start = divmod(copy.target, BASE)
            at, read = divmod(copy.source - BASE // 2, BASE)
            assert start == read == i * size
            assert (copy.width, copy.height) == (size, 1)
            assert rank == (at if direction == "push" else to) and at != to
            assert bench(to, ranks).sender(i, direction) == at
            written[to, i] += 1
    assert written == {(rank, i): 1 for rank in range(ranks) for i in range(count)}


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_ranks_in_step_never_meet_on_the_way_into_one(ranks: int):
    for i in range(2 * ranks):
        pairs = [bench(rank, ranks).ends(i + 1, "push")[i] for rank in range(ranks)]
        assert len({to for *_, to in pairs}) == ranks


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location(
        "copies_tables", ROOT / "benchmarks" / "copies_tables.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copies_tables", module)
    spec.loader.exec_module(module)
    return module


FACTS = {"table": "copies", "ranks": 4, "gpu": "a GPU", "driver": "1", "torch": "2", "nccl": "3",
         "multicast": False, "date": "2026-11-21", "commit": "abc"}  # fmt: skip
STARTS = {"torch copy_": 12e-6, "driver": 8e-6, "batch": 4e-6, "graph": 5e-6}  # of each copy


def rows(*, late: bool = True) -> list[dict[str, Any]]:
    """Copies that start in so long and then go at 200 GB/s; a transport that is missing."""
    found: list[dict[str, Any]] = [
        {"question": "submission", "num_bytes": size, "count": count, "way": way,
         "direction": direction, "ahead": ahead, "seconds": count * (start_s + size / 200e9)}
        for size in SIZES for count in COUNTS for direction in ("push", "pull")
        for way, start_s in STARTS.items() for ahead in (False, True)
        if not (ahead and way == "torch copy_")
    ]  # fmt: skip
    found += [
        {"question": "strided", "num_bytes": 4 << 20, "count": 3, "row_bytes": width,
         "direction": "push", "seconds": seconds}
        for width, seconds in ((4 << 20, 60e-6), (2048, 120e-6))
    ]  # fmt: skip
    found += [
        {"question": "late rank", "order": order, "num_bytes": 16 << 20, "count": 12,
         "late_copies": n, "late_s": n * 5e-5, "seconds": 12 * seconds}
        for order, seconds in (("ring", 5e-5), ("the same for all", 8e-5)) for n in (0.0, 0.5)
        if late
    ]  # fmt: skip
    found += [
        {"question": "transport", "transport": label, "op": op, "num_bytes": size,
         "seconds": size / 100e9}
        for label in ("NCCL", "copy engine") for op in ("all_gather", "all_to_all")
        for size in (1 << 20, 4 << 20)
    ]  # fmt: skip
    found.append({"question": "transport", "transport": "NCCL, zero-CTA", "refused": "NVLS is on"})
    return [row | FACTS for row in found]


def test_without_rows_nothing_is_said_or_drawn(tables: Any, tmp_path: Path):
    assert tables.sections(tmp_path, tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_tables_of_rows(tables: Any, tmp_path: Path):
    record.append(tmp_path / "copies-4x-h200.jsonl", rows())
    found = tables.sections(tmp_path, tmp_path)
    page = (ROOT / "docs" / "transports.md").read_text()
    assert all(page.count(f"<!-- {name}:start -->\n") == 1 for name in found)
    # 1 MiB at 200 GB/s is 5.24 us: 56 of 9.24, 17.24, 13.24 and 10.24 us
    assert (
        "| push | `copy_` of torch, one by one | 966 | 518 | 54% | 40%: missed |"
        in (found["batch"])
    )
    assert "| pull | calls of the driver, one by one | 742 | 518 | 70% | - |" in found["batch"]
    assert "| push | a graph of single copies | 574 | 518 | 90% | 80%: missed |" in found["batch"]
    batch = "| one batch | push | 56 | 15 | 49 | 113 | 168 | 191 | 198 |"
    assert batch in found["submission"] and batch in found["ahead"]
    assert "torch" not in found["ahead"], "what is not ahead of the GPU"
    assert "| 4 MiB | 3 | push | one | 60 | 210 |" in found["strided"]
    assert "| 4 MiB | 3 | push | of 2 KiB | 120 | 105 |" in found["strided"]
    assert "| ring | 600 (336) | 600 (336) |" in found["late"]
    assert "| all_gather | copy engine | 10 | 42 |" in found["transports"]
    assert "NCCL, zero-CTA was missing: NVLS is on." in found["transports"]
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["copies.png", "transports.png"]


def test_a_bar_that_is_met(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STARTS, "batch", 0.1e-6)
    monkeypatch.setitem(STARTS, "graph", 2e-6)
    record.append(tmp_path / "copies-4x-h200.jsonl", rows(late=False))
    found = tables.sections(tmp_path, tmp_path)
    assert "| 31% | 40%: met |" in found["batch"]
    assert "| 74% | 80%: met |" in found["batch"]
    assert "late" not in found, "two ranks have one peer each"
