"""`plan="auto"` from static sizes alone: graded where overlap is sure to pay, else serial."""

from counterpoint.machine import Machine
from counterpoint.plan.grading import copy_s, matmul_s
from counterpoint.problem import Problem

# 4xH200, bf16, 2026-11: eager on an idle GPU, plans lost where one of both took 0.11 ms (M 2048) or
# less, to the host's time, and won from 0.2 ms on; in a graph they won at 0.11 ms as well
WORTHWHILE_S = 100e-6


def choose_spec(problem: Problem, machine: Machine | None) -> str:
    """The spec of the plan for `problem`; "serial" on a machine that is not known."""
    if machine is None or problem.ranks == 1:
        return "serial"
    link_s = (problem.ranks - 1) * copy_s(problem.link_bytes // (problem.ranks - 1), machine)
    if min(matmul_s(problem, problem.m, machine), link_s) < WORTHWHILE_S:
        return "serial"
    return "graded"
