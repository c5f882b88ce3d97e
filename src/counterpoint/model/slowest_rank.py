"""Of equal ranks the one that has most to do: a simulation of it stands for all."""

from itertools import chain

from counterpoint.costs import NO_TILES, Tiles
from counterpoint.machine import Machine
from counterpoint.plan.steps import Plan
from counterpoint.schedules.peers import runs

MAX_RANKS = 64  # that are simulated one beside the other, and compared


def slowest_rank(plan: Plan, machine: Machine, tiles: Tiles = NO_TILES) -> int:
    """Where rows are equal: the rank to whose matmuls it does most that their groups wrap.

    The matmul that no copy hides counts twice: the first one of a scatter, the last of a gather.
    """
    p = plan.problem
    if plan.peers == "grid":  # where tables differ, that with most to send
        return max(range(p.ranks), key=lambda r: sum(p.tables[r])) if p.tables else 0
    if p.ranks > MAX_RANKS:  # they differ little, and to compare them takes ranks squared
        return p.rows.index(max(p.rows))
    times_s = [[0.0] for _ in range(p.ranks)]
    for step in plan.steps:
        region = max(step.reads[:1] + step.writes, key=lambda r: len(r.shards), default=None)
        if step.kind != "matmul" or region is None or not region.shards:
            continue
        weight = step.reads[1]
        k, n = plan.buffer(weight.buffer).shape
        k = weight.rows[1] - weight.rows[0] if weight.rows else k
        n = weight.cols[1] - weight.cols[0] if isinstance(weight.cols, tuple) else n
        group = tuple(peer[0] if peer else 0 for peer in region.shards)
        all_runs = runs(plan.peers, p.ranks, group)
        time_s: dict[int, float] = {}
        for run in set(chain.from_iterable(all_runs)):
            rows = run * p.rows[0] // region.chunk[1]
            tile = tiles.get((rows, n, k))
            time_s[run] = machine.costs.matmul_s(rows, n, k, p.operand_bytes, machine.sms, tile)
        for of_rank, each in zip(times_s, all_runs, strict=True):
            of_rank.append(sum(time_s[run] for run in each))
    gathered, _ = p.operation.moved(p)
    edge = -1 if gathered else 1
    scores_s = [sum(of_rank) + of_rank[edge if of_rank[1:] else 0] for of_rank in times_s]
    # of equal ones one between others: rows of its peers may lie on both sides of its own
    return max(range(p.ranks), key=lambda r: (scores_s[r], 0 < r < p.ranks - 1))
