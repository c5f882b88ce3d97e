"""Closed forms of how long plans take: two resources, matmuls and copies.

A group's matmul starts when the one before has ended and its shards are there; a copy when the one
before has ended and what it sends is computed. Good enough to size groups and to sort out most
candidates; `model.estimate` knows the rest. Where rows are uneven, copies and sums are those of the
longest shard, and matmuls of shards of the mean: a rank multiplies all of them.
"""

from counterpoint.costs import NO_TILES, Tiles, own_matmul
from counterpoint.machine import Machine
from counterpoint.problem import Problem
from counterpoint.schedules.finer import Kind

LOCAL_COPY = 3.0  # rate of a copy within a GPU against one to a peer; not calibrated
# of each further copy of a batch, beside its bytes, where rows of experts lie unequally far apart:
# the host takes 3.5 us to lay it out, and 56 copies of 64 KiB in a batch take 26 us on 8xH200
PIECE_S = 4e-6


def gather_s(
    problem: Problem,
    groups: tuple[int, ...],
    chunks: int,
    machine: Machine,
    tiles: Tiles = NO_TILES,
) -> float:  # fmt: skip
    """Seconds of an all_gather_matmul whose groups of shards have those sizes.

    Args:
        chunks: parts of the last shard, where the last group is one.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    costs, rows = machine.costs, max(problem.rows)
    row_bytes, mean = problem.x_row_bytes, problem.m // problem.ranks
    end_s = 0.0
    arrived_s = costs.barrier_s
    for i, size in enumerate(groups):
        last = i == len(groups) - 1
        parts = chunks if last and size == 1 else 1
        remote = size - (i == 0)
        for _ in range(parts):
            arrived_s += max(remote, 0) * _copy_s(rows * row_bytes // parts, machine)
            after_s = max(end_s, arrived_s) if remote else end_s
            end_s = after_s + _matmul_s(
                problem, mean * size // parts, machine, tiles, again=end_s > 0
            )
            end_s += costs.kernel_s if remote else 0.0
    return end_s


def finer_s(
    problem: Problem, kind: Kind, machine: Machine, tiles: Tiles = NO_TILES, *, gathers: bool
) -> float:
    """Seconds of a plan that is finer than shards."""
    p, costs = problem, machine.costs
    steps, shard, item_bytes = p.ranks, max(p.rows), p.item_bytes
    mean = p.m // p.ranks
    moved_bytes = p.x_row_bytes if gathers else p.n * item_bytes
    row_bytes = moved_bytes // steps if gathers and kind.dims == 2 else 0
    block_s = _copy_s(shard * moved_bytes // steps, machine, row_bytes)
    exchange_s = block_s if machine.link.topology == "mesh" else (p.ranks - 1) * block_s
    owners = p.ranks - kind.hetero
    wait_s, round_s = costs.kernel_s if gathers else 0.0, 0.0
    if kind.dims == 2 and gathers:
        step_s = _matmul_s(p, owners * mean, machine, tiles, k=p.k // steps)
        # a sum in fp32 that every step reads and writes, and that is rounded at the end
        step_s += 2 * owners * mean * p.n * 4 / costs.hbm_bytes_per_s
        round_s = costs.memory_s(owners * mean * p.n * (4 + item_bytes))
    elif kind.dims == 2:
        step_s = _matmul_s(p, owners * mean, machine, tiles, n=p.n // steps)
        if kind.hetero:  # rows before and behind a rank's own are two matmuls
            half_s = _matmul_s(p, p.ranks // 2 * mean, machine, tiles, n=p.n // steps)
            step_s = half_s + _matmul_s(p, (owners // 2) * mean, machine, tiles, n=p.n // steps)
    elif kind.fused:
        step_s = _matmul_s(p, owners * mean // steps, machine, tiles, again=True)
        # rows of each owner are a copy of their own
        packed_bytes = 2 * owners * mean * (p.n * item_bytes if gathers else p.x_row_bytes) // steps
        step_s += owners * costs.kernel_s + packed_bytes / costs.hbm_bytes_per_s
    else:
        step_s = owners * _matmul_s(p, mean // steps, machine, tiles, again=True)
    step_s += wait_s
    own_s = _matmul_s(p, mean, machine, tiles) if kind.hetero else 0.0
    # the longer of the two sides, and of the shorter one a step
    if gathers:
        first_s = max(costs.barrier_s + exchange_s, own_s)
        if not kind.hetero and not kind.fused:
            first_s -= min(
                step_s / p.ranks, first_s
            )  # the own rows of the first step need not wait
        last_s = costs.barrier_s + steps * exchange_s
        return max(first_s + (steps - 1) * step_s, last_s) + step_s + round_s
    # of several sums all but the last run before the last rows are there
    sums = 1 if kind.one_sum else steps
    sum_s = costs.memory_s((p.ranks + 1) * shard * p.n * item_bytes // sums) + costs.kernel_s
    last_s = max(costs.barrier_s, step_s) + steps * exchange_s
    rest_s = max(own_s + (sums - 1) * sum_s, exchange_s)  # beside the last exchange
    return max(steps * step_s + rest_s, last_s) + sum_s


def scatter_s(
    problem: Problem,
    groups: tuple[int, ...],
    chunks: int,
    machine: Machine,
    tiles: Tiles = NO_TILES,
) -> float:  # fmt: skip
    """Seconds of a matmul_reduce_scatter whose groups of owners have those sizes.

    Args:
        chunks: parts of the first owner's rows, where the first group is one, and of the sum.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
    """
    costs, rows = machine.costs, max(problem.rows)
    row_bytes, mean = problem.n * problem.item_bytes, problem.m // problem.ranks
    block_s = _copy_s(rows * row_bytes, machine)
    computed_s, copied_s = 0.0, costs.barrier_s
    owners = 0
    for i, size in enumerate(groups):
        parts = chunks if i == 0 and size == 1 else 1
        owners += size
        remote = size - (owners == problem.ranks)  # the last group holds the own rows
        for _ in range(parts):
            computed_s += _matmul_s(
                problem, mean * size // parts, machine, tiles, again=computed_s > 0
            )
            if parts > 1:
                sent_s = _copy_s(rows * row_bytes // parts, machine)
                copied_s = max(copied_s, computed_s) + sent_s
        if parts == 1 and remote:
            copied_s = max(copied_s, computed_s) + remote * block_s
    sum_s = costs.memory_s((problem.ranks + 1) * rows * row_bytes // chunks)
    # all parts of the sum but the last run while the last block is on its way
    return max(computed_s + (chunks - 1) * sum_s, copied_s) + sum_s + costs.kernel_s


def running_sum_s(
    problem: Problem, chunks: int, machine: Machine, tiles: Tiles = NO_TILES
) -> float:
    """Seconds of a matmul_reduce_scatter whose sums go around in a ring.

    The longest block holds up each rank in turn.

    Args:
        chunks: of each block.
    """
    costs, rows = machine.costs, max(problem.rows) // chunks
    chunk_bytes = rows * problem.n * problem.item_bytes
    copy_s = _copy_s(chunk_bytes, machine)
    computed_s, copied_s = 0.0, costs.barrier_s
    come_s = [0.0] * chunks
    for hop in range(problem.ranks):
        for i in range(chunks):
            matmul_s = _matmul_s(problem, rows, machine, tiles, again=computed_s > 0)
            if hop:  # reads the sum as well
                matmul_s += costs.kernel_s + chunk_bytes / costs.hbm_bytes_per_s
            computed_s = max(computed_s, come_s[i]) + matmul_s
            copied_s = come_s[i] = max(copied_s, computed_s) + copy_s
    return computed_s


def dispatch_s(
    problem: Problem, groups: tuple[int, ...], chunks: int, machine: Machine
) -> float:  # fmt: skip
    """Seconds of an all_to_all_matmul whose groups of experts have those sizes.

    Args:
        chunks: of the rows of each group.
    """
    p, costs = problem, machine.costs
    rows = p.m // p.experts // p.ranks // chunks
    row_bytes = rows * p.k * p.item_bytes
    computed_s, copied_s = 0.0, costs.barrier_s
    for size in (size for size in groups for _ in range(chunks)):
        copied_s += _exchange_s(p, size, row_bytes, machine)
        product_s = _experts_s(p, size, machine)
        if chunks > 1:  # a launch for each expert, or where counts differ for each rank's rows
            each = p.ranks if p.counts == "equal" else 1
            launch_s = costs.matmul_s(
                rows, p.n, p.k, p.item_bytes, machine.sms, again=True, count=each
            )
            product_s = size * p.ranks / each * launch_s
        computed_s = max(computed_s, copied_s) + costs.kernel_s + product_s
    return max(computed_s, _host_s(p, len(groups) * chunks, 2, machine))


def combine_s(problem: Problem, groups: tuple[int, ...], chunks: int, machine: Machine) -> float:
    """Seconds of a matmul_all_to_all whose groups of experts have those sizes.

    Args:
        chunks: of the columns of each group.
    """
    p, costs = problem, machine.costs
    n = p.n // chunks
    row_bytes = p.m // p.experts // p.ranks * n * p.item_bytes
    strides = n * p.item_bytes if chunks > 1 else 0
    computed_s, copied_s, placed_s = 0.0, costs.barrier_s, 0.0
    for size in (size for size in groups for _ in range(chunks)):
        computed_s += _experts_s(p, size, machine, n)
        copied_s = max(computed_s, copied_s) + _exchange_s(p, size, row_bytes, machine)
        # what has come goes on to y, a copy for each peer
        each_s = costs.copy_s(int(size * row_bytes / LOCAL_COPY), strides)
        placed_s = max(copied_s, placed_s) + costs.kernel_s + (p.ranks - 1) * each_s
    return max(placed_s, _host_s(p, len(groups) * chunks, 4, machine))


def _host_s(p: Problem, exchanges: int, others: int, machine: Machine) -> float:
    """Of the host, which lays out each call where counts differ: steps of copy lanes and others."""
    lanes = p.ranks - 1 if machine.link.topology == "mesh" else 1
    steps = 1 + exchanges * (lanes + others)
    costs = machine.costs
    return costs.host_call_s + costs.host_step_s * steps if p.counts != "equal" else 0.0


def _exchange_s(p: Problem, experts: int, row_bytes: int, machine: Machine) -> float:
    """Of that for so many experts from each rank to each; on a mesh all peers are at it at once.

    Args:
        row_bytes: of what a rank has for an expert.
    """
    peers = 1 if machine.link.topology == "mesh" else p.ranks - 1
    num_pieces = experts if p.counts == "equal" else 1
    pieces_s = 0.0 if p.counts == "equal" else (experts - 1) * PIECE_S
    strides = row_bytes if num_pieces > 1 else 0
    return peers * (_copy_s(experts * row_bytes, machine, strides) + pieces_s)


def _experts_s(p: Problem, experts: int, machine: Machine, n: int = 0) -> float:
    """Of the matmuls of so many experts in one launch, or of n of their columns."""

    def alone_s(count: int, cols: int) -> float:
        rows = p.m // p.experts
        return machine.costs.matmul_s(rows, cols, p.k, p.item_bytes, machine.sms, count=count)

    return machine.costs.settling(alone_s(p.experts, p.n)) * alone_s(experts, n or p.n)


def _copy_s(num_bytes: int, machine: Machine, row_bytes: int = 0) -> float:
    """Of one copy to one peer: on a mesh it has one of the links."""
    links = machine.num_devices - 1 if machine.link.topology == "mesh" else 1
    return machine.costs.copy_s(num_bytes * links, row_bytes)


def _matmul_s(
    problem: Problem, rows: int, machine: Machine, tiles: Tiles = NO_TILES, n: int = 0, k: int = 0,
    *, again: bool = False,
) -> float:  # fmt: skip
    costs, p = machine.costs, problem
    whole_s, part_s = (
        costs.matmul_s(*size, p.operand_bytes, machine.sms, tiles.get(size), again=more)
        for size, more in (((p.m, p.n, p.k), False), ((rows, n or p.n, k or p.k), again))
    )
    factor = own_matmul(rows) if p.invariant else 1.0
    return part_s * costs.settling(whole_s) * factor
