"""vLLM's decoding: on vLLM where it is installed, else on stand-ins for its seam."""

import importlib
import importlib.metadata
import pickle
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, nn
from vllm_parts import compiled, compiling, installed, stand_ins

import counterpoint as cp
from counterpoint.adapters import vllm_plugin
from counterpoint.adapters.vllm import PASSES, SEAM, DecodePass, compilation_config
from counterpoint.measure.timing import relative_error

K, N = 24, 16


class RowParallel(nn.Module):
    """A linear layer of whose inputs each rank has a part, in a form of vLLM's graphs."""

    def __init__(self, form: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.form = form
        self.weight = nn.Parameter(torch.randn(N, K))
        self.bias = nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        reduced = torch.ops.vllm.all_reduce
        if self.form == "bias" and dist.get_rank() == 0:
            return reduced(nn.functional.linear(x, self.weight, self.bias), "tp:0")
        y = nn.functional.linear(x.relu(), self.weight)
        if self.form == "added":
            y = y.sin()
        if self.form == "views":
            y = y.view(-1, 2, N // 2)
        return reduced(y, group_name="tp:0")


@pytest.mark.parametrize(("form", "rows", "end", "matched", "why"), [
    ("plain", 8, 8, True, ""),
    ("plain", 64, None, True, ""),
    ("plain", 65, None, False, "its 65 rows are not known to be at most 64"),
    ("views", 4, 8, True, ""),
    ("dynamic", 5, 64, True, ""),
    ("dynamic", 5, 8192, False, "rows are not known to be at most 64"),
    ("dynamic", 5, None, False, "rows are not known to be at most 64"),
    ("added", 4, 8, False, "sin stands before it"),
])  # fmt: skip
@on_ranks(2)
def test_decoding_by_one_operator(
    rank: int, world_size: int, form: str, rows: int, end: int | None, matched: bool, why: str
):
    decoding = DecodePass()
    with compiling(end), by_reference(), torch.no_grad():
        model, x = RowParallel(form, rank), torch.randn(rows, K)
        want = model(x)
        run = compiled(model, decoding, dynamic=form == "dynamic")
        assert relative_error(run(x), want) < 1e-6
        if form == "dynamic" and matched:  # another number of tokens, by the same graph
            assert relative_error(run(x[:3]), model(x[:3])) < 1e-6
    (report,) = decoding.reports
    (one,) = report.found
    assert (bool(one.operator), one.kind, one.ranks) == (matched, "all-reduce", world_size)
    assert one.reason.endswith(why) if why else not one.reason
    assert one.operator == ("matmul_all_reduce" if matched else "")
    assert bool(one.plans) == (matched and form != "dynamic")


@on_ranks(2)
def test_a_bias_of_one_rank_is_refused(rank: int, world_size: int):
    """Graphs that differ between ranks would call different operators."""
    with compiling(8), torch.no_grad():
        run = compiled(RowParallel("bias", rank), DecodePass(), dynamic=False)
        if rank == 0:
            with pytest.raises(Exception, match="adds the bias of addmm on rank 0 alone"):
                run(torch.randn(4, K))


def test_what_vllm_gets():
    with nullcontext() if installed else stand_ins(None):
        config = compilation_config(max_rows=32)
        other = compilation_config()
    assert config["compile_ranges_endpoints"] == [32]
    assert "pass_config" not in config, "vLLM's own passes are as they were"
    mine = config["inductor_compile_config"][SEAM]
    assert mine.callable.max_rows == 32
    assert isinstance(mine.uuid(), str)
    assert mine.uuid() != other["inductor_compile_config"][SEAM].uuid()
    with pytest.raises(cp.InputError, match="max_rows must be a positive integer, got 0"):
        compilation_config(max_rows=0)


@pytest.mark.skipif(not installed, reason="vllm is not installed")
def test_vllm_takes_it():
    """Its processes get it by pickle, and its cache of graphs has a key."""
    from vllm.config import CompilationConfig  # type: ignore[import-not-found]

    config = pickle.loads(pickle.dumps(CompilationConfig(**compilation_config())))
    assert config.compile_ranges_endpoints == [64]
    assert (
        config.pass_config.fuse_allreduce_rms == CompilationConfig().pass_config.fuse_allreduce_rms
    )
    taken = config.inductor_compile_config[SEAM]
    assert isinstance(taken, importlib.import_module(PASSES).InductorPass)
    assert taken.callable.max_rows == 64
    assert config.compute_hash() != CompilationConfig().compute_hash()


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.skipif(not installed, reason="vllm is not installed")
def test_vllm_runs_it_behind_its_own_passes():
    from vllm.compilation.passes import pass_manager  # type: ignore[import-not-found]

    manager = pass_manager.PostGradPassManager()
    for name in ("eliminate_noops", "fuse_allreduce_rms"):
        manager.add(importlib.import_module(PASSES).CallableInductorPass(print, name))
    manager.add(compilation_config()["inductor_compile_config"][SEAM])
    assert [each.callable for each in manager.passes[:2]] == [print, print]
    assert isinstance(manager.passes[-1].callable, DecodePass)


class Configured:
    """As vLLM's VllmConfig, as far as the plugin goes."""

    def __init__(self, gpus: int, **compilation: Any) -> None:
        given = {"compile_ranges_endpoints": None, "inductor_compile_config": {}} | compilation
        self.parallel_config = Named(tensor_parallel_size=gpus)
        self.compilation_config = Named(**given)
        self.__post_init__()

    def __post_init__(self) -> None:
        ends = self.compilation_config.compile_ranges_endpoints or ()
        self.compilation_config.compile_ranges_endpoints = [*ends, 8192]


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Configured]]:
    """A configuration of vLLM's once it has loaded its plugins, twice."""

    class Own(Configured):
        __post_init__ = Configured.__post_init__

    with stand_ins(None):
        monkeypatch.setitem(sys.modules, "vllm.config", Named(VllmConfig=Own))
        monkeypatch.setenv(vllm_plugin.SWITCH, "1")
        vllm_plugin.load()
        vllm_plugin.load()
        yield Own


