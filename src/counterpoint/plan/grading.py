"""Sizes of the groups of a graded plan: few large matmuls, whole waves of tiles, copies hidden.

A matmul runs in waves of one tile per SM, so cutting it may add a part-filled wave to each cut.
The sizes chosen are those with the smallest makespan in a two-resource recurrence: the matmul of a
group starts when the one before has ended and its shards are there.
"""

from collections.abc import Iterator
from itertools import combinations
from math import ceil

from counterpoint.machine import Machine
from counterpoint.problem import Problem

MAX_GROUPS = 4  # above 8 ranks, so that the number of candidates stays in the hundreds
GEMM_EFFICIENCY = 0.8  # H200, bf16, 2026-11: cuBLAS reaches 781 of 989 TFLOP/s at 8192,1280,8192
# of a tile of the machine's size, and of its halvings. 4xH200, bf16, 2026-11: with these, matmuls
# of 80 to 1792 tiles of 128x256 are predicted within 15 %; without halvings, 80 tiles are 60 % off
TILE_EFFICIENCY = (1.0, 0.97, 0.94, 0.9)
LAUNCH_S = 3e-6  # from the end of one kernel to the start of the next on one stream
BARRIER_S = 6e-6


def compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to cut `ranks` shards into groups; above 8 ranks at most MAX_GROUPS."""
    most = ranks if ranks <= 8 else min(ranks, MAX_GROUPS)
    for num_cuts in range(most):
        for cuts in combinations(range(1, ranks), num_cuts):
            edges = (0, *cuts, ranks)
            yield tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


def graded_groups(problem: Problem, machine: Machine) -> tuple[int, ...]:
    """Group sizes with the smallest predicted makespan; of equals, the fewest groups."""
    predict = _gather_s if problem.op == "all_gather_matmul" else _scatter_s
    return min(compositions(problem.ranks), key=lambda g: (predict(problem, g, machine), len(g)))


def matmul_s(problem: Problem, rows: int, machine: Machine) -> float:
    """Seconds of one matmul of `rows` rows: waves x the time of one tile on one SM.

    The library picks the tile: the best of the machine's and its halvings.
    """
    device = machine.device
    tile_m, tile_n = machine.gemm_tile
    times_s: list[float] = []
    for efficiency in TILE_EFFICIENCY:
        tiles = ceil(rows / tile_m) * ceil(problem.n / tile_n)
        sm_flop_per_s = device.bf16_flop_per_s * GEMM_EFFICIENCY * efficiency / device.num_sms
        times_s.append(
            ceil(tiles / device.num_sms) * 2 * tile_m * tile_n * problem.k / sm_flop_per_s
        )
        tile_m, tile_n = sorted((tile_m, tile_n // 2))
    return min(times_s)


def copy_s(num_bytes: int, machine: Machine) -> float:
    """Seconds of one copy-engine copy between two ranks."""
    return machine.link.copy_overhead_s + num_bytes / machine.link.bytes_per_s


def _gather_s(problem: Problem, groups: tuple[int, ...], machine: Machine) -> float:
    rows = max(problem.rows)
    shard_s = copy_s(rows * problem.k * problem.item_bytes, machine)
    end_s, shards = 0.0, 0
    for size in groups:
        shards += size
        arrival_s = BARRIER_S + (shards - 1) * shard_s if shards > 1 else 0.0
        end_s = max(end_s + LAUNCH_S, arrival_s) + matmul_s(problem, rows * size, machine)
    return end_s


def _scatter_s(problem: Problem, groups: tuple[int, ...], machine: Machine) -> float:
    rows = max(problem.rows)
    block_s = copy_s(rows * problem.n * problem.item_bytes, machine)
    compute_s, copies_s, owners = 0.0, 0.0, 0
    for size in groups:
        compute_s += LAUNCH_S + matmul_s(problem, rows * size, machine)
        owners += size
        remote = size - (owners == problem.ranks)  # the last group holds the own rows
        copies_s = max(copies_s, compute_s) + remote * block_s
    return max(compute_s, copies_s)
