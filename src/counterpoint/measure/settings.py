"""Settings of one pipeline, timed side by side; and which there are."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.gpu.occupancy import feasible
from counterpoint.group.ranks import gather_object
from counterpoint.measure.timing import Arm as Call
from counterpoint.measure.timing import rotate
from counterpoint.resources.controls import TRANSPORTS, Along, Controls, Mode, Transport
from counterpoint.resources.granularity import Cut
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager, captured_as
from counterpoint.resources.search import Space
from counterpoint.resources.shape import refusal as unshapeable
from counterpoint.resources.stages import Compute
from counterpoint.resources.transport import refusal


def space_of(pipeline: Pipeline, mode: Mode) -> Space:
    """All settings that can be had for `pipeline` here.

    Captures it once, and runs its compute stages once.
    """
    transports: tuple[Transport, ...] = tuple(t for t in TRANSPORTS[1:] if not refusal(pipeline, t))
    limits = limits_here(pipeline.device)
    if mode == "graph":
        blocks = Captured(pipeline).shaped.feasible()
    else:
        kernels = [
            triton_footprint(kernel)
            for stage in pipeline.stages if isinstance(stage, Compute)
            for kernel in stage.kernels
        ]  # fmt: skip
        able = [k for k in kernels if not unshapeable(k, limits)]
        blocks = tuple(sorted({b for k in able for b in feasible(k, limits)}, reverse=True))
    with Cut(1) as seen:
        for stage in pipeline.stages:
            if isinstance(stage, Compute):
                stage.call()
    wide = any(
        t.dim() == 2 and t.shape[1] > t.shape[0]
        for stage in pipeline.stages if isinstance(stage, Compute)
        for t in stage.writes
    )  # fmt: skip
    along: tuple[Along, ...] = ("m", "n") if wide else ("m",)
    return Space(
        transports=transports,
        blocks_per_sm=blocks[1:],  # the first is what they have
        chunks=((2, 4, 8, 14) if wide else (2, 4, 8)) if seen.num_matmuls else (),
        along=along,
        max_ctas=(16,),
        carve_out=bool(blocks),
    )


class Bench:
    """Settings of one pipeline, timed side by side; captures each kind of graph once.

    A context: left, all graphs are gone and all that was changed is as before.

    Args:
        pipeline: on GPUs.
        mode: "graph" or "eager".
    """

    def __init__(self, pipeline: Pipeline, mode: Mode) -> None:
        self.pipeline = pipeline
        self.mode: Mode = mode
        self.refused: dict[str, str] = {}
        self._runners: dict[Controls, Captured | Eager] = {}
        self._undo = ExitStack()

    def __enter__(self) -> "Bench":
        """Nothing is there yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the graphs, once the GPU has left them."""
        torch.cuda.synchronize(self.pipeline.device)
        self._undo.close()
        self._runners.clear()

    def rounds(
        self, some: Sequence[Controls], num_rounds: int, *, soak_s: float = 0.1
    ) -> dict[Controls, tuple[float, ...]]:
        """Seconds of each setting, one for each round; those that cannot be had are left out."""
        able = [controls for controls in some if self.able(controls)]
        arms = {controls.spec: self._runner(controls) for controls in able}
        times = rotate(
            arms, group=self.pipeline.group, device=self.pipeline.device, rounds=num_rounds,
            soak_s=soak_s, around=self.holding,
        )  # fmt: skip
        return {controls: times[controls.spec].rounds_s for controls in able}

    def able(self, controls: Controls) -> bool:
        """Whether a setting can be had on all ranks; makes what runs it."""
        if controls.spec in self.refused:
            return False
        why = ""
        try:
            self._runner(controls)
            with self.holding(controls.spec):
                pass
        except (InputError, UnsupportedError) as error:
            why = str(error)
        whys = gather_object(why, self.pipeline.group)
        if any(whys):
            self.refused[controls.spec] = next(filter(None, whys))
        return not any(whys)

    @contextmanager
    def holding(self, spec: str) -> Generator[None]:
        """Have the controls hold: an update of an instantiated graph, or a context."""
        controls = Controls.parse(spec)
        runner = self._runner(controls)
        if isinstance(runner, Captured):
            runner.set(controls)
            yield
        else:
            with runner:
                yield

    def call(self, controls: Controls) -> Call:
        """What runs a setting, inside `holding`."""
        return self._runner(controls)

    def _runner(self, controls: Controls) -> Captured | Eager:
        if self.mode == "eager":
            if controls not in self._runners:
                self._runners[controls] = Eager(self.pipeline, controls)
            return self._runners[controls]
        controls.way_in("graph")
        # priority and carve-out are fixed when a graph is instantiated; shapes are updated in place
        key = replace(controls, blocks_per_sm=None)
        if key not in self._runners:
            made = Captured(self.pipeline, captured_as(key))
            self._runners[key] = self._undo.enter_context(made)
        return self._runners[key]
