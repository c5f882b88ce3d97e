"""How many SMs each side may have: the classic way to share a GPU, kept for comparison.

On 4xH200 and 2xH200 none of these beat plain overlap by more than its scatter (8192^3 matmul +
896 MiB collectives, 2026-11; docs/results/sharing.md): a collective with fewer blocks is slower, a
matmul with fewer SMs likewise, and what the one gains the other loses. The number of blocks of a
persistent kernel of somebody else's is no control at all: cuBLAS's write only the tiles that the
grid they were launched with would have (same machine).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from counterpoint.errors import InputError, UnsupportedError

# one of each budget for a group, as a communicator is costly: forgotten with the group
_limited: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def group(of: dist.ProcessGroup, device: torch.device, max_ctas: int) -> dist.ProcessGroup:
    """A second NCCL group of the same ranks, whose kernels have at most this many blocks.

    All ranks of the group call this, and get the one of their first call. It has communicators, and
    so device memory, of its own.

    Args:
        of: an NCCL group.
        device: of this rank.
        max_ctas: blocks of a kernel, from 1 to 64.

    Raises:
        InputError: `max_ctas` is out of range.
        UnsupportedError: this torch does not pass it on to NCCL.
    """
    if not 1 <= max_ctas <= 64:
        raise InputError("budget.group", "max_ctas", want="from 1 to 64", got=max_ctas)
    groups = _limited.setdefault(of, {})
    if max_ctas in groups:
        return groups[max_ctas]
    options: Any = dist.ProcessGroupNCCL.Options()
    if not hasattr(options.config, "max_ctas"):
        raise UnsupportedError(f"budget: torch {torch.__version__} has no max_ctas for NCCL")
    options.config.min_ctas = 1
    options.config.max_ctas = max_ctas
    ranks = dist.get_process_group_ranks(of)
    made = dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "a rank of a group makes a group with its ranks"
    # its communicator is set up now, and not in a capture
    dist.all_reduce(torch.ones(1, device=device), group=made)
    groups[max_ctas] = made
    return made


@contextmanager
def matmul_sms(device: torch.device, num_sms: int) -> Generator[None]:
    """Tell torch's matmul library to leave SMs to others, while the context is entered.

    Args:
        device: of the matmuls.
        num_sms: that it may use.

    Raises:
        InputError: there are not as many.
        UnsupportedError: this torch cannot tell it.
    """
    here = torch.cuda.get_device_properties(device).multi_processor_count
    if not 1 <= num_sms < here:
        raise InputError("budget.matmul_sms", "num_sms", want=f"from 1 to {here - 1}", got=num_sms)
    # both private, a pair since torch 2.7
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)  # pyright: ignore
    told = getattr(torch._C, "_get_sm_carveout_experimental", None)  # pyright: ignore
    if tell is None or told is None:
        raise UnsupportedError(f"budget: torch {torch.__version__} has no SM carve-out")
    before = told()
    tell(here - num_sms)
    try:
        yield
    finally:
        tell(before)
