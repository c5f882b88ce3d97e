"""Scatter: the numbers it states, the looks of its groups, and that no text lies on another."""

import random
from itertools import product
from math import inf, nan

import pytest
from counterpoint.measure.scatter import BANDS, HUES, MARKERS, Point, draw_scatter
from test_draw import collisions, extents, figure_of, fills, png_size, words

from counterpoint.errors import InputError
from counterpoint.measure.canvas import DPI


def points():
    return [
        Point("a", "graded", 1.05e-4, 1e-4),
        Point("b", "graded", 0.9e-3, 1e-3),
        Point("c", "serial", 1.2e-3, 1e-3),
        Point("d", "serial", 0.6e-2, 1e-2),
        Point("e", "serial", 1e-2, 1e-2),
    ]


def cloud(seed, *, num_points=120, spread=0.08, num_groups=5, name="all_gather_matmul 8192, 7168"):
    rng = random.Random(seed)
    made = []
    for i in range(num_points):
        measured_s = 10 ** rng.uniform(-5, -2)
        factor = 2 ** rng.gauss(0, spread)
        group = f"group {i % num_groups}"
        made.append(Point(f"{name} {i}", group, measured_s * factor, measured_s))
    return made


def curves(figure):
    """The lines of the picture by whether they are markers: x and y of each."""
    lines = figure.axes[0].lines
    markers = [line for line in lines if line.get_marker() != "None"]
    return markers, [line for line in lines if line not in markers]


def test_numbers_of_all_and_of_each_group(tmp_path):
    path = draw_scatter(points(), tmp_path / "s.svg", title="a title", source="made up")
    seen = words(path)
    assert {
        "a title", "made up", "measured time", "predicted time", "predicted = measured",
        "5 points", "median error 10%", "worst error -40%", "error: predicted / measured - 1",
        "within 10%: 3 of 5", "within 25%: 4 of 5",
        "graded", "2 points, median 7.5%, worst -10%",
        "serial", "3 points, median 20%, worst -40%",
    } <= {*seen}  # fmt: skip


def test_measured_is_x_and_predicted_is_y_on_equal_axes(monkeypatch):
    figure = figure_of(monkeypatch, lambda: draw_scatter(points(), "x.png"))
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlim() == axes.get_ylim()
    box = axes.get_window_extent()
    assert box.width == pytest.approx(box.height)
    markers, lines = curves(figure)
    drawn = {(x, y) for line in markers for x, y in line.get_xydata()}
    assert drawn == {(p.measured_s, p.predicted_s) for p in points()}
    # the diagonal is the first line
    assert [tuple(end) for end in lines[0].get_xydata()] == [(t, t) for t in axes.get_xlim()]


def test_bands_are_relative_to_the_measured_time(monkeypatch, tmp_path):
    figure = figure_of(monkeypatch, lambda: draw_scatter(points(), "x.png"))
    for (error, _), patch in zip(BANDS, figure.axes[0].patches, strict=True):
        ratios = {round(y / x, 6) for x, y in patch.get_xy()}
        assert ratios == {1 + error, 1 - error}
    drawn = fills(draw_scatter(points(), tmp_path / "s.svg"))
    for _, fill in BANDS:
        assert drawn.count(fill.lower()) == 2  # and in the legend


def test_groups_differ_in_marker_and_colour_in_order_of_appearance(monkeypatch):
    groups = [f"group {i}" for i in range(9)]
    many = [Point(f"{g} {i}", g, 1e-4, 2e-4) for i, g in enumerate(groups) for _ in range(i + 1)]
    figure = figure_of(monkeypatch, lambda: draw_scatter(many, "x.png", num_labels=0))
    looks = {line.get_xydata().shape[0] - 1: line for line in curves(figure)[0]}
    assert sorted(looks) == list(range(9))
    seen = {(looks[i].get_marker(), looks[i].get_color()) for i in looks}
    assert len(seen) == 9
    assert (looks[8].get_marker(), looks[8].get_color()) == (MARKERS[0], HUES[1])
    # large groups lie below the small ones
    assert [len(line.get_xydata()) for line in curves(figure)[0]] == list(range(9, 0, -1))


def test_pairs_of_looks_repeat_late():
    looks = {(MARKERS[i % len(MARKERS)], HUES[i % len(HUES)]) for i in range(56)}
    assert looks == set(product(MARKERS, HUES))


