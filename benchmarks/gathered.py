"""What all_gather_matmul in one kernel is, and could be. Run by gpu_suite.py.

A  few rows, fused: in how many slices rows go, against our matmul alone and the libraries'
B  more rows: the fastest of our persistent matmuls by TMA against the library's. One that
   starts each tile when the copy engine has brought its rows can be no faster than that.
"""

import argparse
import faulthandler
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.decode import our_matmul
from counterpoint.measure.timing import captured, relative_error, rotate
from counterpoint.ops.all_gather_matmul import all_gather_matmul
from counterpoint.runtime.compute import all_gather
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.fused_call import FusedCall
from counterpoint.runtime.launch_gather import Gathered, gather_way, launch_of, reserve, where
from counterpoint.runtime.workspace import workspace_of

FEW = ((8, 7168, 8192), (16, 7168, 8192), (32, 7168, 8192), (64, 7168, 8192), (16, 4096, 4096),
       (16, 1280, 8192))  # fmt: skip
LAYERS = ((7168, 8192), (1280, 8192))
MORE = (128, 256, 512, 1024, 2048, 8192)
# rows, columns and K of a tile, stages, warps
TILES = (
    (64, 64, 64, 6, 4), (64, 128, 64, 5, 4), (64, 256, 64, 4, 4), (128, 64, 64, 5, 4),
    (128, 128, 64, 4, 4), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8), (128, 256, 64, 4, 8),
    (128, 128, 128, 3, 8),
)  # fmt: skip
COLD_BYTES = 240_000_000  # of weights in rotation: four times the L2
GROUP_M = tl.constexpr(8)  # blocks of rows that share their columns of w in L2


