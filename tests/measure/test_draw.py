"""Pictures: valid files of the right size that hold what was asked for, and no global state."""

import re
import struct
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from processes import python

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.canvas import DARK, DPI, LIGHT, SCREEN_IN
from counterpoint.measure.draw import FILLS, boxes, draw_timeline
from counterpoint.measure.draw_step import COLUMNS, EVENTS
from counterpoint.scale import Layout, predict
from counterpoint.spans import KINDS, Span
from counterpoint.timeline import Timeline

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
    shapes = (f"{SVG}path", f"{SVG}use")
    styles = [shape.get("style", "") for shape in root.iter() if shape.tag in shapes]
    return [style.split("fill: ")[1].split(";")[0] for style in styles if "fill: #" in style]


def words(path):
    """The texts of an .svg in the order of drawing."""
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter(f"{SVG}text")]


def figure_of(monkeypatch, draw):
    """The matplotlib figure that `draw` would have saved."""
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(canvas, "save", lambda figure, path: figures.append(figure))
        draw()
    return figures[0]


def extents(figure):
    """Text -> its box in pixels, for all texts that are seen."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden = {
        text
        for axes in figure.axes
        if not axes.axison
        for axis in (axes.xaxis, axes.yaxis)
        for text in axis.findobj(Text)
    }
    # matplotlib places the tick after the last one, and does not draw it
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = axes.xaxis.get_major_ticks()
        hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    return [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text not in hidden
    ]


def collisions(figure):
    """Pairs of texts that overlap, and texts that leave the picture."""
    boxes = extents(figure)
    pairs = [
        (text, other)
        for (text, box), (other, second) in combinations(boxes, 2)
        if box.x0 < second.x1 and second.x0 < box.x1 and box.y0 < second.y1 and second.y0 < box.y1
    ]
    page = figure.bbox
    inside = page.x0, page.y0, page.x1, page.y1
    return pairs + [
        (text, inside)
        for text, box in boxes
        if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1
    ]


def pair(num_ranks=8, *, slowest=5, factor=1.25):
    """A prediction, and a measurement `factor` as long of which one rank ends last."""
    predicted = replace(steps(num_ranks, 4), source="predicted for 8x H200")
    late_s = predicted.end_s * factor
    late = Span(slowest, "compute", late_s - 1e-6, late_s, "matmul", "late")
    return predicted, replace(
        predicted, spans=(*predicted.spans, late), source="measured on 8x H200"
    )


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
        if kind != "wait":
            assert drawn.count(FILLS[kind].lower()) == 2, kind


def test_svg_marks_each_exposed_interval(tmp_path):
    spans = (
        Span(0, "copy", 0, 10, "copy", "pull"),
        Span(0, "compute", 2, 4, "matmul", "gemm 0"),
        Span(0, "compute", 6, 8, "matmul", "gemm 1"),
    )
    drawn = fills(draw_timeline(Timeline(spans), tmp_path / "plan.svg"))
    assert drawn.count(LIGHT.exposed.lower()) == 3 + 1  # and the legend


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


def test_the_strip_of_what_is_exposed_has_a_name_where_there_is_something(tmp_path):
    hidden = Span(1, "compute", 0, 2, "opaque", "m"), Span(1, "copy", 0, 1, "copy", "c")
    exposed = Span(0, "compute", 0, 1, "matmul", "m"), Span(0, "copy", 0, 2, "copy", "c")
    texts = words(draw_timeline(Timeline((*hidden, *exposed)), tmp_path / "plan.svg"))
    assert texts.count("exposed") == 1 and "other compute" in texts and "opaque" not in texts
    assert "exposed" not in words(draw_timeline(Timeline(hidden), tmp_path / "plan.svg"))


def test_lanes_are_in_the_same_order_on_all_ranks(tmp_path):
    spans = (
        Span(0, "compute", 0, 1, "matmul", "m"),
        Span(0, "copy", 0, 1, "copy", "c"),
        Span(1, "copy", 0, 1, "copy", "c"),
        Span(1, "compute", 0, 1, "matmul", "m"),
    )
    drawn = fills(draw_timeline(Timeline(spans), tmp_path / "plan.svg"))
    colours = [FILLS[kind].lower() for kind in ("matmul", "copy")]
    assert [fill for fill in drawn if fill in colours][:4] == colours * 2


@pytest.mark.parametrize("num_steps", [20, 2000])
def test_few_things_are_drawn_however_many_spans_there_are(monkeypatch, num_steps):
    timeline = steps(2, num_steps)
    measured = []
    width = canvas.text_width_pt
    monkeypatch.setattr(canvas, "text_width_pt", lambda *a: measured.append(a) or width(*a))
    figure = figure_of(monkeypatch, lambda: draw_timeline(timeline, "x.png"))
    (axes,) = figure.axes
    points = 12 * 72
    shapes = sum(len(some.get_paths()) for some in axes.collections)
    assert shapes < 2 * 4 * points  # at most one for each point of a lane, or of a red strip
    assert len(axes.collections) + len(axes.patches) < 2 * 8
    assert len(axes.texts) + len(measured) < 2 * 3 * points / 2


def test_short_spans_join_without_more_work_than_there_is():
    kinds = ("copy", "wait", "copy", "matmul")
    spans = [Span(0, "lane", i / 10, i / 10 + 0.05, kinds[i % 4], str(i)) for i in range(400)]
    spans.append(Span(0, "lane", 50, 60, "reduce", "long"))
    found = boxes(reversed(spans), 1.0)
    assert len(found) == 41 and {box.kind for box in found} == {"copy", "reduce"}
    assert sum(box.duration_s for box in found) == pytest.approx(400 * 0.05 + 10)
    assert all(box.end_s <= after.start_s for box, after in zip(found, found[1:], strict=False))
    assert boxes(spans, 0.01) == spans


def test_all_ranks_are_shown_where_they_fit_on_a_screen(monkeypatch):
    shown = []
    for num_ranks in (4, 16):
        timeline = steps(num_ranks, 2)
        figure = figure_of(monkeypatch, lambda t=timeline: draw_timeline(t, "x.png"))
        assert figure.get_size_inches()[1] <= SCREEN_IN
        texts = [text for text, _ in extents(figure)]
        shown.append([text for text in texts if re.fullmatch(r"rank \d+", text)])
    assert shown == [[f"rank {rank}" for rank in range(4)], ["rank 0", "rank 15"]]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_letters_and_shapes_stand_out_from_the_page(theme):
    def luminance(color):
        parts = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
        return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    def contrast(color):
        high, low = sorted((luminance(color), luminance(theme.page)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    # WCAG 2.1: of letters at least 4.5
    assert (
        contrast(theme.ink) > 12 and contrast(theme.faint) > 4.5 and contrast(theme.exposed) > 4.5
    )
    assert all(contrast(hue) > 3 for hue in (canvas.BLUE, canvas.GREEN, canvas.VERMILLION))


def test_dark_pages_have_light_letters(tmp_path):
    pages = []
    for theme, dark in ((LIGHT, False), (DARK, True)):
        text = steps(1, 2).save(tmp_path / f"{theme.name}.svg", dark=dark).read_text()
        assert f"fill: {theme.ink.lower()}" in text and f"fill: {theme.page.lower()}" in text
        pages.append(text)
    assert DARK.page.lower() not in pages[0] and LIGHT.ink.lower() not in pages[1]


def test_some_ranks_of_one_timeline(tmp_path):
    seen = words(draw_timeline(steps(4, 2), tmp_path / "plan.svg", ranks=[3, 1]))
    assert [word for word in seen if re.fullmatch(r"rank \d", word)] == ["rank 1", "rank 3"]
    assert "made up, not measured; ranks 1, 3 of 4; totals are over all ranks" in seen
    whole = steps(4, 2).duration_s * 1e6
    assert f"total {whole:.1f} us" in seen


def test_a_fused_kernel_communicates_inside(tmp_path):
    timeline = Timeline((Span(0, "compute", 0, 1, "fused", "matmul_and_sum"),))
    seen = words(timeline.save(tmp_path / "fused.svg"))
    assert {"communication", "inside the kernel"} <= {*seen} and "no communication" not in seen


@pytest.mark.parametrize("swapped", [False, True])
def test_pair_has_both_sources_and_totals_and_their_ratio(tmp_path, swapped):
    timelines = pair()[::-1] if swapped else pair()
    seen = words(timelines[0].save(tmp_path / "pair.svg", beside=timelines[1]))
    # the predicted one on top, whoever was asked
    order = [w for w in seen if w.startswith(("predicted for", "measured on", "total"))]
    assert order == ["predicted for 8x H200", "total 47.0 us", "measured on 8x H200",
                     "total 58.8 us"]  # fmt: skip
    assert "predicted / measured 0.80" in seen
    assert seen.count("a title") == 1


def test_pair_shows_the_first_and_the_slowest_rank_unless_told(tmp_path):
    predicted, measured = pair(slowest=5)

    def shown(name, **ranks):
        seen = words(predicted.save(tmp_path / name, beside=measured, **ranks))
        return [w for w in seen if re.fullmatch(r"rank \d", w)], seen

    names, seen = shown("default.svg")
    assert names == ["rank 0", "rank 5"] * 2
    assert "ranks 0, 5 of 8; below, rank 5 ends last; totals are over all ranks" in seen
    assert shown("told.svg", ranks=(2,))[0] == ["rank 2"] * 2
    names, seen = shown("all.svg", ranks=range(8))
    assert names == [f"rank {rank}" for rank in range(8)] * 2
    assert "all ranks" in seen


def test_pair_of_few_ranks_shows_them_all(tmp_path):
    predicted, measured = pair(2, slowest=1)
    seen = words(predicted.save(tmp_path / "pair.svg", beside=measured))
    assert [w for w in seen if re.fullmatch(r"rank \d", w)] == ["rank 0", "rank 1"] * 2


def test_pair_has_one_time_axis_on_which_each_ends_where_it_ends(monkeypatch):
    predicted, measured = pair(2, slowest=1)
    late = Timeline(measured.shifted(-3.0).spans, source=measured.source)
    figure = figure_of(monkeypatch, lambda: draw_timeline(predicted, "x.png", beside=late))
    (axes,) = figure.axes
    totals_us = [timeline.duration_s * 1e6 for timeline in (predicted, measured)]
    assert axes.get_xlim() == pytest.approx((0, totals_us[1]))
    upper, lower = (line.get_xydata() for line in axes.lines)
    assert [upper[0, 0], lower[0, 0]] == pytest.approx(totals_us)
    # y is in inches from the top: one ends where the other has not begun
    assert upper[1, 1] < lower[0, 1]
    blue = [path.get_extents() for some in axes.collections for path in some.get_paths()
            if to_hex(some.get_facecolor()[0]) == FILLS["matmul"].lower()]  # fmt: skip
    above = [box for box in blue if box.y1 < upper[1, 1]]
    below = [box for box in blue if box.y0 > lower[0, 1]]
    assert (len(above), len(below)) == (8, 9)
    for panel, timeline in ((above, predicted), (below, measured)):
        starts_us = sorted(s.start_s * 1e6 for s in timeline.spans if s.kind == "matmul")
        assert sorted(box.x0 for box in panel) == pytest.approx(starts_us, abs=1e-6)


def test_pair_marks_what_each_exposes(tmp_path):
    one = Timeline((Span(0, "copy", 0, 4, "copy", "c"), Span(0, "compute", 1, 2, "matmul", "m")))
    other = Timeline((Span(0, "copy", 0, 4, "copy", "c"),))
    drawn = fills(draw_timeline(one, tmp_path / "pair.svg", beside=other))
    assert drawn.count(LIGHT.exposed.lower()) == 2 + 1 + 1  # and the legend


def test_pair_of_the_same_kind_is_first_and_second_and_says_whose_title(tmp_path):
    first = steps(1, 2)
    second = replace(steps(1, 4), title="another title")
    seen = words(draw_timeline(first, tmp_path / "pair.svg", beside=second))
    assert {"speedup 0.50x", "a title", "made up, not measured",
            "made up, not measured: another title"} <= {*seen}  # fmt: skip


def test_several_stand_on_one_time_axis_and_are_not_compared(tmp_path):
    panels = [replace(steps(1, n), source=f"panel {n}", title="") for n in (2, 4, 3)]
    seen = words(draw_timeline(panels[0], tmp_path / "all.svg", beside=panels[1:]))
    assert [w for w in seen if w.startswith("panel")] == ["panel 2", "panel 4", "panel 3"]
    assert len([w for w in seen if w.startswith("total")]) == 3
    assert not any(" / " in w for w in seen)


@pytest.mark.parametrize(
    ("timeline", "beside"),
    [
        pair(),
        pair(factor=40.0),
        pair(factor=1.0),
        (pair()[0], replace(pair()[1], source="measured on something " * 20)),
        (steps(2, 2), Timeline((Span(1, "a long name of a lane", 0, 0, "copy", "no length"),))),
        (pair()[0], pair()),
    ],
    ids=["as usual", "much longer", "as long", "a long source", "no length", "several"],
)
@pytest.mark.parametrize("width_in", [9.0, 12.0])
def test_no_text_of_a_pair_overlaps_another(monkeypatch, timeline, beside, width_in):
    figure = figure_of(
        monkeypatch, lambda: draw_timeline(timeline, "x.png", beside=beside, width_in=width_in)
    )
    assert not collisions(figure)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_timeline: path must be .*\.pdf, got .*plan.jpg"):
        draw_timeline(steps(1, 1), tmp_path / "plan.jpg")
    for ranks in ((0, 7), ()):
        with pytest.raises(InputError, match=r"ranks must be some of \(0, 1\), got \("):
            steps(2, 1).save(tmp_path / "plan.png", ranks=ranks)
    with pytest.raises(InputError, match=r"ranks must be some of \(0, 1\), got \(2,\)"):
        steps(2, 1).save(tmp_path / "plan.png", beside=steps(3, 1), ranks=(2,))
    apart = Timeline((Span(4, "compute", 0, 1, "matmul", "m"),))
    with pytest.raises(InputError, match=r"beside must be .* ranks \(0, 1\), got one with \(4,\)"):
        steps(2, 1).save(tmp_path / "plan.png", beside=apart)
    assert not list(tmp_path.iterdir())


def modes(model, layout):
    """Ours, and the two others beside it."""
    ours, *others = (predict(model, layout, overlap=mode) for mode in ("ours", "none", "ideal"))
    return ours, others


STEPS = {
    "405b": ("llama3-405b", Layout.on(16384, tp=8, pp=16, virtual_stages=4)),
    "experts": ("deepseek-v3", Layout.on(256, ep=32, pp=8, num_micro_batches=20)),
    "zero-bubble": ("llama3-8b", Layout.on(64, tp=4, pp=2, schedule="zero-bubble")),
    "one stage": ("llama3-8b", Layout.on(64, tp=8, cp=2)),
    "many": ("llama3-405b", Layout(tp=8, pp=64, num_micro_batches=256)),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", STEPS)
def test_no_text_of_a_step_overlaps_another_and_it_fits_on_a_screen(monkeypatch, name):
    ours, others = modes(*STEPS[name])
    figure = figure_of(monkeypatch, lambda: ours.save("x.png", beside=others))
    assert not collisions(figure)
    assert figure.get_size_inches()[1] <= SCREEN_IN
    texts = [text for text, _ in extents(figure)]
    assert "stage 0" in texts and f"stage {ours.layout.pp}" not in texts
    for part, seconds in ours.parts.items():
        assert (part in texts) == any(each.parts[part] > 0 for each in (ours, *others)), part
        assert not seconds or f"{seconds / ours.seconds:.1%}" in texts


def test_steps_that_differ_in_much_have_names_that_fit(monkeypatch):
    layouts = [
        Layout(tp=8, pp=pp, num_micro_batches=n, schedule=schedule, recompute=again)
        for pp, n in ((4, 8), (16, 32))
        for schedule in ("1f1b", "zero-bubble")
        for again in ("none", "full")
    ]
    first, *others = (predict("llama3-405b", layout) for layout in layouts)
    figure = figure_of(monkeypatch, lambda: first.save("x.png", beside=others))
    assert not collisions(figure)
    assert figure.get_size_inches()[1] <= SCREEN_IN
    with pytest.raises(InputError, match=r"Prediction.save: beside must be at most 7 pred.*got 8"):
        first.save("x.png", beside=[*others, first])
    with pytest.raises(InputError, match=r"path must be .*\.pdf, got x.jpg"):
        first.save("x.jpg")


def test_a_step_has_a_box_of_each_event_and_the_slowest_bar_above(tmp_path):
    layout = Layout(tp=2, pp=4, num_micro_batches=6, schedule="zero-bubble")
    ours, others = modes("llama3-8b", layout)
    path = ours.save(tmp_path / "step.svg", beside=others)
    drawn, bars = fills(path), 3
    for kind, same in (("forward", bars + 1), ("backward", 0), ("weight gradients", bars + 1)):
        # and one in the legend; matmuls and attention have these hues in bars and table, too
        assert drawn.count(EVENTS[kind].lower()) == 4 * 6 + 1 + same, kind
    names = [word for word in words(path) if word in ("none", "ours", "ideal")]
    assert names[:3] == ["none", "ours", "ideal"]
    assert path.read_bytes() == ours.save(tmp_path / "again.svg", beside=others).read_bytes()
    dark = ours.save(tmp_path / "dark.svg", dark=True).read_text()
    assert f"fill: {DARK.page.lower()}" in dark


def test_rows_of_very_many_events_are_images_of_as_much_work(monkeypatch):
    found = predict("llama3-405b", Layout(tp=8, pp=32, num_micro_batches=256))
    figure = figure_of(monkeypatch, lambda: found.save("x.png"))
    (axes,) = figure.axes
    assert len(axes.images) == 32
    for stage in (0, 31):
        wanted = np.array(to_rgb(LIGHT.idle)) * found.seconds
        for event, start_s, end_s in found.stages.events(stage):
            hue = np.array(to_rgb(EVENTS[event.kind]))
            wanted += (hue - np.array(to_rgb(LIGHT.idle))) * (end_s - start_s)
        image = axes.images[stage].get_array()
        assert image.shape == (1, COLUMNS, 3)
        assert np.asarray(image).mean(axis=(0, 1)) == pytest.approx(wanted / found.seconds)


def test_import_is_light_and_drawing_leaves_pyplot_alone(tmp_path):
    code = f"""
import sys
import counterpoint.machine, counterpoint.measure.trace
import counterpoint.measure.draw, counterpoint.measure.draw_step
from counterpoint.timeline import Span, Timeline
heavy = {{"torch", "triton", "matplotlib", "numpy"}} & set(sys.modules)
assert not heavy, heavy
Timeline((Span(0, "compute", 0, 1, "matmul", "gemm"),)).save({str(tmp_path / "plan.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    python("-c", code)
