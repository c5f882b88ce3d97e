"""What came out of claims of the second paper that the replay's scores do not say."""

from statistics import fmean, geometric_mean

from benchmarks.evaluated import read
from benchmarks.ficco_scores import UNSEEN, finest_s, scenarios_of, shard_s
from benchmarks.losses import CONTENDED, contended
from benchmarks.paper_findings import IN_PART, Found, most, verdict_of
from benchmarks.rows import RESULTS
from benchmarks.score import RIGHT, SERIAL

NOISE = "evaluate-held-out-2x-h200.jsonl"


def ideal() -> Found:
    """Serial over the longer one of a matmul and its collective, each by itself."""
    rows = [r for r in most("ficco") if r["question"] == UNSEEN]
    ratios: list[float] = []
    for row, m in zip(rows, scenarios_of(rows, UNSEEN)[0], strict=True):
        compute_s = row["steps"][SERIAL]["matmul"][0] * 1e-6
        serial_s = m.times[SERIAL]
        ratios.append(serial_s / max(compute_s, serial_s - compute_s))
    return Found(
        f"up to {max(ratios):.2f}x, mean {geometric_mean(ratios):.2f}x of {len(ratios)} unseen "
        "scenarios, by the replay",
        verdict_of(max(ratios) >= 1.7),
    )  # fmt: skip


def engines() -> Found:
    """What a matmul takes beside a copy engine, and beside NCCL."""
    rows = [r for r in most("losses") if r["question"] == CONTENDED and "median_s" in r]
    found = contended(rows)
    by = {way: [each["matmul"][0] for (_, transport), each in found.items() if transport == way]
          for way in ("copy engine", "NCCL")}  # fmt: skip
    told = [f"{min(by[way]):.2f} to {max(by[way]):.2f}" for way in by]
    return Found(
        f"a matmul beside copies by engines takes {told[0]} times as long, beside NCCL {told[1]}",
        verdict_of(max(by["copy engine"]) < min(by["NCCL"])), rows,
    )  # fmt: skip


def topologies() -> Found:
    """Where plans finer than shards win."""
    measured, _ = scenarios_of(most("ficco"), UNSEEN)
    won = sum(finest_s(m) < shard_s(m) for m in measured)
    return Found(
        f"finer plans win on a full mesh ({won} of {len(measured)}, by the replay), shards behind "
        "a switch; on rings and tori neither is measured",
        f"{IN_PART}: two topologies" if won > len(measured) / 2 else verdict_of(False),
    )  # fmt: skip


def noise() -> str:
    """How far a plan that was timed twice in one rotation is from itself."""
    apart: list[float] = []
    for found in read([RESULTS / NOISE]).values():
        for case in found:
            arms = case.case.graph
            if case.picked in arms and "auto" in arms:
                apart.append(arms["auto"]["median_s"] / arms[case.picked]["median_s"])
    share = fmean(not 1 / RIGHT <= ratio <= RIGHT for ratio in apart)
    return (
        f"A plan that was timed twice in one rotation differs from itself by more than 2 % in "
        f"{share:.0%} of {len(apart)} held-out matmuls (2 H200s): 2 % is near the noise."
    )
