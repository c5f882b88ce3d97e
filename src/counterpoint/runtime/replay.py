"""Eager calls as one launch: a call whose addresses repeat is captured once and replayed.

Enqueuing the steps of a plan one by one costs the host some 15 us each, launching them as a CUDA
graph 10 us in all. In a training step or a decoder loop the caching allocator hands out the same
addresses again and again, so most calls are seen again soon; one that is not runs step by step.
The graphs are of this library only: nothing of the user's is captured, and signals carry the
epoch that lives in device memory, so replays and eager calls mix.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
from torch import Tensor

SEEN_BEFORE = 2  # calls with the same addresses that run step by step
MAX_GRAPHS = 256  # of a workspace; each takes some 100 KiB of device memory
MAX_SEEN = 4096


class Replays:
    """The captured calls of one workspace."""

    def __init__(self, device: torch.device) -> None:
        self.graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        # 0 switches it off, for a measurement or a debugger
        self.off = os.environ.get("COUNTERPOINT_REPLAY") == "0"
        self._stream = torch.cuda.Stream(device)

    def clear(self) -> None:
        """Forget all: the memory that they point into is about to go."""
        self.graphs.clear()
        self.seen.clear()

    def run(self, key: Hashable, enqueue: Callable[[torch.cuda.Stream], None]) -> bool:
        """Replay or capture the call `key` on the current stream; False: it is to run by itself.

        Args:
            key: of the code, and all addresses and strides that it reads and writes.
            enqueue: what the call puts on a stream.
        """
        graph = self.graphs.get(key)
        if graph is None:
            if self.off:
                return False
            count = self.seen.get(key, 0)
            if count < SEEN_BEFORE:
                if len(self.seen) >= MAX_SEEN:
                    self.seen.clear()
                self.seen[key] = count + 1
                return False
            graph = self._capture(enqueue)
            if len(self.graphs) >= MAX_GRAPHS:
                self.graphs.popitem(last=False)
            self.graphs[key] = graph
        else:
            self.graphs.move_to_end(key)
        graph.replay()
        return True

    def _capture(self, enqueue: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # one pool for all: what a capture allocates is a workspace of the matmul library. A pool
        # ends with its last graph
        other = next(iter(self.graphs.values()), None)
        pool = other.pool() if other is not None else None
        # only what this thread does counts: others may allocate, record events and so on meanwhile
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                enqueue(self._stream)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


def addresses(operands: dict[str, Tensor]) -> tuple[Hashable, ...]:
    """What a captured call depends on: where its operands lie, and how."""
    return tuple((t.data_ptr(), t.stride()) for t in operands.values())
