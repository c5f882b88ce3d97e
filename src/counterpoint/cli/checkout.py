"""Commands that need a checkout: benchmarks are beside the package there, and not in a wheel."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import counterpoint


def benchmarks() -> Path | None:
    """The checkout that this package is imported from; None where it is installed without one."""
    root = Path(counterpoint.__file__).resolve().parents[2]
    return root if (root / "benchmarks" / "runner.py").is_file() else None


def run(command: str, module: str, arguments: Sequence[str]) -> int:
    """Run a module of benchmarks/ with `arguments`; its exit code, or 2 without a checkout."""
    root = benchmarks()
    if root is None:
        print(
            f"counterpoint {command}: needs a checkout of counterpoint, whose benchmarks/ is not "
            f"part "
            "of the installed package. Clone the repository, and there `pip install -e '.[cuda]'`",
            file=sys.stderr,
        )
        return 2
    paths = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([sys.executable, "-m", module, *arguments], env=environment).returncode
