"""The plan by static sizes alone: overlap where both sides are long enough to be worth it.

Where they are not, a collective of our own in place of the library's. The coarsest of the three
levels: it needs the datasheet only, and one comparison.
"""

from dataclasses import replace

from counterpoint.choose.by_model import parts_s, refusal
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.costs import NO_TILES
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan import direct
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
    "all_to_all_matmul": "grouped",
    "matmul_all_to_all": "grouped",
}


def by_rule(problem: Problem, machine: Machine, *, eager: bool = False) -> Choice:
    """Choose for `problem` on `machine` by the rule; the times beside it are predictions.

    The rule never overrules a prediction that serial is faster, nor a memory limit.
    """
    compute_s, comm_s = parts_s(problem, machine)
    shorter = "matmuls" if compute_s < comm_s else "communication"
    shorter_s = min(compute_s, comm_s)
    serial_s = predicted_s(build(problem, "serial", machine), machine, eager=eager)
    chosen = Candidate("serial", serial_s, "simulated", "chosen")
    other: Candidate | None = None
    # what has the fewest kernels comes last, and is taken
    ours = [spec for spec in direct.SPECS if not direct.refusal(problem, spec)]
    if problem.op == "all_gather_matmul":
        ours = ours[:1]  # not faster in one kernel: docs/fused.md
    spec = OVERLAPPED[problem.op] if shorter_s >= WORTHWHILE_S else ours[-1] if ours else ""
    if problem.ranks > 1 and spec:
        plan = build(problem, spec, machine)
        seconds = predicted_s(plan, machine, eager=eager)
        if why := refusal(plan):
            other = Candidate(plan.spec, float("nan"), "refused", why)
        elif seconds >= serial_s:
            other = Candidate(plan.spec, seconds, "simulated", "not faster than serial")
        else:
            verdict = f"the rule takes {spec} for {shorter} of {shorter_s * 1e6:.0f} us"
            other = replace(chosen, verdict=verdict)
            chosen = Candidate(plan.spec, seconds, "simulated", "chosen")
    table = (chosen, other) if other else (chosen,)
    return Choice(problem, machine, chosen.spec, table, eager, "rule", compute_s, comm_s, NO_TILES)
