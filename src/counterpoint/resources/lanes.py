"""The two lanes of a pipeline: the caller's stream computes, another one communicates.

Stages are put on them in the order written; events are the edges between them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from counterpoint.errors import InputError
from counterpoint.resources import budget, priority
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.granularity import Cut
from counterpoint.resources.order import Delay
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.stages import Compute
from counterpoint.resources.transport import carriers

Mark = Callable[[int], AbstractContextManager[object]]  # around the enqueuing of a stage


class Lanes:
    """What puts the stages on two streams: the caller's, and one for communication."""

    def __init__(self, pipeline: Pipeline, controls: Controls) -> None:
        self.pipeline, self.controls = pipeline, controls
        self.waits = pipeline.waits()
        if pipeline.device.type != "cuda" and controls not in (OFF, SEQUENTIAL):
            want = "'overlap' or 'sequential' on CPU ranks"
            raise InputError("run", "controls", want=want, got=repr(controls.spec))
        group = _limited_group(pipeline, controls.max_ctas) if controls.max_ctas else None
        carries = iter(carriers(pipeline, controls.transport, group))
        self.calls = [
            stage.call if isinstance(stage, Compute) else next(carries) for stage in pipeline.stages
        ]
        # a stage that starts where a collective was just launched is held back
        self.held = [
            bool(controls.delay_s) and i > 0 and isinstance(stage, Compute)
            and not isinstance(pipeline.stages[i - 1], Compute)
            for i, stage in enumerate(pipeline.stages)
        ]  # fmt: skip
        if pipeline.device.type != "cuda":
            return
        kept = pipeline.kept
        # a warp that waits for peers, before and behind copies, must not wait for SMs as well
        urgent = controls.priority or controls.transport == "copy_engine"
        if ("comm", urgent) not in kept:
            kept["comm", urgent] = priority.stream(pipeline.device, urgent=urgent)
        self.comm: torch.cuda.Stream = kept["comm", urgent]
        self.delay: Delay | None = None
        if controls.delay_s:
            self.delay = kept.get("delay") or Delay(pipeline.device)
            kept["delay"] = self.delay
        self.green: torch.cuda.Stream | None = None
        if controls.green_sms:
            key = ("green", controls.green_sms)
            if key not in kept:
                kept[key] = budget.green_stream(pipeline.device, controls.green_sms)
            self.green = kept[key]

    def enqueue(self, mark: Mark = nullcontext) -> None:
        """Put all stages on the lanes; the current stream then waits for them."""
        if self.pipeline.device.type != "cuda":
            for call in self.calls:
                call()
            return
        main = torch.cuda.current_stream(self.pipeline.device)
        if not self.controls.overlap:
            for i, call in enumerate(self.calls):
                with mark(i):
                    call()
            return
        compute = self.green or main
        if self.green:
            self.green.wait_stream(main)
        self.comm.wait_stream(main)
        try:
            self._enqueue(compute, mark)
        finally:
            main.wait_stream(self.comm)
            if self.green:
                main.wait_stream(self.green)

    def _enqueue(self, compute: torch.cuda.Stream, mark: Mark) -> None:
        ended: dict[int, torch.cuda.Event] = {}
        for i, (stage, call) in enumerate(zip(self.pipeline.stages, self.calls, strict=True)):
            computes = isinstance(stage, Compute)
            stream = compute if computes else self.comm
            wait = self.waits[i]
            with torch.cuda.stream(stream):
                if wait is not None:
                    stream.wait_event(ended[wait])
                if self.held[i] and self.delay is not None:
                    self.delay(self.controls.delay_s)
                with mark(i), self._cut() if computes else nullcontext():
                    call()
                if i in self.waits:
                    ended[i] = torch.cuda.Event()
                    ended[i].record(stream)

    def _cut(self) -> AbstractContextManager[Any]:
        if self.controls.pieces == 1:
            return nullcontext()
        properties = torch.cuda.get_device_properties(self.pipeline.device)
        return Cut(self.controls.pieces, self.controls.along, properties.multi_processor_count)


# one of each budget for a group, as a communicator is costly: forgotten with the group
_limited: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def _limited_group(pipeline: Pipeline, max_ctas: int) -> dist.ProcessGroup:
    groups = _limited.setdefault(pipeline.group, {})
    if max_ctas not in groups:
        made = groups[max_ctas] = budget.group(pipeline.group, max_ctas)
        # its communicator is set up now, and not in a capture
        dist.all_reduce(torch.ones(1, device=pipeline.device), group=made)
    return groups[max_ctas]