def test_the_plugin_gives_vllm_serve_the_pass(plugged: type[Configured]):
    config = plugged(2).compilation_config
    assert config.compile_ranges_endpoints == [64, 8192]
    taken = config.inductor_compile_config[SEAM]
    assert taken.callable.max_rows == 64
    config = plugged(8, **vars(config)).compilation_config  # a copy of it, made by vLLM
    assert config.inductor_compile_config[SEAM] is taken
    assert plugged(1).compilation_config.inductor_compile_config == {}
    with pytest.raises(
        cp.InputError, match="COUNTERPOINT_VLLM: compilation_config must be without"
    ):
        plugged(2, inductor_compile_config={SEAM: print})


def test_the_plugin_is_off_and_light_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.config", Named())
    vllm_plugin.load()
    monkeypatch.setenv(vllm_plugin.SWITCH, "1")
    with pytest.raises(cp.UnsupportedError, match="VllmConfig"):
        vllm_plugin.load()


def test_the_entry_point_is_what_vllm_looks_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = entry.partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.load
    if installed:
        plugins = importlib.import_module("vllm.plugins")
        assert plugins.DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not installed, reason="vllm is not installed")
def test_vllms_own_configuration_takes_it(monkeypatch: pytest.MonkeyPatch):
    """As of `vllm serve --tensor-parallel-size 2`, without a model."""
    config = importlib.import_module("vllm.config")
    monkeypatch.setattr(config.VllmConfig, "__post_init__", config.VllmConfig.__post_init__)
    before = config.CompilationConfig().compute_hash()
    monkeypatch.setenv(vllm_plugin.SWITCH, "1")
    vllm_plugin.load()
    parallel = config.ParallelConfig(tensor_parallel_size=2)
    device = config.DeviceConfig(device="cpu")
    given = config.VllmConfig(parallel_config=parallel, device_config=device)
    made = pickle.loads(pickle.dumps(given))
    assert 64 in made.compilation_config.compile_ranges_endpoints
    taken = made.compilation_config.inductor_compile_config[SEAM]
    assert isinstance(taken.callable, DecodePass)
    assert made.compilation_config.compute_hash() != before


@pytest.mark.skipif(installed, reason="vllm is installed")
def test_vllm_that_is_missing_or_has_moved(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(cp.UnsupportedError, match=f"vllm is not installed: .*{PASSES}.* 0.33.0$"):
        compilation_config()
    monkeypatch.setitem(sys.modules, PASSES, Named())
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": "0.99"}.__getitem__)
    with pytest.raises(cp.UnsupportedError, match=r"vllm 0\.99: .*CallableInductorPass"):
        compilation_config()
