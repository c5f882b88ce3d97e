"""A program on a GPU: lanes are streams, edges are events, copies are DMA copies.

The compute lane is the caller's stream; the others are side streams of the workspace, forked from
it at the start of a call and joined before it returns. Everything is enqueued and nothing waits
on the host, so a call can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.profiler import record_function

from counterpoint.errors import PeerTimeoutError, UnsupportedError
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.plan.bind import Arrival, BoundStep, Part, Program
from counterpoint.runtime import compute, copy_engine, driver
from counterpoint.runtime.compute import Action
from counterpoint.runtime.watchdog import Watchdog
from counterpoint.runtime.workspace import Operands, Places, Workspace

COMPUTE_LANE = "compute"
TABLE_WORDS = 1 << 16
MAX_STEPS = 1 << 12  # of a plan, and of programs that a fault word can tell apart
MAX_CODES = 1 << 18
REDUCE_BLOCK = 1024  # columns of one program: 16 bytes per thread and load in bf16


class CudaLanes:
    """What the calls of one workspace share on its GPU: side streams, epoch, fault words, tables."""

    def __init__(self, workspace: Workspace) -> None:
        device = workspace.device
        self.workspace = workspace
        self.pad_ptrs = workspace.pads.buffer_ptrs
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.fault = torch.zeros(2, dtype=torch.int32).pin_memory()
        self.last_stream = torch.cuda.current_stream(device)
        self.fork = torch.cuda.Event()
        self._streams: dict[tuple[str, int], torch.cuda.Stream] = {}
        self._pool = torch.zeros(TABLE_WORDS, dtype=torch.int64, device=device)
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._used = 0
        self._upload = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # the zeros above are there, whatever stream comes next
        self.codes: WeakValueDictionary[int, CudaCode] = WeakValueDictionary()
        self.num_codes = 0
        self.watchdog = Watchdog(self.fault.numpy(), self.describe)

    def stream(self, name: str, priority: int) -> torch.cuda.Stream:
        """The side stream of a lane."""
        key = (name, priority)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.workspace.device, priority=priority)
        return self._streams[key]

    def table(self, words: Sequence[int]) -> torch.Tensor:
        """`words` in device memory, int64; equal tables are one. May be called in a capture."""
        key = tuple(words)
        if key not in self._tables:
            if self._used + len(key) > TABLE_WORDS:
                raise UnsupportedError(f"workspace: tables exceed {TABLE_WORDS} words")
            place = self._pool[self._used : self._used + max(len(key), 1)]
            host = torch.tensor(key or (0,), dtype=torch.int64)
            driver.upload(host, place.data_ptr(), self._upload.cuda_stream)
            self._used += len(place)
            self._tables[key] = place
        return self._tables[key]

    def register(self, code: "CudaCode") -> int:
        """A number by which a fault word names `code`."""
        self.num_codes = (self.num_codes + 1) % MAX_CODES
        self.codes[self.num_codes] = code
        return self.num_codes

    def describe(self, tag: int, late: int) -> PeerTimeoutError:
        """The error that the fault words (1 + tag, bits of the late waits) stand for."""
        code = self.codes.get(tag // MAX_STEPS)
        timeout = f"within {self.workspace.timeout_s:g} s"
        if code is None:
            return PeerTimeoutError(f"a plan no longer in use was not signalled {timeout}")
        bound = code.program.steps[tag % MAX_STEPS]
        ranks = [a.rank for i, a in enumerate(bound.waits) if late >> i & 1]
        plan, name = code.program.plan, bound.step.name
        return PeerTimeoutError(
            f"{plan.problem.op}: ranks {ranks} did not signal step {name!r} of plan {plan.spec} "
            f"to rank {self.workspace.rank} {timeout}; the group is unusable, restart its ranks",
            rank=ranks[0] if ranks else None,
            step=name,
        )

    def words(self, arrivals: Sequence[Arrival]) -> torch.Tensor:
        """The addresses of those slots on the pads of those ranks."""
        return self.table([self.pad_ptrs[a.rank] + 4 * a.slot for a in arrivals])


class CudaCode:
    """A program compiled for one GPU's workspace."""

    def __init__(self, program: Program, workspace: Workspace) -> None:
        if workspace.lanes is None:
            workspace.lanes = CudaLanes(workspace)
        self.lanes: CudaLanes = workspace.lanes
        self.program = program
        self.workspace = workspace
        self.index = self.lanes.register(self)
        places = Places(workspace, program.plan)
        plan = program.plan
        self.side = {
            lane.name: self.lanes.stream(lane.name, lane.priority)
            for lane in plan.lanes
            if lane.name != COMPUTE_LANE and any(s.lane == lane.name for s in plan.steps)
        }
        lane_of = {step.name: step.lane for step in plan.steps}
        edges = {name for step in plan.steps for name in step.after if lane_of[name] != step.lane}
        self.events = {name: torch.cuda.Event() for name in edges}
        self.joins = {name: torch.cuda.Event() for name in self.side}
        self.steps = [_CudaStep(self, i, places) for i in range(len(program.steps))]

    def run(self, operands: Operands) -> None:
        """See `execute.Code.run`."""
        lanes = self.lanes
        main = torch.cuda.current_stream(self.workspace.device)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self.workspace.captured = True
        elif main != lanes.last_stream:
            # calls of one group are in order whatever streams they are on
            main.wait_stream(lanes.last_stream)
            lanes.last_stream = main
        annotate = torch.autograd._profiler_enabled()
        if self.side:
            lanes.fork.record(main)
        for stream in self.side.values():
            stream.wait_event(lanes.fork)
        try:
            for step in self.steps:
                step.enqueue(operands, main, capturing, annotate)
        finally:
            for name, stream in self.side.items():
                self.joins[name].record(stream)
                main.wait_event(self.joins[name])


