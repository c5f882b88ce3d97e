"""Checks of a Problem's sizes, and wants of a family, that several operators share."""

from counterpoint.errors import InputError
from counterpoint.problem import Problem


def check_plain(p: Problem) -> None:
    """Refuse experts and several weights, which most operators have none of."""
    check_no_experts(p)
    if p.splits:
        want = "empty: only all_gather_matmul without a bias takes several weights"
        raise InputError(p.op, "splits", want=want, got=p.splits)


def check_gradient(p: Problem) -> None:
    """Refuse what gradients have none of."""
    check_plain(p)
    if p.bias:
        raise InputError(p.op, "bias", want="False: a gradient adds none", got=p.bias)


def check_no_experts(p: Problem) -> None:
    """Refuse experts."""
    if p.experts:
        raise InputError(p.op, "experts", want="0: the op has none", got=p.experts)


def check_splits(p: Problem) -> None:
    """Refuse several weights that are not all columns, or have a bias."""
    if p.splits and p.bias:
        want = "empty: only all_gather_matmul without a bias takes several weights"
        raise InputError(p.op, "splits", want=want, got=p.splits)
    if p.splits and (sum(p.splits) != p.n or min(p.splits) < 0):
        want = f"counts >= 0 that add up to {p.n}"
        raise InputError(p.op, "splits", want=want, got=p.splits)


def check_experts(p: Problem) -> None:
    """Refuse what experts have none of, and rows that are not equal for all of them."""
    if p.bias:
        raise InputError(p.op, "bias", want="False: experts add none", got=p.bias)
    if p.splits:
        want = "empty: only all_gather_matmul without a bias takes several weights"
        raise InputError(p.op, "splits", want=want, got=p.splits)
    if p.experts < 1:
        raise InputError(p.op, "experts", want="1 or more", got=p.experts)
    if not p.equal_rows or p.rows[0] % p.experts:
        want = f"equal, and a multiple of the {p.experts} experts of a rank"
        raise InputError(p.op, "rows", want=want, got=p.rows)


def wants_one_weight(p: Problem) -> str:
    """What a family wants that multiplies by one weight."""
    return "one weight" if p.splits else ""
