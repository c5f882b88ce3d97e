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

from counterpoint.measure import record
from counterpoint.measure.compare import FIXED, Case, compare, profile_best
from counterpoint.measure.shapes import SHAPES
from counterpoint.plan.direct import SPECS, refusal
from counterpoint.plan.finer import FINER
from counterpoint.problem import Problem
from counterpoint.runtime.workspace import release_all

SMOKE = ("70B gate+up, 2048 tokens", "70B down, 2048 tokens")
PICTURED = ("70B qkv", "70B down")
FINELY = ("70B qkv", "70B gate+up", "70B o", "70B down")


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
            # those finer than shards are timed where four shapes show what they cost
            chosen = tuple(spec for spec in PLANS[op, ranks][1:]
                           if layer in FINELY or spec.split()[0] not in FINER)  # fmt: skip
            chosen = chosen[:6] if args.suite == "smoke" else chosen
            problem = Problem(op, m, n, k, ranks)
            chosen += tuple(spec for spec in SPECS if not refusal(problem, spec))
            case = Case(op, m, n, k, layer)
            rows = compare(case, chosen, group=group, device=device)
            if rank == 0:
                record.append(args.out, rows)
                print(_line(rows), f"[{time.monotonic() - start_s:.0f} s]", flush=True)
            if layer in PICTURED and args.suite == "full":
                timeline = profile_best(case, rows, group=group, device=device)
                if rank == 0:
                    path = args.out.parent / f"timeline-{ranks}x-{op}.json"
                    path.write_text(timeline.to_json())
            torch.cuda.empty_cache()
    release_all()
    dist.destroy_process_group()


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
    auto = next(r for r in rows if r["arm"] == "auto" and r["mode"] == "graph")
    regret = graph["auto"] / graph[ours[0]] - 1
    off = [r["predicted_s"] / r["median_s"] - 1 for r in rows
           if r["mode"] == "graph" and r.get("predicted_s")]  # fmt: skip
    pick = f"auto {auto['pick']} +{regret:.1%}, pairs {auto['serial_over_auto']}, predictions off "
    pick += f"{sorted(map(abs, off))[len(off) // 2]:.1%}, worst {max(off, key=abs):+.1%}"
    return f"{shape}: {known} | {ratio:.3f}x {best}\n    {worst} | {pick}\n    eager {hosts}"


if __name__ == "__main__":
    main()
