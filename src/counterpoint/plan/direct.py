"""Serial with a collective of our own, of one kernel, in place of the library's: "serial direct".

Nothing overlaps; for what is little, the start of the library's collective is most of its time.
What is sent fits in words of 4 bytes, all ranks own equally many: see kernels/collectives.py.
"""

from dataclasses import replace

from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

SPEC = "serial direct"
MAX_BYTES = 64 << 20  # of what is gathered or scattered; its memory is three times that
MAX_RANKS = 32


def refusal(p: Problem) -> str:
    """What "serial direct" wants of a problem that it does not have, or ''."""
    if p.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        return "all_gather_matmul or matmul_reduce_scatter"
    if p.ranks & (p.ranks - 1) or p.ranks > MAX_RANKS:
        return f"a number of ranks that is a power of two up to {MAX_RANKS}"
    if len(set(p.rows)) > 1:
        return "equal rows on all ranks"
    cols = p.k if p.op == "all_gather_matmul" else p.n
    part = p.rows[0] * cols * p.item_bytes
    if part % 4:
        return "parts of a multiple of 4 bytes"
    if part * p.ranks > MAX_BYTES:
        return f"at most {MAX_BYTES} bytes to send"
    return ""


def direct(serial: Plan) -> Plan:
    """The serial plan with its collective by words."""
    steps = tuple(
        replace(s, args=(*s.args, ("transport", "words"))) if s.kind == "collective" else s
        for s in serial.steps
    )
    return replace(serial, variant="direct", steps=steps)
