"""Commands that need a checkout: benchmarks are beside the package there, and not in a wheel."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import counterpoint
from counterpoint.errors import InputError
from counterpoint.lazy import need


def benchmarks() -> Path | None:
    """The checkout that this package is imported from; None where it is installed without one."""
    root = Path(counterpoint.__file__).resolve().parents[2]
    return root if (root / "benchmarks" / "runner.py").is_file() else None


def run(command: str, arguments: Sequence[str]) -> int:
    """Run bench or evaluate of benchmarks/ with `arguments`; its exit code, or 2 without a
    checkout."""
    root = benchmarks()
    if root is None:
        want, got = "a checkout of counterpoint, with benchmarks/", "an installed package"
        fix = "clone the repository, and there `pip install -e '.[cuda]'`"
        raise InputError(command, "this installation", want=want, got=got, fix=fix)
    need("torch")
    paths = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command_line = [sys.executable, "-m", "benchmarks", command, *arguments]
    return subprocess.run(command_line, env=environment).returncode
