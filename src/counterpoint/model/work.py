"""What each step of a plan takes by itself on a machine, by the closed forms of `Costs`."""

from counterpoint.costs import Collective, Tiles
from counterpoint.machine import Machine
from counterpoint.model.experts import predict
from counterpoint.plan.bind import BoundStep, Box, Part
from counterpoint.plan.direct import fused_columns, fused_rounds, fused_rows
from counterpoint.plan.launches import runs
from counterpoint.plan.makespan import LOCAL_COPY
from counterpoint.plan.steps import Plan
from counterpoint.problem import ITEM_BYTES

# of all SMs together against the memory's: what one SM takes in when a fused kernel feeds it its
# tile of w and all of x; 2xH200 and 4xH200, Llama-3 70B at 64 tokens (56 GB/s an SM)
FUSED_INTAKE = 1.8


def work_s(bound: BoundStep, plan: Plan, machine: Machine, tiles: Tiles, batch: int = 1) -> float:
    """Seconds of a step of one rank by itself, clocks not yet lowered.

    Args:
        tiles: the matmul library's tile for (rows, n, k), where it is known.
        batch: matmuls like this one that are one launch.
    """
    costs = machine.costs
    if plan.problem.experts and bound.step.arg("kernel") == "fused":
        return _in_one_kernel_s(bound, plan, machine)
    match bound.step.kind:
        case "barrier":
            return costs.barrier_s if bound.step.posts else costs.kernel_s
        case "matmul":
            return sum(_matmul_s(bound, part, plan, machine, tiles, batch) for part in bound.parts)
        case "copy":
            return _copies_s(bound, plan, machine)
        case "collective":
            # of the whole buffer, what the busiest rank receives: see Problem.link_bytes
            gathers = bound.step.arg("collective") == "all_gather"
            whole = (bound.step.writes if gathers else bound.step.reads)[0].buffer
            p = plan.problem
            rows = p.m - min(p.rows) if gathers else (p.ranks - 1) * max(p.rows)
            whole_bytes = plan.buffer_bytes(plan.buffer(whole))
            kind: Collective = "all_gather" if gathers else "reduce_scatter"
            received = whole_bytes * rows // max(p.m, 1)
            if bound.step.arg("transport") == "words":
                # in the kernel of its matmul a scatter has no start of its own, while tiles that
                # wait for their rows wait for flags, a fence behind each: docs/fused.md
                fused_s = costs.kernel_s if bound.step.arg("kernel") else 0.0
                start_s = costs.direct_s + (fused_s if gathers else -fused_s)
                return max(start_s, 0.0) + received / costs.direct_bytes_per_s
            if bound.step.arg("collective") == "all_to_all":
                # as much comes as in an all-gather; of several experts, rows are put in order
                pass_s = costs.memory_s(2 * whole_bytes) if p.experts > 1 else 0.0
                return costs.collective_s("all_gather", received) + pass_s
            return costs.collective_s(kind, received)
        case _:
            return sum(
                costs.memory_s(sum(_num_bytes(plan, box) for box in (*part.reads, part.write)))
                for part in bound.parts
            )


def _matmul_s(
    bound: BoundStep, part: Part, plan: Plan, machine: Machine, tiles: Tiles, batch: int
) -> float:
    rows, n = part.write.shape
    k = part.reads[0].shape[0 if bound.step.arg("contract") == "rows" else 1]
    if bound.step.arg("kernel") == "fused" and plan.problem.op == "matmul_reduce_scatter":
        return _fused_s(plan, machine)
    costs, tile = machine.costs, tiles.get((rows, n, k))
    seconds = costs.matmul_s(
        rows,
        n,
        k,
        plan.problem.item_bytes,
        machine.sms,
        tile,
        again=_again(bound, part, plan),
        count=batch,
    )
    if bound.step.accumulates:
        # a sum in fp32, which every pass reads and writes
        seconds = max(seconds, costs.memory_s(2 * _num_bytes(plan, part.write)))
    return seconds


def _again(bound: BoundStep, part: Part, plan: Plan) -> bool:
    """Whether a matmul before this one had all of the same w."""
    first = next(step for step in plan.steps if step.kind == "matmul")
    weight = part.reads[1]
    whole = weight.shape == plan.buffer(weight.buffer).shape
    if not whole or bound.step.arg("contract") == "rows":
        return False
    return bound.step.name != first.name or part is not bound.parts[0]


def _fused_s(plan: Plan, machine: Machine) -> float:
    """Seconds of the matmul of our own in the kernel of a reduce-scatter.

    Each program takes in its columns of w and all of x, and the SM that has most of them is last:
    160 tiles on 132 SMs take twice what 132 do.
    """
    p, costs, sms = plan.problem, machine.costs, machine.device.num_sms
    rows = fused_rows(p)
    columns, rounds = fused_columns(rows, p.n, p.ranks, sms), fused_rounds(p, sms)
    intake = FUSED_INTAKE * costs.hbm_bytes_per_s / sms
    intake_s = rounds * (columns + rows) * p.k * p.item_bytes / intake
    read_s = (rows + p.n) * p.k * p.item_bytes / costs.hbm_bytes_per_s
    return costs.kernel_s + max(intake_s, read_s)


def _in_one_kernel_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Experts and their all-to-all, which bears the time of both."""
    p = plan.problem
    if bound.step.kind != "collective":
        return 0.0
    back = p.op == "matmul_all_to_all"
    return predict(p.m, p.k, p.n, p.experts, p.dtype, p.ranks, machine, back=back).fused_s


def _copies_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Of a batch of copies: one after another on a switch; on a mesh each peer has its own link.

    And an engine: the executor of this library enqueues a batch on one stream, for switches.
    """
    costs = machine.costs
    by_peer: dict[int, float] = {}
    for run in runs(bound, plan):
        source, target = run.part.reads[0], run.part.write
        cols = source.c1 - source.c0
        row_bytes = (
            cols * plan.problem.item_bytes if cols < plan.buffer(source.buffer).shape[1] else 0
        )
        num_bytes = _num_bytes(plan, target) * run.times
        if run.times > 1:
            row_bytes = _num_bytes(plan, target)
        peers = {source.rank, target.rank}
        if len(peers) == 1:
            num_bytes = int(num_bytes / LOCAL_COPY)
        elif machine.link.topology == "mesh":
            num_bytes *= machine.num_devices - 1
        peer = -1 if machine.link.topology != "mesh" else source.rank + target.rank
        by_peer[peer] = by_peer.get(peer, 0.0) + costs.copy_s(num_bytes, row_bytes)
    return max(by_peer.values(), default=0.0)


def _num_bytes(plan: Plan, box: Box) -> int:
    rows, cols = box.shape
    return rows * cols * ITEM_BYTES[plan.buffer(box.buffer).dtype]
