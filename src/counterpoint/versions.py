"""Versions that were tried together: what `counterpoint doctor` and docs/versions.md go by.

A combination is tried if its minor versions are: torch 2.13.1 is as torch 2.13.0.
"""

from collections.abc import Mapping
from typing import NamedTuple

NAMES = ("torch", "triton", "numpy", "python")
PLACES = ("CPU ranks", "GPUs")  # by `on_gpus`
# minor versions that the library may be used with, tried or not
RANGES = {
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "python": ("3.11", "3.12", "3.13", "3.14"),
}


class Tried(NamedTuple):
    """Versions that ran together, where, and what of the tests."""

    torch: str
    triton: str
    numpy: str
    python: str
    on_gpus: bool
    ran: str
    date: str


SUBSET = "operators, layers and kernels on CPU ranks, `torch.compile`, PTX; the wheel"
PART = "only FSDP2 and operators; no kernel compiled"

TRIED = (
    Tried("2.11.0+cu130", "3.6.0", "2.5.2", "3.12.3", True, "all tests of GPUs; all tables",
          "2026-11-22"),
    Tried("2.11.0+cu130", "3.6.0", "2.4.6", "3.11.7", False, SUBSET, "2026-11-23"),
    Tried("2.12.1+cu130", "3.7.1", "2.5.5", "3.12.1", False, PART, "2026-11-29"),
    Tried("2.13.0+cpu", "3.6.0", "2.3.5", "3.11.7", False, "all tests without GPUs; the wheel",
          "2026-11-23"),
    Tried("2.13.0+cpu", "3.9.0", "2.4.6", "3.11.7", False, SUBSET, "2026-11-23"),
    Tried("2.14.1+cu130", "3.8.0", "2.5.5", "3.13.0", False, PART, "2026-11-29"),
    Tried("2.15.0+cu132", "3.9.0", "2.4.6", "3.11.7", False, SUBSET, "2026-11-23"),
)  # fmt: skip


def untried(versions: Mapping[str, str | None], *, on_gpus: bool) -> str:
    """What nobody has tried of these versions together; "" if they were tried.

    Args:
        versions: of each of NAMES; None or none at all of what is not installed, which is left out.
        on_gpus: they are to run on GPUs, where only what ran on GPUs counts.
    """
    here = {name: number for name in NAMES if (number := versions.get(name))}
    some = [tried for tried in TRIED if tried.on_gpus or not on_gpus]
    if any(all(_alike(getattr(tried, n), here[n]) for n in here) for tried in some):
        return ""
    nearest = max(some, key=lambda t: [_alike(getattr(t, n), here[n]) for n in here])
    return (
        f"nobody has tried {_words(here)} together on {PLACES[on_gpus]}; the nearest that was: "
        f"{_words(nearest._asdict())}"
    )


def passed() -> dict[str, dict[str, str]]:
    """By torch and python, then minor version: when tests last passed, or "not tried"."""

    def last(name: str, minor: str) -> str:
        some = [tried for tried in TRIED if _alike(getattr(tried, name), minor)]
        full = [tried.date for tried in some if tried.ran != PART]
        return max(full or [f"{tried.date} in part" for tried in some], default="not tried")

    return {name: {m: last(name, m) for m in minors} for name, minors in RANGES.items()}


def _alike(one: str, other: str) -> bool:
    return one.split(".")[:2] == other.split(".")[:2]


def _words(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in NAMES if name in versions)


def rows() -> list[str]:
    """The lines of the table in docs/versions.md."""
    head = ["| torch | Triton | numpy | Python | on | what ran |", "|---|---|---|---|---|---|"]
    cells = [
        (t.torch, t.triton, t.numpy, t.python, PLACES[t.on_gpus], f"{t.ran} ({t.date})")
        for t in TRIED
    ]
    return head + [f"| {' | '.join(line)} |" for line in cells]


def summaries() -> list[str]:
    """A line each for torch and Python, in docs/versions.md and of `counterpoint doctor`."""
    return [
        f"{name} tests passed: {', '.join(f'{minor} {date}' for minor, date in found.items())}"
        for name, found in passed().items()
    ]
