"""The page: nothing fetched, nothing of a trace taken for HTML, all that the report says."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from trace_files import TraceFile

from counterpoint.advice.advise import Report, advise
from counterpoint.advice.words import parts
from counterpoint.errors import InputError

VOID = {"meta", "br", "hr", "img", "link"}


class Checked(HTMLParser):
    """Holds that tags are closed in turn, and collects tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def made(tmp_path: Path, kernel: str = "gemm") -> Report:
    trace = TraceFile(world=2).step(1, -100, 9000)
    for i in range(3000):  # far more than there are pixels
        trace.gpu(kernel, 2 * i, 1.5, asked=-50)
    trace.collective("allreduce", 5000, 2000, elements=2**20, ranks=2, group="<b>", asked=-40)
    trace.gpu("chunk_cat", 7000, 500, asked=-30)
    return advise(trace.write(tmp_path / "trace.json"))


def page(report: Report, tmp_path: Path) -> tuple[str, Checked]:
    text = report.to_html(tmp_path / "report.html").read_text()
    return text, Checked(text)


def test_it_says_what_the_report_says(tmp_path):
    report = made(tmp_path)
    _, found = page(report, tmp_path)
    assert report.verdict in found.words and report.title in found.words
    for kind, name, seconds in parts(report.losses[0]):
        assert (name in found.words) == (seconds >= 0.001 * report.losses[0].time_s), kind
    for each in report.remedies:
        assert each.name in found.words and each.line in found.words
    assert "Largest loss: " in found.words


def test_it_fetches_nothing(tmp_path):
    text, found = page(made(tmp_path), tmp_path)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object"}
    assert not {name for _, given in found.tags for name in given} & {"src", "href", "onclick"}
    assert "url(" not in text and "@import" not in text and "http" not in text


def test_names_are_text(tmp_path):
    """A kernel's name is whatever a trace says."""
    text, found = page(made(tmp_path, "<script>alert(1)</script>\" onload='x"), tmp_path)
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script" not in text and "&lt;script&gt;" in text


def test_thin_neighbours_are_one(tmp_path):
    """3,000 kernels in a step of 1,000 units: fewer rectangles, within the picture, and red."""
    report = made(tmp_path)
    _, found = page(report, tmp_path)
    shapes = [given for tag, given in found.tags if tag == "rect"]
    assert 3 < len(shapes) < 1500
    for given in shapes:
        x, width = float(given["x"] or "nan"), float(given["width"] or "nan")
        assert 0 <= x <= 1000 and 0 < width <= 1000.1 - x
    red = [given for given in shapes if given["class"] == "exposed"][-1]
    exposed = (7000 - 5999.5) / 7500 * 1000
    assert float(red["width"]) == pytest.approx(exposed, abs=0.2)


def test_ranks_and_other_names(tmp_path):
    paths = [
        TraceFile(rank, 2).gpu("gemm", 0, 100).collective("allreduce", 50, 100 - 20 * rank)
        .write(tmp_path / f"{rank}.json")
        for rank in (0, 1)
    ]  # fmt: skip
    report = advise(*paths)
    assert "Ranks" in page(report, tmp_path)[1].words
    with pytest.raises(InputError, match=r"ends in .html, got .*report.txt"):
        report.to_html(tmp_path / "report.txt")
    assert report.draw(tmp_path / "step.png").stat().st_size > 1000
    with pytest.raises(InputError, match="file name that ends in"):
        report.draw(tmp_path / "step.doc")
