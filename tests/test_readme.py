"""The README says what is true: its commands exist, and its code runs as it stands."""

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from counterpoint.versions import rows, summaries, untried

ROOT = Path(__file__).parent.parent


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def under_torchrun(code: str, folder: Path) -> str:
    """What a script prints on 2 CPU ranks: only under torchrun it finds its group by itself."""
    script = folder / "layer.py"
    script.write_text(code)
    environment = os.environ | {
        "PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_code_runs_word_for_word(tmp_path: Path):
    (code,) = python_blocks(ROOT / "README.md")
    printed = under_torchrun(code, tmp_path)
    assert "predicted: shard_p2p ring, 516 us, 1.67x serial" in printed, printed


def test_the_readme_is_short():
    # without the tags around its picture
    assert len(re.sub(r"<[^>]+>", "", (ROOT / "README.md").read_text()).split()) <= 700


def test_the_notebook_prints_what_is_committed():
    """What needs neither ranks nor a display; `make package` runs all of it."""
    notebook = json.loads((ROOT / "examples" / "first_five_minutes.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and "run_on_ranks" not in code and "IPython" not in code:
            with redirect_stdout(StringIO()) as printed:
                exec(code, names)
            committed = ["".join(output["text"]) for output in cell["outputs"]]
            assert printed.getvalue() == "".join(committed), code
    assert {"choice", "plan", "steps"} <= set(names)


def test_the_versions_in_the_docs_are_those_that_doctor_knows():
    page = (ROOT / "docs" / "versions.md").read_text()
    assert "\n".join(["", *rows(), ""]) in page
    assert "\n".join(["", *summaries(), ""]) in page
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().split("\n")
        if "==" in line
    )
    pinned = {name: pins[name] for name in ("torch", "triton", "numpy")}
    assert not untried(pinned, on_gpus=False), "what `make test` installs is tried"


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "docs", "package", "gpu", "readme", "clean"):
        assert f"make {target} " in done.stdout
