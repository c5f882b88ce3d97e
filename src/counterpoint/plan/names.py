"""Names that plans share: lanes, regions of users' tensors; and what serial plans are made of."""

from counterpoint.plan.steps import COUNTS, ROUTES, Buffer, Lane, Plan, Region, Step
from counterpoint.problem import Problem

COMPUTE = Lane("compute", "sm")
SIGNAL = Lane("signal", "sm", priority=-1)
COPY = Lane("copy", "copy", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY)

OWN = ((0,),)  # the block of this rank
X, W, BIAS, Y = Region("x"), Region("w"), Region("bias"), Region("y")


def numbered(p: Problem, size: int) -> list[tuple[str, int]]:
    """What stands behind the names of each weight's buffers, and its part of `size`."""
    return [(str(i), n) for i, n in enumerate(p.splits)] or [("", size)]


def bias_row(p: Problem) -> tuple[Buffer, ...]:
    """The bias [1, N], where the problem has one."""
    return (Buffer("bias", (1, p.n), p.dtype, "input"),) if p.bias else ()


def weights(p: Problem) -> tuple[Region, ...]:
    """What one matmul multiplies x by."""
    return (Region("w0"), Region("w1")) if p.gated else (W,)


def with_bias(p: Problem) -> tuple[tuple[Region, ...], tuple[tuple[str, int | str], ...]]:
    """What a step reads and is told that adds the bias, and applies the activation, if any."""
    activation = (("activation", p.activation),) if p.activation else ()
    return ((BIAS,), (("bias", 1), *activation)) if p.bias else ((), activation)


def counts_of(p: Problem) -> tuple[Region, ...]:
    """What a step reads that has as many rows as the counts say."""
    return () if p.counts == "equal" else (Region(COUNTS),)


def routes_of(p: Problem) -> tuple[Region, ...]:
    """What a step reads whose rows are of tokens, which have several experts."""
    return (Region(ROUTES),) if p.counts == "routed" else ()


def rows_said(p: Problem) -> tuple[Region, ...]:
    """What a copy reads whose rows an operand says."""
    return routes_of(p) or counts_of(p)


def collective(name: str, which: str, reads: tuple[Region, ...], target: Region) -> Step:
    """A step of the library's collective."""
    args = (("collective", which),)
    return Step(name, "compute", "collective", reads, (target,), args=args)


def in_one_lane(p: Problem, family: str, buffers: tuple[Buffer, ...], *steps: Step) -> Plan:
    """A plan whose kernels run one after another."""
    return Plan(p, family, "", "ring", buffers, (COMPUTE,), steps)


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does to multiply x by w, plus the bias."""
    added, args = with_bias(p)
    return (Step("matmul", "compute", "matmul", (X, W, *added), (Y,), args=args),)
