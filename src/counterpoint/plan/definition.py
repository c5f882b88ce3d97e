"""What each op defines: the terms that every cell of its outputs has to hold, on every rank."""

from collections.abc import Iterator
from itertools import product

from counterpoint.plan.all_gather_matmul import weights
from counterpoint.plan.bind import Box
from counterpoint.plan.values import Product, Row, Value, normal
from counterpoint.problem import Problem


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """The boxes of the outputs on `rank`, and what the op says each holds."""
    starts, mine = p.row_starts, p.rows[rank]
    bias: Value = (Row(rank, "bias", 0),) if p.bias else ()

    def box(buffer: str, r0: int, r1: int, cols: int) -> Box:
        return Box(rank, buffer, 0, r0, r1, 0, cols)

    def gathered(left: str, right: str, s: int, k: int) -> Value:
        """Own rows of rank s, by my weight."""
        return _product(left, s, right, rank, k, dr=-starts[s])

    def scattered(left: str, right: str, k: int) -> Value:
        """My rows of what each rank has all rows of, by its weight."""
        every = range(p.ranks)
        return normal(t for s in every for t in _product(left, s, right, s, k, dr=starts[rank]))

    def wgrad(own: str) -> Value:
        """x^T dy, where each rank has its own rows of one of the two, and I all of the other."""
        terms: list[Product] = []
        for s in range(p.ranks):
            # the left side counts the rows
            first, shift = (0, starts[s]) if own == "x" else (starts[s], -starts[s])
            ranks = (s, rank) if own == "x" else (rank, s)
            if p.rows[s]:
                terms.append(Product("x", ranks[0], True, 0, "dy", ranks[1], 0, shift,
                                     first, first + p.rows[s]))  # fmt: skip
        return normal(terms)

    match p.op:
        case "all_gather_matmul":
            for suffix, n in weights(p):
                for s in range(p.ranks):
                    value = normal((*gathered("x", f"w{suffix}", s, p.k), *bias))
                    yield box(f"y{suffix}", starts[s], starts[s + 1], n), value
        case "matmul_reduce_scatter":
            yield box("y", 0, mine, p.n), normal((*scattered("x", "w", p.k), *bias))
        case "all_to_all_matmul" | "matmul_all_to_all":
            count = p.rows[0] // p.experts
            for e, s in product(range(p.experts), range(p.ranks)):
                if p.op == "all_to_all_matmul":
                    multiplies, old, new = rank, (rank * p.experts + e), (e * p.ranks + s)
                else:
                    multiplies, old, new = s, (e * p.ranks + rank), (s * p.experts + e)
                shift, row = count * (old - new), count * new
                term = Product("x", s, False, shift, "w", multiplies, 0, e * p.k, 0, p.k)
                yield box("y", row, row + count, p.n), (term,) if p.k else ()
        case "all_gather_matmul_wgrad":
            yield box("dw", 0, p.k, p.n), wgrad("x")
        case "all_gather_matmul_backward":
            yield box("dx", 0, mine, p.k), scattered("dy", "wt", p.n)
            yield box("dw", 0, p.k, p.n), wgrad("x")
        case "matmul_reduce_scatter_backward":
            for s in range(p.ranks):
                yield box("dx", starts[s], starts[s + 1], p.k), gathered("dy", "wt", s, p.n)
            yield box("dw", 0, p.k, p.n), wgrad("dy")
        case "pipeline":
            return  # what its stages compute is their user's to know


def _product(left: str, left_rank: int, right: str, right_rank: int, k: int, *, dr: int) -> Value:
    return (Product(left, left_rank, False, dr, right, right_rank, 0, 0, 0, k),) if k else ()