@triton.jit
def persistent_kernel(
    x_desc, w_desc, y_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = x w^T of x [M, K] and w [N, K], all of them by TMA."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = num_m * num_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first = tile // (GROUP_M * num_n) * GROUP_M
        rows = min(num_m - first, GROUP_M)
        at_m = (first + tile % (GROUP_M * num_n) % rows) * BLOCK_M
        at_n = tile % (GROUP_M * num_n) // rows * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(x_desc.load([at_m, k]), w_desc.load([at_n, k]).T, acc)
        y_desc.store([at_m, at_n], acc.to(tl.bfloat16))


def main() -> None:
    """Time both; rank 0 writes rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(110, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        cases = [(m, n, k) for (n, k), m in product(LAYERS, MORE)]
        own = [more_rows(*case, device) for case in cases[group.rank() :: group.size()]]
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
        found = [rows for each in everyone for rows in each]
        found += [few_rows(*case, group, device) for case in FEW]
        if group.rank() == 0:
            facts = {"table": "gathered", "ranks": group.size()} | record.environment()
            for rows in found:
                record.append(args.out, [row | facts for row in rows])
                head = rows[0]
                text = ", ".join(f"{r['arm']} {r['median_s'] * 1e6:.1f}" for r in rows)
                print(f"{time.monotonic() - start_s:4.0f} s  {head['m']},{head['n']},{head['k']}: "
                      f"{text}", flush=True)  # fmt: skip


def weights(n: int, k: int, device: torch.device) -> list[Tensor]:
    """[n, k] each, as many as do not fit L2."""
    count = max(4, -(-COLD_BYTES // (2 * n * k)))
    return [(torch.randn(n, k, device=device) * k**-0.5).bfloat16() for _ in range(count)]


def few_rows(
    m: int, n: int, k: int, group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, Any]]:
    """Arms of one shape, m over all ranks; each is checked first."""
    torch.manual_seed(group.rank())
    ranks, ws = group.size(), weights(n, k, device)
    if m % ranks:
        return []
    x = torch.randn(m // ranks, k, device=device).bfloat16()
    full, y = x.new_empty(m, k), x.new_empty(m, n)
    all_gather(full, x, group=group)
    want = full.double() @ ws[0].t().double()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    way = gather_way(m, n, k, ranks, 2, sms)
    ways = {"serial fused": way}
    ways |= {f"slices={count}": replace(way, slices=count) for count in (1, 2, 4, 8, 16)
             if count != way.slices}  # fmt: skip
    arms: dict[str, Callable[[int], object]] = {
        "matmul": lambda i: torch.mm(full, ws[i].t(), out=y),
        "our matmul": lambda i: our_matmul(full, ws[i].t(), y),
    }
    for plan in ("serial", "serial direct"):
        arms[plan] = lambda i, plan=plan: all_gather_matmul(x, ws[i].t(), group=group, plan=plan)
    memory = fused_memory(workspace_of(group, device))
    for name, each in ways.items():
        call = _call(each, memory, m, k)
        arms[name] = lambda i, call=call: call(x, ws[i].t(), None, y)
    errors: dict[str, float] = {}
    for name, arm in arms.items():
        y.fill_(torch.nan)
        result = arm(0)
        errors[name] = relative_error(result if isinstance(result, Tensor) else y, want)
        assert errors[name] <= 2 * errors["matmul"], (m, n, k, name, errors)
    graphs = {name: captured(arm, len(ws)) for name, arm in arms.items()}
    times = rotate({name: replay for name, (replay, _) in graphs.items()}, group=group,
                   device=device, rounds=25, soak_s=0.1)  # fmt: skip
    return [
        {"question": "few rows", "arm": name, "m": m, "n": n, "k": k, "way": way.spec,
         "median_s": t.median_s / len(ws), "p20_s": t.quantile_s(2) / len(ws),
         "p80_s": t.quantile_s(8) / len(ws), "error": errors[name]}
        for name, t in times.items()
    ]  # fmt: skip


def _call(way: Gathered, memory: Any, m: int, k: int) -> FusedCall:
    reserve(way, memory, m, k, 2)
    return FusedCall(partial(launch_of, way, memory, where(memory), 0), way.spec, "gathered")


def more_rows(m: int, n: int, k: int, device: torch.device) -> list[dict[str, Any]]:
    """The library's matmul and each tile of ours, on this GPU alone."""
    torch.manual_seed(m)
    ws, x = weights(n, k, device), torch.randn(m, k, device=device).bfloat16()
    y = x.new_empty(m, n)
    want = x.double() @ ws[0].t().double()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    arms: dict[str, Callable[[int], object]] = {"matmul": lambda i: torch.mm(x, ws[i].t(), out=y)}
    for tile in TILES:
        grid, warps = min(sms, -(-m // tile[0]) * -(-n // tile[1])), tile[4]

        def ours(i: int, tile: Any = tile, grid: int = grid, warps: int = warps) -> None:
            bm, bn, bk, stages, _ = tile
            descriptors = [
                TensorDescriptor.from_tensor(t, block)
                for t, block in ((x, [bm, bk]), (ws[i], [bn, bk]), (y, [bm, bn]))
            ]
            persistent_kernel[(grid,)](*descriptors, m, n, k, bm, bn, bk, stages, num_warps=warps)

        try:
            y.fill_(torch.nan)
            ours(0)
        except OutOfResources:
            continue
        assert relative_error(y, want) < 5e-3, (m, n, k, tile)
        arms["x".join(map(str, tile))] = ours
    graphs = {name: captured(arm, len(ws))[1] for name, arm in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, draw = list(graphs), random.Random(0)
    for _ in range(15):
        draw.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / len(ws))
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min((name for name in medians if name != "matmul"), key=medians.__getitem__)
    return [
        {"question": "more rows", "arm": arm, "m": m, "n": n, "k": k, "median_s": medians[name],
         "tile": name if arm != "matmul" else ""}
        for arm, name in (("matmul", "matmul"), ("our persistent matmul", best))
    ]  # fmt: skip


if __name__ == "__main__":
    main()
