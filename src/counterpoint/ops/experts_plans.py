"""Experts by a plan: copy engines move one group of experts while another one is multiplied.

A plan is laid out for its sizes, so every rank sends equally many rows to every expert, and the
host knows how many: layers of experts with a capacity, padded to it.
"""

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.backward import dtype_of
from counterpoint.ops.experts import Exchange
from counterpoint.ops.experts_serial import Serial, sum_of_rows
from counterpoint.plan.bind import Box
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Op, Problem
from counterpoint.runtime.execute import Code, compile_plan
from counterpoint.runtime.workspace import Places, Workspace

OPS: dict[bool, Op] = {True: "all_to_all_matmul", False: "matmul_all_to_all"}


class Planned:
    """One operator by a plan of the family "grouped".

    Args:
        workspace: of the group.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(self, given: Exchange, add: Tensor | None, clear: bool) -> tuple[Tensor, Tensor]:
        """(the result, the rows that were multiplied where they are kept); as `Serial`.

        A plan adds nothing to the products: where that is asked for, the libraries do it all.

        Raises:
            InputError: the plan is not for these experts, or a graph is captured before a call.
        """
        self.workspace.check()
        if add is not None:
            return Serial(self.workspace)(given, add, clear)
        problem = problem_of(given, self.workspace.group.size())
        y = given.x.new_empty(problem.m, problem.n)
        if not problem.m * problem.n * problem.k:
            build(problem, given.plan)
            return y.zero_(), given.x.new_zeros(problem.m, problem.k)
        code = self._code(problem, given.plan)
        x = given.x.contiguous()
        code.run({"x": x, "w": given.w, "y": y})
        return y, self._received(code.program.plan, x) if given.keep else x

    def summed(
        self, given: Exchange, index: Tensor, weights: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """(the weighted sums of rows that came back, and those rows where they are kept)."""
        y, _ = self(given, None, False)
        return sum_of_rows(y, index, weights), y if keep else y.new_empty(0, y.shape[1])

    def _code(self, problem: Problem, spec: str) -> Code:
        key = (spec, problem)
        code: Code | None = self.workspace.code.get(key)
        if code is None:
            plan = build(problem, spec, knowledge_of(self.workspace).machine)
            # memory and views of it that calls in any mode may write to
            with torch.inference_mode(False), torch.enable_grad():
                code = compile_plan(plan, self.workspace)
            self.workspace.remember(key, code)
        return code

    def _received(self, plan: Plan, x: Tensor) -> Tensor:
        """A copy of the rows by expert: the next call writes over them."""
        p = plan.problem
        if p.ranks == 1:
            return x.clone()
        box = Box(self.workspace.rank, "received", 0, 0, p.m, 0, p.k)
        rows = Places(self.workspace, plan).fixed(box)
        assert rows is not None, "symmetric"
        return rows.clone()


def problem_of(given: Exchange, ranks: int) -> Problem:
    """The problem of a call whose counts are equal."""
    experts, k, n = given.w.shape
    m = given.counts.shape[1] * int(given.counts.flatten()[0]) if given.counts.numel() else 0
    return Problem(OPS[given.out], m, n, k, ranks, dtype_of(given.x), experts=experts)


def refusal(given: Exchange) -> InputError | None:
    """What of the table keeps a call from being a plan."""
    fix = "take plan='auto'"
    if not given.host:
        want = f"on the CPU, or lists, with plan {given.plan!r}"
        return InputError(given.op, "counts", want=want, got="on the GPU", fix=fix)
    low, high = (int(n) for n in given.counts.aminmax()) if given.counts.numel() else (0, 0)
    if low != high:
        want = f"equal for all ranks and experts with plan {given.plan!r}"
        fix = f"pad each pair to a capacity, or {fix}"
        return InputError(given.op, "counts", want=want, got=f"{low} to {high}", fix=fix)
    return None
