"""A python of its own, for code that must not see the imports of this one, and for scripts."""

import os
import subprocess
import sys


def python(*arguments: str, **environment: str) -> str:
    """What `python *arguments` prints, where there are no GPUs; it must succeed."""
    return python_of(0, *arguments, **environment).stdout


def python_of(
    code: int, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`python *arguments`, where there are no GPUs; it must end with that code."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        | environment,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done
