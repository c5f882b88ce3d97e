"""The compute of plans for a machine that is not here, step by step on one GPU.

What a rank of the plan computes, runs here as it runs there: the same steps, one behind the other,
on buffers of the same sizes. What its peers would send lies there already. Each step is timed
between two events, once by itself and once while copies come and go as over the links of a mesh:
between this GPU and a second one, or within it where it is alone.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from counterpoint.attention import steps as attention
from counterpoint.gpu import driver
from counterpoint.group.workspace import Operands, Places, Workspace
from counterpoint.machine import Machine
from counterpoint.model.estimate import replayed_s
from counterpoint.model.slowest_rank import slowest_rank
from counterpoint.model.work import Work
from counterpoint.plan.attended import ATTENTION
from counterpoint.plan.bind import BoundStep, Program, bind
from counterpoint.plan.steps import Plan
from counterpoint.run import compute, launch_cuda
from counterpoint.run.lanes_cuda import CudaLanes

Step = Callable[[], object]
Lane = Mapping[str, Step]  # by the names of steps, in order
Times = Mapping[str, tuple[float, float]]  # of steps: alone, and beside copies
COMPUTED = ("matmul", "move", "reduce", *ATTENTION)
ALIGN_BYTES = 1 << 12  # more than what lies between two buffers of a workspace
COPY_BYTES = 32 << 20
HOST_S = 13e-6  # in which the host enqueues a copy: the GPU is busy for as long
BURN, BURN_S, BURN_LEAST = 4096, 170e-6, 4  # rows of a matmul that it is busy with, its time
ROUNDS = 3
FLUSH_BYTES = 256 << 20  # read before each lane


class OneRank:
    """In place of a rank's workspace: its memory, which stands for that of its peers, too.

    Args:
        rank: whose.
    """

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self.device, self.rank = device, rank
        self.scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self.arena = self
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def peer(self, _: int) -> Tensor:
        """What a rank has there."""
        return self.memory

    def reserve(self, plan: Plan) -> None:
        """Have room for a plan, full of random numbers."""
        room = ALIGN_BYTES * len(plan.buffers)
        self.memory = self._filled(self.memory, plan.num_bytes("symmetric") + room)
        self.scratch = self._filled(self.scratch, plan.num_bytes("scratch") + room)

    def _filled(self, old: Tensor, num_bytes: int) -> Tensor:
        if old.numel() >= num_bytes:
            return old
        drawn = torch.randn(ceil(num_bytes / 4), device=self.device).bfloat16()
        return drawn.repeat(2).view(torch.uint8)


def program_of(plan: Plan, machine: Machine) -> Program:
    """Of the rank that counts: the one which a prediction is of."""
    return bind(plan, slowest_rank(plan, machine))


def lane_of(program: Program, memory: OneRank, operands: Operands) -> Lane:
    """What one rank computes."""
    memory.reserve(program.plan)
    places = Places(cast(Workspace, memory), program.plan)
    found: dict[str, Step] = {}
    for bound in program.steps:
        if bound.step.kind in COMPUTED:
            found[bound.step.name] = _step(bound, places, memory.device, operands)
    operands |= places.constants
    return found


def _step(bound: BoundStep, places: Places, device: torch.device, operands: Operands) -> Step:
    kind = bound.step.kind
    if kind == "matmul":
        actions = compute.matmuls((bound,), places)
    elif kind in ATTENTION:
        make = attention.attention if kind == "attention" else attention.attention_backward
        actions = make(bound, places, operands)
    elif kind == "reduce" and device.type == "cuda":
        of = partial(torch.tensor, device=device)
        lanes = cast(CudaLanes, SimpleNamespace(tables=SimpleNamespace(of=of)))
        actions = [launch_cuda.reduce(lanes, bound, part, places) for part in bound.parts]
    else:
        make = compute.move if kind == "move" else compute.reduce
        actions = [make(bound, part, places) for part in bound.parts]

    def run() -> None:
        for action in actions:
            action(operands)

    return run


def operands_of(plans: Sequence[Plan], draw: Callable[..., Tensor]) -> Operands:
    """Random tensors for what plans of one problem read and write of their user's."""
    buffers = {b.name: b for plan in plans for b in plan.buffers if b.space in ("input", "output")}
    rows = max(plans[0].problem.rows)
    found: Operands = {}
    for name, buffer in buffers.items():
        extent, cols = buffer.shape
        extent = rows if buffer.split and buffer.holds == "own" else extent
        # a weight lies as torch.nn.Linear has it
        found[name] = draw(cols, extent).t() if name[0] == "w" else draw(extent, cols)
    return found


