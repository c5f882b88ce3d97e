"""Ratios: what is drawn where, what shaping won, and no text on another, on a curve or off."""

import random
from html import unescape
from itertools import pairwise
from math import inf, nan

import pytest
from counterpoint.measure.ratios import Curve, Panel, draw_ratios
from test_draw import collisions, extents, figure_of, png_size, words

from counterpoint.errors import InputError
from counterpoint.measure.canvas import set_apart

TITLES = ("cb cuBLAS + all-reduce", "mb Triton 128x256x64 + all-to-all",
          "cb Triton 128x256x64 + reduce-scatter", "mb cuBLAS + all-gather", "cb + broadcast",
          "mb + all-reduce", "cb + all-to-all")  # fmt: skip
BLOCKS = {
    "cuBLAS": [1],
    "Triton 128x256x64": [1, 2],
    "Triton 128x128x64": [1, 2, 3],
    "Triton 64x64x64": [1, 2, 3, 4, 6, 8],
    "Triton 32x64x32": [1, 2, 3, 4, 6, 8, 14, 16],
}


def panels(num_panels=4, seed=0, labels=tuple(BLOCKS)):
    """Ratios that fall from the unshaped kernel to a best one, and rise again from there."""
    rng = random.Random(seed)
    made = []
    for title in TITLES[:num_panels]:
        ideal, curves = rng.uniform(0.55, 0.8), []
        for label in labels:
            best, best_ratio = rng.choice(BLOCKS[label]), rng.uniform(ideal, 0.9)
            for dashed in (False, True):
                slope = rng.uniform(0.01, 0.05)
                points = [(b, best_ratio + slope * abs(b - best) ** 0.7) for b in BLOCKS[label]]
                curves.append(Curve(label, points, dashed))
        made.append(Panel(title, curves, ideal))
    return made


def small():
    solid = Curve("a", [(4, 0.95), (1, 0.9), (2, 0.7)])
    return Panel("p", [solid, Curve("a", [(1, 0.97), (4, 0.98)], dashed=True),
                       Curve("b", [(16, 0.8)])], 0.6)  # fmt: skip


def drawn(axes):
    """The curves and the hollow markers: (colour, dashed, points)."""
    marked = [line for line in axes.lines if line.get_marker() != "None"]
    curves, hollow = [], []
    for line in marked:
        look = line.get_color(), line.is_dashed(), line.get_xydata().tolist()
        (hollow if line.get_markerfacecolor() == "white" else curves).append(look)
    return curves, hollow


def test_numbers_and_names(tmp_path):
    made = [small(), Panel("q", [Curve("b", [(1, 0.8), (2, 0.75)])], None),
            Panel("r", [Curve("a", [(1, 0.8), (2, 1.1)])], 0.5)]  # fmt: skip
    path = draw_ratios(made, tmp_path / "r.svg", title="a title", source="made up")
    seen = [unescape(word) for word in words(path)]
    assert {
        "a title", "made up", "p", "q", "r", "a", "b", "sequential", "ideal 0.60", "ideal 0.50",
        "a: 0.95 -> 0.70 at 2 per SM", "b: 0.75 unshaped", "a: 1.10 -> 0.80 at 1 per SM",
        "TimeRatio (lower is better)", "resident blocks per SM", "with priority",
        "without priority", "unshaped: as many as fit", "1", "2", "4", "16",
    } <= {*seen}  # fmt: skip
    assert seen.count("a") == 2  # once for solid and dashed
    assert seen.count("sequential") == 3
    assert sum(word.startswith("ideal") for word in seen) == 2
    alone = words(draw_ratios(made[1:], tmp_path / "solid.svg"))
    assert not any("priority" in word for word in alone)


def test_a_step_for_each_number_of_blocks_and_the_unshaped_is_hollow(monkeypatch):
    (axes,) = figure_of(monkeypatch, lambda: draw_ratios([small()], "x.png")).axes
    (solid, dashed, other), hollow = drawn(axes)
    # 1, 2, 4, 16 are 0 to 3
    assert solid[1:] == (False, [[0, 0.9], [1, 0.7], [2, 0.95]])
    assert dashed[1:] == (True, [[0, 0.97], [2, 0.98]])
    assert other[1:] == (False, [[3, 0.8]])
    assert solid[0] == dashed[0] != other[0]
    assert [points for _, _, points in hollow] == [[[2, 0.95]], [[2, 0.98]], [[3, 0.8]]]
    levels = {line.get_ydata()[0]: line.get_linestyle() for line in axes.lines
              if line.get_marker() == "None" and list(line.get_xdata()) == [0, 1]}  # fmt: skip
    assert levels == {1.0: "-", 0.6: ":"}


def test_panels_share_the_ratios_and_the_colours(monkeypatch):
    made = [panels(1)[0], small(), Panel("q", [Curve("cuBLAS", [(1, 1.4)])], 0.3)]
    figure = figure_of(monkeypatch, lambda: draw_ratios(made, "x.png"))
    limits = {axes.get_ylim() for axes in figure.axes}
    assert len(limits) == 1
    low, high = limits.pop()
    assert low < 0.3 and high > 1.4
    first, _, last = (drawn(axes)[0] for axes in figure.axes)
    assert first[0][0] == last[0][0]
    assert len({colour for colour, _, _ in first}) == 5


