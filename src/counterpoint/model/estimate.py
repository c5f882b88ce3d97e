"""When each step of a plan will run on a machine: a simulation of its lanes and signals.

Each lane works through its steps in order; a step starts when its lane is free, what it comes
after has ended and what it waits for has been posted. Work has a time of its own, by the closed
forms of `Costs`; while a matmul and a copy run side by side, both are slower. Eager, the host is a
lane too: it enqueues one step after another.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from counterpoint.costs import Costs, Tile
from counterpoint.errors import PlanError
from counterpoint.machine import Machine
from counterpoint.plan.bind import BoundStep, Box, Part, Program, bind
from counterpoint.plan.steps import Plan
from counterpoint.problem import ITEM_BYTES
from counterpoint.timeline import Span, Timeline

LOCAL_COPY = 3.0  # rate of a copy within a GPU against one to a peer; not calibrated

Tiles = Mapping[tuple[int, int, int], Tile]
NO_TILES: Tiles = MappingProxyType({})


class Ran(NamedTuple):
    """A step that has run: when its lane came to it, when its work began and ended."""

    rank: int
    step: BoundStep
    came_s: float
    start_s: float
    end_s: float


def estimate(
    plan: Plan, machine: Machine, *, eager: bool = False, tiles: Tiles = NO_TILES
) -> Timeline:
    """The predicted timeline of one call, all ranks.

    Args:
        plan: what runs.
        machine: where; its `costs` are the constants of the prediction.
        eager: count the time by which the host enqueues the steps; else as in a CUDA graph.
        tiles: the matmul library's tile for (rows, n, k), where it is known.

    Returns:
        Spans as a profiled run gives them; `source` says whether the machine was measured.

    Raises:
        PlanError: the plan waits for what never comes.
    """
    programs = [bind(plan, rank) for rank in range(plan.problem.ranks)]
    spans: list[Span] = []
    for ran in _Simulation(programs, machine, eager, tiles).run():
        step, came_s, start_s = ran.step.step, ran.came_s, ran.start_s
        if ran.step.waits and step.kind != "barrier" and start_s > came_s:
            label = f"wait for {step.name}"
            spans.append(Span(ran.rank, step.lane, came_s, start_s, "wait", label))
            came_s = start_s
        start_s = came_s if step.kind == "barrier" else start_s
        spans.append(Span(ran.rank, step.lane, start_s, ran.end_s, step.kind, step.name))
    p = plan.problem
    title = f"{p.op} {p.m}, {p.n}, {p.k}: {plan.spec}"
    return Timeline(tuple(spans), title=title, source=source(machine))


def predicted_s(
    plan: Plan, machine: Machine, *, eager: bool = False, tiles: Tiles = NO_TILES
) -> float:
    """Seconds of one call: as `estimate`, of one rank whose peers do as it does.

    The rank is the one that has most to do: see `slowest_rank`.

    Raises:
        PlanError: the plan waits for what never comes.
    """
    program = bind(plan, slowest_rank(plan))
    return max(ran.end_s for ran in _Simulation([program], machine, eager, tiles).run())


def slowest_rank(plan: Plan) -> int:
    """A rank with most rows; of these one whose matmuls are cut most, as their groups wrap."""
    regions = {r for s in plan.steps if s.kind == "matmul" for r in s.reads[:1] + s.writes}
    groups = {tuple(peer[0] if peer else 0 for peer in r.shards) for r in regions}
    groups = tuple(sorted(group for group in groups if len(group) > 1))
    return _most_cut(plan.peers, plan.problem.rows, groups)


@lru_cache(maxsize=1024)
def _most_cut(
    peers: Literal["ring", "xor"], rows: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> int:
    ranks = len(rows)

    def launches(rank: int) -> int:
        """Runs of neighbouring shards, over all groups."""
        count = 0
        for group in groups:
            shards = {(rank + d) % ranks if peers == "ring" else rank ^ d for d in group}
            count += sum(shard - 1 not in shards for shard in shards)
        return count

    return max(range(ranks), key=lambda rank: (rows[rank], launches(rank)))


def source(machine: Machine) -> str:
    """What stands beside a prediction."""
    basis = "measured" if machine.measured else "datasheet"
    return f"predicted for {machine.name} from {basis} rates"


class _Lane:
    """Steps yet to run, and what is under way."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = deque(steps)
        self.came_s: float | None = None  # when the lane came to its first step
        self.current = -1
        self.start_s = 0.0
        self.left_s = 0.0


