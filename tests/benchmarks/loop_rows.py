"""Rows of benchmarks/resources.py, as a GPU node would give them."""

from typing import Any

import torch

from benchmarks.loop import Pair

M, N, K = 128, 192, 64
# of benchmarks.loop, for CPU ranks; the interpreter multiplies no bf16
SMALL = {"SHAPES": {"cb": (M, N, K), "mb": (M, 2 * N, K)}, "COLLECTIVE_BYTES": 8 * M * N,
         "DTYPE": torch.float32}  # fmt: skip
FACTS = {
    "table": "resources", "iterations": 4, "nccl_graph_register": False, "date": "2026-11-21",
    "torch": "2.11.0", "commit": "abc1234", "multicast": False, "nvls": False,
    "gpu": "NVIDIA H200", "driver": "580.1", "triton": "3.6.0", "nccl": "2.28.9",
}  # fmt: skip
CONTROLS = {
    "sequential": "sequential", "plain overlap": "overlap", "priority": "overlap priority",
    "order": "overlap delay=5us", "granularity": "overlap chunks=4",
    "budget": "overlap max_ctas=16", "carve-out only": "overlap carve_out",
    "carve-out, priority": "overlap priority carve_out", "shaping": "overlap blocks_per_sm=2",
    "transport": "overlap copy_engine", "tuned": "overlap copy_engine chunks=4",
    "tuned, SM collectives": "overlap priority delay=10us",
}  # fmt: skip


def arm_rows(
    pair: Pair, times_ms: dict[str, float], *, mode: str = "graph", ranks: int = 8,
    ideal_ms: float = 10.0, ideal_sm_ms: float = 11.0, joules: dict[str, float] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each arm; `joules` of those whose energy was read."""
    rows: list[dict[str, Any]] = []
    for arm, ms in times_ms.items():
        ratio = times_ms["plain overlap"] / ms
        row = _facts(pair, ranks) | {
            "arm": arm, "controls": CONTROLS[arm], "mode": mode, "median_s": ms * 1e-3,
            "p20_s": ms * 0.98e-3, "p80_s": ms * 1.04e-3, "ideal_s": ideal_ms * 1e-3,
            "ideal_sm_s": ideal_sm_ms * 1e-3, "error": 1e-3,
            "baseline_over_arm": [ratio, ratio * 0.9, ratio * 1.1],
        }  # fmt: skip
        if joules and arm in joules:
            row |= {"energy_j": joules[arm], "power_w": 560.4, "arm_sm_clock_mhz": 1755.2}
        rows.append(row)
    return rows


def shape_rows(
    pair: Pair, ratios: dict[bool, dict[int, float]], *, ranks: int = 8
) -> list[dict[str, Any]]:
    """A row for each number of blocks per SM, of priority or not; the most blocks are unshaped."""
    return [
        _facts(pair, ranks) | {
            "arm": "shapes", "mode": "graph", "controls": "overlap", "priority": urgent,
            "blocks_per_sm": blocks, "unshaped": blocks == max(curve), "median_s": ratio * 0.02,
            "time_ratio": ratio, "rounds": 3,
        }
        for urgent, curve in ratios.items()
        for blocks, ratio in curve.items()
    ]  # fmt: skip


def _facts(pair: Pair, ranks: int) -> dict[str, Any]:
    return FACTS | {
        "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel, "ranks": ranks,
        "collective": pair.collective, "scale": pair.scale,
    }  # fmt: skip
