"""`counterpoint advise`: text, page, picture and JSON of one report."""

import json
from pathlib import Path

from commands import invoke
from trace_files import TraceFile

import counterpoint as cp


def written(tmp_path: Path) -> Path:
    trace = TraceFile(world=2)
    for number in (3, 4):
        trace.step(number, 100 * number, 100)
        trace.gpu("nvjet_gemm", 1000 * number, 500, asked=100 * number + 10)
        trace.collective("allreduce", 1000 * number + 500, 100 * number, elements=2**20, ranks=2,
                         asked=100 * number + 20)  # fmt: skip
    return trace.write(tmp_path / "trace.json")


def test_text_page_and_picture(tmp_path: Path):
    path = written(tmp_path)
    page, picture = tmp_path / "report.html", tmp_path / "step.png"
    found = invoke("advise", str(path), "--html", str(page), "--picture", str(picture), columns=200)
    report = cp.advise(path)
    assert report.verdict in found.stdout and report.title in found.stdout
    assert str(page) in found.stdout and str(picture) in found.stdout
    assert report.verdict in page.read_text() and picture.read_bytes().startswith(b"\x89PNG")


def test_one_step_as_json(tmp_path: Path):
    path = written(tmp_path)
    found = json.loads(invoke("advise", str(path), "--step", "4", "--json").stdout)
    assert found == json.loads(cp.advise(path, step=4).to_json())
    assert round(found["losses"][0]["exposed_s"] * 1e6) == 400


def test_before_there_is_a_trace(tmp_path: Path):
    page = tmp_path / "report.html"
    found = invoke("advise", "--model", "llama3-8b", "--tokens", "4096", "--html", str(page))
    assert "predicted, not measured" in found.stdout and "counterpoint.overlap" in found.stdout
    assert "<svg" not in page.read_text()
