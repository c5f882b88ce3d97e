"""matmul_all_reduce: y = the sum over ranks of x_s w_s, on every rank; its families of plans."""

from collections.abc import Iterator

from counterpoint.machine import Machine
from counterpoint.plan import direct, fused_sum
from counterpoint.plan.bind import Box
from counterpoint.plan.definition import bias, reduced
from counterpoint.plan.names import W, X, Y, alone, bias_row, collective, in_one_lane, with_bias
from counterpoint.plan.operation import Operation, in_a_row
from counterpoint.plan.sizes import check_plain
from counterpoint.plan.steps import Buffer, Plan, Region, Step
from counterpoint.plan.values import Value, normal
from counterpoint.problem import Problem

MAX_DIRECT_BYTES = 16 << 20  # of y; more is worth the library's collective


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: all ranks have all rows of x and of y."""
    x, y = Buffer("x", (p.m, p.k), p.dtype, "input"), Buffer("y", (p.m, p.n), p.dtype, "output")
    return x, Buffer("w", (p.k, p.n), p.dtype, "input"), *bias_row(p), y


def definition(p: Problem, rank: int) -> Iterator[tuple[Box, Value]]:
    """y: the sum of all ranks' products, plus the bias of this rank."""
    value = normal((*reduced(p, "x", "w", p.k), *bias(p, rank)))
    yield Box(rank, "y", 0, 0, p.m, 0, p.n), value


def serial(p: Problem) -> Plan:
    """One matmul, then the library's all-reduce in place: what users do today."""
    return _summed(p, operands(p), Y)


def _apart(p: Problem) -> Plan:
    """The same from one tensor into another, as an all-reduce of ours needs it."""
    partial = Buffer("partial", (p.m, p.n), p.dtype, "scratch")
    return _summed(p, (*operands(p), partial), Region("partial"))


def _summed(p: Problem, buffers: tuple[Buffer, ...], product: Region) -> Plan:
    """One matmul, the library's all-reduce into y, and the bias, added once."""
    multiply = Step("matmul", "compute", "matmul", (X, W), (product,))
    total = collective("all_reduce", "all_reduce", (product,), Y)
    added, args = with_bias(p)
    bias = [Step("add_bias", "compute", "move", (Y, *added), (Y,), args=args)] if p.bias else []
    return in_one_lane(p, "serial", buffers, multiply, total, *bias)


def refusal_of_direct(p: Problem) -> str:
    """What the collective of ours wants that this problem does not have, or ""."""
    whole = p.m * p.n * p.item_bytes
    return direct.refusal(p, whole // p.ranks) if whole % p.ranks == 0 else "equal shares of y"


def candidates(p: Problem) -> tuple[str, ...]:
    """Specs worth weighing, serial first."""
    found = ["serial"]
    if p.m * p.n * p.item_bytes <= MAX_DIRECT_BYTES:
        found.append("direct")
    if p.m <= fused_sum.FEW_ROWS and p.item_bytes == 2:
        found.append("fused")
    return tuple(found)


def _rule(p: Problem, machine: Machine) -> str:
    """Few rows: one kernel, unless a wide w gives an SM two tiles."""
    wide = p.n > 64 * machine.device.num_sms
    rows = fused_sum.FEW_ROWS // 2 if wide else fused_sum.FEW_ROWS
    if p.m <= rows and p.item_bytes == 2 and not fused_sum.refusal(p):
        return "fused"
    return _direct_if_small(p)


def _direct_if_small(p: Problem) -> str:
    small = p.m * p.n * p.item_bytes <= MAX_DIRECT_BYTES
    return "direct" if small and not refusal_of_direct(p) else ""


OPERATION = Operation(
    operands=operands,
    definition=definition,
    alone=alone,
    families=(
        in_a_row("serial", serial),
        direct.family(_apart, refusal_of_direct),
        fused_sum.family(operands, scatters=False),
    ),
    candidates=candidates,
    collectives=("all_reduce",),
    check=check_plain,
    moved=lambda p: (p.n, p.n),
    overlapped=lambda p, copy_longer: _direct_if_small(p),
    gradient="serial",
    shares_rows=False,
    fused_s=fused_sum.seconds,
    rule=_rule,
)  # fmt: skip
