"""benchmarks/steps.py on CPU ranks: every arm runs, and what is wrong is not timed."""

import sys
from pathlib import Path
from typing import Any

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
    from experts import Model

    from counterpoint.measure.timing import Times

    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    if which == "dlrm":
        made = steps_dlrm.made(steps_dlrm.dlrm.SMALL, torch.float32, device, group)
    else:
        model = Model("small", int(which), 24, 16, 2)
        made = steps_experts.made(model, 96, torch.float32, device, group)
    times: dict[tuple[str, str], Times] = {}
    for i, (name, arm) in enumerate(made.arms.items()):
        arm(1)
        times[name] = Times((1.0 + i, 2.0 + i, 3.0 + i), 0.5)
    return steps.rows_of(made, times, world_size, 0)


def test_dlrm(pool: RankPool):
    rows, other = pool.run(rows_of_steps, 2, "dlrm", timeout_s=90)
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
    rows, *_ = pool.run(rows_of_steps, ranks, str(local), timeout_s=90)
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
    from experts import Model

    from counterpoint.errors import CounterpointError

    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    try:
        if which == "dlrm":  # rows of another sample
            right = steps_dlrm._Looked.forward
            steps_dlrm._Looked.forward = staticmethod(lambda *given: right(*given).roll(1, 0))
            try:
                steps_dlrm.made(steps_dlrm.dlrm.SMALL, torch.float32, device, group)
            finally:
                steps_dlrm._Looked.forward = staticmethod(right)
        else:  # one rank alone is wrong, in one gradient
            right = steps_experts.weight_gradient

            def wrong(*given: Any) -> torch.Tensor:
                return right(*given) * (1.0 + 1e-4 * rank)

            steps_experts.weight_gradient = wrong
            try:
                steps_experts.made(Model("small", 2, 24, 16, 2), 96, torch.float32, device, group)
            finally:
                steps_experts.weight_gradient = right
    except CounterpointError as error:
        return str(error)
    return ""


def test_what_is_wrong_is_not_timed(pool: RankPool):
    said = pool.run(what_is_said, 2, "dlrm", timeout_s=90)
    assert all(text.startswith("DLRM lookup: loss off by") for text in said)
    said = pool.run(what_is_said, 2, "experts", timeout_s=90)
    assert all(text.startswith("experts, fused: y, dx") for text in said)
    assert len(set(said)) == 1
