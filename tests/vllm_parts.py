"""vLLM where it is installed, else stand-ins for its seam, under its names and schemas of 0.33.0.

Its operators in C++ are stand-ins everywhere: a CPU has none of them.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from counterpoint.adapters.vllm import PASSES, STATE, DecodePass

installed = importlib.util.find_spec("vllm") is not None
FP8 = torch.float8_e4m3fn
NORM = "Tensor weight, Tensor scale, float epsilon"
SCHEMAS = {
    "vllm::all_reduce": "(Tensor tensor, str group_name) -> Tensor",
    "vllm_ir::rms_norm": "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) "
    "-> Tensor",
    "vllm_ir::fused_add_rms_norm": "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
    "SymInt? variance_size=None) -> (Tensor, Tensor)",
    "_C::rms_norm_static_fp8_quant": f"(Tensor! result, Tensor input, {NORM}) -> ()",
    "_C::fused_add_rms_norm_static_fp8_quant": "(Tensor! result, Tensor input, Tensor! residual, "
    f"{NORM}) -> ()",
    "_C::rms_norm_dynamic_per_token_quant": "(Tensor! result, Tensor input, Tensor weight, "
    "Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
    "vllm::flashinfer_trtllm_fused_allreduce_norm": "(Tensor! allreduce_in, Tensor! residual, "
    "Tensor rms_gamma, float rms_eps, SymInt world_size, bool launch_with_pdl, bool fp32_acc, "
    "SymInt max_token_num, SymInt pattern_code, Tensor!? norm_out=None, Tensor!? quant_out=None, "
    "Tensor!? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.0) -> ()",
}  # fmt: skip
LIBRARIES: list[torch.library.Library] = []  # they end with what keeps them


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


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide[..., :variance_size].square().mean(-1, True) + epsilon)
    return (unit if weight is None else unit.to(weight.dtype) * weight).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = (x.float() + x_residual.float()).to(x.dtype)
    return rms_norm(h, weight, epsilon, variance_size), h


def rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    wide = rms_norm(input, weight, epsilon).float()
    result.copy_((wide / scale).clamp(-448, 448).to(FP8))


def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    residual.copy_(residual + input)
    rms_norm_static_fp8_quant(result, residual, weight, scale, epsilon)


def rms_norm_dynamic_per_token_quant(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float,
    scale_ub: Tensor | None, residual: Tensor | None,
) -> None:  # fmt: skip
    if residual is not None:
        input = residual.copy_(residual + input)
    wide = rms_norm(input, weight, epsilon).float()
    scale.copy_((wide.abs().amax(-1, True) / 448).clamp(min=1 / (448 * 512)))
    result.copy_((wide / scale).clamp(-448, 448).to(FP8))


def flashinfer_trtllm_fused_allreduce_norm(
    allreduce_in: Tensor,
    residual: Tensor,
    rms_gamma: Tensor,
    rms_eps: float,
    *rest: Any,
    **more: Any,
) -> None:
    """In place, as AllReduceFusedAddRMSNormPattern has it."""
    dist.all_reduce(allreduce_in)
    normed, h = fused_add_rms_norm(allreduce_in, residual, rms_gamma, rms_eps)
    allreduce_in.copy_(normed)
    residual.copy_(h)


@cache
def define() -> None:
    """Define the operators that are not there; once, in a process."""
    if installed:
        importlib.import_module("vllm.ir.ops")
        importlib.import_module(STATE)
    for name, schema in SCHEMAS.items():
        namespace, own = name.split("::")
        if hasattr(getattr(torch.ops, namespace), own):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        LIBRARIES.append(library)
        library.define(own + schema)
        library.impl(own, globals()[own], "CPU")
        fake = {"all_reduce": all_reduce_fake, "rms_norm": rms_norm}.get(own)
        fake = fused_add_rms_norm if own == "fused_add_rms_norm" else fake
        torch.library.register_fake(name, fake or (lambda *given, **named: None), lib=library)


@contextmanager
def compiling(end: int | None) -> Iterator[None]:
    """vLLM while it compiles a graph for 1 to `end` tokens; None: it does not."""
    define()
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


def compiled(model: nn.Module, decoding: DecodePass, *, dynamic: bool | None) -> Any:
    """The model by torch.compile, its graph of inference given to the pass, and run as it is."""

    def run(module: Any, _: Any) -> Any:
        decoding(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run, decompositions=select_decomp_table)
    return torch.compile(model, backend=backend, dynamic=dynamic)
