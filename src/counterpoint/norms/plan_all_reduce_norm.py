"""all_reduce_norm: h = the sum of x over the ranks + residual, and its rows normalised.

By RMS or as a LayerNorm, on every rank. Of few rows one kernel does it all; of many an all-reduce
stands before the kernel of the norm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.plan.bind import Box
from counterpoint.plan.names import BIAS, OWN, X, Y, bias_row, collective, in_one_lane
from counterpoint.plan.operation import (
    Family,
    Operation,
    Options,
    in_a_row,
    refuse_heads,
    refuse_tables,
)
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Cell, Row, Value, normal
from counterpoint.problem import ITEM_BYTES, Problem
from counterpoint.schedules import direct
from counterpoint.schedules.invariant import even_parts
from counterpoint.schedules.sizes import check_none
from counterpoint.tensor_parallel.plan_fused_sum import padded

OP = "all_reduce_norm"
FP8 = "float8_e4m3fn"
RESIDUAL, WEIGHT, SCALE = Region("residual"), Region("weight"), Region("scale")
H, SCALES, TOTAL = Region("h"), Region("scales"), Region("total")
# what a program has in registers: words of a row, and with those of all ranks that it sums
ROW_WORDS, SUMMED_WORDS = 1 << 13, 1 << 14
WORDS_OF_WARP = 512  # that a warp takes
MOST_WARPS = 16
# of a row that goes to all ranks rather than in parts: the bytes of more take longer than a second
# trip; an estimate
ONE_SHOT_BYTES = 512 << 10
ROWS_SHARE = 0.5  # of memory's rate, by rows of 2 H100s; taken to be that of others, too


class Settings(NamedTuple):
    """How the one kernel is launched; a step of a plan has the same as arguments.

    Args:
        shots: "one_shot" or "two_shot".
        num_warps: of a program.
    """

    shots: str
    num_warps: int


def row_words(p: Problem) -> int:
    """Words of a row of x."""
    return p.n * p.item_bytes // 4


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: all ranks have all rows of all of them."""
    whole = p.m, p.n
    return (
        Buffer("x", whole, p.dtype, "input"),
        *((Buffer("residual", whole, p.dtype, "input"),) * p.residual),
        Buffer("weight", (1, p.n), p.dtype, "input"),
        *bias_row(p),
        *((Buffer("scale", (1, 1), "float32", "input"),) * (p.quantized == "tensor")),
        Buffer("y", whole, FP8 if p.quantized else p.dtype, "output"),
        Buffer("h", whole, p.dtype, "output"),
        *((Buffer("scales", (p.m, 1), "float32", "output"),) * (p.quantized == "rows")),
    )


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """What results are made of: the terms of the sum, of h and of its norm. And the sum alone."""
    total = [Cell(s, "x", 0, 0) for s in range(p.ranks)]
    yield Box(rank, "total", 0, 0, p.m, 0, p.n), normal(total)
    h = [*total, *([Cell(rank, "residual", 0, 0)] * p.residual)]
    yield Box(rank, "h", 0, 0, p.m, 0, p.n), normal(h)
    made = normal([*h, Row(rank, "weight", 0), *([Row(rank, "bias", 0)] * p.bias)])
    yield Box(rank, "y", 0, 0, p.m, 0, p.n), made
    if p.quantized == "rows":
        yield Box(rank, "scales", 0, 0, p.m, 0, 1), made


def serial(p: Problem) -> Plan:
    """The library's all-reduce of a copy of x, then the norm."""
    total = Buffer("total", (p.m, p.n), p.dtype, "scratch")
    summed = collective("all_reduce", "all_reduce", (X,), TOTAL)
    return in_one_lane(p, "serial", (*operands(p), total), summed, _norm(p, TOTAL))


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return (_norm(p, X),)


def _norm(p: Problem, source: Region, **of_kernel: int | str) -> Step:
    """The kernel: of one rank, or with peers."""
    reads = (
        source, *((RESIDUAL,) * p.residual), WEIGHT, *((BIAS,) * p.bias),
        *((SCALE,) * (p.quantized == "tensor")),
    )  # fmt: skip
    writes = (Y, H, *((SCALES,) * (p.quantized == "rows")))
    args = (("kernel", OP), *of_kernel.items())
    return Step("norm", "compute", "fused", reads, writes, args=args)


def fused(p: Problem, options: Options, machine: Machine) -> Plan:
    """One kernel: words to the peers, their sum, and its norm."""
    settings = settings_of(p, options)
    two = settings.shots == "two_shot"
    number = p.m * row_words(p) // (p.ranks if two else 1)
    slots, results = (direct.words(name, p.ranks, number) for name in ("slots", "results"))
    step = _norm(p, X, **settings._asdict())
    to_peers = (Region("slots", (d,), OWN) for d in range(1, p.ranks))
    to_all = direct.to_everyone(p.ranks, (results,) * two)
    step = replace(step, writes=(*step.writes, *to_peers, *to_all), spins=True)
    buffers = (*operands(p), slots, *((results,) * two))
    variant = f"{settings.shots} warps={settings.num_warps}"
    return replace(in_one_lane(p, "fused", buffers, step), variant=variant)


