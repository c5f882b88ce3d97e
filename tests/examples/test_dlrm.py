"""The example of embedding tables: as a user starts it, on other numbers of ranks, its parts."""

import argparse
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rankpool import RankPool
from torch.nn import Module

import counterpoint.nn as cnn

SCRIPT = Path(__file__).parents[2] / "examples" / "05_dlrm.py"


def test_it_trains_as_plain_torch_does():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "--ranks", "2"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^step +(\d+) of 30   loss ([\d.]+)   plain torch ([\d.]+)$",
                        done.stdout, re.MULTILINE)  # fmt: skip
    assert [int(step) for step, *_ in losses] == [1, 5, 10, 15, 20, 25, 30]
    for _, ours, plain in losses:
        assert float(ours) == pytest.approx(float(plain), rel=1e-3)
    assert float(losses[-1][1]) < 0.8 * float(losses[0][1]), "it has learnt nothing"
    assert "of a sample's 214 rows, ranks pool [107, 107]" in done.stdout
    assert "the losses of all steps agree on 2 ranks, fused and in plain torch" in done.stdout


def trained(rank: int, world_size: int, options: dict[str, Any]) -> str:
    example = runpy.run_path(str(SCRIPT))
    args = argparse.Namespace(seed=1, **options)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        example["train"](rank, world_size, example["SMALL"], torch.device("cpu"), args)
    return said.getvalue()


@pytest.mark.parametrize(
    ("ranks", "options", "compared"),
    [
        (1, {"dtype": "fp32", "steps": 2}, "all"),
        (3, {"dtype": "fp32", "steps": 3}, "all"),
        (4, {"dtype": "bf16", "steps": 6}, "the first 5"),
        (2, {"dtype": "bf16", "steps": 2}, "the first 2"),
    ],
)
def test_other_ranks(pool: RankPool, ranks: int, options: dict[str, Any], compared: str):
    """It raises where the losses differ."""
    first, *_ = pool.run(trained, ranks, options)
    assert f"the losses of {compared} steps agree on {ranks} ranks" in first


def with_frozen_tables(rank: int, world_size: int) -> str:
    example = runpy.run_path(str(SCRIPT))

    class Frozen(example["InOneCall"]):
        def forward(self: Module, indices: torch.Tensor) -> torch.Tensor:
            return super().forward(indices).detach()

    example["train"].__globals__["InOneCall"] = Frozen
    args = argparse.Namespace(seed=1, dtype="fp32", steps=20)
    try:
        example["train"](rank, world_size, example["SMALL"], torch.device("cpu"), args)
    except AssertionError as error:
        return str(error)
    return ""


def test_tables_that_are_not_trained_show_in_the_loss(pool: RankPool):
    assert pool.run(with_frozen_tables, 2) == ["the losses differ"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 26])
def test_work_is_balanced(ranks: int):
    """No rank has more than the mean, but where the heaviest table alone is more."""
    example = runpy.run_path(str(SCRIPT))
    pooling, (owners, work) = example["POOLING"], example["balanced"](ranks)
    assert len(pooling) == len(example["ROWS"]) == 26 and sum(pooling) == 214
    assert work == [
        sum(p for p, o in zip(pooling, owners, strict=True) if o == r) for r in range(ranks)
    ]
    assert sum(work) == 214 and min(work) > 0
    assert max(work) == max(100, 214 // ranks)


@pytest.mark.parametrize("ranks", [7, 30, 0, -1])
def test_ranks_that_do_not_fit_are_refused(monkeypatch, capsys, ranks: int):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--ranks", str(ranks)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (
        f"ranks must divide the batch of 240 and be 1 to 26, got {ranks}" in capsys.readouterr().err
    )


def timed(rank: int, world_size: int) -> str:
    example = runpy.run_path(str(SCRIPT))

    def rotate(arms: dict[str, Any], **_: Any) -> dict[str, Any]:
        for arm in arms.values():
            arm()
        return {name: argparse.Namespace(median_s=1e-3 * (1 + i)) for i, name in enumerate(arms)}

    names = example["train"].__globals__
    names |= {"rotate": rotate}
    s, device = example["SMALL"], torch.device("cpu")
    rows = [(min(n, s.rows), s.dim) for n in example["ROWS"]]
    bags = cnn.ShardedEmbeddingBags(rows, owners=example["balanced"](world_size)[0])
    dense = [example["Dense"](s) for _ in range(2)]
    plain = example["Training"](s, example["InThree"](s, bags, device), dense[0], torch.float32)
    fused = example["Training"](s, example["InOneCall"](s, bags, device), dense[1], torch.float32)
    batch = example["batch_of"](s, bags.own, 0, device)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        example["say_times"](s, fused, plain, batch)
    return said.getvalue()


def test_what_it_says_of_times(pool: RankPool):
    """With times that are made up, on CPU ranks: that each arm runs, and the form."""
    said, other = pool.run(timed, 2)
    assert re.search(r"^2 GPUs, 240 samples, ms +fused +torch$", said, re.MULTILINE)
    # arms are timed in order: bags 1 ms, exchange 2, then three of ours, three of torch's
    assert re.search(r"^  tables +3\.000 +6\.000 +50% less$", said, re.MULTILINE)
    assert re.search(r"^  forward \+ backward +5\.000 +8\.000 +38% less$", said, re.MULTILINE)
    assert "saves\n1.000 at most" in said and not other
