"""Which of a rank's queries attend to which keys: blocks of both, and none that is masked.

Where it is causal, a rank has two parts of the sequence, its r-th and its r-th from the end, so
that all ranks have equal work: its own rows are in order, of a lower rank all of its rows attend to
the earlier half, and of a higher one its later half attends to all.
"""

from typing import NamedTuple

from counterpoint.problem import Problem


class Block(NamedTuple):
    """Queries and keys, as rows of what a step reads: each attends to all.

    Args:
        diagonal: or, of as many queries as keys, the i-th to the first i.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool = False


def blocks(p: Problem, rank: int, owner: int, first: int, num_keys: int) -> tuple[Block, ...]:
    """The blocks of all queries of a rank and some keys; of equal keys, queries in order.

    Args:
        owner: the rank whose keys they are.
        first: of its rows, the first of these keys.
    """
    rows, last = p.rows[rank], first + num_keys
    if not p.causal:
        found = [Block((0, rows), (0, num_keys))]
    elif owner == rank:
        keys = (0, num_keys)
        found = [Block((first, last), keys, diagonal=True), Block((last, rows), keys)]
    elif owner < rank:
        found = [Block((0, rows), (0, min(last, rows // 2) - first))]
    else:
        found = [Block((rows // 2, rows), (0, num_keys))]
    return tuple(b for b in found if b.queries[0] < b.queries[1] and b.keys[0] < b.keys[1])
