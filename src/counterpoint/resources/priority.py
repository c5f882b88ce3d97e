"""Communication ahead of computation: when both have blocks to launch, its go first.

A priority decides who gets an SM that becomes free; it takes none away. Beside a kernel whose
blocks stay to its end it changes nothing. Three ways in: the stream that a collective runs on, the
stream inside of a process group (for code of one's own that passes `async_op=True`), and the nodes
of a captured graph.
"""

from typing import Any

import torch
import torch.distributed as dist


def most_urgent() -> int:
    """The priority of the most urgent stream of this GPU; 0 is the least urgent."""
    range_of: Any = torch.cuda.Stream.priority_range  # its stub lacks that it is static
    return range_of()[1]


def stream(device: torch.device, *, urgent: bool) -> torch.cuda.Stream:
    """A stream of the most or of the least urgent priority."""
    return torch.cuda.Stream(device, priority=most_urgent() if urgent else 0)


def group(of: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second NCCL group of the same ranks, whose own stream is urgent. All its ranks call this.

    For asynchronous collectives, which run on that stream and not on the caller's. It has
    communicators, and so device memory, of its own.

    Args:
        of: an NCCL group.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    ranks = dist.get_process_group_ranks(of)
    made = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "a rank of a group makes a group with its ranks"
    return made
