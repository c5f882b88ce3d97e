"""Names that plans of matmuls share: lanes, the regions of users' tensors, the row of a bias."""

from counterpoint.plan.steps import Buffer, Lane, Region
from counterpoint.problem import Problem

COMPUTE = Lane("compute", "sm")
SIGNAL = Lane("signal", "sm", priority=-1)
COPY = Lane("copy", "copy", priority=-1)
LANES = (COMPUTE, SIGNAL, COPY)

OWN = ((0,),)  # the block of this rank
X, W, BIAS, Y = Region("x"), Region("w"), Region("bias"), Region("y")


def bias_row(p: Problem) -> tuple[Buffer, ...]:
    """The bias [1, N], where the problem has one."""
    return (Buffer("bias", (1, p.n), p.dtype, "input"),) if p.bias else ()


def with_bias(p: Problem) -> tuple[tuple[Region, ...], tuple[tuple[str, int | str], ...]]:
    """What a step reads and is told where the problem has a bias that it adds."""
    return ((BIAS,), (("bias", 1),)) if p.bias else ((), ())
