"""Problems as a command line gives them: ops, layers and M,N,K by what is typed."""

from collections.abc import Sequence
from difflib import get_close_matches

from counterpoint.errors import InputError
from counterpoint.measure.shapes import SHAPES
from counterpoint.plan.operation import operation_of
from counterpoint.problem import DType, Problem, op_names

Shape = tuple[int, int, int]  # M, N, K
M_N_K = "M over all ranks, N and K of one rank"
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


def numbers(command: str, option: str, text: str, want: str, *, count: int = 0) -> list[int]:
    """The numbers above 0 of "1,8,32".

    Args:
        want: what there should be, for the error.
        count: how many; 0: any.

    Raises:
        InputError: one is none, or there are fewer or more.
    """
    parts = [part.strip() for part in text.split(",")]
    if (count and len(parts) != count) or not all(p.isdecimal() and int(p) for p in parts):
        raise InputError(command, option, want=f"{want} above 0", got=repr(text))
    return [int(part) for part in parts]


def shape_of(command: str, option: str, text: str) -> Shape:
    """M, N and K of "8192,7168,8192".

    Raises:
        InputError: not three numbers above 0.
    """
    m, n, k = numbers(command, option, text, "M,N,K of numbers", count=3)
    return m, n, k


def layers_of(command: str, option: str, text: str) -> list[tuple[str, str]]:
    """Op and M,N,K of the published layers called `text`, or else of all whose names hold it.

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
    return [(op, ",".join(map(str, shape))) for op, _, shape in found]


def problem_of(
    command: str, op: str, shape: str, ranks: int, dtype: DType, experts: int = 0, *,
    out: bool = False,
) -> Problem:  # fmt: skip
    """The problem of a shape on `ranks` ranks, with equal rows where they are shared out.

    Args:
        shape: M,N,K; of embedding bags tables of each GPU, their columns, indices of a bag, all
            bags.
        out: of embedding bags, peers write to outputs that the caller keeps.

    Raises:
        InputError: there is no such op, `shape` is none, the rows cannot be equal, or the sizes are
            not those of the operator.
    """
    op_of(command, "OP", op, op_names())
    if op == BAGS:
        want = "TABLES,D,POOLING,BATCH of numbers"
        tables, columns, pooling, batch = numbers(command, "--shape", shape, want, count=4)
        return Problem(
            BAGS, batch, ranks=ranks, dtype=dtype, tables=((columns,) * tables,) * ranks,
            indices=(tables * batch * pooling,) * ranks, out=out, experts=experts,
        )  # fmt: skip
    m, n, k = shape_of(command, "--shape", shape)
    if m % ranks and operation_of(op).shares_rows:
        near = [rows for rows in (m - m % ranks, m - m % ranks + ranks) if rows]
        fix = f"take {' or '.join(map(str, near))}"
        want = f"of an M that {ranks} ranks share evenly"
        raise InputError(command, "--shape", want=want, got=f"M {m}", fix=fix)
    return Problem(op, m, n, k, ranks, dtype, experts=experts)
