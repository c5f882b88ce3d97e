"""The examples that train: what they print and learn, also on other numbers of ranks."""

import argparse
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import script_by_torch
from rank_bodies import by_reference
from rankpool import RankError, RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA, EXPERTS, DLRM = "01_train_llama", "04_mixture_of_experts", "05_dlrm"


def at(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "ranks", "options", "steps", "off", "learnt"),
    [
        (LLAMA, 2, "--steps 6 --plan graded", [1, 5, 6], 1e-4, 0.5),
        (EXPERTS, 2, "--steps 12", [1, 10, 12], 1e-3, 0.3),
        (EXPERTS, 4, "--steps 10 --islands 2", [1, 10], 1e-3, 0.3),
        (DLRM, 2, "", [1, 5, 10, 15, 20, 25, 30], 1e-3, 0.8),
    ],
)
def test_it_trains_as_plain_torch_does(
    pool: RankPool, name: str, ranks: int, options: str, steps: list[int], off: float, learnt: float
):
    said, *_ = pool.run(script_by_torch, ranks, at(name), *options.split())
    line = rf"^step +(\d+) of {steps[-1]}   loss ([\d.]+)   plain torch ([\d.]+)$"
    losses = re.findall(line, said, re.MULTILINE)
    assert [int(step) for step, *_ in losses] == steps
    for _, ours, plain in losses:
        assert float(ours) == pytest.approx(float(plain), rel=off)
    assert float(losses[-1][1]) < learnt * float(losses[0][1]), "it has learnt nothing"
    assert f"the losses on {ranks} ranks and in plain torch agree" in said
    if name != LLAMA:
        number = r"(\d+\.\d{4}) s"
        parts = re.search(
            f"^a step: {number}, communication {number}, exposed {number}$", said, re.M
        )
        assert parts, said
        whole, communication, exposed = map(float, parts.groups())
        assert whole > 0 and whole >= communication >= exposed


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        (LLAMA, 1, ""),
        (LLAMA, 3, "--plan graded"),
        (LLAMA, 4, "--plan shard_p2p --dtype bfloat16"),
        (EXPERTS, 1, ""),
        (EXPERTS, 3, "--max-rows 600"),
        (EXPERTS, 4, "--dtype bfloat16"),
        (DLRM, 1, ""),
        (DLRM, 3, "--steps 3"),
        (DLRM, 4, "--dtype bfloat16 --steps 6"),
    ],
)
def test_other_ranks(pool: RankPool, name: str, ranks: int, options: str):
    """It raises where the losses differ."""
    first, *_ = pool.run(script_by_torch, ranks, at(name), "--steps", "2", *options.split())
    assert f"the losses on {ranks} ranks and in plain torch agree" in first


def with_frozen_tables(rank: int, world_size: int) -> str:
    example = runpy.run_path(at(DLRM))

    class Frozen(example["Parallel"]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.bags.requires_grad_(False)

    example["train"].__globals__["Parallel"] = Frozen
    try:
        with by_reference():
            example["train"](torch.device("cpu"), argparse.Namespace(dtype="float32", steps=4))
    except AssertionError as error:
        return str(error)
    return ""


def test_tables_that_are_not_trained_show_in_the_loss(pool: RankPool):
    first, *_ = pool.run(with_frozen_tables, 2)
    assert first == "the losses differ"


def test_ranks_that_do_not_fit_are_refused(pool: RankPool):
    text = "ExpertParallelMLP: num_experts must be a multiple of the 5 ranks, got 12"
    with pytest.raises(RankError, match=text):
        pool.run(script_by_torch, 5, at(EXPERTS))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path):
    assert len(path.read_text().splitlines()) < 120
