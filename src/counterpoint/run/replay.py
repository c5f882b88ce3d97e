"""Eager calls as one launch: a call whose addresses repeat is captured once and replayed.

Enqueuing the steps of a plan one by one costs the host 12 us each (4xH200, 2026-11), launching them
as a CUDA graph about as much in all. In a training step or a decoder loop the caching allocator
hands out the same addresses again and again, so most calls are seen again soon; one that is not
runs step by step.
The graphs are of this library only: nothing of the user's is captured, and signals carry the
epoch that lives in device memory, so replays and eager calls mix.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch

from counterpoint.gpu.capture import no_collector

SEEN_BEFORE = 2  # calls with the same addresses that run step by step
MAX_GRAPHS = 512  # of a workspace; each takes less than 256 KiB of device memory (tests/gpu)
MAX_SEEN = 4096


class Replays:
    """The captured calls of one workspace."""

    def __init__(self, device: torch.device) -> None:
        self.graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        # 0 switches it off, for a measurement or a debugger
        self.off = os.environ.get("COUNTERPOINT_REPLAY") == "0"
        self._stream = torch.cuda.Stream(device)
        self._used: dict[Hashable, int] = {}  # when each graph was last replayed, in calls
        self._calls = 0

    def clear(self) -> None:
        """Forget all: the memory that they point into is about to go."""
        self.graphs.clear()
        self.seen.clear()
        self._used.clear()

    def run(self, key: Hashable, enqueue: Callable[[torch.cuda.Stream], None]) -> bool:
        """Replay or capture the call `key` on the current stream; False: it is to run by itself.

        Args:
            key: of the code, and all addresses and strides that it reads and writes.
            enqueue: what the call puts on a stream.
        """
        self._calls += 1
        graph = self.graphs.get(key)
        if graph is None:
            if self.off or not self._worth_capturing(key):
                return False
            graph = self.graphs[key] = self._capture(enqueue)
        else:
            self.graphs.move_to_end(key)
        self._used[key] = self._calls
        graph.replay()
        return True

    def _worth_capturing(self, key: Hashable) -> bool:
        """Whether the call has been seen often enough, and there is room for its graph."""
        count = self.seen.get(key, 0)
        if count < SEEN_BEFORE:
            if len(self.seen) >= MAX_SEEN:
                self.seen.clear()
            self.seen[key] = count + 1
            return False
        if len(self.graphs) >= MAX_GRAPHS:
            oldest = next(iter(self.graphs))
            # a step of more calls than there is room for would capture each of them each time
            if self._calls - self._used[oldest] < 2 * MAX_GRAPHS:
                return False
            del self.graphs[oldest], self._used[oldest]
        return True

    def _capture(self, enqueue: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # one pool for all: what a capture allocates is a workspace of the matmul library. A pool
        # ends with its last graph
        other = next(iter(self.graphs.values()), None)
        pool = other.pool() if other is not None else None
        # only what this thread does counts: others may allocate, record events and so on meanwhile
        with torch.cuda.stream(self._stream), no_collector():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                enqueue(self._stream)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
