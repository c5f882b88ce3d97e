"""The backward of embedding bags by slices of tables: which they are, and what they take.

Gradients of own bags are sent to the ranks whose tables they are of, and summed there for each row
that was named. By slices, those of some tables are summed, or update them, while the others' are
sent. Indices are sorted by row meanwhile, for which no gradient is needed: what that takes longer
than the exchange, slices do not save.
"""

from collections.abc import Sequence
from itertools import accumulate

from counterpoint.embedding.plan_seconds import EXCHANGE_S, through_s
from counterpoint.machine import Machine
from counterpoint.problem import Problem

# H200, 2026-11: together they are what benchmarks of 0.3 to 6.5 million indices have measured, in
# bf16, 128 columns; their shares are those of the bytes that each moves
SORTED_S = 0.07e-9  # of an index that is sorted
SUMMED_S = 0.06e-9  # of one whose gradient is added to its row's, in bf16, of 128 columns
SUMMED_BYTES = 256  # that it then reads
SLICE_S = 10e-6  # of the launches that sum a slice: first and last rows leave SMs idle


def tables_by_slice(dims: Sequence[int], count: int) -> tuple[range, ...]:
    """Which tables each of so many slices has, about as many columns each; some may have none.

    Args:
        dims: columns of one rank's tables.
        count: of slices, alike on all ranks.
    """
    ends = list(accumulate(dims, initial=0))
    edges = [min(range(len(ends)), key=lambda t: abs(ends[t] * count - ends[-1] * i))
             for i in range(count + 1)]  # fmt: skip
    return tuple(range(a, b) for a, b in zip(edges, edges[1:], strict=False))


def backward_s(p: Problem, machine: Machine, count: int) -> float:
    """Predict the exchange of gradients and their sums, until the last rank is done."""
    costs, ranks = machine.costs, range(p.ranks)
    cut = [tables_by_slice(dims, count) for dims in p.tables]
    widths = [[sum(p.tables[r][t] for t in some) for some in cut[r]] for r in ranks]
    packed_s, sent_s = 0.0, 0.0  # since the begin, until a slice is packed, and has come
    come_s: list[float] = []
    for i in range(count):
        wide = sum(widths[r][i] for r in ranks)
        given = max(p.rows[r] * (wide - widths[r][i]) for r in ranks) * p.item_bytes
        packed_s += costs.memory_s(2 * given)
        sent_s = max(sent_s, packed_s) + slice_s(p, machine, [w[i] for w in widths])
        come_s.append(sent_s)
    return max(_summed_s(p, machine, r, cut[r], packed_s, come_s) for r in ranks)


def slice_s(p: Problem, machine: Machine, widths: Sequence[int]) -> float:
    """The exchange of a slice of so many columns of each rank, alone."""
    ranks, wide = range(p.ranks), sum(widths)
    given = max(p.rows[r] * (wide - widths[r]) for r in ranks)
    got = max((p.m - p.rows[r]) * widths[r] for r in ranks)
    return EXCHANGE_S + through_s(p, machine, max(given, got) * p.item_bytes)


def _summed_s(
    p: Problem, machine: Machine, rank: int, cut: Sequence[range], packed_s: float,
    come_s: Sequence[float],
) -> float:  # fmt: skip
    """Until this rank has summed all slices: it sorts first, and waits for each."""
    dims, count = p.tables[rank], p.indices[rank] if p.indices else 0
    own_bytes = p.rows[rank] * sum(dims) * p.item_bytes
    now_s = packed_s + machine.costs.memory_s(2 * own_bytes) + count * SORTED_S
    for some, there_s in zip(cut, come_s, strict=True):
        row_bytes = sum(dims[t] for t in some) * p.item_bytes
        work_s = count / max(len(dims), 1) * row_bytes * (SUMMED_S / SUMMED_BYTES)
        now_s = max(now_s, there_s) + (SLICE_S + work_s if some else 0.0)
    return now_s
