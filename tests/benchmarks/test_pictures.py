"""Pictures of rows: what they say, as text of an SVG, and that equal rows give equal files."""

import re
from pathlib import Path

import matplotlib
import pytest

from benchmarks.pictures import Point, bars, curves, dots, scatter

LABELS = {"title": "A title", "source": "2x H200, 2026"}
PANELS = {"2 GPUs": {"one": {"fast": 2.0, "slow": 0.5}, "two": {"fast": 1.5}}}
POINTS = [Point("graded, 8192", "graded", 1.2e-3, 1e-3), Point("ring", "ring", 2e-4, 2.1e-4)]


def drawn(kind: str, path: Path) -> Path:
    if kind == "bars":
        cases = {"one": {"serial": 2e-3, "ours": 1e-3, "ideal": 0.8e-3}}
        return bars(cases, path, **LABELS)
    if kind == "dots":
        return dots(PANELS, {"2 GPUs": {"one": 3.0}}, path, **LABELS)
    if kind == "curves":
        return curves(
            {"rows": {"a": [(1, 1.0), (4, 2.0)]}}, path, x_label="chunks", y_label="ratio", **LABELS
        )
    return scatter(POINTS, path, **LABELS)


SAID = {
    "bars": ["one", "serial", "ours", "2.00 ms", "1.00 ms   2.00x", "share of serial"],
    "dots": ["2 GPUs", "one", "two", "fast", "slow", "the longer part alone"],
    "curves": ["rows", "a", "chunks", "ratio"],
    "scatter": ["graded, 8192  +20%", "2 points, median error 12.4%,", "1 within 10%, 2 within 25%",
                "graded: 1, median 20.0%, worst 20%"],
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_a_picture_says_what_it_shows(kind: str, tmp_path: Path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = drawn(kind, tmp_path / "a.svg").read_text()
    found = [
        " ".join(t.split()) for t in re.findall(r"<text[^>]*[^/]>(.*?)</text>", text, re.DOTALL)
    ]
    for wanted in [*SAID[kind], *LABELS.values()]:
        assert " ".join(wanted.split()) in found, (wanted, found)


@pytest.mark.parametrize("kind", SAID)
def test_equal_rows_give_equal_files(kind: str, tmp_path: Path):
    first, second = (drawn(kind, tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second and first.startswith(b"\x89PNG")
