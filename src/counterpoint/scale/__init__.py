"""A whole training step on many GPUs, predicted: seconds, where they go, and what they stand on.

layout = cp.scale.Layout.on(16384, tp=8, pp=16, virtual_stages=4)
fabric = cp.scale.Fabric(levels=((3072, 7),))
print(cp.scale.predict("llama3-405b", layout, fabric, "h100-8", overlap="ours").explain())
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.scale.layout import Layout
    from counterpoint.scale.memory import Memory
    from counterpoint.scale.models import Model
    from counterpoint.scale.network.fabric import Fabric
    from counterpoint.scale.prediction import Prediction, predict
    from counterpoint.scale.recommenders.dlrm import Dlrm
    from counterpoint.scale.serving import Serving, serve

_HOME = {
    "Dlrm": "scale.recommenders.dlrm",
    "Fabric": "scale.network.fabric",
    "Layout": "scale.layout",
    "Memory": "scale.memory",
    "Model": "scale.models",
    "Prediction": "scale.prediction",
    "Serving": "scale.serving",
    "predict": "scale.prediction",
    "serve": "scale.serving",
}

__all__ = [
    "Dlrm", "Fabric", "Layout", "Memory", "Model", "Prediction", "Serving", "predict", "serve",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _HOME:
        found = globals()[name] = getattr(import_module(f"counterpoint.{_HOME[name]}"), name)
        return found
    raise AttributeError(f"module 'counterpoint.scale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
