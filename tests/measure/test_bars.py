"""Bars: valid files, and no row or time that means nothing."""

import struct

import pytest
from counterpoint.measure.bars import BarRow, draw_bars

from counterpoint.errors import InputError
from counterpoint.measure.canvas import DPI


def rows():
    return [
        BarRow(label="8192, 1280, 8192", serial_s=613e-6, ours_s=425e-6, ideal_s=390e-6),
        BarRow(label="512, 7168, 8192", serial_s=144e-6, ours_s=151e-6, ideal_s=94e-6),
    ]


@pytest.mark.parametrize("relative", [False, True])
def test_bars(tmp_path, relative):
    path = draw_bars(
        rows(), tmp_path / "bars.png", title="t", source="s", relative_to_serial=relative
    )
    width = struct.unpack(">I", path.read_bytes()[16:20])[0]
    assert width == 9 * DPI
    assert b"<svg" in draw_bars(rows(), tmp_path / "bars.svg").read_bytes()


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_bars: path must be .*\.pdf, got .*plan.json"):
        draw_bars(rows(), tmp_path / "plan.json")
    with pytest.raises(InputError, match="rows must be at least one row, got none"):
        draw_bars([], tmp_path / "bars.png")
    with pytest.raises(InputError, match=r"ours_s must be above 0, got 0.0"):
        BarRow(label="x", serial_s=1.0, ours_s=0.0, ideal_s=1.0)
