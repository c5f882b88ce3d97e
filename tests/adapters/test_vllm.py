"""vLLM's decoding: on vLLM where it is installed, else on stand-ins for its seam.

The stand-ins have the names of vLLM 0.33.0, and its operator's schema.
"""

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import counterpoint as cp
from counterpoint.adapters.vllm import PASSES, SEAM, STATE, DecodePass, compilation_config
from counterpoint.measure.timing import relative_error

K, N = 24, 16
installed = importlib.util.find_spec("vllm") is not None
LIBRARY = None if installed else torch.library.Library("vllm", "FRAGMENT")


class Wrapped:
    """As vLLM's CallableInductorPass."""

    def __init__(self, callable: Callable[[Any], None], uuid: Any = None) -> None:
        self.callable, self._uuid = callable, uuid

    def __call__(self, graph: Any) -> None:
        self.callable(graph)

    def uuid(self) -> Any:
        return self._uuid


def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    result = tensor.clone()
    dist.all_reduce(result, group=sys.modules[STATE]._groups[group_name]().device_group)
    return result


def all_reduce_fake(tensor: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(tensor)


@contextmanager
def compiling(end: int | None) -> Iterator[None]:
    """vLLM while it compiles a graph for 1 to `end` tokens; None: it does not."""
    if not installed:
        with stand_ins(end):
            yield
        return
    passes, state = importlib.import_module(PASSES), importlib.import_module(STATE)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # on CPU alone its operator returns its input
        warnings.filterwarnings("ignore", "vllm::all_reduce .*must not also be an input")
        patch.setattr(state, "_groups", {})
        patch.setattr(state, "_group_name_counter", {})
        ranks = range(dist.get_world_size())
        group = state.GroupCoordinator([[*ranks]], dist.get_rank(), "gloo", True, group_name="tp")
        assert group.unique_name == "tp:0"
        with passes.pass_context(Named(start=1, end=end)) if end else nullcontext():
            yield


@contextmanager
def stand_ins(end: int | None) -> Iterator[None]:
    """Modules of vLLM's names."""
    if not hasattr(torch.ops.vllm, "all_reduce"):
        assert LIBRARY is not None
        LIBRARY.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
        LIBRARY.impl("all_reduce", all_reduce, "CPU")
        torch.library.register_fake("vllm::all_reduce", all_reduce_fake, lib=LIBRARY)
    context = None if end is None else Named(compile_range=Named(start=1, end=end))
    group = dist.group.WORLD if dist.is_initialized() else None
    modules = {
        PASSES: Named(_pass_context=context, CallableInductorPass=Wrapped),
        STATE: Named(_groups={"tp:0": lambda: Named(device_group=group)}),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


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


def compiled(model: nn.Module, decoding: DecodePass, *, dynamic: bool) -> Any:
    """The model by torch.compile, its graph of inference given to the pass, and run as it is."""

    def run(module: Any, _: Any) -> Any:
        decoding(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run, decompositions=select_decomp_table)
    return torch.compile(model, backend=backend, dynamic=dynamic)


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
    assert config["pass_config"] == {"fuse_allreduce_rms": False}
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
    assert not config.pass_config.fuse_allreduce_rms
    taken = config.inductor_compile_config[SEAM]
    assert isinstance(taken, importlib.import_module(PASSES).InductorPass)
    assert taken.callable.max_rows == 64
    assert config.compute_hash()


@pytest.mark.skipif(installed, reason="vllm is installed")
def test_vllm_that_is_missing_or_has_moved(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(cp.UnsupportedError, match=f"vllm is not installed: .*{PASSES}.* 0.33.0$"):
        compilation_config()
    monkeypatch.setitem(sys.modules, PASSES, Named())
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": "0.99"}.__getitem__)
    with pytest.raises(cp.UnsupportedError, match=r"vllm 0\.99: .*CallableInductorPass"):
        compilation_config()
