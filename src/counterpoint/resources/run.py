"""A pipeline under one setting of the controls: eager on streams, or captured as one graph.

Both put the stages on two lanes in the order written. What a graph's nodes carry (shared memory,
priority) is changed in the graph and needs no second capture; what decides which nodes there are
(transport, granularity, order) does.
"""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import graph_nodes
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.device_limits import limits_here
from counterpoint.plan.steps import Plan
from counterpoint.resources import budget
from counterpoint.resources.calls import Call, compiled
from counterpoint.resources.controls import OFF, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.rewrites import COMPUTE, rewritten
from counterpoint.resources.shape import Nodes, Shape
from counterpoint.resources.shape_triton import triton_launches
from counterpoint.resources.stages import Compute, Stage
from counterpoint.resources.transport import library_writes_to_peers_memory


class Eager:
    """A pipeline that is enqueued stage by stage at each call. All ranks make and call it alike.

    A context: entered, the controls hold; left, all that they changed is as before.

    Args:
        pipeline: to run.
        controls: that hold meanwhile.

    Raises:
        InputError: ranks have different pipelines, or a control cannot be had here, and why.
        UnsupportedError: a kernel cannot be shaped, or this machine lacks what a control needs.
    """

    def __init__(self, pipeline: Pipeline, controls: Controls = OFF) -> None:
        pipeline.agree("run")
        pipeline.check("run")
        controls.way_in("eager")
        self.pipeline, self.controls = pipeline, controls
        self._code = compiled(pipeline, controls)
        self._shape = _shape_of(self._code.program.plan, controls)
        self._num_stages = len(pipeline.stages)
        self._undo = ExitStack()
        self._holds = False

    def __enter__(self) -> "Eager":
        """Let the controls hold."""
        with ExitStack() as undo:
            wanted = self._shape
            if wanted != Shape():
                kernels = [
                    kernel
                    for stage in self.pipeline.stages if isinstance(stage, Compute)
                    for kernel in stage.kernels
                ]  # fmt: skip
                if not kernels:
                    fix = "pass kernels= to Pipeline.compute, or run it as a graph"
                    raise UnsupportedError(
                        f"shape: no Triton kernels are known to be shaped; {fix}"
                    )
                limits = limits_here(self.pipeline.device)
                distinct = list({id(k): k for k in kernels}.values())
                undo.enter_context(triton_launches(distinct, wanted, limits))
            if self.controls.num_sms:
                undo.enter_context(budget.matmul_sms(self.pipeline.device, self.controls.num_sms))
            self._undo = undo.pop_all()
        self._holds = True
        return self

    def __exit__(self, *_: object) -> None:
        """Bring all back."""
        self._holds = False
        self._undo.close()

    def __call__(self) -> None:
        """Enqueue all stages; the current stream then waits for all of them.

        Raises:
            InputError: the controls hold only while the context is entered, and it is not.
            PeerTimeoutError: a rank did not come to copies of an earlier call.
        """
        held = self._shape != Shape() or self.controls.num_sms
        _check_entered(bool(self._holds or not held), self.controls)
        if len(self.pipeline.stages) != self._num_stages:
            want, got = f"of {self._num_stages} stages as made", len(self.pipeline.stages)
            raise InputError("run", "pipeline", want=want, got=got, fix="make another Eager")
        self.pipeline.workspace.check()
        self._code.run({})