class _CudaStep:
    """One step, ready to be enqueued."""

    def __init__(self, code: CudaCode, index: int, places: Places) -> None:
        bound = code.program.steps[index]
        step = bound.step
        kind = "barrier" if step.kind == "barrier" else "wait"
        self.mark_before = f"counterpoint/{step.lane}/{kind}/{step.name}"
        self.mark = f"counterpoint/{step.lane}/{step.kind}/{step.name}"
        self.mark_after = f"counterpoint/{step.lane}/barrier/{step.name}"
        self.stream = code.side.get(step.lane)
        self.edges = [code.events[name] for name in step.after if name in code.events]
        self.ended = code.events.get(step.name)
        self.copy = copy_engine.copies(bound, places) if step.kind == "copy" else None
        self.actions = _actions(code, bound, places)
        tag = code.index * MAX_STEPS + index
        opens = index == code.program.opens
        # a barrier posts and waits in one kernel; other steps wait first and post last
        both = bound if step.kind == "barrier" else None
        waits = both or (bound if bound.waits else None)
        self.before = _signal(code.lanes, both.posts if both else (), bound.waits, tag, opens) \
            if waits else None  # fmt: skip
        self.after: Any = None
        if both is None and bound.posts:
            self.after = _signal(code.lanes, bound.posts, (), tag, False)

    def enqueue(
        self, operands: Operands, main: torch.cuda.Stream, capturing: bool, annotate: bool
    ) -> None:
        """Launch the step. Annotations tell `measure.trace` which step launched what."""
        stream = self.stream or main
        for edge in self.edges:
            stream.wait_event(edge)
        mark = record_function if annotate else _no_mark
        with torch.cuda.stream(stream) if self.stream else nullcontext():
            if self.before:
                with mark(self.mark_before):
                    self.before()
            with mark(self.mark):
                for action in self.actions:
                    action(operands)
                if self.copy:
                    self.copy(operands, stream.cuda_stream, capturing)
            if self.after:
                with mark(self.mark_after):
                    self.after()
        if self.ended:
            self.ended.record(stream)


def _no_mark(_: str) -> AbstractContextManager[object]:
    return nullcontext()


def _actions(code: CudaCode, bound: BoundStep, places: Places) -> list[Action]:
    match bound.step.kind:
        case "matmul":
            return [compute.matmul(bound, part, places) for part in bound.parts]
        case "move":
            return [compute.move(bound, part, places) for part in bound.parts]
        case "collective":
            return [compute.collective(bound, part, places) for part in bound.parts]
        case "reduce":
            return [_reduce(code.lanes, bound, part, places) for part in bound.parts]
        case _:
            return []


def _signal(
    lanes: CudaLanes,
    posts: Sequence[Arrival],
    waits: Sequence[Arrival],
    step: int,
    opens: bool,
):
    """A launch of the signal kernel on the current stream."""
    num_lanes = 32
    while num_lanes < max(len(posts), len(waits)):
        num_lanes *= 2
    post_ptrs, wait_ptrs = lanes.words(posts), lanes.words(waits)
    timeout_ns = int(lanes.workspace.timeout_s * 1e9)

    def launch() -> None:
        signal_kernel[(1,)](
            post_ptrs, len(posts), wait_ptrs, len(waits), lanes.epoch, lanes.fault, step,
            timeout_ns, ADVANCE=opens, BOUNDED=True, LANES=num_lanes, num_warps=1,
        )  # fmt: skip

    return launch


def _reduce(lanes: CudaLanes, bound: BoundStep, part: Part, places: Places) -> Action:
    """The sum kernel. Reads, in order: a running fp32 sum, slots, own partial, bias; each optional.

    Tables hold slot numbers, not addresses: they depend on the plan's form, not on its sizes.
    """
    plan = places.plan
    reads = list(part.reads)
    bias = places.of(reads.pop()) if bound.step.arg("bias") else None
    holds = [plan.buffer(box.buffer).holds for box in reads]
    wide = plan.buffer(reads[0].buffer).dtype == "float32" != plan.problem.dtype
    running = places.fixed(reads.pop(0)) if wide else None
    own = places.fixed(reads.pop()) if reads and holds[-1] != "slots" else None
    slots = [box for box in reads if plan.buffer(box.buffer).holds == "slots"]
    if len(slots) < len(reads) or len({box._replace(slot=0) for box in slots}) > 1:
        form = "a running sum, slots of one buffer, an own partial and a bias, in this order"
        raise UnsupportedError(f"plan {plan.spec}: on a GPU a reduce reads {form}")
    base = places.fixed(slots[0]._replace(slot=0)) if slots else None
    second = places.fixed(slots[0]._replace(slot=1)) if slots and plan.problem.ranks > 1 else None
    slot_stride = 0
    if base is not None and second is not None:
        slot_stride = (second.data_ptr() - base.data_ptr()) // base.element_size()
    order = lanes.table([box.slot for box in slots])
    rows, cols = part.write.shape
    target = places.of(part.write)
    grid = (rows, -(-cols // REDUCE_BLOCK))

    def run(operands: Operands) -> None:
        out = target(operands)
        reduce_kernel[grid](
            running if running is not None else out,
            base if base is not None else out,
            own if own is not None else out,
            bias(operands) if bias else out,
            out, order, len(slots), rows, cols, slot_stride,
            running.stride(0) if running is not None else 0,
            base.stride(0) if base is not None else 0,
            own.stride(0) if own is not None else 0,
            out.stride(0), HAS_SUM=running is not None, HAS_OWN=own is not None,
            HAS_BIAS=bias is not None, BLOCK=REDUCE_BLOCK,
        )  # fmt: skip

    return run
