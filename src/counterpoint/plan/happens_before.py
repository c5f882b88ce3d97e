"""Which event is before which: begin and end of every step, on every rank, over several calls.

An event is before another by lane order, by `after`, from a post to its wait, and because a call
ends before the next of its rank begins. A barrier posts at its begin and waits at its end; every
other step waits at its begin and posts at its end. A collective begins on all ranks before it ends
on any; a kernel that spins on its peers, on all ranks of an island. An exchange ends once those
that it sends to and gets from have begun it.
"""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NoReturn

from counterpoint.errors import PlanError
from counterpoint.plan.bind import Program


class HappensBefore:
    """The order of events, closed under transitivity.

    Raises:
        PlanError: a post and a wait do not pair, or events wait for one another in a cycle; the
            cycle is looked for once with lanes side by side and once with all SM steps of a rank
            one after the other in tuple order, as when each fills the GPU.
    """

    def __init__(self, programs: tuple[Program, ...], calls: int) -> None:
        self.programs = programs
        self.plan = programs[0].plan
        self.calls = calls
        self.num_steps = len(self.plan.steps)
        self._stride = 2 * self.num_steps + 2
        self.num_events = calls * len(programs) * self._stride
        edges = [
            *self._order_of_a_rank(),
            *self._signals(),
            *self._collectives(),
            *self._exchanges(),
        ]
        self.order = self._sorted([*edges, *self._one_after_another()], "launched in tuple order, ")
        self.order = self._sorted(edges, "")
        self._before = self._closure(edges)

    def start(self, call: int, rank: int) -> int:
        """The user has written the inputs of a call."""
        return (call * len(self.programs) + rank) * self._stride

    def begin(self, call: int, rank: int, step: int) -> int:
        """The step may read and write from here."""
        return self.start(call, rank) + 1 + 2 * step

    def end(self, call: int, rank: int, step: int) -> int:
        """The step has read and written."""
        return self.begin(call, rank, step) + 1

    def stop(self, call: int, rank: int) -> int:
        """The user reads the outputs of a call."""
        return self.start(call, rank) + self._stride - 1

    def before(self, first: int, second: int) -> bool:
        """Whether `first` has happened whenever `second` happens."""
        return first == second or bool(self._before[second] >> first & 1)

    def locate(self, event: int) -> tuple[int, int, int | None]:
        """(call, rank, step) of an event; step None for start and stop."""
        place, local = divmod(event, self._stride)
        call, rank = divmod(place, len(self.programs))
        return call, rank, (local - 1) // 2 if 0 < local < self._stride - 1 else None

    def name(self, event: int) -> str:
        """The event for a message."""
        call, rank, step = self.locate(event)
        what = "the user" if step is None else repr(self.plan.steps[step].name)
        return f"{what} on rank {rank}" + (f", call {call}" if call else "")

    def _everywhere(self) -> Iterable[tuple[int, int]]:
        return ((c, r) for c in range(self.calls) for r in range(len(self.programs)))

    def _order_of_a_rank(self) -> Iterable[tuple[int, int]]:
        steps = self.plan.steps
        index = {step.name: i for i, step in enumerate(steps)}
        for c, r in self._everywhere():
            if c:
                yield self.stop(c - 1, r), self.start(c, r)
            last: dict[str, int] = {}
            for i, step in enumerate(steps):
                yield self.start(c, r), self.begin(c, r, i)
                yield self.begin(c, r, i), self.end(c, r, i)
                yield self.end(c, r, i), self.stop(c, r)
                if step.lane in last:
                    yield self.end(c, r, last[step.lane]), self.begin(c, r, i)
                last[step.lane] = i
                for name in step.after:
                    yield self.end(c, r, index[name]), self.begin(c, r, i)

    def _signals(self) -> Iterable[tuple[int, int]]:
        posts: dict[tuple[int, int], tuple[int, int]] = {}
        waits: dict[tuple[int, int], tuple[int, int, int]] = {}
        for r, program in enumerate(self.programs):
            for i, bound in enumerate(program.steps):
                name = bound.step.name
                for slot, to in bound.posts:
                    if (slot, to) in posts:
                        self._fail(f"slot {slot} of rank {to} is posted twice in a call", name)
                    posts[slot, to] = r, i
                for slot, source in bound.waits:
                    if (slot, r) in waits:
                        self._fail(f"slot {slot} of rank {r} is waited for twice in a call", name)
                    waits[slot, r] = source, i, r
        for (slot, rank), (source, i, _) in waits.items():
            if posts.get((slot, rank), (None,))[0] != source:
                problem = (
                    f"rank {rank} waits for slot {slot} from rank {source}, which never posts it"
                )
                self._fail(problem, self.plan.steps[i].name)
        for slot, rank in posts.keys() - waits.keys():
            name = self.plan.steps[posts[slot, rank][1]].name
            self._fail(f"slot {slot} is posted to rank {rank}, which never waits for it", name)
        barrier = [step.kind == "barrier" for step in self.plan.steps]
        for (slot, rank), (r, i) in posts.items():
            _, j, _ = waits[slot, rank]
            for c in range(self.calls):
                post = self.begin(c, r, i) if barrier[i] else self.end(c, r, i)
                yield post, self.end(c, rank, j) if barrier[j] else self.begin(c, rank, j)

    def _collectives(self) -> Iterable[tuple[int, int]]:
        ranks = len(self.programs)
        for i, step in enumerate(self.plan.steps):
            if step.kind == "collective" or step.spins:
                size = ranks if step.kind == "collective" else ranks // self.plan.problem.islands
                for c, r in self._everywhere():
                    mates = range(r // size * size, (r // size + 1) * size)
                    yield from ((self.begin(c, other, i), self.end(c, r, i)) for other in mates)

    def _exchanges(self) -> Iterable[tuple[int, int]]:
        for i, step in enumerate(self.plan.steps):
            if step.kind == "exchange":
                for c, r in self._everywhere():
                    for other in self.plan.met(step, r):
                        yield self.begin(c, other, i), self.end(c, r, i)

    def _one_after_another(self) -> Iterable[tuple[int, int]]:
        # a copy that waits does so in a kernel, and an exchange is one
        sm = [
            i
            for i, s in enumerate(self.plan.steps)
            if self.plan.lane(s.lane).engine != "copy" or s.waits
        ]
        for c, r in self._everywhere():
            for i, j in pairwise(sm):
                yield self.end(c, r, i), self.begin(c, r, j)

    def _sorted(self, edges: list[tuple[int, int]], how: str) -> list[int]:
        """Events in an order that keeps all edges; PlanError names a cycle."""
        try:
            return [*TopologicalSorter(self._predecessors(edges)).static_order()]
        except CycleError as error:
            circle: list[int] = error.args[1]
            names = ", ".join(list(dict.fromkeys(map(self.name, sorted(circle))))[:6])
            self._fail(f"deadlock: {how}these wait for one another: {names}")

    def _closure(self, edges: list[tuple[int, int]]) -> list[int]:
        predecessors = self._predecessors(edges)
        before = [0] * self.num_events
        for event in self.order:
            for first in predecessors[event]:
                before[event] |= before[first] | 1 << first
        return before

    def _predecessors(self, edges: list[tuple[int, int]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {event: [] for event in range(self.num_events)}
        for first, second in edges:
            found[second].append(first)
        return found

    def _fail(self, problem: str, step: str = "") -> NoReturn:
        raise PlanError(self.plan.spec, problem, step=step)
