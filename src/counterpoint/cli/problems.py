"""Problems as a command line gives them: ops, layers and M,N,K by what is typed."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import cast

from counterpoint.errors import InputError
from counterpoint.measure.shapes import SHAPES
from counterpoint.plan.operation import operation_of
from counterpoint.problem import DType, Problem

Shape = tuple[int, int, int]  # M, N, K
BAGS = "embedding_bag_all_to_all"


def op_of(command: str, option: str, text: str, among: Sequence[str]) -> str:
    """The operator called `text`.

    Raises:
        InputError: it is not `among` those.
    """
    if text not in among:
        near = get_close_matches(text, among, 1)
        fix = f"did you mean {near[0]!r}?" if near else ""
        want = f"one of {', '.join(among)}"
        raise InputError(command, option, want=want, got=repr(text), fix=fix)
    return text


def shape_of(command: str, option: str, text: str) -> Shape:
    """M, N and K of "8192,7168,8192".

    Raises:
        InputError: not three numbers above 0.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(command, option, want="M,N,K of numbers above 0", got=repr(text))
    m, n, k = (int(part) for part in parts)
    return m, n, k


def layers_of(command: str, option: str, text: str) -> list[tuple[str, Shape]]:
    """The published layers called `text`, or else all whose names hold it.

    Raises:
        InputError: there is none.
    """
    layers: list[tuple[str, str, Shape]] = [
        (op, name, shape) for op, named in SHAPES.items() for name, shape in named.items()
    ]
    same = [layer for layer in layers if layer[1] == text]
    found = same or [layer for layer in layers if text.lower() in layer[1].lower()]
    if not found:
        want = f"a part of one of {'; '.join(name for _, name, _ in layers)}"
        raise InputError(command, option, want=want, got=repr(text))
    return [(op, shape) for op, _, shape in found]


def problem_of(
    command: str, op: str, shape: Shape, ranks: int, dtype: str, experts: int = 0
) -> Problem:
    """The problem of `shape` on `ranks` ranks, with equal rows where they are shared out.

    Raises:
        InputError: the rows cannot be equal, or the sizes are not those of the operator.
    """
    m, n, k = shape
    if m % ranks and operation_of(op).shares_rows:
        near = [rows for rows in (m - m % ranks, m - m % ranks + ranks) if rows]
        fix = f"take {' or '.join(map(str, near))}"
        want = f"of an M that {ranks} ranks share evenly"
        raise InputError(command, "--shape", want=want, got=f"M {m}", fix=fix)
    return Problem(op, m, n, k, ranks, cast(DType, dtype), experts=experts)


def bags_of(
    command: str, text: str, ranks: int, dtype: str, experts: int = 0, *, out: bool = False
) -> Problem:
    """Embedding bags of "8,128,5,65536": tables of each GPU, columns, indices of a bag, all bags.

    Raises:
        InputError: not four numbers above 0, or bags that the ranks do not share evenly.
    """
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() and int(part) for part in parts):
        want = "TABLES,D,POOLING,BATCH of numbers above 0"
        raise InputError(command, "--shape", want=want, got=repr(text))
    tables, columns, pooling, batch = map(int, parts)
    return Problem(
        BAGS, batch, ranks=ranks, dtype=cast(DType, dtype), tables=((columns,) * tables,) * ranks,
        indices=(tables * batch * pooling,) * ranks, out=out, experts=experts,
    )  # fmt: skip
