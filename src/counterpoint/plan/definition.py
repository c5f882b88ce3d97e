"""Terms of which operators define their outputs: what each cell has to hold, on every rank.

The declaration of an operator has a `definition(problem, rank)` made of these.
"""

from counterpoint.plan.values import Product, Row, Value, normal
from counterpoint.problem import Problem


def bias(p: Problem, rank: int) -> Value:
    """The row that this rank adds, where there is one."""
    return (Row(rank, "bias", 0),) if p.bias else ()


def gathered(p: Problem, left: str, s: int, right: str, rank: int, k: int) -> Value:
    """Own rows of rank s of `left`, at their place among all, times `right` of this rank."""
    return product(left, s, right, rank, k, dr=-p.row_starts[s])


def scattered(p: Problem, left: str, right: str, rank: int, k: int) -> Value:
    """My rows of the sum of what each rank has all rows of, times that rank's `right`."""
    start = p.row_starts[rank]
    return normal(t for s in range(p.ranks) for t in product(left, s, right, s, k, dr=start))


def reduced(p: Problem, left: str, right: str, k: int) -> Value:
    """The sum over the ranks of all rows."""
    return normal(t for s in range(p.ranks) for t in product(left, s, right, s, k, dr=0))


def weight_gradient(p: Problem, rank: int, own: str, dy: str = "dy") -> Value:
    """x^T dy, where each rank has its own rows of `own`, x or dy, and I all of the other."""
    starts = p.row_starts
    terms: list[Product] = []
    for s in range(p.ranks):
        # the left side counts the rows
        first, shift = (0, starts[s]) if own == "x" else (starts[s], -starts[s])
        ranks = (s, rank) if own == "x" else (rank, s)
        if p.rows[s]:
            last = first + p.rows[s]
            terms.append(Product("x", ranks[0], True, 0, dy, ranks[1], 0, shift, first, last))
    return normal(terms)


def product(left: str, left_rank: int, right: str, right_rank: int, k: int, *, dr: int) -> Value:
    """One product term over all of k."""
    return (Product(left, left_rank, False, dr, right, right_rank, 0, 0, 0, k),) if k else ()
