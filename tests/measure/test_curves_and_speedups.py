"""Curves and speedups: valid files of the right size, and nothing that means nothing."""

import struct
from pathlib import Path

import pytest
from counterpoint.measure.curves import GAP, LEFT, PLOT_WIDTH, Curves, draw_curves
from counterpoint.measure.speedups import Speedups, draw_speedups

from counterpoint.errors import InputError
from counterpoint.measure.canvas import DPI

CURVES = [
    Curves("rows", {"wide": [(1, 1.0), (4, 1.1)], "narrow": [(1, 1.0), (4, 2.5)]}),
    Curves("K", {"wide": [(1, 1.0), (64, 20.0)]}),
]
ROWS = {"AG 8, 8, 8": {"graded": 1.3, "finer": 0.8}, "RS 8, 8, 8": {"graded": 1.1, "finer": 0.7}}
IDEALS = {"AG 8, 8, 8": 1.5, "RS 8, 8, 8": 1.2}


def width_of(path: Path) -> int:
    return struct.unpack(">I", path.read_bytes()[16:20])[0]


def test_curves(tmp_path: Path):
    path = draw_curves(CURVES, tmp_path / "c.png", title="t", source="s", x_label="x", y_most=8.0)
    assert width_of(path) == int((LEFT + 2 * (PLOT_WIDTH + GAP)) * DPI)
    text = draw_curves(CURVES, tmp_path / "c.svg", y_label="pieces / whole").read_text()
    assert text.count('<g id="axes_') == 2


def test_speedups(tmp_path: Path):
    panels = [Speedups("mesh", ROWS, IDEALS), Speedups("switch", ROWS, {})]
    one = draw_speedups(panels[:1], tmp_path / "s.png")
    assert width_of(draw_speedups(panels, tmp_path / "t.png", title="t")) > width_of(one)
    assert draw_speedups(panels, tmp_path / "s.svg").read_text().count('<g id="axes_') == 2


def test_what_means_nothing_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="panels must be at least one panel, got none"):
        draw_curves([], tmp_path / "c.png")
    with pytest.raises(InputError, match="panels must be one or more, of equal rows"):
        draw_speedups([Speedups("a", ROWS, {}), Speedups("b", dict([*ROWS.items()][:1]), {})],
                      tmp_path / "s.png")  # fmt: skip
    with pytest.raises(InputError, match=r"path must be .*, got .*plan.json"):
        draw_curves(CURVES, tmp_path / "plan.json")
    for wrong in ({}, {"wide": []}, {"wide": [(1, 0.0)]}, {"wide": [(0, 1.0)]}):
        with pytest.raises(InputError, match="Curves"):
            Curves("rows", wrong)
    for rows in ({}, {"x": {}}, {"x": {"graded": -1.0}}):
        with pytest.raises(InputError, match="Speedups"):
            Speedups("mesh", rows, {})
