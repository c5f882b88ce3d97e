"""A program on a GPU: lanes are streams, edges are events, copies are DMA copies.

The compute lane is the caller's stream; the others are side streams of the workspace, forked from
it at the start of a call and joined before it returns. Everything is enqueued and nothing waits
on the host, so a call can be captured in a CUDA graph.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from counterpoint.attention import steps as attention
from counterpoint.errors import UnsupportedError
from counterpoint.experts import steps_routed
from counterpoint.gpu import copy_engine, driver
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Action, Operands, Places, Workspace, refuse_capture
from counterpoint.plan.attended import ATTENTION
from counterpoint.plan.bind import BoundStep, Program
from counterpoint.plan.launches import HELD_BACK_S, batches, held_back, in_no_graph
from counterpoint.run import compute, launch_collective, launch_cuda
from counterpoint.run.compute import Calls
from counterpoint.run.lanes_cuda import CudaLanes, awaited_by, lanes_of, profiling
from counterpoint.run.launch import Site, Temporaries, fused_action, temporaries

COMPUTE_LANE = "compute"


class CudaCode:
    """A program compiled for one GPU's workspace."""

    def __init__(
        self, program: Program, workspace: Workspace, calls: Calls, like: Operands | None = None
    ) -> None:
        self.like = like
        lanes_of(workspace)
        if program.opens >= 0 and not workspace.lanes.signals_compiled:
            refuse_capture("none: this is the group's first call of a plan with signals")
            # all ranks have compiled their signals before one of them waits for another
            launch_cuda.compile_signals(workspace.lanes)
            workspace.gather(None)
            workspace.lanes.signals_compiled = True
        self.lanes: CudaLanes = workspace.lanes
        self.program = program
        self.workspace = workspace
        self.calls = calls
        self.tag = self.lanes.register(
            program.plan.problem.op, program.plan.spec, awaited_by(program)
        )
        self.ran = False
        # a library's collective stays outside of graphs that the user did not ask for: its group
        # could not be destroyed while one lives; an exchange likewise. So do calls of the user's
        # own, what the host lays out by counts that differ, and attention, which makes the results
        # of a call. One kernel is launched as fast as a graph of it
        kept_out = any(
            s.kind in ("opaque", "exchange", *ATTENTION)
            or (s.kind == "collective" and not s.arg("transport"))
            for s in program.plan.steps
        )
        # calls of the user's own may hold the graph; who holds that holds this
        self.opaque = any(s.kind == "opaque" for s in program.plan.steps)
        kept_out = kept_out or in_no_graph(program.plan)
        self.replayable = len(program.steps) > 1 and not kept_out
        # of experts one step is several kernels; what no host knows is not laid out by it
        self.sized = program.plan.problem.counts in ("device", "device_routed")
        self.spins = any(step.spins for step in program.plan.steps)  # a grid waits for its peers
        places = Places(workspace, program.plan)
        self.constants = places.constants
        plan = program.plan
        self.side = {
            lane.name: self.lanes.stream(lane.name, lane.priority, lane.num_sms)
            for lane in plan.lanes
            if (lane.name != COMPUTE_LANE or lane.num_sms)
            and any(s.lane == lane.name for s in plan.steps)
        }
        lane_of = {step.name: step.lane for step in plan.steps}
        edges = {name for step in plan.steps for name in step.after if lane_of[name] != step.lane}
        self.events = {name: torch.cuda.Event() for name in edges}
        self.joins = {name: torch.cuda.Event() for name in self.side}
        self.steps = self._compiled_steps(places)
        self.like = None  # nothing is held on to
        # a plan of one lane without signals is a list of torch calls on the current stream
        signals = any(step.waits or step.posts for step in plan.steps)
        self.plain: list[Action] | None = None
        self.temporaries: list[Temporaries] = []
        if not self.side and not signals:
            self.plain = [action for step in self.steps for action in step.actions]
            if self.sized and len(program.steps) == 1:
                known = (temporaries.get(action) for action in self.plain)
                self.temporaries = [made for made in known if made is not None]
            self.replayable = self.replayable or bool(self.temporaries)

    def _compiled_steps(self, places: Places) -> list["_CudaStep"]:
        """All steps. Ranks meet behind them where a kernel waits for its peers.

        Raises:
            UnsupportedError: a kernel does not fit the GPU of a rank; where ranks meet, on all.
        """
        if any(step.kind == "exchange" for step in places.plan.steps):
            wire_of(self.workspace)  # ranks meet for it: so before one of them may fail to compile
        meets = self.spins and not torch.cuda.is_current_stream_capturing()
        problem, steps = "", list[_CudaStep]()
        try:
            # a plan that is new while a graph is captured: its kernels are loaded now
            with self._loading():
                steps = [_CudaStep(self, launch, places) for launch in batches(self.program)]
        except UnsupportedError as error:
            if not meets:
                raise
            problem = str(error)
        # a rank that still compiles is late for all, and one that cannot must not be waited for
        if meets and (problems := [p for p in self.workspace.gather(problem) if p]):
            raise UnsupportedError(problems[0])
        return steps

    def run(self, operands: Operands) -> None:
        """See `execute.Code.run`."""
        capturing = torch.cuda.is_current_stream_capturing()
        traced = profiling()
        for made in self.temporaries:
            operands.update(made(operands))
        # calls of one group are in order whatever streams they are on
        if capturing:
            self.workspace.captured = True
            if not self.opaque:  # the graph reads its tables
                self.workspace.keep(self)
            self.lanes.follow_in_capture(self.spins)
        else:
            self.lanes.follow(self.spins)
            # under a profiler step by step, so that it sees which step launched what
            if self.replayable and not traced:
                given = operands.values()
                pointers = tuple(map(Tensor.data_ptr, given))
                key = (self.tag, *pointers, *map(Tensor.stride, given))
                if self.sized:
                    key += tuple((t.shape, t.dtype) for t in given)
                # tensors of no rows are made anew, which a graph would keep
                whole = not self.sized or all(t.shape[0] for t in given)
                enqueue = partial(self._enqueue, operands, capturing=True)
                if whole and self.lanes.replays.run(key, enqueue):
                    return
        # in a capture always: a tile that fits these sizes may not be loaded yet
        with self._loading() if capturing or not self.ran else nullcontext():
            if self.plain is not None and not traced:
                operands.update(self.constants)
                for action in self.plain:
                    action(operands)
            else:
                self._enqueue(operands, torch.cuda.current_stream(), capturing=capturing)
        self.ran = True

    @property
    def chains(self) -> bool:
        """See `execute.Code.chains`."""
        return bool(self.temporaries)

    def temporaries_of(self, operands: Operands) -> Operands:
        """See `execute.Code.temporaries_of`."""
        return {name: t for made in self.temporaries for name, t in made(operands).items()}

    def launch(self, operands: Operands) -> None:
        """See `execute.Code.launch`."""
        operands.update(self.constants)
        for action in self.plain or ():
            action(operands)

    def _loading(self) -> AbstractContextManager[object]:
        """Where kernels may be compiled and loaded: also while a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            return driver.relaxed_capture()
        return nullcontext()

    def _enqueue(self, operands: Operands, main: torch.cuda.Stream, *, capturing: bool) -> None:
        operands.update(self.constants)
        annotate = profiling()
        if self.side:
            self.lanes.fork.record(main)
        for stream in self.side.values():
            stream.wait_event(self.lanes.fork)
        try:
            for step in self.steps:
                step.enqueue(operands, main, capturing, annotate)
        finally:
            for name, stream in self.side.items():
                self.joins[name].record(stream)
                main.wait_event(self.joins[name])


class _CudaStep:
    """One step, ready to be enqueued: edges, then `before`, the work itself, then `after`.

    Or a batch of matmuls: what comes before its first is before all, what is behind its last after.
    """

    def __init__(self, code: CudaCode, launch: tuple[int, ...], places: Places) -> None:
        index, lanes = launch[0], code.lanes
        bound, *rest = (code.program.steps[i] for i in launch)
        step, posts = bound.step, (rest[-1] if rest else bound).posts
        self.stream = code.side.get(step.lane)
        self.edges = [code.events[name] for name in step.after if name in code.events]
        names = [each.step.name for each in (bound, *rest)]
        self.ended = [code.events[name] for name in names if name in code.events]
        self.copy = self.before = self.after = None
        tag = code.tag + index
        self.actions = _actions(code, bound, places, tag)
        if rest:
            self.actions = compute.matmuls((bound, *rest), places)
        if step.kind == "barrier":
            opens = index == code.program.opens
            self.before = launch_cuda.signal(lanes, bound.posts, bound.waits, tag, opens=opens)
        elif bound.waits:
            self.before = launch_cuda.signal(lanes, (), bound.waits, tag, opens=False)
        self.delay = lanes.delay if held_back(code.program, index) else None
        if step.kind == "copy":
            self.copy = copy_engine.copies(bound, places, lanes.post_copies(bound.posts))
        elif step.kind != "barrier" and posts:
            self.after = launch_cuda.signal(lanes, posts, (), tag, opens=False)
        # for `measure.trace`, which tells by them which step launched what
        kind = "barrier" if step.kind == "barrier" else "wait"
        self.mark_before = f"counterpoint/{step.lane}/{kind}/{step.name}"
        self.mark = f"counterpoint/{step.lane}/{step.kind}/{step.name}"
        self.mark_after = f"counterpoint/{step.lane}/barrier/{step.name}"

    def enqueue(
        self, operands: Operands, main: torch.cuda.Stream, capturing: bool, annotate: bool
    ) -> None:
        """Launch the step on its lane's stream."""
        stream = self.stream or main
        for edge in self.edges:
            stream.wait_event(edge)
        mark = record_function if annotate else _no_mark
        if self.before:
            with mark(self.mark_before):
                self.before(stream.cuda_stream)
        if self.copy:
            with mark(self.mark):
                self.copy(operands, stream.cuda_stream, capturing)
        elif self.actions:
            on_lane = torch.cuda.stream(stream) if self.stream else nullcontext()
            with mark(self.mark), on_lane:
                if self.delay:
                    self.delay(HELD_BACK_S)
                for action in self.actions:
                    action(operands)
        if self.after:
            with mark(self.mark_after):
                self.after(stream.cuda_stream)
        for ended in self.ended:
            ended.record(stream)


