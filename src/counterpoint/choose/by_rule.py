"""The plan by static sizes alone: overlap where both sides are long enough to be worth it.

Where they are not, a collective of our own in place of the library's. The coarsest of the three
levels: the time of the matmuls from their products, that of communication from its bytes, and three
comparisons, which `RULE` says.
"""

from dataclasses import replace

from counterpoint.choose.by_model import candidates, parts_s, refusal
from counterpoint.choose.choice import Candidate, Choice, computed_of
from counterpoint.costs import NO_TILES, Tiles
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build, parse
from counterpoint.problem import Problem

# found on 4 and 2 H200 at the 16 scenarios of Llama-3 70B, bf16, in a graph, 2026-11: below it the
# shorter side is at most 17 us, above it at least 44
WORTHWHILE_S = 25e-6
MESH = 3  # GPUs: among fewer, all links are one
RULE = f"""
if the shorter one of matmuls (op / rate) and communication (bytes / rate)
takes less than {WORTHWHILE_S * 1e6:.0f} us: kernels in a row
    few rows, and no SM with two tiles: "fused"
    else: "direct"
else: a plan that overlaps, of one or two matmuls shard_p2p, a matmul for each shard
    if a shard's copy takes longer than its matmul (op / byte less than the machine's),
    and of a gather it is large, or of an all-reduce in any case: chunks=2
but on a full mesh of {MESH} GPUs or more: the plan whose closed form is least;
    kernels in a row, and plans without a closed form, are simulated
"""


def by_rule(
    problem: Problem, machine: Machine, *, eager: bool = False, tiles: Tiles = NO_TILES
) -> Choice:
    """Choose for `problem` on `machine` by the rule; the times beside it are predictions.

    The rule never overrules a prediction that serial is faster, nor a memory limit.

    Args:
        eager: count the host's time.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    compute_s, comm_s = parts_s(problem, machine, tiles)
    shorter = computed_of(problem) if compute_s < comm_s else "communication"
    shorter_s = min(compute_s, comm_s)
    serial_s = predicted_s(build(problem, "serial", machine), machine, eager=eager, tiles=tiles)
    chosen = Candidate("serial", serial_s, "simulated", "chosen")
    other: Candidate | None = None
    # of one shard: each rank has as many matmuls as there are ranks, and a copy less
    copy_longer = compute_s / problem.ranks < comm_s / max(problem.ranks - 1, 1)
    operation = problem.operation
    spec = operation.overlapped(problem, copy_longer)
    if shorter_s < WORTHWHILE_S:
        spec = operation.rule(problem, machine)
    why = f" for {shorter} of {shorter_s * 1e6:.0f} us"
    if machine.link.topology == "mesh" and problem.ranks >= MESH:
        spec = _least(problem, machine, tiles)
        why = ", the least of its estimates"
    instead, why_not_serial = operation.without_serial(problem)
    spec = instead or spec
    if problem.ranks > 1 and spec:
        plan = build(problem, spec, machine)
        seconds = predicted_s(plan, machine, eager=eager, tiles=tiles)
        if refused := refusal(plan, machine):
            other = Candidate(plan.spec, float("nan"), "refused", refused)
        elif instead:
            other = replace(chosen, verdict=why_not_serial)
            chosen = Candidate(plan.spec, seconds, "simulated", "chosen")
        elif seconds >= serial_s:
            other = Candidate(plan.spec, seconds, "simulated", "not faster than serial")
        else:
            other = replace(chosen, verdict=f"the rule takes {plan.spec}{why}")
            chosen = Candidate(plan.spec, seconds, "simulated", "chosen")
    table = (chosen, other) if other else (chosen,)
    return Choice(problem, machine, chosen.spec, table, eager, "rule", compute_s, comm_s, tiles)


def _least(problem: Problem, machine: Machine, tiles: Tiles) -> str:
    """The plan whose closed form, or where it has none its simulation, is least; "" is serial."""
    in_a_row, others = candidates(problem, machine)
    times_s: dict[str, float] = {}
    for spec in ("serial", *in_a_row, *others):
        family, options = parse(problem, spec)
        if family.guess_s and not family.in_a_row:
            times_s[spec] = family.guess_s(problem, options, machine, tiles)
        else:
            times_s[spec] = predicted_s(build(problem, spec, machine), machine, tiles=tiles)
    allowed = (spec for spec in sorted(times_s, key=times_s.__getitem__)
               if not refusal(build(problem, spec, machine), machine))  # fmt: skip
    best = next(allowed, "serial")
    return "" if best == "serial" else best
