"""Embedding bags that are stored at their owners, with what the fused-operator paper varies free:
the order of tasks, the slices that have a flag each, and how many programs there are.

The library's own kernel has settled these: here they can be compared. All tables of a rank are one,
bags have equal sizes, and results stay in memory that is open to peers.

Source: arXiv 2305.06942.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.declare import Bench
from counterpoint.device import PeerKernel, end_of_call, is_last, next_epoch, peer_ptr, post, put
from counterpoint.device import wait as wait_for
from counterpoint.group.symmetric import allocate

ORDERS = ("remote first", "own first", "in turn")
ROWS = 8  # bags of a task


@triton.jit(do_not_specialize=["bags", "rank", "tag", "timeout_ns"])
def bags_kernel(
    table_ptr,  # [entries, D]
    indices_ptr,  # [WORLD * bags, POOLING] int32: bags of rank 0, then of rank 1
    outs_ptr,  # [WORLD] int64: where each rank's [bags, WORLD * D] begins
    counts_ptr,  # [WORLD * SLICES + 1] int32, zero: tasks of a slice that are done, programs
    bags,  # of each rank
    bases_ptr,
    half_bytes,
    flags_at,
    state_ptr,
    fault_ptr,
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,
    D: tl.constexpr,
    POOLING: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,  # at most as many as a rank has tasks
    ORDER: tl.constexpr,  # of ORDERS
):
    DTYPE: tl.constexpr = table_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(tl.load(state_ptr))
    half = (epoch & 1).to(tl.int64) * half_bytes + flags_at
    blocks = tl.cdiv(bags, ROWS)
    cols = tl.arange(0, D)[None, :]
    for task in range(program, blocks * WORLD, programs):
        step, block = task // blocks, task % blocks
        if ORDER == 2:
            step, block = task % WORLD, task // WORLD
        to = (rank + step) % WORLD if ORDER == 1 else (rank + 1 + step) % WORLD
        own = block * ROWS + tl.arange(0, ROWS)
        live = own < bags
        acc = tl.zeros((ROWS, D), tl.float32)
        for i in range(POOLING):
            index = tl.load(indices_ptr + (to * bags + own) * POOLING + i, live, other=0)
            row = tl.load(table_ptr + index.to(tl.int64)[:, None] * D + cols)
            acc += row.to(tl.float32)
        place = own.to(tl.int64)[:, None] * (WORLD * D) + rank * D + cols
        put(peer_ptr(outs_ptr, to, 0, DTYPE) + place, acc.to(DTYPE), live[:, None] & (cols >= 0))

        part = block * SLICES // blocks
        tasks = tl.cdiv((part + 1) * blocks, SLICES) - tl.cdiv(part * blocks, SLICES)
        if is_last(counts_ptr + to * SLICES + part, tasks):
            tl.store(counts_ptr + to * SLICES + part, 0)
            # pairs with the wait of the last program of rank `to`
            post(peer_ptr(bases_ptr, to, half + 4 * (rank * SLICES + part), tl.int32), epoch)

    ranks = tl.arange(0, WORLD)
    late = tl.zeros((WORLD,), tl.int32)
    # one program waits, when no other is left: the grid may be of any size
    if is_last(counts_ptr + WORLD * SLICES, programs):
        tl.store(counts_ptr + WORLD * SLICES, 0)
        flags = peer_ptr(bases_ptr, rank, half, tl.int32) + ranks * SLICES
        for s in range(SLICES):
            # pairs with the post of each rank's last task of the slice
            late |= wait_for(flags + s, epoch, state_ptr + 2, timeout_ns).to(tl.int32)
    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)


class Sliced:
    """One way to launch it; all ranks make it, and call it alike.

    Args:
        table: [entries, D], own; D a power of 2.
        indices: int32 [ranks * bags, pooling].
        bench: this rank.
        order: of ORDERS.
        slices: of what goes to a rank, at most as many as there are tasks for it.
        programs: at most; fewer where fewer fit. None: one for each task, not all at once.
    """

    def __init__(
        self, table: Tensor, indices: Tensor, bench: Bench, order: str = ORDERS[0],
        slices: int = 1, programs: int | None = 1 << 16,
    ) -> None:  # fmt: skip
        bags = len(indices) // bench.ranks
        self.slices = min(slices, -(-bags // ROWS))
        self.memory = allocate(bags * bench.ranks * table.shape[1] * table.element_size(),
                               bench.group, bench.device)  # fmt: skip
        flat = self.memory.local()[: bags * bench.ranks * table[0].nbytes]
        self.out = flat.view(table.dtype).view(bags, bench.ranks * table.shape[1])
        self.kernel = PeerKernel(bags_kernel, device=bench.device, group=bench.group,
                                 num_flags=bench.ranks * self.slices)  # fmt: skip
        counts = bench.ranks * self.slices + 1
        self.given: dict[str, Any] = {
            "table_ptr": table, "indices_ptr": indices,
            "outs_ptr": torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64).to(bench.device),
            "counts_ptr": torch.zeros(counts, dtype=torch.int32, device=bench.device),
            "bags": bags, "D": table.shape[1], "POOLING": indices.shape[1], "ROWS": ROWS,
            "SLICES": self.slices, "ORDER": ORDERS.index(order),
        }  # fmt: skip
        tasks = -(-bags // ROWS) * bench.ranks
        self.work = tasks if programs is None else min(programs, tasks)
        self.launch = self.kernel.for_each if programs is None else self.kernel

    def __call__(self, _: int) -> Tensor:
        """Launch it; the result is what all ranks have stored here: [bags, ranks * D]."""
        self.launch(self.work, **self.given)
        return self.out
