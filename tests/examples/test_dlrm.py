"""The example of embedding tables: its parts."""

import argparse
import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from rankpool import RankPool
from torch.nn import Module

import counterpoint.nn as cnn

SCRIPT = Path(__file__).parents[2] / "examples" / "05_dlrm.py"


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