def settings_of(p: Problem, options: Options) -> Settings:
    """What a spec says, and for the rest: one shot where a row of all ranks fits registers.

    Raises:
        InputError: a row does not fit, or ranks do not share it evenly.
    """
    words = row_words(p)
    fits = p.ranks * padded(words) <= SUMMED_WORDS
    shared = _two_shot(p)
    sent = p.m * words * 4 * (p.ranks - 1)
    # two ranks send as many bytes either way
    first = fits and (p.ranks == 2 or sent <= ONE_SHOT_BYTES or not shared)
    shots = options.shots or ("one_shot" if first else "two_shot")
    if (
        shots == "scatter"
        or (shots == "one_shot" and not fits)
        or (shots == "two_shot" and not shared)
    ):
        good = ["one_shot"] * fits + ["two_shot"] * shared
        want = f"a spec of {' or '.join(good)} for such rows"
        raise InputError(p.op, "plan", want=want, got=repr(options.spec))
    taken = padded(words) if shots == "one_shot" else padded(words // p.ranks)
    warps = options.warps or max(4, min(MOST_WARPS, p.ranks * taken // WORDS_OF_WARP))
    if warps & (warps - 1):
        raise InputError(p.op, "plan", want="num_warps a power of 2 from 1 to 32", got=warps)
    return Settings(shots, warps)


def _two_shot(p: Problem) -> bool:
    """Whether ranks may sum a part of each row."""
    return even_parts(p) if p.invariant else row_words(p) % p.ranks == 0


def settings_in(step: Step) -> Settings:
    """Those of a step of a plan."""
    return Settings(str(step.arg("shots")), int(step.arg("num_warps")))


def refusal(p: Problem) -> str:
    """What one kernel wants of a problem that it does not have, or ""."""
    if why := direct.wants_ranks(p.ranks):
        return why
    if p.n * p.item_bytes % 4:
        return "rows of a multiple of 4 bytes"
    words = row_words(p)
    if words > ROW_WORDS:
        return f"rows of at most {4 * ROW_WORDS} bytes"
    if p.ranks * padded(words) > SUMMED_WORDS and not _two_shot(p):
        return f"rows that ranks share evenly{' in 1, 2, 4, ... words' * p.invariant}"
    if (sent := p.m * words * 4 * p.ranks) > direct.MAX_BYTES:
        return f"at most {direct.MAX_BYTES} bytes to send, not {sent}"
    return ""


def refusal_of_direct(p: Problem) -> str:
    """What the all-reduce of ours wants that this problem does not have, or ""."""
    whole = p.m * p.n * p.item_bytes
    return direct.refusal(p, whole // p.ranks) if whole % p.ranks == 0 else "equal shares of x"


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    return ("serial",) if p.islands > 1 else ("serial", "direct", "fused")


def _least_launches(p: Problem) -> str:
    if not refusal(p):
        return "fused"
    return "direct" if not refusal_of_direct(p) else ""


def seconds(p: Problem, step: Step, machine: Machine) -> float:
    """Of the kernel: what it reads and writes; with peers, an all-reduce of ours in its place of x.

    The constants of that are of one trip; a second one is not counted of either. A program that
    waits for the words of its row reads nothing else meanwhile: memory then has ROWS_SHARE of its
    rate.
    """
    costs, item_bytes = machine.costs, p.item_bytes
    kept = p.m * p.n * (item_bytes * (1 + p.residual) + ITEM_BYTES[FP8 if p.quantized else p.dtype])
    whole = p.m * p.n * item_bytes
    if not step.spins:
        return costs.memory_s(whole + kept)
    one = settings_in(step).shots == "one_shot"
    received = whole * (p.ranks - 1) * (1.0 if one else 2 / p.ranks)
    words_s = costs.direct_s + received / costs.direct_bytes_per_s
    return words_s + kept / (ROWS_SHARE * costs.hbm_bytes_per_s)


def filled(p: Problem) -> Mapping[str, object]:
    """Which norm it is, if the problem does not say."""
    refuse_tables(p)
    refuse_heads(p)
    return {"norm": p.norm or "rms"}


def check(p: Problem) -> None:
    """Refuse what a norm has none of."""
    check_none(p, "experts", "splits")
    if p.k:
        raise InputError(p.op, "k", want="0: nothing is contracted", got=p.k)
    if p.bias and p.norm != "layer":
        raise InputError(p.op, "bias", want="False: a norm by RMS adds none", got=p.bias)


def described(p: Problem) -> str:
    """Its norm, and its result where that is in fp8."""
    scaled = {"tensor": ", fp8 by one scale", "rows": ", fp8 by rows"}.get(p.quantized, "")
    eps = f" eps {p.eps:g}" if p.eps else ""
    return f" {p.norm}{eps}" + " +residual" * p.residual + scaled


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        direct.family(serial, refusal_of_direct),
        Family(
            name="fused", takes=("shots", "warps"), build=fused, wants=refusal, in_a_row=True
        ),
    ),
    candidates=candidates,
    collectives=("all_reduce",),
    check=check,
    moved=lambda p: (p.n, p.n),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: _least_launches(p),
    gradient="serial",
    shares_rows=False,
    invariant=True,
    fused_s=seconds,
    rule=lambda p, machine: _least_launches(p),
    filled=filled,
    described=described,
    computed_s=lambda p, machine: seconds(p, alone(p)[0], machine),
)  # fmt: skip
