"""NVTX ranges around the calls of operators, as COUNTERPOINT_NVTX=1 asks for: see a profile's rows.

Asked when a call is prepared: a call that has been prepared without them never has them.
"""

import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from counterpoint.errors import UnsupportedError
from counterpoint.plan.steps import Plan
from counterpoint.run.execute import Code

VARIABLE = "COUNTERPOINT_NVTX"
P = ParamSpec("P")
R = TypeVar("R")


def refusal(op: str) -> UnsupportedError | None:
    """Why there can be no ranges, where they are asked for."""
    if os.environ.get(VARIABLE) != "1":
        return None
    try:
        torch.cuda.nvtx.range_push(op)
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        what = f"{op}: {VARIABLE}=1 needs NVTX, and this torch says {str(error)!r}"
        return UnsupportedError(f"{what}; unset it, or install torch for CUDA")
    return None


def within(call: Callable[P, R], *plans: Plan) -> Callable[P, R]:
    """A call of those plans within a range, where ranges are asked for; else as it is."""
    if os.environ.get(VARIABLE) != "1":
        return call
    label = " + ".join(map(_label, plans))

    def in_range(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.nvtx.range(label):
            return call(*args, **kwargs)

    return in_range


def _label(plan: Plan) -> str:
    """The operator, M, N and K, and the plan."""
    p = plan.problem
    return f"counterpoint.{p.op} {p.m}x{p.n}x{p.k} {plan.spec}"


def ranged(code: Code) -> Code:
    """Code whose calls are within ranges, where these are asked for; else as it is."""
    return _Ranged(code) if os.environ.get(VARIABLE) == "1" else code


class _Ranged:
    """Code that runs within a range; what is launched with others has one together with them."""

    def __init__(self, code: Code) -> None:
        self.program, self.workspace, self.chains = code.program, code.workspace, code.chains
        self.temporaries_of, self.launch = code.temporaries_of, code.launch
        self.run = within(code.run, code.program.plan)
