"""The plan by static sizes alone: overlap where both sides are long enough to be worth it.

Where they are not, a collective of our own in place of the library's. The coarsest of the three
levels: the time of the matmuls from their products, that of communication from its bytes, and three
comparisons, which `RULE` says.
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

# found on 4 and 2 H200 at the 16 scenarios of Llama-3 70B, bf16, in a graph, 2026-11: below it the
# shorter side is at most 17 us, above it at least 44
WORTHWHILE_S = 25e-6
LARGE_COPY = 16 << 20  # bytes of a shard of x that is worth two copies
RULE = f"""
if the shorter one of matmuls (op / rate) and communication (bytes / rate)
takes less than {WORTHWHILE_S * 1e6:.0f} us: a collective of our own
    matmul_reduce_scatter, {direct.FUSED_ROWS} rows or fewer, no SM with two tiles: "serial fused"
    else: "serial direct"
else: shard_p2p, a matmul for each shard
    if a shard's copy takes longer than its matmul (op / byte less than the machine's),
    and of a gather it has {LARGE_COPY >> 20} MiB: pieces=2
"""
OVERLAPPED: dict[Op, str] = {
    "all_gather_matmul": "shard_p2p ring push",
    "matmul_reduce_scatter": "shard_p2p ring",
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
    # of one shard: each rank has as many matmuls as there are ranks, and a copy less
    copy_longer = compute_s / problem.ranks < comm_s / max(problem.ranks - 1, 1)
    spec = _overlapped(problem, copy_longer)
    if shorter_s < WORTHWHILE_S:
        spec = _direct(problem, machine)
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


def _overlapped(problem: Problem, copy_longer: bool) -> str:
    """The plan that overlaps; `copy_longer`: a shard's copy takes longer than its matmul."""
    spec, gathers = OVERLAPPED[problem.op], problem.op == "all_gather_matmul"
    shard = max(problem.rows) * problem.k * problem.item_bytes
    in_pieces = spec.startswith("shard_p2p") and copy_longer
    return f"{spec} pieces=2" if in_pieces and (not gathers or shard >= LARGE_COPY) else spec


def _direct(problem: Problem, machine: Machine) -> str:
    """The spec with a collective of our own, or '' where there is none."""
    ours = [spec for spec in direct.SPECS if not direct.refusal(problem, spec)]
    at_once = direct.fused_rounds(problem, machine.device.num_sms) == 1
    if not at_once:
        ours = ours[:1]
    return ours[-1] if ours else ""
