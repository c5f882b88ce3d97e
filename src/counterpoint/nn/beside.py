"""A module that runs beside a call over the ranks, on a stream of its own."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from counterpoint.errors import InputError
from counterpoint.ops.check import is_fake


def beside(name: str, module: nn.Module, x: Tensor, call: Callable[[], Tensor]) -> Tensor:
    """call() + module(x).

    The call is launched first: the host launches the module while the GPU works on it already. The
    module has what it leaves free, its backward too: autograd runs it where the forward ran. On CPU
    ranks and where a compiler traces, one follows the other; in a CUDA graph, too, where both would
    begin at once, and the module keeps back the ranks that wait for this one.

    Args:
        name: of the layer, for errors.

    Raises:
        InputError: the module makes no tensor like x, or writes to x, which the call may read yet.
    """
    on_gpu = isinstance(x, Tensor) and x.is_cuda and not is_fake(x)  # else the call refuses it
    if not on_gpu or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        y = call()
        return y + _made(name, module, x)
    here, stream = torch.cuda.current_stream(x.device), _stream_of(x.device)
    stream.wait_stream(here)
    y = call()
    try:
        with torch.cuda.stream(stream):
            made = _made(name, module, x)
    finally:
        here.wait_stream(stream)
    made.record_stream(here)
    if torch.is_grad_enabled():  # a backward there reads x, which is free for this stream by then
        x.record_stream(stream)
    return y + made


def _made(name: str, module: nn.Module, x: Tensor) -> Tensor:
    version = None if x.is_inference() else x._version
    made = module(x)
    got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if got != tuple(x.shape):
        want = f"a module that makes {tuple(x.shape)} of x"
        raise InputError(name, "shared", want=want, got=got)
    if version is not None and x._version != version:
        want, got = "a module that leaves x as it is", "one that writes to it"
        raise InputError(name, "shared", want=want, got=got)
    return made


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
