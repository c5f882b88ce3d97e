"""Kernels that meet no peer: each is compiled once for tensors like these, and then launched."""

from contextlib import nullcontext
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
    given = [t.contiguous() for t in tensors]
    given = [t if aligned(t) else t.clone() for t in given]
    device = given[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dtypes = tuple(t.dtype for t in given)
        _launch(kernel, dtypes, len(sizes), fixed, launched, device, name)(*given, *sizes)


@lru_cache(maxsize=1024)
def _launch(
    kernel: Any, dtypes: tuple[torch.dtype, ...], sizes: int, fixed: Fixed,
    launched: tuple[int, int], device: torch.device, name: str,
) -> Launch:  # fmt: skip
    """The kernel, compiled for tensors like these."""
    programs, num_warps = launched
    known = dict(fixed)
    given = tuple(each for each in kernel.arg_names if each not in known)
    grid = Grid(programs, reserve=False, each=True)
    launch = Launch(kernel, given, known, grid, device, name, {"num_warps": num_warps})
    return launch.compile(*dtypes, *(0,) * sizes)