class _Rank:
    """One simulated rank."""

    def __init__(self, program: Program, machine: Machine, tiles: Tiles) -> None:
        self.program = program
        names = {bound.step.name: i for i, bound in enumerate(program.steps)}
        self.after = [[names[name] for name in b.step.after] for b in program.steps]
        self.work_s = [_work_s(bound, program.plan, machine, tiles) for bound in program.steps]
        kinds = [bound.step.kind for bound in program.steps]
        matmuls_s = sum(s for s, kind in zip(self.work_s, kinds, strict=True) if kind == "matmul")
        settling = machine.costs.settling(matmuls_s)
        self.work_s = [
            s * settling if kind == "matmul" else s
            for s, kind in zip(self.work_s, kinds, strict=True)
        ]
        self.ended = [False] * len(program.steps)
        lanes: dict[str, list[int]] = {}
        for i, bound in enumerate(program.steps):
            lanes.setdefault(bound.step.lane, []).append(i)
        self.lanes = [_Lane(steps) for steps in lanes.values()]

    def kinds(self) -> set[str]:
        """Kinds of the steps that are under way."""
        return {
            self.program.steps[lane.current].step.kind for lane in self.lanes if lane.current >= 0
        }


class _Simulation:
    """All lanes of the ranks given; where it is one, its peers are taken to do as it does."""

    def __init__(
        self, programs: Sequence[Program], machine: Machine, eager: bool, tiles: Tiles
    ) -> None:
        self.costs: Costs = machine.costs
        self.ranks = [_Rank(program, machine, tiles) for program in programs]
        self.alone = len(programs) == 1
        self.eager = eager
        self.posted: set[tuple[int, int, int]] = set()
        self.now_s = 0.0

    def run(self) -> Iterator[Ran]:
        """Steps as they end."""
        while True:
            while any(self._start(rank, lane) for rank in self.ranks for lane in rank.lanes):
                pass
            busy = [(r, lane) for r in self.ranks for lane in r.lanes if lane.current >= 0]
            if not busy:
                waiting = [(r, lane) for r in self.ranks for lane in r.lanes if lane.steps]
                if not waiting:
                    return
                later = [self._enqueued_s(lane.steps[0]) for _, lane in waiting]
                later = [t for t in later if t > self.now_s]
                if not later:
                    rank, lane = waiting[0]
                    step = rank.program.steps[lane.steps[0]].step.name
                    problem = "waits for what never comes"
                    raise PlanError(rank.program.plan.spec, problem, step=step)
                self.now_s = min(later)
                continue
            slowness = {id(rank): self._slowness(rank) for rank in self.ranks}
            factors = [self._factor(rank, lane, slowness[id(rank)]) for rank, lane in busy]
            step_s = min(
                lane.left_s * factor for (_, lane), factor in zip(busy, factors, strict=True)
            )
            if self.eager:
                later = [
                    self._enqueued_s(lane.steps[0]) - self.now_s
                    for r in self.ranks for lane in r.lanes if lane.steps and lane.current < 0
                ]  # fmt: skip
                step_s = min([step_s, *(t for t in later if t > 0)])
            self.now_s += step_s
            for (rank, lane), factor in zip(busy, factors, strict=True):
                lane.left_s -= step_s / factor
                if lane.left_s <= 1e-12:
                    yield self._end(rank, lane)

    def _start(self, rank: _Rank, lane: _Lane) -> bool:
        """Start what can start on a lane; whether anything changed."""
        if lane.current >= 0 or not lane.steps:
            return False
        i = lane.steps[0]
        if self._enqueued_s(i) > self.now_s or not all(rank.ended[j] for j in rank.after[i]):
            return False
        bound = rank.program.steps[i]
        if lane.came_s is None:
            lane.came_s = self.now_s
            if bound.step.kind == "barrier":
                self._post(rank, bound)
        me = rank.program.rank
        for slot, peer in bound.waits:
            key = (0, slot, 0) if self.alone else (peer, slot, me)
            if key not in self.posted:
                return False
        if bound.step.kind == "barrier" and bound.step.after and "matmul" in rank.kinds():
            return False  # a persistent matmul leaves no room for what is launched after it
        lane.steps.popleft()
        lane.current, lane.start_s = i, self.now_s
        waits = bool(bound.waits) and bound.step.kind != "barrier"
        lane.left_s = rank.work_s[i] + (self.costs.kernel_s if waits else 0.0)
        return True

    def _end(self, rank: _Rank, lane: _Lane) -> Ran:
        i = lane.current
        bound = rank.program.steps[i]
        rank.ended[i] = True
        if bound.step.kind != "barrier":
            self._post(rank, bound)
        assert lane.came_s is not None
        ran = Ran(rank.program.rank, bound, lane.came_s, lane.start_s, self.now_s)
        lane.current, lane.came_s = -1, None
        return ran

    def _post(self, rank: _Rank, bound: BoundStep) -> None:
        for slot, peer in bound.posts:
            self.posted.add((0, slot, 0) if self.alone else (rank.program.rank, slot, peer))

    def _enqueued_s(self, i: int) -> float:
        """When the host has enqueued step i."""
        return self.costs.host_call_s + (i + 1) * self.costs.host_step_s if self.eager else 0.0

    def _slowness(self, rank: _Rank) -> tuple[float, float]:
        """Factors on the time of matmuls and of copies."""
        kinds = rank.kinds()
        both = "copy" in kinds and "matmul" in kinds
        return (
            (self.costs.matmul_beside_copy, self.costs.copy_beside_matmul) if both else (1.0, 1.0)
        )

    def _factor(self, rank: _Rank, lane: _Lane, slowness: tuple[float, float]) -> float:
        kind = rank.program.steps[lane.current].step.kind
        return slowness[0] if kind == "matmul" else slowness[1] if kind == "copy" else 1.0


