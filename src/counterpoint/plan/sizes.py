"""Checks of a Problem's sizes, and wants of a family, that several operators share."""

from counterpoint.errors import InputError
from counterpoint.problem import Problem

ONE_WEIGHT = "empty: only all_gather_matmul without a bias takes several weights"
NONE = {"experts": "0: the op has none", "splits": ONE_WEIGHT, "bias": "False: the op adds none"}


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


def check_splits(p: Problem) -> None:
    """Refuse several weights that are not all columns, or have a bias."""
    check_none(p, "experts", *(("splits",) if p.bias else ()))
    if p.splits and (sum(p.splits) != p.n or min(p.splits) < 0):
        want = f"counts >= 0 that add up to {p.n}"
        raise InputError(p.op, "splits", want=want, got=p.splits)


def check_experts(p: Problem) -> None:
    """Refuse what experts have none of, and rows that are not equal for all of them."""
    check_none(p, "bias", "splits")
    if p.experts < 1:
        raise InputError(p.op, "experts", want="1 or more", got=p.experts)
    if not p.equal_rows or p.rows[0] % p.experts:
        want = f"equal, and a multiple of the {p.experts} experts of a rank"
        raise InputError(p.op, "rows", want=want, got=p.rows)


def wants_one_weight(p: Problem) -> str:
    """What a family wants that multiplies by one weight."""
    return "one weight" if p.splits else ""
