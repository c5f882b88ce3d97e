"""The map of what fusing saves of a DLRM's step: steps and lines lie where their numbers say."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from counterpoint.errors import InputError
from counterpoint.measure import canvas
from counterpoint.measure.draw_map import RATIOS, SHARES, draw_map
from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.recommenders.dlrm import DLRMS
from counterpoint.scale.recommenders.map import PAPER_SAVING, Map, map_of, saving
from counterpoint.scale.recommenders.step import DlrmStep


@pytest.fixture(scope="module")
def paper() -> Map:
    network = Network(preset("h100-1"), Fabric(nic_bytes_per_s=25e9))
    return map_of(DlrmStep(DLRMS["dlrm-paper"], Layout(dp=128, micro_batch=512), network, "ours"))


def drawn(found: Map, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []

    def kept(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(canvas, "save", kept)
    draw_map(found, "map.png")
    return figures[0]


def test_steps_and_the_paper_s_line_lie_at_their_numbers(
    paper: Map, monkeypatch: pytest.MonkeyPatch
):
    figure = drawn(paper, monkeypatch)
    (axes,) = figure.axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    at = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in points]  # pyright: ignore
    assert at == [pytest.approx((each.ratio, each.share)) for each in paper.places]
    thick = max(axes.lines, key=lambda line: line.get_linewidth())
    for ratio, share in zip(thick.get_xdata(), thick.get_ydata(), strict=True):  # pyright: ignore
        assert saving(float(share), float(ratio)) == pytest.approx(PAPER_SAVING)  # pyright: ignore
    words = " ".join(text.get_text() for text in (*axes.texts, *figure.texts))
    assert all(each.label in words for each in paper.places)
    assert "all sizes assumed" in words and "At other link rates" in words


def test_it_fits_on_a_screen_and_words_on_the_page(paper: Map, monkeypatch: pytest.MonkeyPatch):
    figure = drawn(paper, monkeypatch)
    width_in, height_in = figure.get_size_inches()
    assert height_in <= canvas.SCREEN_IN
    renderer = figure.canvas.get_renderer()  # pyright: ignore
    for text in (*figure.texts, *figure.axes[0].texts):
        box = text.get_window_extent(renderer)  # pyright: ignore
        assert box.x0 >= 0 and box.x1 <= width_in * canvas.DPI, text.get_text()
        assert box.y0 >= 0 and box.y1 <= height_in * canvas.DPI, text.get_text()


def test_steps_outside_are_drawn_at_the_edge(paper: Map, monkeypatch: pytest.MonkeyPatch):
    far = paper.places[0]._replace(ratio=50.0, share=0.001)
    figure = drawn(Map("far", "made up", (far._replace(label="far"),), ()), monkeypatch)
    (point,) = (line for line in figure.axes[0].lines if line.get_marker() == "o")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (RATIOS[1], SHARES[0])  # pyright: ignore


def test_the_same_map_gives_the_same_file(paper: Map, tmp_path: Path):
    first, second = (draw_map(paper, tmp_path / f"{n}.svg", dark=True).read_bytes() for n in "ab")
    assert first == second
    with pytest.raises(InputError, match="path must be a file name that ends in"):
        draw_map(paper, tmp_path / "map.gif")
