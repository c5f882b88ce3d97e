"""Two floors of embedding bags and their all-to-all: only reading rows, and only storing results.

Neither knows of bags. The first streams through the same indices and reads the same rows, as fast
as several tiles allow; the second stores as many bytes to the same places, from registers.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from counterpoint.kernels.peer import peer_ptr
from counterpoint.runtime.embedding_layout import DTYPES, Layout

GATHERS = ((4096, 4, 4), (8192, 2, 4), (8192, 4, 8), (2048, 8, 4))  # bytes, unroll, warps
STORES = ((4096, 4, True), (8192, 4, True), (4096, 4, False))  # bytes, warps, one rank at a time


@triton.jit
def gather_kernel(
    indices_ptr,  # [indices], of one table after another
    edges_ptr,  # [tables + 1] int64: where the indices of each begin
    tables_ptr,  # [tables] int64: addresses
    one_ptr,  # [1] fp32: 1.0
    sink_ptr,  # [programs, ROWS, D] fp32
    num_tables,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    acc = tl.zeros((ROWS, D), tl.float32)
    done = 0
    for table in range(num_tables):
        start = tl.load(edges_ptr + table)
        blocks = ((tl.load(edges_ptr + table + 1) - start) // (ROWS * UNROLL)).to(tl.int32)
        base = tl.multiple_of(tl.load(tables_ptr + table).to(tl.pointer_type(DTYPE)), 16)
        for block in range((program + programs - done % programs) % programs, blocks, programs):
            first = start + block.to(tl.int64) * (ROWS * UNROLL)
            rows = ()
            for i in tl.static_range(UNROLL):
                index = tl.load(indices_ptr + (first + i * ROWS + lanes)).to(tl.int64)
                row = tl.load(base + index * D + cols)
                rows = rows + (row,)  # noqa: RUF005  (the compiler knows no other way)
            # all loads before all sums, as in the kernel that is measured
            tl.debug_barrier()
            one = tl.load(one_ptr)
            for i in tl.static_range(UNROLL):
                acc += rows[i].to(tl.float32) * one
        done += blocks
    tl.store(sink_ptr + ((program * ROWS + lanes) * D + cols), acc)


@triton.jit
def store_kernel(
    outs_ptr,  # [WORLD] int64: where each rank's output begins
    starts_ptr,  # [WORLD + 1] int32: the first bag of each rank
    stride,  # columns of the output
    first,  # own column
    columns,  # own columns
    rank,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    BAGS: tl.constexpr,
    D: tl.constexpr,
    ONE_AT_A_TIME: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, D)[None, :]
    values = tl.full((BAGS, D), 1.0, tl.float32).to(DTYPE)
    pieces = columns // D
    for step in range(WORLD):
        to = (rank + 1 + (step if ONE_AT_A_TIME else step + program)) % WORLD
        bags = tl.load(starts_ptr + to + 1) - tl.load(starts_ptr + to)
        blocks = tl.cdiv(bags, BAGS)
        base = peer_ptr(outs_ptr, to, 0, DTYPE)
        for task in range(program, blocks * pieces, programs):
            own = (task % blocks) * BAGS + tl.arange(0, BAGS)[:, None]
            column = tl.multiple_of(first + (task // blocks) * D, 16)
            place = base + (own.to(tl.int64) * stride + column)
            tl.store(place + cols, values, mask=(own < bags) & (cols >= 0))


def gathers(
    tables: list[Tensor], sets: list[Tensor], edges: Tensor, sms: int
) -> dict[str, Callable[[int], object]]:
    """Arms that read all rows of a set of indices; tables of one width, a power of 2."""
    d, dtype, device = tables[0].shape[1], tables[0].dtype, tables[0].device
    places = torch.tensor([t.data_ptr() for t in tables], dtype=torch.int64, device=device)
    one = torch.ones(1, device=device)
    arms: dict[str, Callable[[int], object]] = {}
    kernel: Any = gather_kernel
    for num_bytes, unroll, warps in GATHERS:
        rows, programs = max(1, num_bytes // dtype.itemsize // d), sms * 32 // warps
        sink = torch.empty(programs * rows * d, device=device)

        def arm(
            i: int, rows: int = rows, unroll: int = unroll, warps: int = warps,
            programs: int = programs, sink: Tensor = sink,
        ) -> None:  # fmt: skip
            kernel[(programs,)](
                sets[i % len(sets)], edges, places, one, sink, len(tables), DTYPES[dtype], rows, d,
                unroll, num_warps=warps,
            )  # fmt: skip

        arms[f"gather {num_bytes}x{unroll}x{warps}"] = arm
    return arms


def stores(
    layout: Layout, rank: int, outs: Tensor, starts: Tensor, sms: int
) -> dict[str, Callable[[int], object]]:
    """Arms that store the own columns of all bags, in pieces of a table's width."""
    d, ranks = layout.dims[rank][0], len(layout.batch)
    first, columns = layout.first_columns(rank)[0], sum(layout.dims[rank])
    arms: dict[str, Callable[[int], object]] = {}
    kernel: Any = store_kernel
    for num_bytes, warps, one_at_a_time in STORES:
        bags = max(1, num_bytes // layout.dtype.itemsize // d)

        def arm(
            i: int, bags: int = bags, warps: int = warps, one_at_a_time: bool = one_at_a_time
        ) -> None:
            kernel[(sms * 32 // warps,)](
                outs, starts, layout.columns, first, columns, rank, ranks, DTYPES[layout.dtype],
                bags, d, one_at_a_time, num_warps=warps,
            )  # fmt: skip

        name = "in turn" if one_at_a_time else "at once"
        arms[f"store {num_bytes} {name}"] = arm
    return arms
