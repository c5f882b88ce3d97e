"""The decode table: matmul_all_reduce of few rows against the libraries. Run by gpu_suite.py."""

import argparse
import faulthandler
import random
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.decode import TORCH, compare_decode
from counterpoint.ops.matmul_all_reduce import matmul_all_reduce
from counterpoint.resources.order import Delay
from counterpoint.runtime.capture import no_collector

LAYERS = {"Llama-3-70B down": (8192, 3584), "Llama-3-70B O": (8192, 1024),
          "Llama-3.1-405B down": (16384, 6656), "DeepSeek-V3 dense down": (7168, 2304)}  # fmt: skip
ROWS = (1, 8, 32, 64)
MORE_ROWS = (128, 256, 1024)
# of the first layer: ways to send, then tiles of other widths
ABLATION = (
    "fused one_shot 64x64x6 warps=4",
    "fused two_shot 64x64x6 warps=4",
    "fused two_shot 32x64x6 warps=4",
    "fused two_shot 128x64x4 warps=4",
)


def main() -> None:
    """Time the layers, then call again and again under delays; rank 0 writes rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--soak", type=int, default=0, help="calls under random delays")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(110, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        ratios: dict[str, list[float]] = {"serial": [], "torch": []}
        for layer, (n, k) in LAYERS.items():
            if args.suite == "smoke" and (n, k) != (8192, 3584):
                continue
            first = layer == next(iter(LAYERS))
            for m in (*ROWS, *MORE_ROWS) if first else ROWS:
                plans = [p for p in ABLATION if m <= 8 or "one_shot" not in p] if first else []
                plans = plans if m <= 64 else []
                rows = compare_decode(m, n, k, group=group, device=device, plans=plans)
                if group.rank() == 0:
                    record.append(args.out, [row | {"layer": layer} for row in rows])
                    s = {r["arm"]: r["median_s"] for r in rows if r["mode"] == "graph"}
                    if m in ROWS:
                        ratios["serial"].append(s["auto"] / s["serial"])
                        ratios["torch"].append(s["auto"] / min(s[arm] for arm in TORCH))
                    text = ", ".join(f"{arm} {t * 1e6:.1f}" for arm, t in s.items())
                    print(f"{time.monotonic() - start_s:4.0f} s  {m},{n},{k}: {text}", flush=True)
        if group.rank() == 0:
            means = {arm: round(geometric_mean(r), 3) for arm, r in ratios.items()}
            print(f"auto over that of serial and of torch's better: {means}", flush=True)
        if args.soak:
            row = soak(args.soak, group, device)
            if group.rank() == 0:
                print(row, flush=True)
                record.append(args.out, [row])


def soak(calls: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Replays of graphs of calls, ranks late at random, each result compared on the device."""
    draw, delay = random.Random(group.rank()), Delay(device)
    generator = torch.Generator(device).manual_seed(group.rank())
    in_graph, kinds = 64, (1, 4, 32)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    graphs: list[torch.cuda.CUDAGraph] = []
    kept: list[object] = []  # graphs point into them
    for m in kinds:
        cases = [
            (torch.randn(m, 512, device=device, generator=generator).bfloat16(),
             torch.randn(1024, 512, device=device, generator=generator).bfloat16().t())
            for _ in range(8)
        ]  # fmt: skip
        want = [matmul_all_reduce(x, w, group=group, plan="fused") for x, w in cases]
        for (x, w), y in zip(cases, want, strict=True):
            exact = x.double() @ w.double()
            dist.all_reduce(exact, group=group)
            assert float((y - exact).norm() / exact.norm()) < 1e-2
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            for i in range(in_graph):
                x, w = cases[i % 8]
                y = matmul_all_reduce(x, w, group=group, plan="fused")
                wrong += (y != want[i % 8]).any()
        graphs.append(graph)
        kept += [cases, want]
    start_s, done = time.monotonic(), 0
    while done < calls:
        # the same on all ranks; how late is each rank's own
        graphs[done // in_graph % len(graphs)].replay()
        if draw.random() < 0.3:
            delay(draw.choice((1e-5, 1e-4, 5e-4)))
        done += in_graph
    torch.cuda.synchronize()
    dist.all_reduce(wrong, group=group)
    return {"table": "decode soak", "calls": done, "wrong": int(wrong), "ranks": group.size(),
            "seconds": time.monotonic() - start_s} | record.environment()  # fmt: skip


if __name__ == "__main__":
    main()
