"""torchtitan: its blocks are compiled with the pass of `compile_options`, its FSDP2 is overlapped.

    --compile.enable --override.imports counterpoint.adapters.torchtitan.overlap

torchtitan compiles each block with torch's own configuration, where the override puts the pass.
What it claims is the configuration of the learning rate, which each trainer has once, and whose
values it leaves as they are: so it is in no other override's way. The learning rate's scheduler is
made once the model is sharded: then `counterpoint.overlap` is called on it, and what it returns is
in `overlapped`. The log has what was done with each collective of each block; `explain` returns it.
"""

from collections.abc import Mapping
from typing import Any

from torch._inductor import config as inductor

from counterpoint.adapters.compile import compile_options
from counterpoint.adapters.seams import taken
from counterpoint.errors import InputError
from counterpoint.fsdp.overlap import overlap as overlap_fsdp
from counterpoint.fsdp.overlapped import Overlapped
from counterpoint.fsdp.torch_parts import states_of

TESTED = "0.3.0"
overlapped: list[Overlapped] = []  # of each part of the model, once they are sharded
override: Any
rates: Any
(override,) = taken("torchtitan", TESTED, "torchtitan.config", "override")
(rates,) = taken("torchtitan", TESTED, "torchtitan.components.optimizer", "LRSchedulersContainer")


@override(target=rates.Config, description="tensor-parallel collectives overlap with matmuls")
def overlap(
    rate: Any, *, merge_reductions: bool = False, fsdp: bool | Mapping[str, Any] = True
) -> Any:
    """Overlap the tensor-parallel collectives of all that torch compiles from now on, and FSDP2.

    Args:
        merge_reductions: see `compile_options`. In --override.imports:
            'counterpoint.adapters.torchtitan.overlap={"merge_reductions": true}'.
        fsdp: whether `counterpoint.overlap` is called on what FSDP2 has sharded, or its options:
            'counterpoint.adapters.torchtitan.overlap={"fsdp": {"memory": "ring"}}'.

    Returns:
        The configuration that it was given.

    Raises:
        InputError: `merge_reductions` is no bool, or `fsdp` neither a bool nor options.
        UnsupportedError: this torch has no place for a pass.
    """
    for seam, of_both in compile_options(merge_reductions=merge_reductions).items():
        setattr(inductor, seam, of_both)
    if not isinstance(fsdp, (bool, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("overlap", "fsdp", want="True, False or options", got=repr(fsdp))
    if fsdp is not False:
        rate.__class__ = _then_overlapped(type(rate), {} if fsdp is True else fsdp)
    return rate


def _then_overlapped(kind: Any, options: Mapping[str, Any]) -> Any:
    """The configuration of a scheduler, with which models are overlapped once they are sharded."""

    class Config(kind):
        __slots__ = ()

        def build(self, *, optimizers: Any, **given: Any) -> Any:
            built = super().build(optimizers=optimizers, **given)
            for part in optimizers.model_parts:
                if states_of(part):
                    overlapped.append(overlap_fsdp(part, **options))
            return built

    return Config