class Captured:
    """A pipeline as one CUDA graph. All ranks make and call it alike.

    A context: left, the graph is as it was captured, and functions have their limits back.

    Args:
        pipeline: to run; it has run once before, so that kernels are compiled and loaded.
        controls: to begin with; `set` changes those that need no other capture.

    Raises:
        InputError: a control cannot be had here; the message says why.
        UnsupportedError: a stage cannot be captured, or this machine lacks what a control needs.
    """

    def __init__(self, pipeline: Pipeline, controls: Controls = OFF) -> None:
        pipeline.agree("run")
        pipeline.check("run")
        controls.way_in("graph")
        if pipeline.device.type != "cuda" or torch.version.hip:
            where = f"the pipeline is on {pipeline.device}"
            raise UnsupportedError(f"Captured: graphs need an NVIDIA GPU, {where}; use Eager")
        self.pipeline = pipeline
        self.controls = captured_as(controls)
        self._plan = pipeline.plan()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.compute_nodes: list[int] = []  # kernels of compute stages
        self.collective_nodes: list[int] = []
        self._capture()
        self._priorities = {n: graph_nodes.kernel_of(n).priority for n in self.collective_nodes}
        limits = limits_here(pipeline.device)
        self.shaped = Nodes(int(self.graph.raw_cuda_graph()), limits, self.compute_nodes)
        self._undo = ExitStack()
        self._stale = True
        self._wanted = controls
        self._holds = False

    def __enter__(self) -> "Captured":
        """Let the controls hold, as far as they are numbers of nodes."""
        with ExitStack() as undo:
            undo.enter_context(self.shaped)
            undo.callback(self._bring_back)
            self._holds = True
            self.set(self._wanted)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Bring all back."""
        self._undo.close()

    def _bring_back(self) -> None:
        self._holds = False
        self._stale = True
        self.controls = captured_as(self.controls)
        self._prioritise(urgent=False)

    def set(self, controls: Controls) -> None:
        """Change the numbers of the nodes: shape and priority.

        Shared memory of an instantiated graph is updated in place; priority and carve-out need an
        instantiation.

        Raises:
            InputError: `controls` need another capture, or kernels cannot be shaped so.
            UnsupportedError: no kernel can be shaped.
        """
        if captured_as(controls) != captured_as(self.controls):
            want = f"captured as {captured_as(self.controls).spec!r}"
            raise InputError("Captured.set", "controls", want=want, got=repr(controls.spec))
        now, before = (_shape_of(rewritten(self._plan, c), c) for c in (controls, self.controls))
        if now != before:
            self.shaped.check()
            self.shaped.set(now)
        if controls.priority != self.controls.priority:
            self._prioritise(urgent=controls.priority)
            self._stale = True
        if now.carve_out or before.carve_out:
            self._stale = True
        if now != before and not self._stale:
            self.shaped.set(now, int(self.graph.raw_cuda_graph_exec()))
        if self._stale:
            self.graph.instantiate()
            self._stale = False
        self.controls = controls

    def __call__(self) -> None:
        """Replay the graph on the current stream.

        Raises:
            InputError: the controls hold only while the context is entered, and it is not.
            PeerTimeoutError: a rank did not come to copies of an earlier call.
        """
        _check_entered(self._holds or captured_as(self._wanted) == self._wanted, self._wanted)
        self.pipeline.workspace.check()
        if self._stale:
            self.graph.instantiate()
            self._stale = False
        self.graph.replay()

    def _prioritise(self, *, urgent: bool) -> None:
        for node, captured in self._priorities.items():
            graph_nodes.set_priority(node, _most_urgent() if urgent else captured)

    def _capture(self) -> None:
        num_sms = self.controls.num_sms
        with budget.matmul_sms(self.pipeline.device, num_sms) if num_sms else nullcontext():
            self._capture_stages()

    def _capture_stages(self) -> None:
        if os.environ.get("NCCL_GRAPH_REGISTER") != "0" and library_writes_to_peers_memory(
            self.pipeline, self.controls.transport
        ):
            fix = "set NCCL_GRAPH_REGISTER=0 before the process starts"
            what = "NCCL's collectives hang when captured with memory of Pipeline.empty"
            raise UnsupportedError(f"Captured: {what}; {fix}")
        code = compiled(self.pipeline, self.controls, self._watched)
        side: torch.cuda.Stream = self.pipeline.kept.setdefault(
            "capture", torch.cuda.Stream(self.pipeline.device)
        )
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            code.run({})  # libraries set themselves up for each stream
        torch.cuda.synchronize(self.pipeline.device)
        # what stages allocate, a pool holds that no other memory comes from. The graphs of one
        # pipeline share it, as they never run at once; it ends with the last of them
        kept = self.pipeline.kept
        others: WeakSet[Captured] = kept.setdefault("captured", WeakSet())
        if not others:
            kept["pool"] = torch.cuda.graph_pool_handle()
        try:
            with (
                no_collector(),
                torch.cuda.graph(
                    self.graph, pool=kept["pool"], stream=side, capture_error_mode="thread_local"
                ),
            ):
                code.run({})
        except RuntimeError as error:
            fix = "what synchronises must go out of the pipeline; or run it eagerly"
            raise UnsupportedError(
                f"a stage cannot be captured in a graph: {error}; {fix}"
            ) from error
        others.add(self)

    def _watched(self, stage: Stage, call: Call) -> None:
        """Learn which nodes a stage has made, while it is captured."""
        if not torch.cuda.is_current_stream_capturing():
            call()
            return
        graph = graph_nodes.graph_of_capture(torch.cuda.current_stream().cuda_stream)
        before = set(graph_nodes.nodes(graph))
        call()
        made = (node for node in graph_nodes.nodes(graph) if node not in before)
        kernels = [node for node in made if graph_nodes.kind_of(node) == "kernel"]
        (self.compute_nodes if isinstance(stage, Compute) else self.collective_nodes).extend(
            kernels
        )


def _most_urgent() -> int:
    range_of: Any = torch.cuda.Stream.priority_range  # its stub lacks that it is static
    return range_of()[1]


def _check_entered(holds: bool, controls: Controls) -> None:
    if not holds:
        fix = "call it inside `with`"
        raise InputError("run", "controls", want="held", got=repr(controls.spec), fix=fix)


def captured_as(controls: Controls) -> Controls:
    """The controls that decide which nodes a graph has; the rest are numbers of its nodes."""
    return replace(controls, priority=False, blocks_per_sm=None, carve_out=False)


def _shape_of(plan: Plan, controls: Controls) -> Shape:
    return Shape(blocks_per_sm=plan.lane(COMPUTE.name).blocks_per_sm, carve_out=controls.carve_out)
