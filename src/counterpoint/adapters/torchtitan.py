"""torchtitan: its blocks are compiled with the pass of `compile_options`.

    --compile.enable --override.imports counterpoint.adapters.torchtitan.overlap

torchtitan compiles each block with torch's own configuration, where the override puts the pass.
What it claims is the configuration of the learning rate, which each trainer has once, and which it
leaves as it is: so it is in no other override's way. The log has what was done with each
collective of each block, and `explain` returns it.
"""

from typing import Any

from torch._inductor import config as inductor

from counterpoint.adapters.compile import compile_options
from counterpoint.adapters.seams import taken

TESTED = "0.3.0"
override: Any
rates: Any
(override,) = taken("torchtitan", TESTED, "torchtitan.config", "override")
(rates,) = taken("torchtitan", TESTED, "torchtitan.components.optimizer", "LRSchedulersContainer")


@override(target=rates.Config, description="tensor-parallel collectives overlap with matmuls")
def overlap(rate: Any, *, merge_reductions: bool = False) -> Any:
    """Overlap the tensor-parallel collectives of all that torch compiles from now on.

    Args:
        merge_reductions: see `compile_options`. In --override.imports:
            'counterpoint.adapters.torchtitan.overlap={"merge_reductions": true}'.

    Returns:
        The configuration that it was given.

    Raises:
        InputError: `merge_reductions` is no bool.
        UnsupportedError: this torch has no place for a pass.
    """
    for seam, of_both in compile_options(merge_reductions=merge_reductions).items():
        setattr(inductor, seam, of_both)
    return rate
