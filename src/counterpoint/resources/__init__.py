"""How lanes share a GPU: what a kernel takes of it, and the controls that change it.

loop = resources.Pipeline(group)
loop.compute(lambda: torch.mm(a, b, out=c), reads=[a, b], writes=[c])
loop.all_reduce(c)
...
tuned = resources.tune(loop)
tuned()
print(tuned.explain())
"""

from importlib import import_module
from typing import TYPE_CHECKING

from counterpoint.lazy import needing

if TYPE_CHECKING:
    from counterpoint.gpu.footprint import Footprint, footprints
    from counterpoint.measure.tune_resources import Tuned, tune
    from counterpoint.resources.controls import Controls
    from counterpoint.resources.pipeline import Pipeline
    from counterpoint.resources.run import Captured, Eager
    from counterpoint.resources.search import Space
    from counterpoint.resources.shape import Shape
    from counterpoint.resources.shape_triton import triton_launches

_HOME = {
    "Captured": "resources.run",
    "Controls": "resources.controls",
    "Eager": "resources.run",
    "Footprint": "gpu.footprint",
    "Pipeline": "resources.pipeline",
    "Shape": "resources.shape",
    "Space": "resources.search",
    "Tuned": "measure.tune_resources",
    "footprints": "gpu.footprint",
    "triton_launches": "resources.shape_triton",
    "tune": "measure.tune_resources",
}

__all__ = [
    "Captured",
    "Controls",
    "Eager",
    "Footprint",
    "Pipeline",
    "Shape",
    "Space",
    "Tuned",
    "footprints",
    "triton_launches",
    "tune",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        with needing(f"resources.{name}"):
            found = globals()[name] = getattr(import_module(f"counterpoint.{_HOME[name]}"), name)
        return found
    raise AttributeError(f"module 'counterpoint.resources' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
