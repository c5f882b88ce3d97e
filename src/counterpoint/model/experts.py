"""What a layer of experts takes in one kernel, and by the libraries, whatever its counts.

Serial is an all-to-all, a pass that puts rows in order, and a grouped matmul. In one kernel the
shorter of the two sides hides, for a matmul that is somewhat slower and takes SMs to send.
"""

from dataclasses import dataclass
from math import ceil

from counterpoint.machine import Machine
from counterpoint.plan.expert_tiles import tile_of
from counterpoint.problem import ITEM_BYTES

# 4xH200, bf16, 2026-11: our grouped matmul over the library's, behind and before the all-to-all
SLOWER = {False: 1.05, True: 1.03}
SENDING = 0.15  # of the all-to-all's time, in SMs that do not multiply
LAUNCHES_S = {False: 15e-6, True: 25e-6}  # routes, flags, what is collected: kernels of their own
MARGIN = 1.03  # predicted faster than serial by this much, or it is not taken


@dataclass(frozen=True)
class Predicted:
    """Seconds of one call on the busiest rank, and its parts."""

    serial_s: float
    fused_s: float
    matmul_s: float
    comm_s: float

    @property
    def fused(self) -> bool:
        """Whether one kernel is to be taken."""
        return self.fused_s * MARGIN <= self.serial_s


def predict(
    rows: int, k: int, n: int, experts: int, dtype: str, ranks: int, machine: Machine, *,
    back: bool, equal: bool = True,
) -> Predicted:  # fmt: skip
    """Predict both ways.

    Args:
        rows: of the busiest rank.
        k, n: of the weights.
        experts: of one rank.
        back: rows go back behind the matmul; else they go to their experts before it.
        equal: all its experts have equally many rows.
    """
    costs, item = machine.costs, ITEM_BYTES[dtype]
    bytes_s = 1 / costs.hbm_bytes_per_s
    math_s = 2.0 * rows * k * n / costs.gemm_flop_per_s
    math_s *= costs.settling(math_s)
    matmul_s = max(math_s, (experts * k * n + rows * (k + n)) * item * bytes_s)
    moved = rows * (n if back else k) * item
    comm_s = costs.all_gather_s + moved * (ranks - 1) / ranks / costs.collective_bytes_per_s
    pass_s = 2 * moved * bytes_s
    in_order_s = pass_s if experts > 1 else 0.0
    rounds = _rounds(rows, k, n, experts, machine.sms.count, back=back, equal=equal)
    longer_s = max(max(matmul_s, math_s * rounds) * SLOWER[back], comm_s)
    fused_s = longer_s + LAUNCHES_S[back] + (pass_s if back else SENDING * comm_s)
    return Predicted(matmul_s + comm_s + in_order_s, fused_s, matmul_s, comm_s)


def _rounds(rows: int, k: int, n: int, experts: int, sms: int, *, back: bool, equal: bool) -> float:
    """Rounds of tiles over the SMs, over those that the products alone would need."""
    each = rows / max(experts, 1)
    tile = tile_of(rows, k, n, experts, back=back)
    tile_m, tile_n = tile.block_m, tile.block_n
    # of counts that differ, an expert's last tile is half full in the mean
    blocks = experts * (ceil(each / tile_m) if equal else each / tile_m + 0.5)
    needed = rows * n / (tile_m * tile_n * sms)
    return max(ceil(blocks * ceil(n / tile_n) / sms) / needed, 1.0) if needed else 1.0
