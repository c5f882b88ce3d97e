"""The family "direct": the serial plan with a collective of our own in place of the library's.

For small tensors the start of the library's collective is most of its time. Ours is one kernel that
stores low-latency words straight to the peers, so what is sent is a multiple of 4 bytes and all
ranks own equally many: see kernels/collectives.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from counterpoint.plan.names import OWN
from counterpoint.plan.operation import Family, in_a_row
from counterpoint.plan.scaled import REFUSAL
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.problem import ITEM_BYTES, Problem

MAX_BYTES = 64 << 20  # of what is gathered or scattered; its memory is twice that
MAX_RANKS = 32  # that the bits of a fault word name


def wants_ranks(ranks: int) -> str:
    """What kernels of ours that wait for peers want of a number of ranks, or ""."""
    good = not ranks & (ranks - 1) and ranks <= MAX_RANKS
    return "" if good else f"a number of ranks that is a power of two up to {MAX_RANKS}"


def refusal(p: Problem, part_bytes: int) -> str:
    """What the collective wants of parts of so many bytes that each rank owns, or ""."""
    if why := wants_ranks(p.ranks):
        return why
    if part_bytes % 4:
        return "shares of a multiple of 4 bytes"
    return f"at most {MAX_BYTES} bytes to send" if part_bytes * p.ranks > MAX_BYTES else ""


def refusal_of_gather(p: Problem) -> str:
    """Of an all-gather of x."""
    if p.scales:  # a second collective would cost what this one saves
        return REFUSAL
    return _of_equal(p) or refusal(p, p.rows[0] * p.k * p.item_bytes)


def refusal_of_scatter(p: Problem) -> str:
    """Of a reduce-scatter of the products."""
    return _of_equal(p) or refusal(p, p.rows[0] * p.n * p.item_bytes)


def _of_equal(p: Problem) -> str:
    return "" if p.equal_rows else "equal rows on all ranks"


def family(serial: Callable[[Problem], Plan], refusal: Callable[[Problem], str]) -> Family:
    """The family of an operator that has that serial plan."""
    return in_a_row("direct", lambda p: with_our_collective(serial(p)), refusal)


def with_our_collective(serial: Plan) -> Plan:
    """The serial plan whose one collective is a kernel of ours, and the words that it stores."""
    (collective,) = (s for s in serial.steps if s.kind == "collective")
    words = _words_of(serial, collective)
    ours = replace(
        collective,
        writes=(*collective.writes, *to_everyone(serial.problem.ranks, words)),
        args=(*collective.args, ("transport", "words")),
        spins=True,
    )
    steps = tuple(ours if step is collective else step for step in serial.steps)
    buffers = (*serial.buffers, *words)
    return replace(serial, family="direct", buffers=buffers, steps=steps)


def to_everyone(ranks: int, buffers: Sequence[Buffer]) -> Iterator[Region]:
    """My row of those buffers, on every rank, this one included."""
    for buffer in buffers:
        yield from (Region(buffer.name, (d,) if d else (), OWN) for d in range(ranks))


def words(name: str, ranks: int, number: int) -> Buffer:
    """So many words of each rank that may write to them."""
    return Buffer(name, (ranks, number), "int32", "words", split=True)


def _words_of(serial: Plan, collective: Step) -> tuple[Buffer, ...]:
    """Slots by sender; where all ranks get sums, those behind them."""
    ranks, name = serial.problem.ranks, collective.arg("collective")
    side = collective.writes if name == "all_gather" else collective.reads
    whole = serial.buffer(side[0].buffer)
    part = whole.shape[0] * whole.shape[1] * ITEM_BYTES[whole.dtype] // ranks // 4
    names = ("slots", "results") if name == "all_reduce" else ("slots",)
    return tuple(words(each, ranks, part) for each in names)
