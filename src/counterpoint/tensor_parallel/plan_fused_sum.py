"""The family "fused" of a matmul and the sum over ranks: one kernel, for the few rows of decoding.

Each program multiplies tiles of columns and stores each at once, as low-latency words, to the ranks
that sum it: see tensor_parallel/kernel_matmul_all_reduce.py.

- one_shot: every rank sums every tile. One trip, and ranks times the bytes.
- two_shot: each rank sums its columns of a tile and gives the sums to all.
- scatter: each rank sums the rows that it owns, and keeps them: a reduce-scatter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan.names import BIAS, W, X, Y, in_one_lane
from counterpoint.plan.operation import Family, Options
from counterpoint.plan.scaled import REFUSAL
from counterpoint.plan.steps import Buffer, Plan, Step
from counterpoint.problem import Problem
from counterpoint.schedules.direct import to_everyone, wants_ranks, words

KERNEL = "matmul_all_reduce"
FEW_ROWS = 64  # more are the matmul library's
TILE_BYTES = 100_000  # of the tiles on their way: two blocks are resident on an SM of 227 KiB
MAX_STAGES = 8
# of all SMs together against the memory's: what one SM takes in when the kernel feeds it its tile
# of w and all of x; 2xH200 and 4xH200, Llama-3 70B at 64 tokens (56 GB/s an SM)
INTAKE = 1.8


@dataclass(frozen=True, slots=True)
class Settings:
    """How the kernel is launched; a step of a plan has the same as arguments.

    Args:
        shots: "one_shot", "two_shot" or "scatter".
        block_n: columns of a tile, a multiple of the ranks.
        block_k: of K that is multiplied at a time.
        stages: loads of w on their way.
        num_warps: of a program.
    """

    shots: str
    block_n: int
    block_k: int
    stages: int
    num_warps: int

    @property
    def variant(self) -> str:
        """As the words of a spec: "two_shot 64x64x8 warps=4"."""
        tile = f"{self.block_n}x{self.block_k}x{self.stages}"
        return f"{self.shots} {tile} warps={self.num_warps}"


def settings_of(p: Problem, options: Options, num_sms: int, *, scatters: bool) -> Settings:
    """What a spec says, and for the rest what was fastest on 4 H200 up to 64 rows.

    One shot where a call sends little more than two would; tiles so that every SM has one, as deep
    on their way as two blocks fit.

    Raises:
        InputError: it scatters by two shots, the ranks do not divide a tile, or a size is wrong.
    """
    rows = rows_of_tile(p, scatters=scatters)
    wide = -(-p.n // 64) > num_sms
    block_n = columns(rows, p.n, p.ranks, num_sms)
    step_bytes = (block_n + max(rows, 16)) * 64 * p.item_bytes
    stages = max(2, min(MAX_STAGES, TILE_BYTES // step_bytes))
    tile = options.tile or (block_n, 64, stages)
    shots = "scatter" if scatters else "one_shot" if rows * (p.ranks - 1) <= 8 else "two_shot"
    if options.shots and scatters != (options.shots == "scatter"):
        want = "a spec that scatters" if scatters else "a spec of one_shot or two_shot"
        raise InputError(p.op, "plan", want=want, got=repr(options.spec))
    warps = options.warps or (8 if rows > (16 if wide else 64) else 4)
    found = Settings(options.shots or shots, *tile, warps)
    for name, least, most in (("block_n", 16, 1024), ("block_k", 16, 1024), ("num_warps", 1, 32)):
        size: int = getattr(found, name)
        if not least <= size <= most or size & (size - 1):
            want = f"{name} a power of 2 from {least} to {most}"
            raise InputError(p.op, "plan", want=want, got=size)
    if found.stages > 64:
        raise InputError(p.op, "plan", want="stages of at most 64", got=found.stages)
    if found.block_n % p.ranks:
        want = f"a spec whose tile has columns for each of {p.ranks} ranks"
        raise InputError(p.op, "plan", want=want, got=repr(options.spec))
    return found


def settings_in(step: Step) -> Settings:
    """Those of a step of a plan."""
    args = dict(step.args)
    return Settings(*(args[name] for name in Settings.__slots__))  # type: ignore[arg-type]


def rows_of_tile(p: Problem, *, scatters: bool) -> int:
    """Rows of a tile: the next power of two, of each owner where it scatters."""
    return p.ranks * own_rows(p, max(p.rows)) if scatters else own_rows(p, p.m)


def own_rows(p: Problem, rows: int) -> int:
    """Rows of a tile that one rank has: at least two where a single one, too, has to be rounded."""
    return max(padded(rows), 1 + p.invariant)


def padded(rows: int) -> int:
    """The next power of 2."""
    return 1 << max(rows - 1, 0).bit_length()


def columns(rows: int, n: int, ranks: int, num_sms: int) -> int:
    """Columns of a tile of y[rows, n], from measurements on 4 H200."""
    wide = -(-n // 64) > num_sms
    found = 128 if wide and rows <= 16 else 64 if n >= 48 * num_sms else 32
    return max(found, ranks)


def word_counts(p: Problem, settings: Settings) -> tuple[int, int]:
    """Words that a rank stores to each rank: partial tiles, and results of two shots.

    Two rows of a 16-bit dtype share a word, a single row travels in fp32.
    """
    rows = max(p.rows) if settings.shots == "scatter" else p.m
    live = ceil(rows / 2) if rows > 1 and p.item_bytes == 2 else rows
    tile = -(-p.n // settings.block_n) * live * settings.block_n
    if settings.shots == "two_shot":
        return tile // p.ranks, tile // p.ranks
    return tile, 0


def build(
    p: Problem, settings: Settings, operands: Callable[[Problem], tuple[Buffer, ...]]
) -> Plan:
    """The plan of one step."""
    slots, results = word_counts(p, settings)
    own = (
        words("slots", p.ranks, slots),
        *([words("results", p.ranks, results)] if results else ()),
    )
    args = tuple((name, getattr(settings, name)) for name in Settings.__slots__)
    step = Step(
        "matmul_and_sum", "compute", "fused", (X, W, *((BIAS,) if p.bias else ())),
        (Y, *to_everyone(p.ranks, own)), args=(("kernel", KERNEL), *args), spins=True,
    )  # fmt: skip
    return replace(in_one_lane(p, "fused", (*operands(p), *own), step), variant=settings.variant)


def refusal(p: Problem) -> str:
    """What the kernel wants of a problem that it does not have, or ""."""
    return REFUSAL if p.scales else wants_ranks(p.ranks)


def refusal_of_scatter(p: Problem) -> str:
    """Of a reduce-scatter, also: equal and few rows."""
    if why := refusal(p):
        return why
    if p.splits:
        return "one weight"
    if not p.equal_rows:
        return "equal rows on all ranks"
    if p.m > FEW_ROWS or p.item_bytes != 2:
        return f"{FEW_ROWS} rows or fewer, of 16-bit numbers"
    return ""


def is_few(p: Problem, machine: Machine, *, scatters: bool = True) -> bool:
    """Whether no SM has two tiles."""
    return _rounds(p, machine.device.num_sms, scatters=scatters) == 1


def family(operands: Callable[[Problem], tuple[Buffer, ...]], *, scatters: bool) -> Family:
    """The family for an operator of those operands."""

    def build_it(p: Problem, options: Options, machine: Machine) -> Plan:
        found = settings_of(p, options, machine.device.num_sms, scatters=scatters)
        return build(p, found, operands)

    return Family(
        name="fused", takes=("shots", "tile", "warps"), build=build_it,
        wants=refusal_of_scatter if scatters else refusal, in_a_row=True,
    )  # fmt: skip


def seconds(p: Problem, step: Step, machine: Machine) -> float:
    """Of the kernel: its matmul, and what the words take beyond it.

    Each program takes in its columns of w and all of x, and the SM that has most of them is last:
    160 tiles on 132 SMs take twice what 132 do. The sum has no start of its own.
    """
    settings, costs, sms = settings_in(step), machine.costs, machine.device.num_sms
    scatters = settings.shots == "scatter"
    rows = max(rows_of_tile(p, scatters=scatters), 16)
    rounds = _rounds(p, sms, scatters=scatters)
    intake = INTAKE * costs.hbm_bytes_per_s / sms
    intake_s = rounds * (settings.block_n + rows) * p.k * p.item_bytes / intake
    read_s = (rows + p.n) * p.k * p.item_bytes / costs.hbm_bytes_per_s
    whole = p.m * p.n * p.item_bytes
    shares = {"scatter": 1 / p.ranks, "one_shot": 1.0, "two_shot": 2 / p.ranks}
    received = whole * (p.ranks - 1) * shares[settings.shots]
    sum_s = max(costs.direct_s - costs.kernel_s, 0.0) + received / costs.direct_bytes_per_s
    return costs.kernel_s + max(intake_s, read_s) + sum_s


def _rounds(p: Problem, num_sms: int, *, scatters: bool) -> int:
    """How many tiles one SM has at most."""
    rows = max(rows_of_tile(p, scatters=scatters), 16)
    return ceil(ceil(p.n / columns(rows, p.n, p.ranks, num_sms)) / num_sms)
