"""Checks of a Problem's sizes, and wants of a family, that several operators share."""

from counterpoint.errors import InputError
from counterpoint.problem import Problem

NONE = {
    "experts": "0: the op has none", "splits": "empty: the op has one weight",
    "bias": "False: the op adds none",
}  # fmt: skip


def check_none(p: Problem, *names: str) -> None:
    """Refuse what the operator has none of: "experts", "splits" or "bias"."""
    for name in names:
        if given := getattr(p, name):
            raise InputError(p.op, name, want=NONE[name], got=given)


def check_plain(p: Problem) -> None:
    """Refuse experts and several weights, which most operators have none of."""
    check_none(p, "experts", "splits")


def check_gradient(p: Problem) -> None:
    """Refuse what gradients have none of."""
    check_none(p, "experts", "splits", "bias")


def check_gradients(p: Problem) -> None:
    """Refuse what gradients of several weights have none of, and weights that are not all."""
    check_none(p, "bias")
    check_splits(p)


def check_splits(p: Problem) -> None:
    """Refuse several weights that are not all columns, or have a bias."""
    _check_parts(p, p.n)


def check_activated(p: Problem) -> None:
    """`check_splits`, and refuse weights that an activation is not of, or a bias."""
    if p.gated and p.bias:
        raise InputError(p.op, "bias", want=f"False with {p.activation}", got=True)
    check_splits(p)
    halves = p.gated and len(p.splits) == 2 and p.splits[0] == p.splits[1]
    if p.activation and not halves and (p.splits or p.gated):
        want = "two equal halves of N" if p.gated else "empty"
        raise InputError(p.op, "splits", want=f"{want} with {p.activation}", got=p.splits)


def check_products(p: Problem) -> None:
    """Refuse several products that are not of all that is summed over, or have a bias."""
    _check_parts(p, p.k)
    check_sum(p)


def check_sum(p: Problem) -> None:
    """Refuse what a batch-invariant sum over ranks has none of."""
    if p.invariant:  # plans round a sum before or after they add the bias
        check_none(p, "experts", "splits", "bias")


def _check_parts(p: Problem, whole: int) -> None:
    check_none(p, "experts")
    if p.splits and (p.bias or sum(p.splits) != whole or min(p.splits) < 0):
        want = "empty with a bias" if p.bias else f"counts >= 0 that add up to {whole}"
        raise InputError(p.op, "splits", want=want, got=p.splits)


def check_heads(p: Problem) -> None:
    """Refuse what an attention has none of, and rows and columns that do not make heads."""
    check_none(p, "experts", "splits", "bias")
    heads = p.head_dim and not p.n % p.head_dim and not p.k % p.head_dim
    if not heads or (p.k and p.n % p.k):
        want = f"a divisor of N and of K, and N a multiple of K; N is {p.n}, K is {p.k}"
        raise InputError(p.op, "head_dim", want=want, got=p.head_dim)
    if not p.equal_rows or (p.causal and p.rows[0] % 2):
        want = "equal on all ranks" + ", and two halves where it is causal" * p.causal
        raise InputError(p.op, "rows", want=want, got=p.rows)


def check_experts(p: Problem) -> None:
    """Refuse what experts have none of, and rows that are not equal for all of them."""
    check_none(p, "bias", "splits")
    if p.experts < 1:
        raise InputError(p.op, "experts", want="1 or more", got=p.experts)
    if not p.equal_rows or p.rows[0] % p.experts:
        want = f"equal, and a multiple of the {p.experts} experts of a rank"
        raise InputError(p.op, "rows", want=want, got=p.rows)


def wants_one_weight(p: Problem) -> str:
    """What a family wants that has one matmul at a time."""
    return "one weight" if p.splits and not p.gated else ""