_NOTHING = nullcontext()


def _no_mark(_: str) -> AbstractContextManager[object]:
    return _NOTHING


def _actions(code: CudaCode, bound: BoundStep, places: Places, tag: int) -> list[Action]:
    lanes = code.lanes
    match bound.step.kind:
        case kind if bound.step.routed and kind in steps_routed.ACTIONS:
            return [steps_routed.action(bound, places)]
        case "fused":
            return [fused_action(Site(bound, places, tag, code.like))]
        case "matmul":
            return compute.matmuls((bound,), places)
        case "attention":
            return attention.attention(bound, places, code.like)
        case "attention_backward":
            return attention.attention_backward(bound, places, code.like)
        case "opaque":
            return [compute.opaque(bound, code.calls)]
        case "move" | "spread" | "fold":  # without routes, rows as they are
            return [compute.move(bound, part, places) for part in bound.parts]
        case "collective" if bound.step.arg("transport"):
            return [launch_collective.action(bound, places, tag)]
        case "collective" if places.plan.problem.invariant and bound.step.sums:
            return [launch_cuda.sum_in_order(lanes, bound, places)]
        case "collective":
            return [compute.collective(bound, bound.parts[0], places)]
        case "exchange":
            return [compute.exchange(bound, places)]
        case "reduce":
            return [launch_cuda.reduce(lanes, bound, part, places) for part in bound.parts]
        case "barrier" | "copy":  # what is before and behind it, and its copies, are all there is
            return []
