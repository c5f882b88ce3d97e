"""A python of its own, for code that must not see the imports of this one, and for scripts."""

import os
import subprocess
import sys


def python(*arguments: str, **environment: str) -> str:
    """What `python *arguments` prints, where there are no GPUs; it must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
