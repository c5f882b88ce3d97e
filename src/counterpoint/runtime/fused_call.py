"""A fused kernel at one size, compiled for the tensors that come: one launch for each call."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from counterpoint.errors import UnsupportedError
from counterpoint.runtime import driver
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.launch_fused import Fused, Launch, aligned, grid, where
from counterpoint.runtime.resident import resident_blocks


class FusedCall:
    """The kernel for one size; tensors differ from call to call in their addresses only.

    Args:
        way: how, equal on all ranks.
        memory: with room for it, by `launch_fused.reserve`.
        tag: that a fault word names it by.
        name: of the operator, for errors.
    """

    def __init__(self, way: Fused, memory: FusedMemory, tag: int, name: str) -> None:
        self.way, self.memory, self.tag, self.name = way, memory, tag, name
        # a rank by itself may compile a second launch, and by then the memory may have grown
        self.at = where(way, memory)
        self.launches: dict[bool, Launch] = {}

    def compile(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Launch:
        """The launch for tensors like these.

        A w whose address is no multiple of 16 has a kernel of its own, and so a grid; a rank by
        itself may have such a one.

        Raises:
            UnsupportedError: no block of it fits this GPU.
        """
        found = self.launches.get(aligned(w))
        if found is not None:
            return found
        launch = Launch(self.way, self.memory, self.at, self.tag, x, w, bias)
        capturing = torch.cuda.is_current_stream_capturing()
        with driver.relaxed_capture() if capturing else nullcontext():
            try:
                compiled: Any = launch.compile(x, w, bias, y)
                resident = resident_blocks(compiled, x.device, self.name)
            except OutOfResources as error:
                problem = f"{self.name}: {self.way.spec} does not fit: {error}"
                raise UnsupportedError(problem) from error
        launch.use(compiled, grid(self.way, w.shape[1], resident))
        self.launches[aligned(w)] = launch
        return launch

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Launch on the current stream; x and y at multiples of 16, their rows without gaps."""
        launch = self.launches.get(aligned(w)) or self.compile(x, w, bias, y)
        launch(x, w, bias, y)