@pytest.mark.parametrize("num_labels", [0, 1, 3, 99])
def test_the_worst_are_named_with_a_line_to_each(monkeypatch, num_labels):
    figure = figure_of(monkeypatch, lambda: draw_scatter(points(), "x.png", num_labels=num_labels))
    worst = ["d  -40%", "c  +20%", "b  -10%", "a  +5.0%", "e  +0.0%"][:num_labels]
    named = [text for text, _ in extents(figure) if "  " in text]
    assert named == worst
    starts = [line.get_xydata()[0] for line in curves(figure)[1][1:]]
    by_label = {p.label: (p.measured_s, p.predicted_s) for p in points()}
    for (x, y), text in zip(starts, worst, strict=True):
        assert (x, y) == pytest.approx(by_label[text[0]])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spread", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("width_in", [8.0, 9.0])
def test_no_text_overlaps_another_or_leaves_the_picture(monkeypatch, seed, spread, width_in):
    made = cloud(seed, spread=spread)
    figure = figure_of(
        monkeypatch,
        lambda: draw_scatter(made, "x.png", title="t", num_labels=5, width_in=width_in),
    )
    assert not collisions(figure)


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_labels_leave_markers_of_a_usual_model_alone(monkeypatch, spread):
    made = cloud(1, spread=spread)
    figure = figure_of(monkeypatch, lambda: draw_scatter(made, "x.png"))
    labels = [box for text, box in extents(figure) if "  " in text]
    assert len(labels) == 3
    at_px = figure.axes[0].transData.transform([(p.measured_s, p.predicted_s) for p in made])
    for box in labels:
        assert not any(box.contains(x, y) for x, y in at_px)


@pytest.mark.parametrize(
    "made",
    [
        points()[:1],
        cloud(0, num_points=60, num_groups=20),
        cloud(0, name="$x^2$ of\ntwo lines " + 40 * "and long "),
        [Point("far", "g" * 90, 1.0, 1e-7), Point("near", "", 1e-7, 1e-7)],
    ],
    ids=["one", "many groups", "long names", "far off"],
)
def test_unusual_points_are_drawn(monkeypatch, tmp_path, made):
    assert not collisions(figure_of(monkeypatch, lambda: draw_scatter(made, "x.png")))
    assert png_size(draw_scatter(made, tmp_path / "new" / "s.png", width_in=8))[0] == 8 * DPI


def test_limits_make_pictures_comparable(monkeypatch):
    limits_s = (1e-6, 1.0)
    figure = figure_of(monkeypatch, lambda: draw_scatter(points(), "x.png", limits_s=limits_s))
    assert figure.axes[0].get_xlim() == figure.axes[0].get_ylim() == limits_s
    ticks = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert ticks == ["1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s"]


def test_ticks_are_dense_where_there_is_room(monkeypatch):
    figure = figure_of(
        monkeypatch, lambda: draw_scatter(points()[:1], "x.png", limits_s=(4e-5, 1.2e-3))
    )
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        ticks = [text.get_text() for text in axis.get_ticklabels() if text.get_text()]
        assert ticks == ["50 us", "100 us", "200 us", "500 us", "1 ms"]


def test_same_points_give_the_same_svg(tmp_path):
    paths = [draw_scatter(cloud(3), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_every_picture_suffix(tmp_path, suffix):
    start = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[suffix]
    assert draw_scatter(points(), tmp_path / f"s{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("field", ["predicted_s", "measured_s"])
@pytest.mark.parametrize("time_s", [0.0, -1e-3, nan, inf])
def test_a_time_that_is_none_is_refused(field, time_s):
    times_s = {"predicted_s": 1.0, "measured_s": 1.0, field: time_s}
    with pytest.raises(
        InputError, match=rf"Point: {field} must be above 0 and finite \('p'\), got"
    ):
        Point("p", "g", **times_s)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_scatter: path must be .*\.pdf, got .*s.json"):
        draw_scatter(points(), tmp_path / "s.json")
    with pytest.raises(InputError, match="points must be at least one point, got none"):
        draw_scatter([], tmp_path / "s.png")
    with pytest.raises(InputError, match="num_labels must be 0 or more, got -1"):
        draw_scatter(points(), tmp_path / "s.png", num_labels=-1)
    for limits_s in ((1e-4, 1e-3), (0.0, 1.0), (1.0, 1e-5), (nan, 1.0)):
        with pytest.raises(
            InputError, match=r"limits_s must be \(low, high\) around 0.0001 to 0.01"
        ):
            draw_scatter(points(), tmp_path / "s.png", limits_s=limits_s)
    with pytest.raises(InputError, match=r"num_labels must be \d+ or fewer, .* room for, got 120"):
        draw_scatter(cloud(0), tmp_path / "s.png", num_labels=120)
    assert not list(tmp_path.iterdir())
