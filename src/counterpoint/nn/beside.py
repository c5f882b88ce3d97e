"""A module that runs beside the calls of a layer, on a stream of its own."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from counterpoint.ops.check import is_fake


class Beside(NamedTuple):
    """What a module makes, meanwhile."""

    result: Tensor
    stream: torch.cuda.Stream | None  # on which it is made; None: on the caller's

    def added(self, y: Tensor) -> Tensor:
        """The sum of both, behind both."""
        if self.stream is not None:
            torch.cuda.current_stream(y.device).wait_stream(self.stream)
        return y + self.result


def beside(module: nn.Module, x: Tensor) -> Beside:
    """Begin with module(x): the host goes on, and so does the caller's stream.

    Its backward is on that stream, too: autograd runs it where the forward ran. On CPU ranks, and
    where a compiler traces, it is a call like any other.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or is_fake(x):
        return Beside(module(x), None)
    stream = _stream_of(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        return Beside(module(x), stream)


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
