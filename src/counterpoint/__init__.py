"""counterpoint: communication hidden behind computation on multi-GPU machines.

Importing it imports neither torch nor triton: names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.errors import (
        CounterpointError,
        InputError,
        PeerTimeoutError,
        PlanError,
        UnsupportedError,
    )
    from counterpoint.machine import Machine
    from counterpoint.measure.profile import profile
    from counterpoint.ops.all_gather_matmul import all_gather_matmul
    from counterpoint.ops.matmul_reduce_scatter import matmul_reduce_scatter
    from counterpoint.plan.bind import bind
    from counterpoint.plan.families import build
    from counterpoint.plan.steps import Plan
    from counterpoint.plan.validate import validate
    from counterpoint.presets import preset
    from counterpoint.problem import Problem
    from counterpoint.runtime.groups import check, release
    from counterpoint.timeline import Timeline

__version__ = "0.1.0"

_HOME = {
    "CounterpointError": "errors",
    "InputError": "errors",
    "Machine": "machine",
    "PeerTimeoutError": "errors",
    "Plan": "plan.steps",
    "PlanError": "errors",
    "Problem": "problem",
    "Timeline": "timeline",
    "UnsupportedError": "errors",
    "all_gather_matmul": "ops.all_gather_matmul",
    "bind": "plan.bind",
    "build": "plan.families",
    "check": "runtime.groups",
    "matmul_reduce_scatter": "ops.matmul_reduce_scatter",
    "preset": "presets",
    "profile": "measure.profile",
    "release": "runtime.groups",
    "validate": "plan.validate",
}

__all__ = [
    "CounterpointError",
    "InputError",
    "Machine",
    "PeerTimeoutError",
    "Plan",
    "PlanError",
    "Problem",
    "Timeline",
    "UnsupportedError",
    "all_gather_matmul",
    "bind",
    "build",
    "check",
    "matmul_reduce_scatter",
    "preset",
    "profile",
    "release",
    "validate",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        found = globals()[name] = getattr(import_module(f"counterpoint.{_HOME[name]}"), name)
        return found
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
