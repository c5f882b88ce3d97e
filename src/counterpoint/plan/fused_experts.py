"""The family "fused" of experts: one kernel moves rows and multiplies them, by a persistent matmul.

Rows are stored to their owners, and flags behind them; tiles wait for the rows that they take. See
kernels/all_to_all_matmul.py and kernels/matmul_all_to_all.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from counterpoint.machine import Machine
from counterpoint.plan.direct import MAX_RANKS
from counterpoint.plan.names import COMPUTE, W, X, Y
from counterpoint.plan.operation import Family
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import Problem

MAX_EXPERTS = 1024  # of all ranks, in one kernel: see kernels/routes.py
# rows of an expert. Few are one block of rows, and reading the weight is all the time; of many the
# matmul is, which fewer senders and loads in flight leave more to
FEW_ROWS, MANY_ROWS = 96, 512
LONG_K = 4096  # from which a tile's own stores matter little


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time.

    Args:
        block_m, block_n, block_k: rows and columns of y, and how much of K is loaded at a time.
        stages: loads in flight.
        num_warps: of a program.
        group_m: blocks of rows that share their columns of w in L2.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    num_warps: int = 8
    group_m: int = 8

    @property
    def constants(self) -> tuple[int, ...]:
        """As the kernels take them."""
        return self.block_m, self.block_n, self.block_k, self.group_m, self.stages


def tile_of(rows: int, k: int, n: int, experts: int, *, back: bool) -> Tile:
    """The tile for `rows` in all of so many experts on a rank, by measurements on 4 H200."""
    each = rows / max(experts, 1)
    if each <= FEW_ROWS:
        return Tile(64, 256, 64, 4, 4)
    few = rows * n < 132 * 128 * 256
    if back and (k < LONG_K or few):
        return Tile(128, 128, 64, 4, 4)
    return Tile(stages=4 if back or each < MANY_ROWS else 3)


# 4xH200, bf16, 2026-11: our grouped matmul over the library's, of a combine and of a dispatch
SLOWER = {False: 1.05, True: 1.03}
SENDING = 0.15  # of the all-to-all's time, in SMs that do not multiply
LAUNCHES_S = {False: 15e-6, True: 25e-6}  # routes, flags, what is collected: kernels of their own


def refusal(p: Problem) -> str:
    """What the kernels want of a problem that it does not have, or ""."""
    if p.ranks & (p.ranks - 1) or p.ranks > MAX_RANKS:
        return f"a number of ranks that is a power of two up to {MAX_RANKS}"
    if p.item_bytes != 2 or p.k % 8 or p.n % 8:
        return "16-bit numbers, K and N multiples of 8"
    return "" if p.experts * p.ranks <= MAX_EXPERTS else f"at most {MAX_EXPERTS} experts"


def family(operands: Callable[[Problem], tuple[Buffer, ...]]) -> Family:
    """The family for an operator of those operands."""

    def build(p: Problem, *_: object) -> Plan:
        tile = tile_of(p.m, p.k, p.n, p.experts, back=_combines(p))
        args = tuple((name, getattr(tile, name)) for name in Tile.__dataclass_fields__)
        moved = Buffer("moved", (p.m, sum(p.sizes.moved(p))), p.dtype, "turns")
        everyone = (Region("moved", (d,) if d else ()) for d in range(p.ranks))
        step = Step("experts", "compute", "fused", (X, W), (Y, *everyone),
                    args=(("kernel", p.op), *args), spins=True)  # fmt: skip
        return Plan(p, "fused", "", "ring", (*operands(p), moved), (COMPUTE,), (step,))

    return Family(name="fused", build=build, refusal=refusal, in_a_row=True)


def _combines(p: Problem) -> bool:
    return p.op == "matmul_all_to_all"


def seconds(p: Problem, step: Step, machine: Machine) -> float:
    """Of the kernel on the busiest rank: the shorter of both sides hides behind the longer.

    Its matmul is somewhat slower than the library's, and takes SMs to send.
    """
    combines, costs = _combines(p), machine.costs
    bytes_s = 1 / costs.hbm_bytes_per_s
    math_s = p.flop / costs.gemm_flop_per_s
    math_s *= costs.settling(math_s)
    weights = p.experts * p.k * p.n
    matmul_s = max(math_s, (weights + p.m * (p.k + p.n)) * p.item_bytes * bytes_s)
    moved = p.m * sum(p.sizes.moved(p)) * p.item_bytes
    comm_s = costs.all_gather_s + moved * (p.ranks - 1) / p.ranks / costs.collective_bytes_per_s
    rounds = _rounds(p, machine.sms.count, combines=combines)
    longer_s = max(max(matmul_s, math_s * rounds) * SLOWER[combines], comm_s)
    beside_s = 2 * moved * bytes_s if combines else SENDING * comm_s
    return longer_s + LAUNCHES_S[combines] + beside_s


def _rounds(p: Problem, sms: int, *, combines: bool) -> float:
    """Rounds of tiles over the SMs, over those that the products alone would need."""
    tile = tile_of(p.m, p.k, p.n, p.experts, back=combines)
    tile_m, tile_n = tile.block_m, tile.block_n
    blocks = p.experts * ceil(p.m / max(p.experts, 1) / tile_m)
    needed = p.m * p.n / (tile_m * tile_n * sms)
    return max(ceil(blocks * ceil(p.n / tile_n) / sms) / needed, 1.0) if needed else 1.0
