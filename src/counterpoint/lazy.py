"""Packages that a light install lacks, and what is said where one of them is needed."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from counterpoint.errors import UnsupportedError

# as pyproject.toml has them in its extras; no index has counterpoint, so a line names them all
INSTALLED_BY = {
    **dict.fromkeys(
        ("torch", "triton", "numpy"), "pip install 'numpy>=1.26' 'torch>=2.11' 'triton>=3.6'"
    ),
    "matplotlib": "pip install 'matplotlib>=3.9'",
}


def need(package: str, op: str = "") -> None:
    """Refuse to go on without a package, which is not imported yet.

    Args:
        package: one of `INSTALLED_BY`.
        op: what needs it; "" where a command says so itself.

    Raises:
        UnsupportedError: it is not installed.
    """
    if find_spec(package) is None:
        raise _missing(package, op)


@contextmanager
def needing(op: str = "") -> Generator[None]:
    """Import what may need such packages; `op` as for `need`.

    Raises:
        UnsupportedError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in INSTALLED_BY:
            raise
        raise _missing(error.name, op) from error


def _missing(package: str, op: str) -> UnsupportedError:
    text = f"{package} must be installed, got none; {INSTALLED_BY[package]}"
    return UnsupportedError(f"{op}: {text}" if op else text)
