"""`plan="auto"` from static sizes alone: graded where overlap is sure to pay, else serial."""

from counterpoint.machine import Machine
from counterpoint.plan.grading import copy_s, matmul_s
from counterpoint.problem import Problem

# 8xH200, bf16, 2026-11: with 0.094 ms of matmul and 0.054 ms of all-gather (M 512) every plan
# lost, with 0.178 and 0.118 ms (M 2048) plans won by 1.2x; below this, serial
WORTHWHILE_S = 100e-6


def choose_spec(problem: Problem, machine: Machine | None) -> str:
    """The spec of the plan for `problem`; "serial" on a machine that is not known."""
    if machine is None or problem.ranks == 1:
        return "serial"
    link_s = (problem.ranks - 1) * copy_s(problem.link_bytes // (problem.ranks - 1), machine)
    if min(matmul_s(problem, problem.m, machine), link_s) < WORTHWHILE_S:
        return "serial"
    return "graded"
