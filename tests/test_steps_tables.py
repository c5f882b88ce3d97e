"""benchmarks/steps_tables.py: what docs/training.md and the README say of rows."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FACTS = {
    "table": "steps", "ranks": 4, "gpu": "H200", "driver": "1", "torch": "2", "triton": "3",
    "nccl": "4", "multicast": False, "date": "2026-11-21", "commit": "abc",
}  # fmt: skip
# milliseconds; pooling by our lookup takes 2, the exchange 3: hiding saves 2 at most
DLRM = {
    ("pooling", "torch"): 4.0, ("pooling", "lookup"): 2.0, ("exchange", ""): 3.0,
    ("tables", "fused"): 3.5, ("tables", "torch"): 7.0, ("tables", "lookup"): 5.0,
    ("forward", "fused"): 8.0, ("forward", "torch"): 12.0, ("forward", "lookup"): 10.0,
    ("forward + backward", "fused"): 18.0, ("forward + backward", "torch"): 24.0,
    ("forward + backward", "lookup"): 20.0,
}  # fmt: skip
EXPERTS = {
    ("matmuls", "forward"): 4.0, ("exchanges", "forward"): 1.0,
    ("matmuls", "forward + backward"): 12.0, ("exchanges", "forward + backward"): 2.0,
    ("forward", "fused"): 5.0, ("forward", "fused, host"): 5.5, ("forward", "serial"): 9.0,
    ("forward", "torch"): 8.0, ("forward", "torch, counts"): 6.0,
    ("forward + backward", "fused"): 16.0, ("forward + backward", "fused, host"): 17.0,
    ("forward + backward", "serial"): 14.0, ("forward + backward", "torch"): 20.0,
    ("forward + backward", "torch, counts"): 15.0,
}  # fmt: skip


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("steps_tables")


def rows_of(model: str, size: int, ms: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    facts = FACTS | {"model": model, "size": size}
    return [facts | {"what": what, "way": way, "median_s": t * 1e-3}
            for (what, way), t in ms.items()]  # fmt: skip


def write(results: Path, ranks: int, rows: list[dict[str, Any]]) -> None:
    lines = (json.dumps(row | {"ranks": ranks}) + "\n" for row in rows)
    (results / f"steps-{ranks}x-h200.jsonl").write_text("".join(lines))


def cells(text: str, start: str) -> list[str]:
    """Of the one line of a table that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_what_the_page_says(tables: ModuleType, tmp_path: Path):
    rows = rows_of("DLRM-DCNv2", 16384, DLRM) + rows_of("Mixtral-8x7B", 1024, EXPERTS)
    write(tmp_path, 4, rows)
    (text,) = tables.sections(tmp_path).values()
    assert cells(text, "DLRM-DCNv2, 16384, forward") == [
        "12.000", "10.000", "**8.000**", "33%", "20%", "2.000", "2.000", "3.000", "100%"
    ]  # fmt: skip
    whats = [line.split("|")[1].strip() for line in text.splitlines() if "| DLRM-" in line]
    assert whats == [f"DLRM-DCNv2, 16384, {w}" for w in ("tables", "forward", "forward + backward")]
    assert cells(text, "Mixtral-8x7B, 1024, forward") == [
        "8.000", "6.000", "9.000", "5.500", "**5.000**", "38%", "17%", "1.000", "4.000", "1.000",
        "100%",
    ]  # fmt: skip
    # slower than serial, which is the fastest there
    assert cells(text, "Mixtral-8x7B, 1024, forward + backward") == [
        "20.000", "15.000", "14.000", "17.000", "**16.000**", "20%", "-14%", "-2.000", "12.000",
        "2.000", "-100%",
    ]  # fmt: skip
    assert "tables 50% less time than torch, 30% less than the fastest" in text
    assert "4x H200, bf16, driver 1" in text and "commit abc" in text


def test_means_and_the_readme_are_of_most_gpus(tables: ModuleType, tmp_path: Path):
    slower = {arm: 2 * t if arm[1] == "fused" else t for arm, t in DLRM.items()}
    write(tmp_path, 2, rows_of("DLRM-DCNv2", 16384, slower))
    write(tmp_path, 4, rows_of("DLRM-DCNv2", 16384, DLRM) + rows_of("DLRM-DCNv2", 65536, slower))
    text = tables.sections(tmp_path)["steps"]
    assert text.index("**4 GPUs**") < text.index("**2 GPUs**")
    # forward: 8 / 10 and 16 / 10, sqrt(1.28) = 1.131
    assert "forward 6% less time than torch, 13% more than the fastest" in text
    assert "that is not fused (60% more at worst)" in text
    said = tables.readme(tmp_path)
    # 18 / 24 and 36 / 24, 18 / 20 and 36 / 20
    assert said == (
        "[Whole steps](docs/training.md#whole-steps), forward and backward, on 4x H200, in the "
        "mean: a DLRM 6% more time than with torch's own operators, 27% more than the fastest "
        "way that is not fused (2 sizes)."
    )


def test_picture(tables: ModuleType, tmp_path: Path):
    write(tmp_path, 4, rows_of("Mixtral-8x7B", 1024, EXPERTS))
    write(tmp_path, 2, rows_of("Mixtral-8x7B", 1024, EXPERTS))
    tables.draw(tmp_path, tmp_path)
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_without_rows(tables: ModuleType, tmp_path: Path):
    assert tables.sections(tmp_path) == {"steps": "Not measured yet."}
    assert tables.readme(tmp_path) == ""
    tables.draw(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())
