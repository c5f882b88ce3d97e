"""Arms: lengths and numbers of the bars, and no text on a bar, on another text or off the sheet."""

from math import inf, nan

import pytest
from counterpoint.measure.arms import ABOVE, IDEAL, Arm, Pair, draw_arms
from test_draw import collisions, extents, figure_of, fills, png_size, words

from counterpoint.errors import InputError

NAMES = ("sequential", "plain overlap", "priority", "shaping", "priority + shaping",
         "carve-out only", "order", "granularity", "transport", "tuned")  # fmt: skip
LABELS = ("cb cuBLAS + all-reduce", "mb Triton 128x256x64 + all-to-all",
          "cb Triton 128x256x64 + reduce-scatter", "mb cuBLAS + all-gather")  # fmt: skip
SHARES = (1.6, 1.3, 1.22, 1.1, 1.04, 1.33, 1.25, 1.18, 1.21, 0.985)
NOTES = ("62 J, 1755 MHz", "61 J, 1740 MHz", "priority -1", "2 blocks per SM",
         "2 blocks per SM, priority -1", "16 SMs", "", "4 chunks", "copy engine",
         "2 blocks per SM, priority -1, 4 chunks, copy engine")  # fmt: skip


def arms(ideal_s, spread=0.02):
    return [
        Arm(name, ideal_s * share, ideal_s * share * (1 - spread), ideal_s * share * (1 + spread),
            note)
        for name, share, note in zip(NAMES, SHARES, NOTES, strict=True)
    ]  # fmt: skip


def pairs(num_pairs=4, spread=0.02):
    ideals_s = (11.2e-3, 37.5e-3, 18.4e-3, 14.9e-3, 26e-3)[:num_pairs]
    return [
        Pair(LABELS[i % 4], ideal_s, arms(ideal_s, spread)) for i, ideal_s in enumerate(ideals_s)
    ]


def small():
    return Pair("p", 10e-3, [
        Arm("plain overlap", 16e-3, 15e-3, 20e-3),
        Arm("tuned", 12e-3, 12e-3, 12e-3, "62 J"),
        Arm("cut", 8e-3, 8e-3, 8e-3),
        Arm("sequential", 18e-3, 17e-3, 19e-3),
    ])  # fmt: skip


def bars(figure):
    """Left and right end of each bar, by colour, in pixels."""
    import matplotlib.colors

    drawn = {IDEAL.lower(): [], ABOVE.lower(): []}
    for axes in figure.axes:
        for patch in axes.patches:
            colour = matplotlib.colors.to_hex(patch.get_facecolor())
            drawn[colour].append(patch.get_window_extent())
    return drawn


def test_numbers_and_notes(tmp_path):
    seen = words(draw_arms([small()], tmp_path / "a.svg", title="a title", source="made up"))
    assert {
        "a title", "made up", "p", "ideal 10.0 ms", "vs plain overlap", "ideal pipeline",
        "plain overlap", "16.0 ms", "tuned", "12.0 ms", "-25.0%", "62 J", "cut", "8.00 ms",
        "-50.0%", "sequential", "18.0 ms", "+12.5%",
    } <= {*seen}  # fmt: skip
    assert sum("%" in word for word in seen) == 3  # none for plain overlap itself


def test_bars_are_stacked_at_the_ideal(monkeypatch):
    figure = figure_of(monkeypatch, lambda: draw_arms([small()], "x.png"))
    drawn = bars(figure)
    calm, strong = drawn[IDEAL.lower()], drawn[ABOVE.lower()]
    unit = calm[0].width / 10
    assert [box.width / unit for box in calm] == pytest.approx([10, 10, 8, 10])
    assert [box.width / unit for box in strong] == pytest.approx([6, 2, 8])
    assert len({round(box.x0, 3) for box in calm}) == 1
    for box in strong:
        assert box.x0 == pytest.approx(calm[0].x1)
    # the longest whisker ends the axis
    ends = [line.get_xydata()[:, 0] for line in figure.axes[0].lines if line.get_marker() == "|"]
    to_px = figure.axes[0].transData
    spans = [[(to_px.transform((x, 0))[0] - calm[0].x0) / unit for x in end] for end in ends]
    assert spans[0] == pytest.approx([15, 20])
    assert spans[3] == pytest.approx([17, 19])
    ideals = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert to_px.transform(ideals[0].get_xydata()[0])[0] == pytest.approx(calm[0].x1)


