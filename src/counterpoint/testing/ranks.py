"""Run a test on CPU processes whose Triton kernels are interpreted."""

import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple
from unittest import mock

from counterpoint.group.ranks import spawn

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def interpreted_ranks(
    fn: Callable[[int, int, *Ts], T], num_ranks: int, *args: *Ts, timeout_s: float = 300.0
) -> list[T]:
    """Run `fn(rank, num_ranks, *args)` in `num_ranks` new processes of this host.

    In each, Triton kernels are interpreted, no GPU is visible, and the default process group is a
    gloo group of all ranks. Assert in `fn`, or return what the caller asserts. With one rank it is
    the interpreting process that `interleave` needs, while the caller's own compiles kernels.

    Args:
        fn: a module-level function; the new processes import its module.
        num_ranks: how many processes.
        args: picklable; each rank gets a copy.
        timeout_s: for everything, the start of the processes included.

    Returns:
        The results in rank order, copied by pickle.

    Raises:
        InputError: `fn` cannot be imported by name, `num_ranks` or `timeout_s` is too small.
        CounterpointError: a rank raised or died; the message holds all tracebacks.
        PeerTimeoutError: a rank did not return in time.
    """
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""):
        return spawn(fn, num_ranks, *args, timeout_s=timeout_s)
