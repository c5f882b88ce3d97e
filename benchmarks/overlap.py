"""The overlap table: every plan of benchmarks/plans.py at every shape of benchmarks/shapes.py.

Run under torchrun, or by `make gpu`.
"""

import argparse
import faulthandler
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from plans import PLANS
from shapes import SHAPES

import counterpoint
from counterpoint.measure import record
from counterpoint.measure.compare import FIXED, Case, compare
from counterpoint.runtime.symmetric import allocate
from counterpoint.runtime.workspace import release_all
from counterpoint.timeline import Timeline

SMOKE = ("70B gate+up, 2048 tokens", "70B down, 2048 tokens")
PICTURED = ("70B qkv", "70B down")


def main() -> None:
    """Write the rows; rank 0 prints a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", nargs="*", default=list(SHAPES))
    args = parser.parse_args()
    faulthandler.dump_traceback_later(290, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    ranks, rank = dist.get_world_size(), dist.get_rank()
    start_s = time.monotonic()
    for op in args.ops:
        for layer, (m, n, k) in SHAPES[op].items():
            if args.suite == "smoke" and layer not in SMOKE:
                continue
            chosen = PLANS[op, ranks][1:]
            chosen = chosen[:6] if args.suite == "smoke" else chosen
            case = Case(op, m, n, k, layer)
            rows = compare(case, chosen, group=group, device=device)
            if rank == 0:
                record.append(args.out, rows)
                print(_line(rows), f"[{time.monotonic() - start_s:.0f} s]", flush=True)
            if layer in PICTURED and args.suite == "full":
                _picture(rows, case, args.out.parent / f"timeline-{ranks}x-{op}.json")
            torch.cuda.empty_cache()
    release_all()
    dist.destroy_process_group()


def _picture(rows: list[dict], case: Case, path: Path) -> None:
    """The timeline of one call of the best plan."""
    graph = {r["arm"]: r["median_s"] for r in rows if r["mode"] == "graph"}
    best = min((a for a in graph if a not in FIXED), key=graph.__getitem__)
    ranks, device = dist.get_world_size(), torch.cuda.current_device()
    gathers = case.op == "all_gather_matmul"
    x = torch.randn(case.m // ranks if gathers else case.m, case.k, device=device).bfloat16()
    w = torch.randn(case.n, case.k, device=device).bfloat16().t()
    op = getattr(counterpoint, case.op)
    meeting = allocate(1 << 16, dist.group.WORLD, x.device)

    busy = torch.randn(8192, 8192, device=device).bfloat16()

    def call() -> None:
        # the host, slow under a profiler, is ahead of the GPU, whose clocks have settled
        for _ in range(12):
            torch.mm(busy, busy)
        meeting.handle.barrier(channel=0)
        op(x, w, plan=best)

    call()
    title = f"{case.op} {case.m}, {case.n}, {case.k}: {best}"
    timelines = [counterpoint.profile(call, title=title)[1] for _ in range(5)]
    if dist.get_rank() == 0:
        only = [
            Timeline(tuple(s for s in t.spans if s.kind != "other"), t.title, t.source).shifted()
            for t in timelines
        ]
        middle = sorted(only, key=lambda t: t.duration_s)[len(only) // 2]
        path.write_text(middle.to_json())


def _line(rows: list[dict]) -> str:
    graph = {r["arm"]: r["median_s"] for r in rows if r["mode"] == "graph"}
    eager = {r["arm"]: r for r in rows if r["mode"] == "eager"}
    ours = sorted((arm for arm in graph if arm not in FIXED), key=graph.__getitem__)
    first = rows[0]
    known = "  ".join(f"{arm} {graph[arm] * 1e3:.3f}" for arm in FIXED if arm in graph)
    best = ", ".join(f"{arm} {graph[arm] * 1e3:.3f}" for arm in ours[:4])
    hosts = ", ".join(
        f"{arm} {r['median_s'] * 1e3:.3f}/{r['plain_eager_s'] * 1e3:.3f} "
        f"host {r['host_s'] * 1e6:.0f}us"
        for arm, r in eager.items()
    )
    ratio = graph["serial"] / graph[ours[0]]
    shape = f"{first['op']} {first['m']},{first['n']},{first['k']}"
    worst = f"worst {ours[-1]} {graph[ours[-1]] * 1e3:.3f}"
    return f"{shape}: {known} | {ratio:.3f}x {best}\n    {worst} | eager {hosts}"


if __name__ == "__main__":
    main()
