"""Pictures of rows: what they say, as text of an SVG; and the committed pictures."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import Axis, Point, bars, curves, dots, errors, layer_name, shown
from benchmarks.tables import IMAGES, ROOT
from counterpoint.measure.canvas import SCREEN_IN

SVG = "{http://www.w3.org/2000/svg}"
LABELS = {"title": "A title", "source": "2x H200, 2026"}
PANELS = {"2 GPUs": {"one": {"fast": 2.0, "slow": 2.0}, "two": {"fast": 1.5}}}
POINTS = [Point("graded, 8192", "graded", 1.2e-3, 1e-3), Point("ring", "ring", 2e-4, 2.1e-4)]


def drawn(kind: str, path: Path) -> Path:
    if kind == "bars":
        cases = {"one": {"serial": 18.8e-6, "counterpoint": 9.4e-6, "floor": 8e-6}}
        return bars(cases, path, mark="floor", **LABELS)
    if kind == "dots":
        return dots(PANELS, path, marks={"2 GPUs": {"one": 3.0}}, **LABELS)
    if kind == "curves":
        axis = Axis("chunks", "speedup")
        bands = {"a": [(1, 0.9, 1.1), (4, 1.8, 2.0)]}
        return curves({"rows": {"a": [(1, 1.0), (4, 2.0)]}}, path, axis, bands=bands, **LABELS)
    return errors({"2 GPUs": POINTS}, path, **LABELS)


SAID = {
    "bars": ["one (18.8 us)", "counterpoint", "floor", "2.00x, 9.40 us",
             "speedup over serial (higher is better)", "2x H200, 2026; in parentheses: serial"],
    "dots": ["2 GPUs", "one", "two", "fast", "slow", "the longer part alone", LABELS["source"]],
    "curves": ["rows", "a", "chunks", "speedup", LABELS["source"]],
    "errors": ["graded, 8192: +20%", "1 ms", "graded", "ring", LABELS["source"],
               "2 GPUs: 2 predictions, median error 12.4%, 1 within 10%, 2 within 25%"],
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_a_picture_says_what_it_shows_on_light_and_on_dark_pages(kind: str, tmp_path: Path):
    path = drawn(kind, tmp_path / "a.svg")
    assert path == tmp_path / "a-light.svg"
    assert {each.name for each in tmp_path.iterdir()} == {"a-light.svg", "a-dark.svg"}
    for each in tmp_path.iterdir():
        found = {"".join(t.itertext()).strip() for t in ElementTree.parse(each).iter(f"{SVG}text")}
        assert {*SAID[kind], LABELS["title"]} <= found, found


@pytest.mark.parametrize("kind", SAID)
def test_equal_rows_give_equal_files(kind: str, tmp_path: Path):
    first, second = (drawn(kind, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second and b"<dc:date>" not in first


def test_markers_of_a_case_do_not_hide_each_other(tmp_path: Path):
    root = ElementTree.parse(drawn("dots", tmp_path / "a.svg"))
    clipped = [group for group in root.iter(f"{SVG}g") if group.get("clip-path")]
    uses = [use for group in clipped for use in group.iter(f"{SVG}use")]
    # both of "one" are at 2.0x
    heights = [float(str(use.get("y"))) for use in uses]
    assert len({*heights}) == len(heights) == 3, heights


def test_layers_have_names():
    assert layer_name(8192, 1280, 8192) == "Llama-3-70B QKV, 8192 tokens"
    assert layer_name(16384, 16384, 6656) == "Llama-3.1-405B down, 16384 tokens"


def test_committed_pictures_are_light_and_dark_small_no_taller_than_a_screen_and_shown():
    files = {path.name for path in IMAGES.iterdir()}
    names = {name.removesuffix("-light.svg") for name in files if name.endswith("-light.svg")}
    assert files == {f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    referenced: set[str] = set()
    for page in pages:
        text = page.read_text()
        # with a text for who does not see it
        found = re.findall(r"!\[[^\]]{15,}\]\(([^)#]*images/[^)#]+)-(light|dark)\.svg"
                           r"#gh-(?:light|dark)-mode-only\)", text)  # fmt: skip
        found += re.findall(r'src(?:set)?="([^"]*images/[^"]+)-(light|dark)\.svg"', text)
        assert len(found) == len(re.findall(r"images/[\w-]+\.(?:svg|png)", text)), page
        for name in {name for name, _ in found}:
            assert {theme for each, theme in found if each == name} == {"light", "dark"}, page
            assert (page.parent / f"{name}-light.svg").resolve().parent == IMAGES, page
            referenced.add(Path(name).name)
    assert referenced == names
    for path in IMAGES.iterdir():
        assert path.stat().st_size < 150_000, path
        height = str(ElementTree.parse(path).getroot().get("height"))
        assert float(height.removesuffix("pt")) <= SCREEN_IN * 72, path


def test_a_page_shows_both():
    assert shown("a", "what it shows") == (
        "![what it shows](../images/a-light.svg#gh-light-mode-only)\n"
        "![what it shows](../images/a-dark.svg#gh-dark-mode-only)"
    )
