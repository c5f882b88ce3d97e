"""How commands show what they find: tables, and how far they are."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


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
