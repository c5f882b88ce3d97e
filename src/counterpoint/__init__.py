"""counterpoint: communication hidden behind computation on multi-GPU machines.

Importing it imports neither torch nor triton: names are loaded when they are first used. Once torch
is there as well, its dispatcher knows our operators by name.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from counterpoint.lazy import needing
from counterpoint.operators import declare_with_torch

if TYPE_CHECKING:
    from counterpoint import nn, resources, scale
    from counterpoint.adapters.compile import compile_options
    from counterpoint.adapters.explain import explain
    from counterpoint.advice.advise import Report, advise
    from counterpoint.attention.all_gather_attention import all_gather_attention
    from counterpoint.choose.choice import Choice
    from counterpoint.choose.choose import choose
    from counterpoint.costs import Costs
    from counterpoint.embedding.embedding_bag_all_to_all import embedding_bag_all_to_all
    from counterpoint.embedding.pooled_outputs import PooledOutputs
    from counterpoint.errors import (
        CounterpointError,
        CounterpointWarning,
        InputError,
        PeerTimeoutError,
        PlanError,
        UnsupportedError,
    )
    from counterpoint.experts.all_to_all_matmul import all_to_all_matmul
    from counterpoint.experts.matmul_all_to_all import matmul_all_to_all
    from counterpoint.experts.routes.exchange_counts import exchange_counts
    from counterpoint.experts.routes.exchange_routes import Routes, exchange_routes
    from counterpoint.fsdp.overlap import overlap
    from counterpoint.fsdp.overlapped import Overlapped
    from counterpoint.group.groups import check, release
    from counterpoint.group.run_on_ranks import run_on_ranks
    from counterpoint.machine import DeviceSpec, LinkSpec, Machine
    from counterpoint.measure.profile import profile
    from counterpoint.measure.stats import stats
    from counterpoint.measure.tune import tune
    from counterpoint.model.estimate import estimate
    from counterpoint.norms.all_reduce_norm import all_reduce_layer_norm, all_reduce_rms_norm
    from counterpoint.norms.matmul_all_reduce_norm import (
        matmul_all_reduce_layer_norm,
        matmul_all_reduce_rms_norm,
    )
    from counterpoint.ops.batch_invariant import batch_invariant
    from counterpoint.ops.scaled import Scaled
    from counterpoint.plan.bind import bind
    from counterpoint.plan.families import build
    from counterpoint.plan.steps import Plan
    from counterpoint.plan.validate import validate
    from counterpoint.presets import preset
    from counterpoint.problem import Problem
    from counterpoint.tensor_parallel.all_gather_matmul import all_gather_matmul
    from counterpoint.tensor_parallel.matmul_all_reduce import matmul_all_reduce
    from counterpoint.tensor_parallel.matmul_reduce_scatter import matmul_reduce_scatter
    from counterpoint.timeline import Timeline

__version__ = "0.1.0"

_PACKAGES = ("nn", "resources", "scale")
_HOME = {
    "Choice": "choose.choice",
    "Costs": "costs",
    "CounterpointError": "errors",
    "CounterpointWarning": "errors",
    "DeviceSpec": "machine",
    "InputError": "errors",
    "LinkSpec": "machine",
    "Machine": "machine",
    "Overlapped": "fsdp.overlapped",
    "PeerTimeoutError": "errors",
    "Plan": "plan.steps",
    "PlanError": "errors",
    "PooledOutputs": "embedding.pooled_outputs",
    "Problem": "problem",
    "Report": "advice.advise",
    "Routes": "experts.routes.exchange_routes",
    "Scaled": "ops.scaled",
    "Timeline": "timeline",
    "UnsupportedError": "errors",
    "advise": "advice.advise",
    "all_gather_attention": "attention.all_gather_attention",
    "all_gather_matmul": "tensor_parallel.all_gather_matmul",
    "all_reduce_layer_norm": "norms.all_reduce_norm",
    "all_reduce_rms_norm": "norms.all_reduce_norm",
    "all_to_all_matmul": "experts.all_to_all_matmul",
    "batch_invariant": "ops.batch_invariant",
    "bind": "plan.bind",
    "build": "plan.families",
    "check": "group.groups",
    "choose": "choose.choose",
    "compile_options": "adapters.compile",
    "embedding_bag_all_to_all": "embedding.embedding_bag_all_to_all",
    "estimate": "model.estimate",
    "exchange_counts": "experts.routes.exchange_counts",
    "exchange_routes": "experts.routes.exchange_routes",
    "explain": "adapters.explain",
    "matmul_all_reduce": "tensor_parallel.matmul_all_reduce",
    "matmul_all_reduce_layer_norm": "norms.matmul_all_reduce_norm",
    "matmul_all_reduce_rms_norm": "norms.matmul_all_reduce_norm",
    "matmul_all_to_all": "experts.matmul_all_to_all",
    "matmul_reduce_scatter": "tensor_parallel.matmul_reduce_scatter",
    "overlap": "fsdp.overlap",
    "preset": "presets",
    "profile": "measure.profile",
    "release": "group.groups",
    "run_on_ranks": "group.run_on_ranks",
    "stats": "measure.stats",
    "tune": "measure.tune",
    "validate": "plan.validate",
}

__all__ = [
    "Choice",
    "Costs",
    "CounterpointError",
    "CounterpointWarning",
    "DeviceSpec",
    "InputError",
    "LinkSpec",
    "Machine",
    "Overlapped",
    "PeerTimeoutError",
    "Plan",
    "PlanError",
    "PooledOutputs",
    "Problem",
    "Report",
    "Routes",
    "Scaled",
    "Timeline",
    "UnsupportedError",
    "advise",
    "all_gather_attention",
    "all_gather_matmul",
    "all_reduce_layer_norm",
    "all_reduce_rms_norm",
    "all_to_all_matmul",
    "batch_invariant",
    "bind",
    "build",
    "check",
    "choose",
    "compile_options",
    "embedding_bag_all_to_all",
    "estimate",
    "exchange_counts",
    "exchange_routes",
    "explain",
    "matmul_all_reduce",
    "matmul_all_reduce_layer_norm",
    "matmul_all_reduce_rms_norm",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "nn",
    "overlap",
    "preset",
    "profile",
    "release",
    "resources",
    "run_on_ranks",
    "scale",
    "stats",
    "tune",
    "validate",
]


def _load(name: str) -> object:
    with needing(name):
        return getattr(import_module(f"counterpoint.{_HOME[name]}"), name)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"counterpoint.{name}")
    if name in _HOME:
        found = globals()[name] = _load(name)
        return found
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Keeps `counterpoint.choose` the function: importing the package of that name would set it."""

    @property
    def choose(self) -> object:
        """See `counterpoint.choose.choose`."""
        return _load("choose")

    @choose.setter
    def choose(self, value: object) -> None:
        pass


sys.modules[__name__].__class__ = _Package
declare_with_torch()
