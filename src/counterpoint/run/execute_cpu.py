"""A program on a CPU rank: SM lanes on the calling thread in tuple order, others on threads.

Signals are words in shared memory. A release and an acquire are plain stores and loads: x86 keeps
their order. How a wait ends that is in vain: notice_board.py.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import torch

from counterpoint.attention import steps as attention
from counterpoint.experts import steps_counted, steps_routed
from counterpoint.group.notice_board import LOOK_EVERY_S, Awaited
from counterpoint.group.pads_cpu import await_words, pads_of, wrapped
from counterpoint.group.workspace import Action, Operands, Places, Workspace
from counterpoint.plan.bind import BoundStep, Part, Program
from counterpoint.run import compute
from counterpoint.run.compute import Calls
from counterpoint.run.launch import Site, fused_action
from counterpoint.spans import Span

COMPUTE: dict[str, Callable[[BoundStep, Part, Places], Action]] = {
    "move": compute.move,
    "reduce": compute.reduce,
    "spread": compute.move,  # where there are no routes
    "fold": compute.move,
}

# where it is noted what ran when; None: nowhere. On GPUs the profiler sees it
recording: list[Span] | None = None

_threads: dict[str, ThreadPoolExecutor] = {}


def _thread(lane: str) -> ThreadPoolExecutor:
    if lane not in _threads:
        _threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"counterpoint-{lane}")
    return _threads[lane]


class CpuCode:
    """A program compiled for the shared memory of CPU ranks."""

    def __init__(
        self, program: Program, workspace: Workspace, calls: Calls, like: Operands | None = None
    ) -> None:
        self.program = program
        self.workspace = workspace
        self.pads = pads_of(workspace)
        places = Places(workspace, program.plan)
        self.calls = calls
        self.constants = places.constants
        self.actions = [
            self._actions(bound, places, i, like) for i, bound in enumerate(program.steps)
        ]
        lanes = {lane.name: lane.engine for lane in program.plan.lanes}
        self.on_side_lane = [lanes[bound.step.lane] != "sm" for bound in program.steps]

    def _actions(
        self, bound: BoundStep, places: Places, index: int, like: Operands | None
    ) -> list[Action]:
        match bound.step.kind:
            case kind if bound.step.routed and kind in steps_routed.ACTIONS:
                return [steps_routed.action(bound, places)]
            case "barrier":
                return []
            case "opaque":
                return [compute.opaque(bound, self.calls)]
            case "attention":
                return attention.attention(bound, places, like)
            case "attention_backward":
                return attention.attention_backward(bound, places, like)
            case "fused":
                return [fused_action(Site(bound, places, index, like))]
            case "exchange":
                return [compute.exchange(bound, places)]
            case "collective":  # also of a transport of ours, for which the library stands in
                return [compute.collective(bound, bound.parts[0], places)]
            case "matmul":
                return compute.matmuls((bound,), places)
            case "copy" if bound.step.counted:
                return [steps_counted.copies(bound, places)]
            case "copy":
                return [compute.move(bound, part, places) for part in bound.parts]
            case kind:
                return [COMPUTE[kind](bound, part, places) for part in bound.parts]

    def run(self, operands: Operands) -> None:
        """See `execute.Code.run`."""
        operands.update(self.constants)
        _Call(self, operands, recording).run()
        self.workspace.board.compare()

    @property
    def chains(self) -> bool:
        """See `execute.Code.chains`."""
        plan = self.program.plan
        return plan.problem.counts == "device_routed" and len(plan.steps) == 1

    def temporaries_of(self, operands: Operands) -> Operands:
        """See `execute.Code.temporaries_of`."""
        return {}

    def launch(self, operands: Operands) -> None:
        """See `execute.Code.launch`."""
        self.run(operands)


class _Call:
    """One call: the side lanes at work beside the calling thread."""

    def __init__(self, code: CpuCode, operands: Operands, spans: list[Span] | None) -> None:
        self.code = code
        self.operands = operands
        self.spans = spans
        self.workspace = code.workspace
        self.differentiates = torch.is_grad_enabled()
        self.ended = {bound.step.name: Event() for bound in code.program.steps}
        self.failed = Event()

    def run(self) -> None:
        steps = range(len(self.code.program.steps))
        copies: dict[str, list[int]] = {}
        for i in steps:
            if self.code.on_side_lane[i]:
                copies.setdefault(self.code.program.steps[i].step.lane, []).append(i)
        futures: list[Future[None]] = [
            _thread(lane).submit(self._lane, indices, torch.is_inference_mode_enabled())
            for lane, indices in copies.items()
        ]
        try:
            self._lane([i for i in steps if not self.code.on_side_lane[i]])
        finally:
            errors = [future.exception() for future in futures]  # joins the lanes
        for error in errors:
            if error is not None:
                raise error

    @torch.no_grad()  # the mode is a thread's own, as is the caller's inference mode
    def _lane(self, indices: list[int], inference: bool | None = None) -> None:
        if inference:
            with torch.inference_mode():
                self._lane(indices)
            return
        try:
            for i in indices:
                if self.failed.is_set():
                    return
                self._step(i)
        except BaseException:
            self.failed.set()  # the other lanes must not wait for this one
            raise

    def _step(self, i: int) -> None:
        bound = self.code.program.steps[i]
        step = bound.step
        for name in step.after:
            while not self.ended[name].wait(LOOK_EVERY_S):
                if self.failed.is_set():
                    return
        start_s = time.perf_counter()
        if step.kind == "barrier":
            if i == self.code.program.opens:
                self.workspace.epoch = wrapped(self.workspace.epoch + 1)
            self._post(bound)
            self._wait(bound)
        else:
            self._wait(bound)
            if self.failed.is_set():
                return  # what was waited for may not be there
            if self.spans is not None and bound.waits:
                self._note(bound, "wait", start_s)
                start_s = time.perf_counter()
            self._act(bound, self.code.actions[i])
            self._post(bound)
        self._note(bound, step.kind, start_s)
        self.ended[step.name].set()

    def _act(self, bound: BoundStep, actions: list[Action]) -> None:
        theirs = self.differentiates and bound.step.kind == "opaque"
        with torch.set_grad_enabled(theirs):
            for action in actions:
                action(self.operands)

    def _note(self, bound: BoundStep, kind: str, start_s: float) -> None:
        if self.spans is not None:
            step, end_s = bound.step, time.perf_counter()
            rank = self.workspace.rank
            label = f"wait for {step.name}" if kind == "wait" else step.name
            self.spans.append(Span(rank, step.lane, start_s, end_s, kind, label))

    def _post(self, bound: BoundStep) -> None:
        for slot, rank in bound.posts:
            self.code.pads[rank][slot] = self.workspace.epoch

    def _wait(self, bound: BoundStep) -> None:
        if bound.waits:
            epoch, awaited = self.workspace.epoch, self._awaited(bound)
            await_words(self.workspace, bound.waits, epoch, awaited, self.failed.is_set)

    def _awaited(self, bound: BoundStep) -> Awaited:
        plan, step = self.code.program.plan, bound.step.name
        deed = f"signal step {step!r} of plan {plan.spec} to rank {self.workspace.rank}"
        return Awaited(plan.problem.op, deed, step)
