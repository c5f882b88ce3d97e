"""Pictures: valid files of the right size that hold what was asked for, and no global state."""

import struct
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from counterpoint.errors import InputError
from counterpoint.measure.canvas import DPI
from counterpoint.measure.draw import EXPOSED, LOOKS, draw_timeline
from counterpoint.timeline import KINDS, Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def steps(num_ranks, num_steps):
    spans = []
    for rank in range(num_ranks):
        for i in range(num_steps):
            start_s = (rank + 10 * i) * 1e-6
            spans.append(Span(rank, "compute", start_s, start_s + 9e-6, "matmul", f"gemm {i}"))
            spans.append(Span(rank, "copy", start_s, start_s + 6e-6, "copy", f"pull_{i}"))
            spans.append(Span(rank, "sum", start_s + 9e-6, start_s + 1e-5, "reduce", "$1 $2"))
    return Timeline(tuple(spans), title="a title", source="made up, not measured")


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def fills(path):
    """Count of the drawn shapes by their fill colour."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    styles = [path.get("style", "") for path in root.iter(f"{SVG}path")]
    return [style.split("fill: ")[1].split(";")[0] for style in styles if "fill: #" in style]


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(1, 1), (1, 20), (4, 20)])
def test_png_has_the_width_asked_for_and_grows_with_the_lanes(tmp_path, num_ranks, num_steps):
    path = draw_timeline(steps(num_ranks, num_steps), tmp_path / "plan.png", width_in=10)
    width, height = png_size(path)
    assert width == 10 * DPI
    assert 0.3 * 3 * num_ranks * DPI < height < (2 + 1.2 * num_ranks) * DPI


def test_svg_has_each_span_in_the_colour_of_its_kind(tmp_path):
    spans = (Span(0, f"lane {i}", i, i + 1, kind, kind) for i, kind in enumerate(KINDS))
    drawn = fills(draw_timeline(Timeline(tuple(spans)), tmp_path / "plan.svg"))
    for kind in KINDS:
        # once in the picture and once in the legend; hatched fills are patterns
        if not LOOKS[kind][1]:
            assert drawn.count(LOOKS[kind][0].lower()) == 2, kind


def test_svg_marks_each_exposed_interval(tmp_path):
    spans = (
        Span(0, "copy", 0, 10, "copy", "pull"),
        Span(0, "compute", 2, 4, "matmul", "gemm 0"),
        Span(0, "compute", 6, 8, "matmul", "gemm 1"),
    )
    drawn = fills(draw_timeline(Timeline(spans), tmp_path / "plan.svg"))
    assert drawn.count(EXPOSED.lower()) == 3 + 1  # and the legend


def test_same_timeline_gives_the_same_svg(tmp_path):
    paths = [draw_timeline(steps(2, 3), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline((Span(0, "compute", 0, 0, "matmul", "no length"),)),
        Timeline((Span(0, "compute", 0, 1e-3, "matmul", "no communication"),)),
        Timeline((Span(3, "copy", 5.0, 5.1, "copy", "only communication"),), title="x" * 400),
    ],
    ids=["no length", "no communication", "only communication"],
)
def test_degenerate_timelines_are_drawn(tmp_path, timeline):
    assert png_size(timeline.save(tmp_path / "plan.png"))[0] == 12 * DPI


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_save_draws_every_picture_suffix(tmp_path, suffix):
    path = steps(1, 2).save(str(tmp_path / f"plan{suffix}"))
    start = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[suffix]
    assert path.read_bytes().startswith(start)


def test_lanes_are_in_the_same_order_on_all_ranks(tmp_path):
    spans = (
        Span(0, "compute", 0, 1, "matmul", "m"),
        Span(0, "copy", 0, 1, "copy", "c"),
        Span(1, "copy", 0, 1, "copy", "c"),
        Span(1, "compute", 0, 1, "matmul", "m"),
    )
    drawn = fills(draw_timeline(Timeline(spans), tmp_path / "plan.svg"))
    colours = [LOOKS[kind][0].lower() for kind in ("matmul", "copy")]
    assert [fill for fill in drawn if fill in colours][:4] == colours * 2


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_timeline: path must be .*\.pdf, got .*plan.jpg"):
        draw_timeline(steps(1, 1), tmp_path / "plan.jpg")


def test_import_is_light_and_drawing_leaves_pyplot_alone(tmp_path):
    code = f"""
import sys
import counterpoint.machine, counterpoint.measure.trace
import counterpoint.measure.bars, counterpoint.measure.draw
from counterpoint.timeline import Span, Timeline
heavy = {{"torch", "triton", "matplotlib", "numpy"}} & set(sys.modules)
assert not heavy, heavy
Timeline((Span(0, "compute", 0, 1, "matmul", "gemm"),)).save({str(tmp_path / "plan.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    env = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
