"""The code of docs/ that is for ranks, on GPUs: what the pages say is the same script."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from doc_pages import DOCS, blocks, script

PAGES = sorted(page for page in DOCS.glob("*.md") if '("nccl")' in "".join(blocks(page, "python")))


def stay(*_: object) -> None:
    """The ranks are in a group already, and go on after the page."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs_on_gpus(
    page: Path, gpus: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(dist, "init_process_group", stay)
    monkeypatch.setattr(dist, "destroy_process_group", stay)
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(script(page))
    assert runpy.run_path(str(path), run_name="__main__")["device"] == gpus
    torch.cuda.synchronize()