def test_at_most_four_panels_stand_beside_each_other(monkeypatch, tmp_path):
    sizes = [png_size(draw_ratios(panels(n), tmp_path / f"{n}.png")) for n in (1, 2, 4, 7)]
    assert sizes[0][0] < sizes[1][0] <= sizes[2][0] == sizes[3][0]
    assert sizes[2][1] < sizes[3][1]
    figure = figure_of(monkeypatch, lambda: draw_ratios(panels(7), "x.png"))
    tops = [round(axes.get_position().y1, 6) for axes in figure.axes]
    assert [tops.count(top) for top in dict.fromkeys(tops)] == [4, 3]


def unusual():
    long = Curve("a long name of a kernel " * 4, [(b, 0.01 * b) for b in range(1, 65)])
    flat = [Curve(f"kernel {i}", [(1, 1.0), (2, 1.0)], dashed=i % 2 == 0) for i in range(20)]
    return [
        Panel("a long name of a pair " * 9, [long, Curve("$1 $2", [(1, 5.0)])], 1.0),
        Panel("", flat, 1.0),
        Panel("q", [Curve("", [(1, 1.0)])], None),
        small(),
    ]


@pytest.mark.parametrize(
    "made",
    [*(panels(n, seed=n) for n in (1, 2, 3, 4, 7)), panels(4, 1, ("cuBLAS",)), unusual()],
    ids=["one", "two", "three", "four", "seven", "one point each", "unusual"],
)
def test_no_text_lies_on_another_or_on_a_curve_or_off_the_sheet(monkeypatch, made):
    figure = figure_of(
        monkeypatch,
        lambda: draw_ratios(made, "x.png", title="What shaping wins", source="8x H200, " * 9),
    )
    assert not collisions(figure)
    # curves end with their axes
    plots = [axes.get_window_extent() for axes in figure.axes]
    for text, box in extents(figure):
        assert not any(
            box.x0 < plot.x1 and plot.x0 < box.x1 and box.y0 < plot.y1 and plot.y0 < box.y1
            for plot in plots
        ), text
    page = figure.bbox
    for plot in plots:
        assert plot.x0 >= 0 and plot.y0 >= 0 and plot.x1 <= page.x1 and plot.y1 <= page.y1


def test_each_label_is_where_its_curve_ends_if_there_is_room(monkeypatch):
    far = Panel("p", [Curve("high", [(1, 0.5), (2, 0.9)]), Curve("low", [(1, 1.2), (2, 0.7)])], 0.5)
    figure = figure_of(monkeypatch, lambda: draw_ratios([far], "x.png"))
    (axes,) = figure.axes
    boxes = dict(extents(figure))
    for text, ratio in (("sequential", 1.0), ("high", 0.9), ("low", 0.7), ("ideal 0.50", 0.5)):
        at = axes.transData.transform((0, ratio))[1]
        assert boxes[text].y0 < at < boxes[text].y1


def test_places_are_a_step_apart_and_the_nearest():
    assert set_apart([0.2, 0.5, 0.9], 0.1, 1.0) == pytest.approx([0.2, 0.5, 0.9])
    assert set_apart([0.5, 0.5, 0.9], 0.1, 1.0) == pytest.approx([0.45, 0.55, 0.9])
    assert set_apart([0.0, 0.0, 1.0, 1.0], 0.1, 1.0) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    rng = random.Random(0)
    for _ in range(50):
        places = set_apart(sorted(rng.random() for _ in range(9)), 0.1, 1.0)
        assert all(after - before > 0.1 - 1e-9 for before, after in pairwise(places))
        assert places[0] > -1e-9 and places[-1] < 1 + 1e-9


def test_same_panels_give_the_same_svg(tmp_path):
    paths = [draw_ratios(panels(), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_ratios: path must be .*\.pdf, got .*r.json"):
        draw_ratios(panels(), tmp_path / "r.json")
    with pytest.raises(InputError, match="panels must be at least one panel, got none"):
        draw_ratios([], tmp_path / "r.png")
    with pytest.raises(InputError, match=r"Panel: curves must be not empty \('p'\), got none"):
        Panel("p", [], None)
    for ratio in (0.0, -1.0, nan, inf):
        with pytest.raises(InputError, match=r"Panel: ideal must be above 0 and finite \('p'\)"):
            Panel("p", panels(1)[0].curves, ratio)
        with pytest.raises(InputError, match=r"Curve: TimeRatio must be above 0 .* \('a'\), got"):
            Curve("a", [(1, 1.0), (2, ratio)])
    for blocks in ((), (1, 1), (0,), (65,), (1.5,)):
        with pytest.raises(InputError, match=r"points must be .* blocks from 1 to 64 \('a'\), got"):
            Curve("a", [(num_blocks, 1.0) for num_blocks in blocks])
    assert not list(tmp_path.iterdir())
