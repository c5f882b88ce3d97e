"""Serial with a collective of our own in place of the library's, as specs: words behind "serial".

For what is little, the start of the library's collective is most of its time. "serial direct" is
the library's matmul and a kernel of ours; "serial fused" is a matmul and its reduce-scatter in one
kernel, for few rows. What is sent fits in words of 4 bytes, and all ranks own equally many: see
kernels/collectives.py and kernels/matmul_all_reduce.py.
"""

from dataclasses import replace
from math import ceil

from counterpoint.plan.steps import Plan
from counterpoint.problem import EXPERTS, Problem

DIRECT, FUSED = SPECS = ("serial direct", "serial fused")
MAX_BYTES = 64 << 20  # of what is gathered or scattered; its memory is twice that
MAX_RANKS = 32
MAX_EXPERTS = 1024  # of all ranks, in one kernel: see kernels/routes.py
FUSED_ROWS = 64  # more are the matmul library's


def refusal(p: Problem, spec: str) -> str:
    """What a spec of SPECS wants of a problem that it does not have, or ''."""
    gathers = p.op == "all_gather_matmul"
    if p.op in EXPERTS:
        return _refusal_of_experts(p, spec)
    if p.op != "matmul_reduce_scatter" and not gathers:
        return "a forward operator"
    if p.ranks & (p.ranks - 1) or p.ranks > MAX_RANKS:
        return f"a number of ranks that is a power of two up to {MAX_RANKS}"
    if len(set(p.rows)) > 1:
        return "equal rows on all ranks"
    if spec == FUSED:
        if gathers:
            return "matmul_reduce_scatter or experts"
        if p.m > FUSED_ROWS or p.item_bytes != 2:
            return f"{FUSED_ROWS} rows or fewer, of 16-bit numbers"
        return ""
    part = p.rows[0] * (p.k if gathers else p.n) * p.item_bytes
    if part % 4:
        return "parts of a multiple of 4 bytes"
    return f"at most {MAX_BYTES} bytes to send" if part * p.ranks > MAX_BYTES else ""


def fused_columns(rows: int, n: int, ranks: int, num_sms: int) -> int:
    """Columns of a tile of y[rows, n] in the fused kernel, from measurements on 4 H200."""
    wide = -(-n // 64) > num_sms
    columns = 128 if wide and rows <= 16 else 64 if n >= 48 * num_sms else 32
    return max(columns, ranks)


def fused_rounds(p: Problem, num_sms: int) -> int:
    """How many tiles one SM has at most in the fused kernel."""
    columns = fused_columns(fused_rows(p), p.n, p.ranks, num_sms)
    return ceil(ceil(p.n / columns) / num_sms)


def fused_rows(p: Problem) -> int:
    """Rows of a tile there: of each owner the next power of two."""
    return max(p.ranks << max(max(p.rows) - 1, 0).bit_length(), 16)


def _refusal_of_experts(p: Problem, spec: str) -> str:
    if spec != FUSED:
        return "an operator without experts"
    if p.ranks & (p.ranks - 1) or p.ranks > MAX_RANKS:
        return f"a number of ranks that is a power of two up to {MAX_RANKS}"
    if p.item_bytes != 2 or p.k % 8 or p.n % 8:
        return "16-bit numbers, K and N multiples of 8"
    return "" if p.experts * p.ranks <= MAX_EXPERTS else f"at most {MAX_EXPERTS} experts"


def most_bytes(p: Problem) -> int:
    """A bound on the words of one call, padded rows and columns of a fused kernel included."""
    cols = p.k if p.op == "all_gather_matmul" else p.n + 256
    return 2 * (p.m + p.ranks) * cols * p.item_bytes


def with_our_collective(serial: Plan, spec: str) -> Plan:
    """The serial plan with its collective by words, or in one kernel with its matmul."""
    ours = (("transport", "words"),)
    kinds = ("collective",)
    if spec == FUSED:
        ours, kinds = (*ours, ("kernel", "fused")), ("matmul", "collective")
    steps = tuple(replace(s, args=(*s.args, *ours)) if s.kind in kinds else s for s in serial.steps)
    return replace(serial, variant=spec.partition(" ")[2], steps=steps)
