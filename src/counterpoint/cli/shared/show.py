"""How commands show what they find: tables, and how far they are."""

from collections.abc import Callable, Mapping
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from counterpoint.choose.choice import Candidate, Choice


def table(*columns: str, title: str = "") -> Table:
    """A table without a frame; only its last column may take several lines.

    Args:
        columns: their names; ">" before one: it stands to the right.
        title: above the table.
    """
    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=0,
                 show_edge=False)  # fmt: skip
    for i, name in enumerate(columns, 1):
        made.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left",
            no_wrap=i < len(columns),
        )  # fmt: skip
    return made


def progress(console: Console, *, shown: bool) -> Progress:
    """A bar that is gone when all is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not shown)


def us(seconds: float) -> str:
    """Microseconds, as a cell of a table."""
    return f"{seconds * 1e6:.1f}"


def candidates(
    choice: Choice, took: str, beside: Mapping[str, Callable[[Candidate], str]]
) -> Table:
    """A row for each plan that was weighed, the fastest first.

    Args:
        took: name of the column of times.
        beside: more columns, by their names: what stands there.
    """
    made = table("plan", took, ">speedup", *beside, "verdict")
    for c in choice.table:
        known = isfinite(c.seconds)
        quiet = "dim" if c.basis in ("closed form", "refused") else ""
        made.add_row(
            c.spec, us(c.seconds) if known else "-",
            f"{choice.speedup(c.seconds):.2f}" if known else "-",
            *(cell(c) for cell in beside.values()), c.verdict,
            style="bold" if c.spec == choice.spec else quiet,
        )  # fmt: skip
    return made
