"""What embedding bags and their all-to-all take in one kernel, and by three passes.

Serial is a lookup of all own tables, the library's all-to-all and a concat. In one kernel the
shorter one of the lookup and the stores to peers hides behind the other; nothing is concatenated,
but the output is copied where it is not the caller's own. How long single bags are is not known: a
rank's mean stands for it.
"""

from dataclasses import dataclass, field

from counterpoint.embedding_problem import EmbeddingProblem
from counterpoint.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants of the two ways, fitted to rows of benchmarks/embedding.py.

    H200, 2026-11, 39 cases: those of one kernel on 2 GPUs, the others on 2 and on 4.

    Args:
        read_rate: rows that are read, against the machine's rate of memory.
        written_cost: of a byte that a lookup writes, in bytes read.
        start_s: of a lookup, beside its bytes; first and last bags leave SMs idle.
        row_s: of each row of the longest mean bag, one after another: no lookup is shorter.
        exchange_s: of the library's all-to-all beside its bytes.
        fused_s: of the fused kernel beside its longer side: a start with nothing to hide, flags.
    """

    read_rate: float = 1.07
    written_cost: float = 1.62
    start_s: float = 7e-6
    row_s: float = 0.31e-6
    exchange_s: float = 16e-6
    fused_s: float = 16e-6


FITTED = Fitted()
# faster than serial by this much as predicted, or it is not taken: errors are most of them common
# to both ways of a case; a datasheet may be far off
MARGINS = {True: 1.03, False: 1.15}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of one call until the last rank has its rows, and its parts on the busiest one."""

    serial_s: float
    fused_s: float
    lookup_s: float
    exchange_s: float
    store_s: float
    margin: float = field(repr=False)

    @property
    def fused(self) -> bool:
        """Whether one kernel is to be taken."""
        return self.fused_s * self.margin <= self.serial_s


def predict(problem: EmbeddingProblem, machine: Machine, fitted: Fitted = FITTED) -> Predicted:
    """Predict both ways; of one rank there is nothing to exchange, and both are the lookup."""
    p, f, costs = problem, fitted, machine.costs
    bytes_s = 1 / (f.read_rate * costs.hbm_bytes_per_s)
    read_s = [p.read_bytes(rank) * bytes_s for rank in range(p.ranks)]
    written_s = [f.written_cost * p.lookup_bytes(rank) * bytes_s for rank in range(p.ranks)]
    rows = [p.mean_bag(rank) for rank in range(p.ranks)]
    pooled_s = [
        max(r + w, f.row_s * bag) for r, w, bag in zip(read_s, written_s, rows, strict=True)
    ]
    lookups_s = [f.start_s + each for each in pooled_s]
    margin = MARGINS[machine.measured is not None]
    if p.ranks == 1:
        return Predicted(lookups_s[0], lookups_s[0], lookups_s[0], 0.0, 0.0, margin)

    sent = [p.sent_bytes(rank) for rank in range(p.ranks)]
    received = [p.received_bytes(rank) for rank in range(p.ranks)]
    rate = costs.collective_bytes_per_s
    # a rank sends when it has pooled: to one that is late too, which then finds its rows there
    last_s = max(s + each / rate for s, each in zip(lookups_s, sent, strict=True))
    last_s = max(last_s, min(lookups_s) + max(received) / rate)
    in_order_s = costs.memory_s(2 * p.output_bytes)
    serial_s = last_s + f.exchange_s + in_order_s

    # out of one GPU, or into one
    stores_s = [max(each, *received) / costs.copy_bytes_per_s for each in sent]
    fused_s = f.fused_s + max(*pooled_s, *stores_s)
    fused_s += 0.0 if p.out else costs.memory_s(2 * p.output_bytes)
    exchange_s = f.exchange_s + max(*sent, *received) / costs.collective_bytes_per_s
    return Predicted(serial_s, fused_s, max(lookups_s), exchange_s, max(stores_s), margin)
