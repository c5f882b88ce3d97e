"""The examples that train: as a user starts them, and on other numbers of ranks."""

import argparse
import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from rankpool import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA, EXPERTS, DLRM = "01_train_llama", "04_mixture_of_experts", "05_dlrm"
AGREE = "the losses on 2 ranks and in plain torch agree"


def script(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize(
    ("name", "options", "steps", "off", "learnt", "texts"),
    [
        (LLAMA, "--steps 6 --plan graded", [1, 5, 6], 1e-4, 0.5, [AGREE]),
        (EXPERTS, "--steps 12 --plan serial", [1, 10, 12], 1e-3, 0.3, [AGREE]),
        (DLRM, "", [1, 5, 10, 15, 20, 25, 30], 1e-3, 0.8, [
            "of a sample's 214 rows, ranks pool [107, 107]",
            "the losses of all steps agree on 2 ranks, fused and in plain torch",
        ]),
    ],
)  # fmt: skip
def test_it_trains_as_plain_torch_does(
    name: str, options: str, steps: list[int], off: float, learnt: float, texts: list[str]
):
    said = python("-W", "error", script(name), "--ranks", "2", *options.split())
    line = rf"^step +(\d+) of {steps[-1]}   loss ([\d.]+)   plain torch ([\d.]+)$"
    losses = re.findall(line, said, re.MULTILINE)
    assert [int(step) for step, *_ in losses] == steps
    for _, ours, plain in losses:
        assert float(ours) == pytest.approx(float(plain), rel=off)
    assert float(losses[-1][1]) < learnt * float(losses[0][1]), "it has learnt nothing"
    assert all(text in said for text in texts)


def trained(rank: int, world_size: int, name: str, options: dict[str, Any]) -> str:
    example = runpy.run_path(script(name))
    args = argparse.Namespace(**{"steps": 2, "seed": 1, **options})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        example["train"](rank, world_size, example["SMALL"], torch.device("cpu"), args)
    return said.getvalue()


@pytest.mark.parametrize(
    ("name", "ranks", "options", "said"),
    [
        (LLAMA, 1, {"plan": "auto", "dtype": "fp32"}, ""),
        (LLAMA, 3, {"plan": "graded", "dtype": "fp32"}, ""),
        (LLAMA, 4, {"plan": "shard_p2p", "dtype": "bf16"}, ""),
        (EXPERTS, 1, {"plan": "auto", "dtype": "fp32", "max_rows": None}, ""),
        (EXPERTS, 3, {"plan": "serial", "dtype": "fp32", "max_rows": 600}, ""),
        (EXPERTS, 4, {"plan": "auto", "dtype": "bf16", "max_rows": None}, ""),
        (DLRM, 1, {"dtype": "fp32"}, "all steps agree on 1 ranks"),
        (DLRM, 3, {"dtype": "fp32", "steps": 3}, "all steps agree on 3 ranks"),
        (DLRM, 4, {"dtype": "bf16", "steps": 6}, "the first 5 steps agree on 4 ranks"),
        (DLRM, 2, {"dtype": "bf16"}, "the first 2 steps agree on 2 ranks"),
    ],
)
def test_other_ranks(pool: RankPool, name: str, ranks: int, options: dict[str, Any], said: str):
    """It raises where the losses differ."""
    first, *_ = pool.run(trained, ranks, name, options)
    assert said in first


@pytest.mark.parametrize(
    ("name", "text", "ranks"),
    [(LLAMA, "must divide the 12 KV heads", 5)]
    + [(EXPERTS, "must divide the 12 experts", ranks) for ranks in (5, 0, -2)]
    + [(DLRM, "ranks must divide the batch of 240 and be 1 to 26", ranks)
       for ranks in (7, 30, 0, -1)],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused(monkeypatch, capsys, name: str, text: str, ranks: int):
    monkeypatch.setattr(sys, "argv", [script(name), "--ranks", str(ranks)])
    with pytest.raises(SystemExit):
        runpy.run_path(script(name), run_name="__main__")
    assert f"{text}, got {ranks}" in capsys.readouterr().err