@dataclass
class Traffic:
    """Copies that come and go: to and from the second GPU, or within the only one.

    Args:
        device: that computes.
    """

    device: torch.device

    def __post_init__(self) -> None:
        other = (self.device.index + 1) % torch.cuda.device_count()
        self.other = torch.device("cuda", other)
        self.streams = [torch.cuda.Stream(self.device, priority=-1) for _ in range(2)]
        each = COPY_BYTES * 4
        here, there = (
            torch.ones(2 * each, dtype=torch.uint8, device=d) for d in (self.device, self.other)
        )
        self.load = torch.randn(BURN, BURN, device=self.device).bfloat16()
        there.copy_(here)  # torch lets the two reach each other
        torch.cuda.synchronize()
        self._keep = (here, there)
        push = [(there.data_ptr() + i, here.data_ptr() + i) for i in range(0, each, COPY_BYTES)]
        pull = [(here.data_ptr() + i, there.data_ptr() + i)
                for i in range(each, 2 * each, COPY_BYTES)]  # fmt: skip
        # within one GPU a copy both reads and writes its memory: one direction is enough
        self.ways = [push, pull] if self.other != self.device else [push]

    @property
    def between(self) -> str:
        """What the copies go between, for rows."""
        return "two GPUs" if len(self.ways) == 2 else "one GPU"

    def burn(self, seconds: float) -> None:
        """Multiply for so long, at least, while the host goes ahead: clocks stay settled."""
        for _ in range(max(BURN_LEAST, ceil(seconds / BURN_S))):
            torch.mm(self.load, self.load)

    def bytes_per_s(self) -> float:
        """What copies read and write of this GPU's memory, with nothing beside them."""
        # a byte that goes and one that comes; or one that is read and written
        return 2 * 32 * COPY_BYTES / self.seconds(32)

    def more(self, machine: Machine) -> float:
        """What its links carry for a byte that is copied here: one that goes and one that comes."""
        return 2 * machine.costs.copy_bytes_per_s / self.bytes_per_s()

    def start(self, count: int, num_bytes: int = COPY_BYTES) -> list[torch.cuda.Event]:
        """Enqueue so many copies each way, behind what the current stream has; their ends."""
        current = torch.cuda.current_stream(self.device)
        ends: list[torch.cuda.Event] = []
        for stream, way in zip(self.streams, self.ways, strict=False):
            stream.wait_stream(current)
            for i in range(count):
                target, source = way[i % len(way)]
                copy = driver.Copy(target, num_bytes, source, num_bytes, num_bytes, 1)
                driver.copy_async(copy, stream.cuda_stream)
            end = torch.cuda.Event(enable_timing=True)
            end.record(stream)
            ends.append(end)
        return ends

    def seconds(
        self, count: int, num_bytes: int = COPY_BYTES, beside: Step = lambda: None
    ) -> float:
        """Of so many copies each way, beside what is enqueued while they are under way."""
        found: list[float] = []
        for _ in range(ROUNDS):
            start = torch.cuda.Event(enable_timing=True)
            self.burn(HOST_S * (2 * count + 20))
            start.record()
            ends = self.start(count, num_bytes)
            beside()
            torch.cuda.synchronize()
            found.append(max(start.elapsed_time(end) for end in ends) * 1e-3)
        return median(found)


