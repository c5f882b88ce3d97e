"""When each step of a plan will run on a machine: a simulation of its lanes and signals.

Each lane works through its steps in order; a step starts when its lane is free, what it comes
after has ended and what it waits for has been posted. Work has a time of its own: `work_s`. While a
matmul and a copy run side by side, both are slower. A matmul takes all SMs: kernels that become
ready beside it start when it ends. Eager, the host is a lane too: it enqueues one step after
another.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from counterpoint.costs import NO_TILES, Costs, Tiles
from counterpoint.errors import PlanError
from counterpoint.machine import Machine
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.model.slowest_rank import MAX_RANKS, slowest_rank
from counterpoint.model.work import Work, receiver, works
from counterpoint.plan.bind import BoundStep, Program, bind
from counterpoint.plan.launches import HELD_BACK_S, batches, held_back, in_no_graph
from counterpoint.plan.steps import Plan
from counterpoint.ranges import instance
from counterpoint.timeline import Span, Timeline

# what a call with side lanes costs beside its steps, as starts of kernels: a fork, an edge between
# lanes and a join; 2xH200, Llama-3 70B at 64 and 512 tokens, in a graph
SIDE_STARTS = 3
MAX_REGIONS = 2**16  # of a rank
# kernels that find no room beside a persistent matmul; an exchange is one of NCCL's
KERNELS = frozenset({"barrier", "exchange", "reduce", "fold"})


class Ran(NamedTuple):
    """A step that has run: when its lane came to it, when its work began and ended."""

    rank: int
    step: BoundStep
    came_s: float
    start_s: float
    end_s: float


def estimate(
    plan: Plan, machine: MachineLike, *, eager: bool = False, tiles: Tiles = NO_TILES
) -> Timeline:
    """The predicted timeline of one call, all ranks; of more than 64 the one with most rows.

    Args:
        plan: what runs.
        machine: where, given as to `choose`; predictions stand on its `costs`.
        eager: count the time by which the host enqueues the steps; else as in a CUDA graph.
        tiles: the matmul library's tile for (rows, n, k), where it is known.

    Returns:
        Spans as a profiled run gives them; `source` says whether the machine was measured.

    Raises:
        InputError: an argument is of another kind, or there is no such machine.
        PlanError: the plan waits for what never comes.
    """
    instance("estimate", "plan", plan, Plan)
    machine = machine_of("estimate", machine)
    instance("estimate", "eager", eager, bool)
    programs = _programs(plan, machine, tiles, plan.problem.ranks > MAX_RANKS)
    spans: list[Span] = []
    for ran in _Simulation(programs, machine, tiles, eager=eager).run():
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
    """Seconds of one call: as `estimate`, where rows are equal from one rank alone.

    Its peers then do as it does; it is the one that has most to do: see `slowest_rank`.

    Raises:
        PlanError: the plan waits for what never comes.
    """
    equal = len(set(plan.problem.rows)) == 1 or plan.problem.ranks > MAX_RANKS
    programs = _programs(plan, machine, tiles, equal)
    return max(ran.end_s for ran in _Simulation(programs, machine, tiles, eager=eager).run())


def replayed_s(program: Program, machine: Machine, measured: Mapping[str, Work]) -> float:
    """Seconds of one call, in a graph, if the steps of one rank take what was measured of them.

    Its peers do as it does. Steps that were not measured, copies say, take what the machine's
    `costs` say.

    Args:
        measured: by the names of steps.

    Raises:
        PlanError: the plan waits for what never comes.
    """
    simulation = _Simulation([program], machine, NO_TILES, measured=measured)
    return max(ran.end_s for ran in simulation.run())


def _programs(plan: Plan, machine: Machine, tiles: Tiles, one: bool) -> list[Program]:
    """What is simulated: all ranks, or the slowest alone."""
    regions = sum(len(s.reads) + len(s.writes) + len(s.waits) + len(s.posts) for s in plan.steps)
    if regions > MAX_REGIONS:
        problem = f"{regions} regions and signals, more than {MAX_REGIONS}: too many to estimate"
        raise PlanError(plan.spec, problem)
    ranks = (slowest_rank(plan, machine, tiles),) if one else range(plan.problem.ranks)
    return [bind(plan, rank) for rank in ranks]


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
        self.behind: int | None = None  # the matmul that its first step found under way; -1: none


class _Rank:
    """One simulated rank."""

    def __init__(
        self, program: Program, machine: Machine, tiles: Tiles, measured: Mapping[str, Work]
    ) -> None:
        self.program = program
        names = {bound.step.name: i for i, bound in enumerate(program.steps)}
        self.after = [[names[name] for name in b.step.after] for b in program.steps]
        priced = works(program, machine, tiles)
        found = [measured.get(b.step.name, w) for b, w in zip(program.steps, priced, strict=True)]
        self.work_s = [work.seconds for work in found]
        self.turns = machine.device.one_at_a_time
        steps = range(len(program.steps))
        self.held_back = {i for i in steps if not self.turns and held_back(program, i)}
        for i in self.held_back:
            self.work_s[i] += HELD_BACK_S
        self.beside_copy = [work.beside_copy for work in found]
        self.into = [receiver(bound) for bound in program.steps]
        self.ended = [False] * len(program.steps)
        lanes: dict[str, list[int]] = {}
        main_lane = program.plan.lanes[0].name
        for i, bound in enumerate(program.steps):
            in_turn = self.turns and bound.step.kind not in ("copy", "exchange")
            lanes.setdefault(main_lane if in_turn else bound.step.lane, []).append(i)
        self.lanes = [_Lane(steps) for steps in lanes.values()]
        main = lanes.get(main_lane, [])
        if main and len(lanes) > 1:  # side lanes fork from it, and it joins them behind its last
            last = next(launch[0] for launch in batches(program) if main[-1] in launch)
            self.work_s[last] += SIDE_STARTS * machine.costs.kernel_s

    def in_launch_order(self) -> list[_Lane]:
        """Lanes that have steps yet, by the first of them: of those ready at once it is first."""
        return sorted((lane for lane in self.lanes if lane.steps), key=lambda lane: lane.steps[0])

    def has_room(self, lane: _Lane, now_s: float) -> bool:
        """Whether the first step of a lane, ready now, has SMs: see `KERNELS`.

        Of those that become ready at once a matmul is the first, but while it is held back.
        """
        step = self.program.steps[lane.steps[0]].step
        opens = step.kind == "barrier" and not step.after  # launched before all others
        if self.turns or step.kind not in KERNELS or opens:
            return True
        if lane.behind is None:
            under_way = (
                other.current
                for other in self.lanes
                if other.current >= 0
                and self.program.steps[other.current].step.kind == "matmul"
                and not (other.current in self.held_back and now_s < other.start_s + HELD_BACK_S)
            )
            lane.behind = next(under_way, -1)
        return lane.behind < 0 or self.ended[lane.behind]

    def kinds(self) -> set[str]:
        """Kinds of the steps that are under way."""
        return {
            self.program.steps[lane.current].step.kind for lane in self.lanes if lane.current >= 0
        }


class _Simulation:
    """All lanes of the ranks given; where it is one, its peers are taken to do as it does."""

    def __init__(
        self, programs: Sequence[Program], machine: Machine, tiles: Tiles, *, eager: bool = False,
        measured: Mapping[str, Work] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.costs: Costs = machine.costs
        self.ranks = [_Rank(program, machine, tiles, measured) for program in programs]
        self.alone = len(programs) == 1
        # what slows matmuls and is slowed by them: a NIC has an engine, a CPU's is its cores
        self.copies = {"copy", "exchange"} if machine.device.one_at_a_time else {"copy"}
        # equal copies go to one rank each, and on a mesh each pair has its own link
        unequal = len(set(programs[0].plan.problem.rows)) > 1
        self.shares = unequal and machine.link.topology != "mesh"
        self.eager = eager or in_no_graph(programs[0].plan)
        launches = enumerate(batches(programs[0]), 1)
        self.launched = {i: number for number, steps in launches for i in steps}
        self.posted: set[tuple[int, int, int]] = set()
        self.now_s = 0.0

    def run(self) -> Iterator[Ran]:
        """Steps as they end."""
        while True:
            while any(self._start(r, lane) for r in self.ranks for lane in r.in_launch_order()):
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
            kinds = {id(rank): rank.kinds() for rank in self.ranks}
            into = Counter(rank.into[lane.current] for rank, lane in busy if self.shares)
            del into[-1]
            factors = [self._factor(rank, lane, kinds[id(rank)], into) for rank, lane in busy]
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
        if not rank.has_room(lane, self.now_s):
            return False
        lane.steps.popleft()
        lane.current, lane.start_s, lane.behind = i, self.now_s, None
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
        if not self.eager:
            return 0.0
        return self.costs.host_call_s + self.launched[i] * self.costs.host_step_s

    def _factor(self, rank: _Rank, lane: _Lane, kinds: set[str], into: Counter[int]) -> float:
        """What the time of the step under way is multiplied by, for what runs beside it."""
        if rank.program.steps[lane.current].step.kind not in self.copies:
            return rank.beside_copy[lane.current] if kinds & self.copies else 1.0
        slowness = self.costs.copy_beside_matmul if "matmul" in kinds else 1.0
        # what comes to one rank from several shares its link
        return slowness * max(into[rank.into[lane.current]], 1)
