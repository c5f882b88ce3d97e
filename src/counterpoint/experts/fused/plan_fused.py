"""The family "fused" of experts: one kernel moves rows and multiplies them, by a persistent matmul.

Rows are stored to their owners, and flags behind them; tiles wait for the rows that they take. See
experts/fused/kernel_dispatch.py and experts/fused/kernel_combine.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from counterpoint.machine import Machine
from counterpoint.plan.names import W, X, Y, counts_of, in_one_lane
from counterpoint.plan.operation import Family
from counterpoint.plan.steps import ME, Buffer, Plan, Region, Step
from counterpoint.problem import Problem
from counterpoint.schedules.direct import to_everyone, wants_ranks
from counterpoint.schedules.expected_rows import once

MAX_EXPERTS = 1024  # of all ranks, in one kernel: see experts/routes/kernel_rows.py
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


@dataclass(frozen=True)
class Sending:
    """How rows are sent to their experts.

    Args:
        senders: programs that send.
        parts: of the rows of an (expert, rank), a flag behind each; a power of 2.
        words: of 4 bytes, that a program sends at a time.
    """

    senders: int = 16
    parts: int = 8
    words: int = 8192


def tile_of(rows: int, k: int, n: int, experts: int, *, combines: bool) -> Tile:
    """The tile for `rows` in all of so many experts on a rank, by measurements on 4 H200."""
    each = rows / max(experts, 1)
    if each <= FEW_ROWS:
        return Tile(64, 256, 64, 4, 4)
    few = rows * n < 132 * 128 * 256
    if combines and (k < LONG_K or few):
        return Tile(128, 128, 64, 4, 4)
    return Tile(stages=4 if combines or each < MANY_ROWS else 3)


def sending_of(rows: int, experts: int, ranks: int) -> Sending:
    """How to send `rows` in all to so many experts on each of `ranks` ranks."""
    senders = 16 if rows >= MANY_ROWS * experts else 32
    # all senders are at one expert at a time, so that it is there soon; a single one is in parts
    return Sending(senders, max(1, senders // ranks) * (1 if experts > 4 else 8))


def inside(p: Problem) -> Problem:
    """What the kernel of an island sees: its ranks, each with the tokens of its rail."""
    if p.islands == 1:
        return p
    return replace(p, ranks=p.ranks // p.islands, islands=1, rows=(), top_k=0)


def settings_in(step: Step) -> tuple[Tile, Sending]:
    """Those of a step of a plan; a combine has no senders of its own."""
    args = dict(step.args)
    tile, sending = (
        kind(**{name: int(args[name]) for name in kind.__dataclass_fields__ if name in args})
        for kind in (Tile, Sending)
    )
    return tile, sending  # type: ignore[return-value]


# 4xH200, bf16, 2026-11: our grouped matmul over the library's, of a combine and of a dispatch
SLOWER = {False: 1.05, True: 1.03}
SENDING = 0.15  # of the all-to-all's time, in SMs that do not multiply
LAUNCHES_S = {False: 15e-6, True: 25e-6}  # routes, flags, what is collected: kernels of their own


def refusal(p: Problem) -> str:
    """What the kernels want of a problem that it does not have, or ""."""
    if why := wants_ranks(p.ranks):
        return why
    if p.counts == "routed":
        return "a row for each expert of a token"
    if p.item_bytes != 2 or p.k % 8 or p.n % 8:
        return "16-bit numbers, K and N multiples of 8"
    if p.experts * p.ranks > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts"
    tile = tile_of(p.m, p.k, p.n, p.experts, combines=_combines(p))
    # kernels count in int32; an expert's last blocks may be partly empty, and up to one a rank none
    blocks = ceil(p.m / tile.block_m) + p.experts * p.ranks
    tiles = blocks * ceil(p.n / tile.block_n)
    return "" if max(p.m, p.k, p.n, tiles) < 2**31 else "M, N, K and tiles of y below 2**31"


def or_serial(p: Problem) -> str:
    """The family where a rule takes kernels in a row; "" is serial."""
    return "" if refusal(p) else "fused"


def overlapped(p: Problem, copy_longer: bool) -> str:
    """The family that a rule takes where both sides are long enough."""
    families = {"equal": "grouped", "routed": "routed"}
    return families.get(p.counts) or or_serial(p)


def without_serial(p: Problem) -> tuple[str, str]:
    """One kernel where only the GPU knows the counts, if it takes the problem."""
    if p.counts not in ("device", "device_routed") or not or_serial(p):
        return "", ""
    return "fused", "waits for the host to read the counts, which its time leaves out"


def family(operands: Callable[[Problem], tuple[Buffer, ...]]) -> Family:
    """The family for an operator of those operands."""

    def build(p: Problem, *_: object) -> Plan:
        step, own = one_kernel(p, X, Y)
        return in_one_lane(p, "fused", (*operands(p), *own), step)

    return Family(name="fused", build=build, wants=refusal, in_a_row=True, alone=True)


def one_kernel(
    p: Problem, rows: Region, result: Region, after: tuple[str, ...] = ()
) -> tuple[Step, tuple[Buffer, ...]]:
    """The kernel as a step of the ranks of each island, and the memory of its protocol.

    Args:
        rows: what it takes.
        result: what it makes of that.
    """
    ours, combines = inside(p), _combines(p)
    tile = tile_of(p.m, p.k, p.n, p.experts, combines=combines)
    sending = None if combines else sending_of(p.m, p.experts, ours.ranks)
    own: tuple[Buffer, ...] = received(ours, sending)
    stored = to_everyone(p.ranks, own)
    if p.islands > 1:  # rows lie there by place, with those of a whole rail as one block
        own = tuple(replace(buffer, split=False, chunks=1) for buffer in own)
        mates = [(0, place) if place else ME for place in range(ours.ranks)]
        stored = (Region(buffer.name, at) for buffer in own for at in mates)
    args = [(name, getattr(kind, name)) for kind in (tile, sending) if kind
            for name in kind.__dataclass_fields__]  # fmt: skip
    step = Step(
        "experts", "compute", "fused", (rows, W, *counts_of(p)), (result, *stored), after,
        args=(("kernel", p.op), *args), spins=True,
    )  # fmt: skip
    return step, own


def received(p: Problem, sending: Sending | None) -> tuple[Buffer, Buffer]:
    """Rows that come to a rank, and the flags behind them; a block of each rank that stores them.

    Of a dispatch, rows by expert, and a flag for each part of what a rank has for an expert, in
    that order; of a combine, rows by owner and a flag of each rank.
    """
    rows = Buffer("moved", (p.m, sum(p.operation.moved(p))), p.dtype, "turns", split=True,
                  chunks=1 if sending is None else p.experts)  # fmt: skip
    flags = 1 if sending is None else p.experts * sending.parts
    return rows, Buffer("arrived", (p.ranks * flags, 1), "int32", "flags", split=True, chunks=flags)


def _combines(p: Problem) -> bool:
    return p.op == "matmul_all_to_all"


def seconds(p: Problem, step: Step, machine: Machine) -> float:
    """Of the kernel on the busiest rank: the shorter of both sides hides behind the longer.

    Its matmul is somewhat slower than the library's, and takes SMs to send. Sums of tokens go back
    behind the matmul, and not beside it.
    """
    combines, costs = _combines(p), machine.costs
    bytes_s = 1 / costs.hbm_bytes_per_s
    math_s = p.flop / costs.gemm_flop_per_s
    math_s *= costs.settling(math_s)
    weights = p.experts * p.k * p.n
    matmul_s = max(math_s, (weights + p.m * (p.k + p.n)) * p.item_bytes * bytes_s)
    moved = p.m * sum(p.operation.moved(p)) * p.item_bytes
    made = moved if combines and p.by_routes else 0  # products, written and read again
    moved *= once(p, 1) if p.by_routes else 1
    size = p.ranks // p.islands
    comm_s = costs.all_gather_s + moved * (size - 1) / size / costs.collective_bytes_per_s
    rounds = _rounds(p, machine.sms.count, combines=combines)
    matmul_s = max(matmul_s, math_s * rounds) * SLOWER[combines]
    longer_s = matmul_s + comm_s + 2 * made * bytes_s if made else max(matmul_s, comm_s)
    beside_s = 2 * moved * bytes_s if combines else SENDING * comm_s
    return longer_s + LAUNCHES_S[combines] + beside_s


def _rounds(p: Problem, sms: int, *, combines: bool) -> float:
    """Rounds of tiles over the SMs, over those that the products alone would need."""
    tile = tile_of(p.m, p.k, p.n, p.experts, combines=combines)
    tile_m, tile_n = tile.block_m, tile.block_n
    each = p.m / max(p.experts, 1) / tile_m
    # of counts that differ, an expert's last tile is half full in the mean
    blocks = p.experts * (ceil(each) if p.counts == "equal" else each + 0.5)
    needed = p.m * p.n / (tile_m * tile_n * sms)
    return max(ceil(blocks * ceil(p.n / tile_n) / sms) / needed, 1.0) if needed else 1.0
