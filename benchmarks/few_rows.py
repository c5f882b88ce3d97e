"""The table of few rows: auto, and what it may choose from, at 64 to 1024 tokens."""

import argparse
import faulthandler
import time
from pathlib import Path
from statistics import geometric_mean

from plans import PLANS

from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.compare import Case, compare
from counterpoint.plan.direct import SPECS, refusal
from counterpoint.problem import Op, Problem
from counterpoint.runtime.workspace import release_all

ROWS = (64, 128, 256, 512, 1024)
# of Llama-3-70B at 8 ranks: N and K of one rank
LAYERS: dict[Op, dict[str, tuple[int, int]]] = {
    "all_gather_matmul": {"70B qkv": (1280, 8192), "70B gate+up": (7168, 8192)},
    "matmul_reduce_scatter": {"70B o": (8192, 1024), "70B down": (8192, 3584)},
}
OVERLAPPED = ("2/2 ", "4/4 ", "1/2/1 xor", "2/2/2/2 ring", "2 ring push", "2 ring")


def main() -> None:
    """Write the rows; rank 0 prints a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(200, exit=True)
    start_s, ratios = time.monotonic(), list[float]()
    with nccl_group() as (group, device):
        for op, layers in LAYERS.items():
            overlapped = [s for s in PLANS[op, group.size()] if any(o in s for o in OVERLAPPED)][:2]
            for layer, (n, k) in layers.items():
                for m in ROWS if args.suite == "full" else ROWS[:1]:
                    problem = Problem(op, m, n, k, group.size())
                    ours = [spec for spec in SPECS if not refusal(problem, spec)]
                    specs = [*ours, *overlapped]
                    rows = compare(Case(op, m, n, k, layer), specs, group=group, device=device,
                                   soak_s=0.1)  # fmt: skip
                    if group.rank() == 0:
                        record.append(args.out, [row | {"table": "few rows"} for row in rows])
                        ratios.append(_say(rows, time.monotonic() - start_s))
        if group.rank() == 0:
            print(f"serial / auto, eager: {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
        release_all()


def _say(rows: list[dict], seconds: float) -> float:
    """Print one line; what serial takes of the time of auto, plain eager, in pairs."""
    graph = {r["arm"]: r["median_s"] for r in rows if r["mode"] == "graph"}
    eager = {r["arm"]: r for r in rows if r["mode"] == "eager"}
    auto = {r["mode"]: r for r in rows if r["arm"] == "auto"}
    first, us = rows[0], 1e6
    times = ", ".join(f"{arm} {t * us:.1f}" for arm, t in graph.items())
    hosts = ", ".join(
        f"{arm} {r['plain_eager_s'] * us:.0f} ({r['host_s'] * us:.0f} host)"
        for arm, r in eager.items()
    )
    off = [f"{r['arm']} {r['predicted_s'] / r['median_s'] - 1:+.0%}" for r in rows
           if r["mode"] == "graph" and r.get("predicted_s")]  # fmt: skip
    ratio = {mode: r["serial_over_auto"] for mode, r in auto.items()}
    print(f"{seconds:4.0f} s  {first['op']} {first['m']},{first['n']},{first['k']}: {times}\n"
          f"    eager {hosts}\n    auto {auto['graph']['pick']}, serial / auto "
          f"{ratio}, off {off}", flush=True)  # fmt: skip
    return ratio["eager"][0]


if __name__ == "__main__":
    main()
