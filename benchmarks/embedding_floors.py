"""Two floors of embedding bags and their all-to-all: only reading rows, and only storing results.

Neither knows of bags. The first streams through the same indices and reads the same rows, as fast
as two tiles allow; the second stores as many bytes to the same places, from registers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.declare import Bench, Call

GATHERS = ((4096, 4, 4), (8192, 2, 4), (8192, 4, 8))  # bytes, unroll, warps
STORES = ((4096, True), (8192, True), (4096, False))  # bytes, one rank at a time
MISSING = "the floors are kernels for GPUs"


@triton.jit
def gather_kernel(
    indices_ptr,  # [indices], of one table after another
    edges_ptr,  # [tables + 1] int64: where the indices of each begin
    tables_ptr,  # [tables] int64: addresses
    one_ptr,  # [1] fp32: 1.0
    sink_ptr,  # [programs, ROWS, D] fp32
    num_tables,
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
        base = tl.multiple_of(tl.load(tables_ptr + table).to(tl.pointer_type(tl.bfloat16)), 16)
        for block in range((program + programs - done % programs) % programs, blocks, programs):
            first = start + block.to(tl.int64) * (ROWS * UNROLL)
            rows = ()
            for i in tl.static_range(UNROLL):
                index = tl.load(indices_ptr + (first + i * ROWS + lanes)).to(tl.int64)
                row = tl.load(base + index * D + cols)
                rows = rows + (row,)  # noqa: RUF005  (the compiler knows no other form)
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
    bags_of_each,
    stride,  # columns of the output
    first,  # own column
    columns,  # own columns
    rank,
    WORLD: tl.constexpr,
    BAGS: tl.constexpr,
    D: tl.constexpr,
    ONE_AT_A_TIME: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, D)[None, :]
    values = tl.full((BAGS, D), 1.0, tl.float32).to(tl.bfloat16)
    blocks = tl.cdiv(bags_of_each, BAGS)
    for step in range(WORLD):
        to = (rank + 1 + (step if ONE_AT_A_TIME else step + program)) % WORLD
        base = tl.multiple_of(tl.load(outs_ptr + to).to(tl.pointer_type(tl.bfloat16)), 16)
        for task in range(program, blocks * (columns // D), programs):
            own = (task % blocks) * BAGS + tl.arange(0, BAGS)[:, None]
            column = tl.multiple_of(first + (task // blocks) * D, 16)
            place = base + (own.to(tl.int64) * stride + column)
            tl.store(place + cols, values, mask=(own < bags_of_each) & (cols >= 0))


def gathers(
    tables: Sequence[Tensor], sets: Sequence[Tensor], edges: Tensor, bench: Bench
) -> dict[str, Call | str]:
    """Arms that read all rows of a set of indices; tables of one width, a power of 2."""
    if not bench.on_gpu:
        return {"gather": MISSING}
    d, sms = tables[0].shape[1], _sms(bench)
    places = torch.tensor([t.data_ptr() for t in tables], dtype=torch.int64, device=bench.device)
    one, kernel, found = torch.ones(1, device=bench.device), gather_kernel, dict[str, Call | str]()
    for num_bytes, unroll, warps in GATHERS:
        rows, programs = max(1, num_bytes // 2 // d), sms * 32 // warps
        sink = bench.empty(programs * rows * d, dtype=torch.float32)

        def arm(i: int, launch: Any = kernel[(programs,)], rows: int = rows, unroll: int = unroll,
                warps: int = warps, sink: Tensor = sink) -> None:  # fmt: skip
            launch(sets[i % len(sets)], edges, places, one, sink, len(tables), rows, d, unroll,
                   num_warps=warps)  # fmt: skip

        found[f"gather {num_bytes}x{unroll}x{warps}"] = arm
    return found


def stores(dims: Sequence[Sequence[int]], own: int, bench: Bench) -> dict[str, Call | str]:
    """Arms that store the own columns of all bags, a table's width at a time.

    Args:
        dims: columns of the tables of each rank, all alike.
        own: bags of each rank.
    """
    if not bench.on_gpu:
        return {"store": MISSING}
    d, each = dims[bench.rank][0], [sum(columns) for columns in dims]
    memory, handle = bench.opened(own * sum(each))
    outs = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=bench.device)
    launcher: Any = store_kernel[(_sms(bench) * 8,)]
    found: dict[str, Call | str] = {}
    for num_bytes, in_turn in STORES:
        bags = max(1, num_bytes // 2 // d)

        # peers' memory is open as long as own is
        def arm(_: int, bags: int = bags, in_turn: bool = in_turn, kept: Tensor = memory) -> None:
            launcher(outs, own, sum(each), sum(each[: bench.rank]), each[bench.rank], bench.rank,
                   bench.ranks, bags, d, in_turn, num_warps=4)  # fmt: skip

        found[f"store {num_bytes} {'in turn' if in_turn else 'at once'}"] = arm
    return found


def _sms(bench: Bench) -> int:
    return torch.cuda.get_device_properties(bench.device).multi_processor_count
