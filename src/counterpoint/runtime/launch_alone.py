"""Kernels that meet no peer: each is compiled once for tensors like these, and then launched."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from counterpoint.runtime.launch import Grid, Launch, aligned

Fixed = tuple[tuple[str, int], ...]  # arguments that do not change, by name


def launch_alone(
    kernel: Any, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], fixed: Fixed,
    launched: tuple[int, int], name: str,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream.

    Args:
        kernel: Triton's; its arguments are tensors, then sizes that it is not specialized for.
        tensors: those that it writes have no gaps, and begin at a multiple of 16 bytes.
        fixed: all other arguments.
        launched: programs, and warps of each.
        name: of the operator, for errors.

    Raises:
        UnsupportedError: it does not fit this GPU.
    """
    given = [t if t.is_contiguous() and aligned(t) else _placed(t) for t in tensors]
    device = given[0].device
    known = kernel, tuple(t.dtype for t in given), len(sizes), fixed, launched, device, name
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_of(*known)(*given, *sizes)
    else:
        launch_of(*known)(*given, *sizes)


def _placed(t: Tensor) -> Tensor:
    """Without gaps, from a multiple of 16 bytes on."""
    t = t.contiguous()
    return t if aligned(t) else t.clone()


@lru_cache(maxsize=1024)
def launch_of(
    kernel: Any, dtypes: tuple[torch.dtype, ...], sizes: int, fixed: Fixed,
    launched: tuple[int, int], device: torch.device, name: str,
) -> Launch:  # fmt: skip
    """The kernel, compiled for tensors like these, with `sizes` numbers behind them."""
    programs, num_warps = launched
    known = dict(fixed)
    given = tuple(each for each in kernel.arg_names if each not in known)
    grid = Grid(programs, reserve=False, each=True)
    launch = Launch(kernel, given, known, grid, device, name, {"num_warps": num_warps})
    return launch.compile(*dtypes, *(0,) * sizes)
