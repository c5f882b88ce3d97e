"""benchmarks/steps.py on CPU ranks: every arm runs, and what is wrong is not timed."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rankpool import RankPool

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
WHATS = ("tables", "forward", "forward + backward")


def in_benchmarks() -> None:
    """As when one of them is started: its folder is where modules are looked for."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))


def rows_of_steps(rank: int, world_size: int, which: str) -> list[dict[str, Any]]:
    in_benchmarks()
    import steps
    import steps_dlrm
    import steps_experts
    from experts_layer import Model

    from counterpoint.measure.timing import Times

    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    if which == "dlrm":
        made = steps_dlrm.made(steps_dlrm.dlrm.SMALL, torch.float32, device, group)
    else:
        model = Model("small", int(which), 24, 16, 2)
        made = steps_experts.made(model, 96, torch.float32, device, group)

    def rotate(arms: dict[str, Any], **_: Any) -> dict[str, Times]:
        for arm in arms.values():
            arm()
        return {name: Times((1.0 + i, 2.0 + i, 3.0 + i), 0.5) for i, name in enumerate(arms)}

    with mock.patch.object(steps, "rotate", rotate):
        rows = steps.measured(made, group, device)
    assert len(rows) == len(made.arms) and f"{rows[0]['what']}: " in steps.said(rows)
    assert [r["median_s"] for r in rows] == [2.0 + i for i in range(len(rows))]
    return rows


def names_of_cases(rank: int, world_size: int, smoke: bool) -> list[str]:
    in_benchmarks()
    import steps

    group = dist.group.WORLD
    assert group is not None
    return list(steps.cases(torch.device("cpu"), group, smoke=smoke))


def test_cases(pool: RankPool):
    (full,), (smoke,) = (pool.run(names_of_cases, 1, smoke) for smoke in (False, True))
    assert full[:3] == ["DLRM, 16384 samples", "DLRM, 65536 samples",
                        "DeepSeek-V3, 1024 tokens a rank"]  # fmt: skip
    assert len(full) == 8 and smoke == [full[0], "Qwen3-235B, 1024 tokens a rank"]


def test_dlrm(pool: RankPool):
    rows, other = pool.run(rows_of_steps, 2, "dlrm")
    assert [r["what"] for r in rows] == [r["what"] for r in other]
    found = {(r["what"], r["way"]): r for r in rows}
    assert set(found) == {(w, way) for w in WHATS for way in ("fused", "torch", "lookup")} | {
        ("pooling", "torch"), ("pooling", "lookup"), ("exchange", "")
    }  # fmt: skip
    row = found["forward", "fused"]
    assert row["pooled"] == [107, 107] and row["batch"] == 240 and row["ranks"] == 2
    assert 0 < row["error"] < 1e-5 and "torch" in row and "commit" in row
    assert row["p20_s"] < row["median_s"] < row["p80_s"] and row["skew_s"] == 0.5


@pytest.mark.parametrize(("ranks", "local"), [(2, 3), (3, 1)])
def test_experts(pool: RankPool, ranks: int, local: int):
    rows, *_ = pool.run(rows_of_steps, ranks, str(local))
    found = {(r["what"], r["way"]): r for r in rows}
    ways = ("fused", "fused, host", "serial", "torch", "torch, counts")
    assert set(found) == {(w, way) for w in WHATS[1:] for way in ways} | {
        (part, w) for part in ("matmuls", "exchanges") for w in WHATS[1:]
    }
    row = found["forward", "fused"]
    assert 0 < row["error"] < 1e-5 and row["experts"] == local and len(row["rows"]) == 3


def what_is_said(rank: int, world_size: int, which: str) -> str:
    in_benchmarks()
    import steps_dlrm
    import steps_experts
    from experts_layer import Model

    from counterpoint.errors import CounterpointError

    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    pool, weight_gradient = steps_dlrm.pooled_on_cpu, steps_experts.weight_gradient

    def of_another_sample(*given: Any, **how: Any) -> torch.Tensor:
        return pool(*given, **how).roll(1, 0)

    def too_long(*given: Any) -> torch.Tensor:  # on one rank alone
        return weight_gradient(*given) * (1 + 1e-4 * rank)

    try:
        if which == "dlrm":
            with mock.patch.object(steps_dlrm, "pooled_on_cpu", of_another_sample):
                steps_dlrm.made(steps_dlrm.dlrm.SMALL, torch.float32, device, group)
        else:
            with mock.patch.object(steps_experts, "weight_gradient", too_long):
                steps_experts.made(Model("small", 2, 24, 16, 2), 96, torch.float32, device, group)
    except CounterpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("which", "says"),
    [("dlrm", "DLRM lookup: loss off by"), ("experts", "experts, fused: y, dx, dweights")],
)
def test_what_is_wrong_is_not_timed(pool: RankPool, which: str, says: str):
    said = pool.run(what_is_said, 2, which)
    assert said[0].startswith(says) and said == [said[0]] * 2
