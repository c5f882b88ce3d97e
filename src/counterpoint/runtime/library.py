"""The library's collectives, as the process group takes them.

torch.distributed's functions check and log each call, which takes the host as long as the call
itself; what a plan calls has been checked. These methods of a group are not public, and their names
differ between versions of torch: a feature test holds them.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from counterpoint.errors import UnsupportedError


def _method(*names: str) -> Any:
    for name in names:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            return method
    raise UnsupportedError(f"torch: its process groups have none of {', '.join(names)}")


def _blocking(options: Any) -> Any:
    """Options of a collective that the current stream waits for."""
    options.asyncOp = False
    return options


_GATHER = _method("all_gather_single", "_allgather_base")
_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_GATHER_OPTIONS = _blocking(distributed_c10d.AllgatherOptions())  # pyright: ignore  (not in its stub)
_SCATTER_OPTIONS = _blocking(distributed_c10d.ReduceScatterOptions())  # pyright: ignore  (sums by default)


def all_gather(target: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """All ranks' `source`, one under the other, into `target`, in stream order."""
    work = _GATHER(group, target, source, _GATHER_OPTIONS)
    if work is not None:
        work.wait()


def reduce_scatter(target: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum of all ranks' `source` into `target`, in stream order."""
    work = _SCATTER(group, target, source, _SCATTER_OPTIONS)
    if work is not None:
        work.wait()
