"""Whole steps: a DLRM and layers of experts, forward and backward, fused and unfused.

    torchrun --nproc-per-node=2 benchmarks/steps.py --out FILE.jsonl

steps_dlrm.py and steps_experts.py say what each way is. Every way is checked against fp64 first:
losses, results and gradients. Calls are eager, batches in rotation; the host is some 15 ms ahead
when an arm begins, so that what it takes to enqueue a step shows only where an arm waits for the
GPU. Beside each: its compute alone and its communication alone, the shorter of which is what hiding
can save at most.
"""

import argparse
import faulthandler
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import steps_dlrm
import steps_experts
import torch
import torch.distributed as dist
from experts_layer import MODELS
from steps_dlrm import Steps, dlrm

import counterpoint as cp
from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.timing import Times, rotate

BATCHES = (16384, 65536)  # samples of all ranks
TOKENS = (1024, 4096)  # of a rank
ROUNDS = 11
BACKLOG_CYCLES = 30_000_000
LIMIT_S = 170


def cases(
    device: torch.device, group: dist.ProcessGroup, *, smoke: bool
) -> dict[str, Callable[[], Steps]]:
    """What makes each case, by the name of its line."""
    found: dict[str, Callable[[], Steps]] = {}
    for batch in BATCHES[:1] if smoke else BATCHES:
        sizes = dlrm.LARGE._replace(batch=batch)
        found[f"DLRM, {batch} samples"] = partial(
            steps_dlrm.made, sizes, torch.bfloat16, device, group
        )
    for model in MODELS[1:2] if smoke else MODELS:
        for tokens in TOKENS[:1] if smoke else TOKENS:
            found[f"{model.name}, {tokens} tokens a rank"] = partial(
                steps_experts.made, model, tokens, torch.bfloat16, device, group
            )
    return found


def measured(steps: Steps, group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Rows of all arms, in one rotation; equal on all ranks."""
    calls = dict.fromkeys(steps.arms, 0)

    def turn(arm: tuple[str, str]) -> Callable[[], object]:
        def run() -> object:
            calls[arm] += 1
            return steps.arms[arm](calls[arm])

        return run

    names = {", by ".join(arm): arm for arm in steps.arms}
    times = rotate({name: turn(arm) for name, arm in names.items()}, group=group, device=device,
                   rounds=ROUNDS, soak_s=0.2, backlog_cycles=BACKLOG_CYCLES)  # fmt: skip
    cp.check(group)
    clock = record.sm_clock_mhz()
    return rows_of(steps, {arm: times[name] for name, arm in names.items()}, group.size(), clock)


def rows_of(
    steps: Steps, times: dict[tuple[str, str], Times], ranks: int, clock_mhz: int
) -> list[dict[str, Any]]:
    """A row for each arm."""
    facts = {"table": "steps", "ranks": ranks, "dtype": "bfloat16", "sm_clock_mhz": clock_mhz}
    facts |= steps.facts | record.environment()
    return [
        {"what": what, "way": way, "median_s": t.median_s, "p20_s": t.quantile_s(2),
         "p80_s": t.quantile_s(8), "skew_s": t.skew_s, "rounds": len(t.rounds_s),
         "error": steps.errors.get(way), **facts}
        for (what, way), t in times.items()
    ]  # fmt: skip


def said(rows: list[dict[str, Any]]) -> str:
    """One line: milliseconds of all arms."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['way']} " if row["way"] else ""
        parts.setdefault(row["what"], []).append(f"{name}{row['median_s'] * 1e3:.3f}")
    return "; ".join(f"{what}: {', '.join(each)}" for what, each in parts.items())


def main() -> None:
    """Time all cases; rank 0 writes rows and says a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=("smoke", "full"), default="full")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose line begins so")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        for name, make in cases(device, group, smoke=args.suite == "smoke").items():
            if not name.startswith(args.only):
                continue
            rows = measured(make(), group, device)
            if group.rank() == 0:
                record.append(args.out, rows)
                print(f"{time.monotonic() - start_s:4.0f} s  {name}: {said(rows)}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