class Replay:
    """A lane as a CUDA graph, with events within: one before each step and one behind the last.

    Args:
        lane: that has run once, so that kernels are compiled.
        pool: memory that the graphs of all lanes share.
        steps: have an event between any two of them, not only at both ends.
    """

    def __init__(self, lane: Lane, pool: Any, *, steps: bool) -> None:
        count = len(lane) + 1 if steps else 2
        self.marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(count)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.marks[0].record()
            for i, step in enumerate(lane.values(), 1):
                step()
                if steps:
                    self.marks[i].record()
            if not steps:
                self.marks[1].record()

    def seconds(self, traffic: Traffic, copies: int, copy_bytes: int, swept: Tensor) -> list[float]:
        """Between its events, in one run beside so many copies."""
        traffic.burn(HOST_S * (2 * copies + 20))
        torch.sum(swept, dtype=torch.int64)  # nothing of what was before is in the L2
        ends = traffic.start(copies, copy_bytes) if copies else []
        self.graph.replay()
        for end in ends:
            torch.cuda.current_stream().wait_event(end)
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) * 1e-3 for a, b in pairs]


def timed(
    lanes: Mapping[str, Lane], rounds: int, traffic: Traffic, copy_bytes: int = COPY_BYTES
) -> dict[str, dict[str, tuple[float, float]]]:
    """Seconds of each step by itself, and beside copies; all lanes in one random rotation.

    Events between steps take time too, more of it beside copies: 4 us, 2xH200. So the steps of a
    lane are made to add up to what it takes without them.

    Args:
        lanes: by the names of plans.
        rounds: the median of which counts.
        traffic: that goes on beside each lane.
        copy_bytes: of one of its copies.
    """
    copies_s = traffic.seconds(16, copy_bytes) / 16
    swept = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=traffic.device)
    pool, replays = torch.cuda.graph_pool_handle(), dict[tuple[str, bool], Replay]()
    lasts_s: dict[str, float] = {}
    for name, lane in lanes.items():
        for step in lane.values():
            step()
        torch.cuda.synchronize()
        for steps in (True, False):
            replays[name, steps] = Replay(lane, pool, steps=steps)
        lasts_s[name] = sum(replays[name, True].seconds(traffic, 0, copy_bytes, swept))
    order = [(name, steps, beside) for name, steps in replays for beside in (False, True)]
    taken: dict[tuple[str, bool, bool], list[list[float]]] = {key: [] for key in order}
    shuffle = random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name, steps, beside in order:
            copies = ceil(1.15 * lasts_s[name] / copies_s) + 2 if beside else 0
            found = replays[name, steps].seconds(traffic, copies, copy_bytes, swept)
            taken[name, steps, beside].append(found)

    def middle(name: str, beside: bool) -> list[float]:
        each, (whole,) = (
            [median(some) for some in zip(*taken[name, steps, beside], strict=True)]
            for steps in (True, False)
        )
        return [seconds * whole / sum(each) for seconds in each]

    return {
        name: dict(
            zip(lane, zip(middle(name, False), middle(name, True), strict=True), strict=True)
        )
        for name, lane in lanes.items()
    }


def replayed(program: Program, times: Times, machine: Machine, more: float) -> float:
    """Seconds of a call on a machine with such links.

    Args:
        times: of its steps.
        more: what links carry, for a byte of the copies that steps were timed beside.
    """
    measured = {name: Work(alone, 1 + more * max(beside / alone - 1, 0.0))
                for name, (alone, beside) in times.items()}  # fmt: skip
    return replayed_s(program, machine, measured)


def microseconds(times: Times) -> dict[str, list[float]]:
    """Of each step for a row: alone, and the factor on that beside copies."""
    return {name: [round(alone * 1e6, 2), round(beside / alone, 3)]
            for name, (alone, beside) in times.items()}  # fmt: skip