def _work_s(bound: BoundStep, plan: Plan, machine: Machine, tiles: Tiles) -> float:
    """Seconds of a step by itself."""
    costs, kind = machine.costs, bound.step.kind
    match kind:
        case "barrier":
            return costs.barrier_s
        case "matmul":
            return sum(_matmul_s(bound, part, plan, machine, tiles) for part in bound.parts)
        case "copy":
            return _copies_s(bound, plan, machine)
        case "collective":
            # of the whole buffer, the part that is not this rank's comes over the link
            gathers = bound.step.arg("collective") == "all_gather"
            whole = (bound.step.writes if gathers else bound.step.reads)[0].buffer
            p = plan.problem
            return costs.collective_s(
                plan.buffer_bytes(plan.buffer(whole)) * (p.m - min(p.rows)) // max(p.m, 1)
            )
        case _:
            return sum(
                costs.memory_s(sum(_num_bytes(plan, box) for box in (*part.reads, part.write)))
                for part in bound.parts
            )


def _matmul_s(bound: BoundStep, part: Part, plan: Plan, machine: Machine, tiles: Tiles) -> float:
    rows, n = part.write.shape
    k = part.reads[0].shape[0 if bound.step.arg("contract") == "rows" else 1]
    costs, tile = machine.costs, tiles.get((rows, n, k))
    seconds = costs.matmul_s(rows, n, k, plan.problem.item_bytes, machine.sms, tile)
    if bound.step.accumulates:
        # a sum in fp32, which every pass reads and writes
        seconds = max(seconds, costs.memory_s(2 * _num_bytes(plan, part.write)))
    return seconds


def _copies_s(bound: BoundStep, plan: Plan, machine: Machine) -> float:
    """Of a batch of copies: one after another on a switch; on a mesh each peer has its own link."""
    costs = machine.costs
    by_peer: dict[int, float] = {}
    for part in bound.parts:
        source, target = part.reads[0], part.write
        cols = source.c1 - source.c0
        row_bytes = (
            cols * plan.problem.item_bytes if cols < plan.buffer(source.buffer).shape[1] else 0
        )
        num_bytes = _num_bytes(plan, target)
        peers = {source.rank, target.rank}
        if len(peers) == 1:
            num_bytes = int(num_bytes / LOCAL_COPY)
        elif machine.link.topology == "mesh":
            num_bytes *= machine.num_devices - 1
        peer = -1 if machine.link.topology != "mesh" else source.rank + target.rank
        by_peer[peer] = by_peer.get(peer, 0.0) + costs.copy_s(num_bytes, row_bytes)
    return max(by_peer.values(), default=0.0)


def _num_bytes(plan: Plan, box: Box) -> int:
    rows, cols = box.shape
    return rows * cols * ITEM_BYTES[plan.buffer(box.buffer).dtype]
