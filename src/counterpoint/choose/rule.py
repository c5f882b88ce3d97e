"""The plan by static sizes alone: overlap where both sides are long enough to be worth it.

The coarsest of the three levels: it needs the datasheet only, and one comparison.
"""

from counterpoint.choose.by_model import parts_s
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.machine import Machine
from counterpoint.model.estimate import NO_TILES, predicted_s
from counterpoint.plan.families import build
from counterpoint.problem import Op, Problem

# 4xH200, bf16, in a graph, 2026-11: at the shapes of Llama-3 plans won from 0.11 ms of the shorter
# side on (M 2048), and were on a par below (M 512: 0.03 ms)
WORTHWHILE_S = 50e-6
OVERLAPPED: dict[Op, str] = {
    "all_gather_matmul": "graded",
    "matmul_reduce_scatter": "graded",
    "all_gather_matmul_wgrad": "sliced",
    "all_gather_matmul_backward": "side_by_side",
    "matmul_reduce_scatter_backward": "graded",
}


def by_rule(problem: Problem, machine: Machine, *, eager: bool = False) -> Choice:
    """Choose for `problem` on `machine` by the rule; the times beside it are predictions."""
    compute_s, comm_s = parts_s(problem, machine)
    spec = "serial"
    if problem.ranks > 1 and min(compute_s, comm_s) >= WORTHWHILE_S:
        spec = build(problem, OVERLAPPED[problem.op], machine).spec
    table: list[Candidate] = []
    for each in dict.fromkeys((spec, "serial")):
        seconds = predicted_s(build(problem, each, machine), machine, eager=eager)
        shorter = "matmuls" if compute_s < comm_s else "communication"
        size = f"{shorter} of {min(compute_s, comm_s) * 1e6:.0f} us"
        verdict = "chosen" if each == spec else f"the rule overlaps {size}"
        table.append(Candidate(each, seconds, "simulated", verdict))
    return Choice(problem, machine, spec, tuple(table), eager, "rule", compute_s, comm_s, NO_TILES)