def test_two_pairs_stand_beside_each_other(tmp_path):
    sizes = [png_size(draw_arms(pairs(n), tmp_path / f"{n}.png")) for n in (1, 2, 4, 5)]
    assert sizes[0][0] < sizes[1][0] == sizes[2][0] == sizes[3][0]
    assert sizes[0][1] == sizes[1][1] < sizes[2][1] < sizes[3][1]


def unusual():
    long = Pair("a long name of a pair " * 9, 1e-6, [
        Arm("plain overlap", 60e-3, 1e-3, 0.2, "a note that is very long " * 9),
        Arm("a name of an arm that is long", 11.2e-3, 11e-3, 12e-3, "$1 $2"),
    ])  # fmt: skip
    return [long, small(), Pair("fast", 1.0, [Arm("plain overlap", 1e-5, 1e-5, 1e-5)])]


@pytest.mark.parametrize(
    "made",
    [pairs(1), pairs(2), pairs(4), pairs(5), pairs(4, spread=0.6), unusual(), unusual()[::-1]],
    ids=["one", "two", "four", "five", "wide spread", "unusual", "unusual, reversed"],
)
def test_no_text_lies_on_a_bar_or_a_text_or_off_the_sheet(monkeypatch, made):
    figure = figure_of(
        monkeypatch,
        lambda: draw_arms(made, "x.png", title="Where the time goes", source="8x H200, " * 9),
    )
    assert not collisions(figure)
    drawn = [box for boxes in bars(figure).values() for box in boxes]
    whiskers = [
        line.get_window_extent()
        for axes in figure.axes
        for line in axes.lines
        if line.get_marker() == "|"
    ]
    for text, box in extents(figure):
        assert not any(
            box.x0 < other.x1 and other.x0 < box.x1 and box.y0 < other.y1 and other.y0 < box.y1
            for other in drawn + whiskers
        ), text
    for box in whiskers:
        assert box.x1 <= figure.bbox.x1


def test_the_fastest_arm_stands_out(monkeypatch):
    figure = figure_of(monkeypatch, lambda: draw_arms([small()], "x.png"))
    bold = {t.get_text() for t in figure.axes[0].texts if t.get_weight() == "bold"}
    assert bold - {""} == {"p", "cut", "8.00 ms", "-50.0%"}


def test_same_arms_give_the_same_svg(tmp_path):
    paths = [draw_arms(pairs(), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert fills(paths[0]).count(IDEAL.lower()) == 40 + 1  # and the legend


@pytest.mark.parametrize("field", ["seconds", "low_s", "high_s"])
@pytest.mark.parametrize("time_s", [0.0, -1e-3, nan, inf])
def test_a_time_that_is_none_is_refused(field, time_s):
    times_s = {"seconds": 1.0, "low_s": 1.0, "high_s": 1.0, field: time_s}
    with pytest.raises(InputError, match=rf"Arm: {field} must be above 0 and finite \('a'\), got"):
        Arm("a", **times_s)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match=r"draw_arms: path must be .*\.pdf, got .*a.json"):
        draw_arms(pairs(), tmp_path / "a.json")
    with pytest.raises(InputError, match="pairs must be at least one pair, got none"):
        draw_arms([], tmp_path / "a.png")
    for seconds in (0.5, 2.5):
        with pytest.raises(InputError, match=r"seconds must be within low_s = 1\.0 and"):
            Arm("a", seconds, 1.0, 2.0)
    for ideal_s in (0.0, nan, inf):
        with pytest.raises(InputError, match=r"Pair: ideal_s must be above 0 and finite \('p'\)"):
            Pair("p", ideal_s, arms(1.0))
    for wrong in ([], arms(1.0)[2:], arms(1.0) * 2):
        with pytest.raises(InputError, match="arms must be arms of which one is called 'plain ov"):
            Pair("p", 1.0, wrong)
    assert not list(tmp_path.iterdir())
