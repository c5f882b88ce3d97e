"""`counterpoint warmup`: what it takes, and what it says without GPUs."""

from itertools import cycle

import pytest
import torch
from commands import as_rank_0, example, invoke
from on_ranks import on_ranks
from rank_bodies import world
from typer.testing import CliRunner

from counterpoint.cli import warmup
from counterpoint.cli.main import app
from counterpoint.cli.shared.problems import numbers
from counterpoint.cli.warmup import layers_of
from counterpoint.errors import InputError


def test_sizes_are_read():
    assert layers_of("8192,3584: 8192,1024") == [(8192, 3584), (8192, 1024)]
    assert numbers("warmup", "--rows", "1, 8,32", "numbers") == [1, 8, 32]


@pytest.mark.parametrize("text", ["", "8192", "8192,0", "8192,1,2", "a,b", "8192,-1"])
def test_what_is_no_layer_is_refused(text: str):
    with pytest.raises(InputError, match="--layers must be"):
        layers_of(text)


def test_an_operator_that_is_not_there_is_named():
    shown = CliRunner().invoke(app, ["warmup", "--layers", "64,64", "--op", "gemm"])
    assert shown.exit_code == 2 and "--op must be one of matmul_all_reduce, " in shown.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_so():
    result = CliRunner().invoke(app, ["warmup", "--layers", "64,64"])
    assert result.exit_code == 2
    assert "GPUs of this machine must be 2 or more, got " in result.stderr
    shown = CliRunner().invoke(app, ["warmup", "--layers", "64"])
    assert shown.exit_code == 2 and "--layers must be N,K of each layer" in shown.stderr


def test_it_prints_what_help_shows(monkeypatch: pytest.MonkeyPatch):
    as_rank_0(warmup, None, monkeypatch)
    times = cycle((0.9, 1e-5))
    monkeypatch.setattr(warmup, "call_of", lambda *_: None)
    monkeypatch.setattr(warmup, "_seconds", lambda *_: next(times))
    (name, *words), lines = example("warmup")
    shown = " ".join(invoke(name, *words, columns=100).stdout.split())
    assert [line for line in lines if " ".join(line.split()) not in shown] == []
    assert "matmul_all_reduce 64, 8192, 3584 900.0 0.0" in shown


@on_ranks(2)
def test_every_operator_is_called_at_its_size(rank: int, ranks: int):
    for name in warmup.OPS:
        sizes = warmup.Sizes(6, 16, 8)
        found = warmup.call_of(name, sizes, torch.float32, world(), torch.device("cpu"))()
        y, *_ = found if isinstance(found, tuple) else (found,)
        rows = 3 if name == "matmul_reduce_scatter" else 6
        assert y.shape == (rows, 16) and y.isfinite().all(), name
        assert isinstance(found, tuple) == name.endswith("norm")
