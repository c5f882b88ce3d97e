"""Kernels of x, w and a bias that wait for their peers: compiled for the tensors that come."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from counterpoint.errors import UnsupportedError
from counterpoint.runtime import driver
from counterpoint.runtime.lanes_cuda import raw_stream
from counterpoint.runtime.resident import resident_blocks

ALIGN = 16  # bytes: what Triton compiles for, if an address is a multiple of it


class Launch:
    """A kernel with all arguments that do not change from call to call.

    Args:
        kernel: takes x, w, bias and y, then what is fixed.
        fixed: its other arguments.
        options: of Triton: warps and stages.
        tiles: that programs share; at first each has one.
        device: it runs on.
    """

    def __init__(
        self, kernel: Any, fixed: tuple[Any, ...], options: dict[str, int], tiles: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.tiles = self.programs = tiles
        self._kernel, self._fixed, self._options = kernel, fixed, options
        self._direct: Callable[..., None] | None = None
        self._device = device

    def compile(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Any:
        """Triton's compiled kernel, loaded, without a launch."""
        return self._kernel.warmup(*self._arguments(x, w, bias, y), grid=(1,), **self._options)

    def use(self, compiled: Any, resident: int) -> None:
        """From now on launch this kernel, no more than `resident` programs, past Triton's binder.

        That takes the host longer than all else; tensors must lie as those it was compiled for.
        """
        self.programs = grid(self.tiles, resident)
        self._direct = compiled[(self.programs, 1, 1)]

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Launch on the current stream, into y [M, N] or own rows of it, contiguous; all ranks."""
        arguments = self._arguments(x, w, bias, y)
        if self._direct is not None:
            self._direct(*arguments, stream=raw_stream(self._device.index))
            return
        self._kernel[(self.programs,)](*arguments, **self._options)

    def _arguments(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> tuple[Any, ...]:
        return (x, w, y if bias is None else bias, y, *self._fixed)


class FusedCall:
    """The kernel for one size; tensors differ from call to call in their addresses only.

    Args:
        launch_of: makes the launch for x, w and bias; a rank by itself may ask for a second one.
        what: runs, and `name`, of the operator, for errors.
    """

    def __init__(
        self, launch_of: Callable[[Tensor, Tensor, Tensor | None], Launch], what: str, name: str
    ) -> None:
        self.launch_of, self.what, self.name = launch_of, what, name
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
        launch = self.launch_of(x, w, bias)
        capturing = torch.cuda.is_current_stream_capturing()
        with driver.relaxed_capture() if capturing else nullcontext():
            try:
                compiled: Any = launch.compile(x, w, bias, y)
                resident = resident_blocks(compiled, x.device, self.name)
            except OutOfResources as error:
                problem = f"{self.name}: {self.what} does not fit: {error}"
                raise UnsupportedError(problem) from error
        launch.use(compiled, resident)
        self.launches[aligned(w)] = launch
        return launch

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Launch on the current stream; x and y at multiples of 16, their rows without gaps."""
        launch = self.launches.get(aligned(w)) or self.compile(x, w, bias, y)
        launch(x, w, bias, y)


def grid(tiles: int, resident: int) -> int:
    """Programs for so many tiles, of which `resident` can be at once: equal work for each."""
    rounds = -(-tiles // max(resident, 1))
    return -(-tiles // rounds)


def aligned(tensor: Tensor) -> bool:
    """Whether Triton compiles for an address like this one's."""
    return tensor.data_ptr() % ALIGN == 0
