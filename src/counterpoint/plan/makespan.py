"""Closed forms of how long a graded plan takes: two resources, matmuls and copies.

A group's matmul starts when the one before has ended and its shards are there; a copy when the one
before has ended and what it sends is computed. Good enough to size groups and to sort out most
candidates; `model.estimate` knows the rest.
"""

from counterpoint.costs import NO_TILES, Tiles
from counterpoint.machine import Machine
from counterpoint.problem import Problem


def gather_s(
    problem: Problem,
    groups: tuple[int, ...],
    pieces: int,
    machine: Machine,
    tiles: Tiles = NO_TILES,
) -> float:  # fmt: skip
    """Seconds of an all_gather_matmul whose groups of shards have those sizes.

    Args:
        pieces: parts of the last shard, where the last group is one.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    costs, rows = machine.costs, max(problem.rows)
    row_bytes = problem.k * problem.item_bytes
    end_s = 0.0
    arrived_s = costs.barrier_s
    for i, size in enumerate(groups):
        last = i == len(groups) - 1
        parts = pieces if last and size == 1 else 1
        remote = size - (i == 0)
        for _ in range(parts):
            arrived_s += max(remote, 0) * _copy_s(rows * row_bytes // parts, machine)
            after_s = max(end_s, arrived_s) if remote else end_s
            end_s = after_s + _matmul_s(problem, rows * size // parts, machine, tiles)
            end_s += costs.kernel_s if remote else 0.0
    return end_s


def exchanges_s(problem: Problem, machine: Machine) -> float:
    """Seconds of an all_gather_matmul of an n-th of every shard at a time, and passes over y."""
    costs, ranks = machine.costs, problem.ranks
    block_s = _copy_s(max(problem.rows) * problem.k * problem.item_bytes // ranks, machine)
    exchange_s = block_s if machine.link.topology == "mesh" else (ranks - 1) * block_s
    step_s = _matmul_s(problem, problem.m // ranks, machine) + costs.kernel_s
    step_s += costs.memory_s(2 * problem.m * problem.n * problem.item_bytes // ranks)
    # the longer of the two sides, and of the shorter one a step
    rest_s = (ranks - 1) * max(exchange_s, step_s)
    return costs.barrier_s + exchange_s + rest_s + step_s


def scatter_s(
    problem: Problem,
    groups: tuple[int, ...],
    pieces: int,
    machine: Machine,
    tiles: Tiles = NO_TILES,
) -> float:  # fmt: skip
    """Seconds of a matmul_reduce_scatter whose groups of owners have those sizes.

    Args:
        pieces: parts of the first owner's rows, where the first group is one, and of the sum.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    costs, rows = machine.costs, max(problem.rows)
    row_bytes = problem.n * problem.item_bytes
    block_s = _copy_s(rows * row_bytes, machine)
    computed_s, copied_s = 0.0, costs.barrier_s
    owners = 0
    for i, size in enumerate(groups):
        parts = pieces if i == 0 and size == 1 else 1
        owners += size
        remote = size - (owners == problem.ranks)  # the last group holds the own rows
        for _ in range(parts):
            computed_s += _matmul_s(problem, rows * size // parts, machine, tiles)
            if parts > 1:
                sent_s = _copy_s(rows * row_bytes // parts, machine)
                copied_s = max(copied_s, computed_s) + sent_s
        if parts == 1 and remote:
            copied_s = max(copied_s, computed_s) + remote * block_s
    sum_s = costs.memory_s((problem.ranks + 1) * rows * row_bytes // pieces)
    # all parts of the sum but the last run while the last block is on its way
    return max(computed_s + (pieces - 1) * sum_s, copied_s) + sum_s + costs.kernel_s


def _copy_s(num_bytes: int, machine: Machine) -> float:
    """Of one copy to one peer: on a mesh it has one of the links."""
    links = machine.num_devices - 1 if machine.link.topology == "mesh" else 1
    return machine.costs.copy_s(num_bytes * links)


def _matmul_s(problem: Problem, rows: int, machine: Machine, tiles: Tiles = NO_TILES) -> float:
    costs, p = machine.costs, problem
    whole_s, part_s = (
        costs.matmul_s(r, p.n, p.k, p.item_bytes, machine.sms, tiles.get((r, p.n, p.k)))
        for r in (p.m, rows)
    )
    return part_s * costs.settling(whole_s)
