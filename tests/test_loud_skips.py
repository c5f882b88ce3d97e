"""What a machine cannot test is said in the last lines of a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLUGIN = """
from benchmarks import namespaces

namespaces.can_run = lambda: "unshare failed:\\nno user namespaces"
"""


def test_islands_that_cannot_have_namespaces_are_skipped_loudly(tmp_path: Path):
    """As errors of warnings are: a run without namespaces passes, and says what it left out."""
    (tmp_path / "no_namespaces.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p",
               "no_namespaces", "tests/group/test_namespaces.py"]  # fmt: skip
    paths = [str(tmp_path), *(str(ROOT / folder) for folder in ("src", "tests", "."))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = "not tested here: islands in network namespaces (unshare failed: no user namespaces)"
    assert done.stdout.splitlines().count(said) == 1
    assert re.search(r"\d skipped\b", done.stdout) and "passed" not in done.stdout
