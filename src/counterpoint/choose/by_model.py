"""The plan with the smallest predicted time: closed forms sort out, simulations decide.

Serial is a candidate like the others, and wins unless another is faster by more than predictions
are off: see gains.py.
"""

from collections.abc import Mapping, Sequence
from math import inf, nan

from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.gains import MARGINS, MIN_GAIN_S
from counterpoint.costs import NO_TILES, Costs, Tiles, own_matmul
from counterpoint.machine import Machine, kernels_refused
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build, parse
from counterpoint.plan.launches import has_kernels
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.schedules import finer
from counterpoint.schedules.expected_rows import once
from counterpoint.schedules.invariant import varies

MAX_SIMULATED = 5  # besides serial
# of plans as close as that, the finest, of most steps that wait: a late copy holds up less then
TIE = 1.01
# but where kernels in a row are as close as predictions are off, they are taken: there is no side
# stream that a late copy or the host may hold up
ROW_TIE = 1.03
ROW_TIE_S = 5e-6  # of what a side stream costs beyond the model: signals and copies that are late


def by_model(
    problem: Problem, machine: Machine, *, eager: bool = False, tiles: Tiles = NO_TILES,
    words_limit: int | None = None,
) -> Choice:  # fmt: skip
    """Choose for `problem` on `machine` by prediction.

    Args:
        eager: count the host's time.
        tiles: the matmul library's tile for (rows, n, k), where it is known.
        words_limit: most bytes of low-latency words that a plan may need; None: any.
    """
    in_a_row, others = candidates(problem, machine)
    weighed = _Weighed(problem, machine, eager, tiles)
    weighed.limits |= varying(problem, machine)
    serial_s = weighed.simulate("serial")
    for spec in (*weighed.closest(others), *in_a_row):
        plan = build(problem, spec, machine)
        if words_limit is not None and plan.num_bytes("words") > words_limit:
            weighed.limits[spec] = "needs memory for words, which cannot be made now"
        else:
            weighed.simulate(spec)

    margin = MARGINS[machine.measured is not None]
    enough_s = {  # what a plan has to be faster than; kernels in a row start no later than serial
        spec: min(serial_s / margin, serial_s - (0.0 if spec in in_a_row else MIN_GAIN_S))
        for spec in weighed.times
    }
    instead, why_not_serial = problem.operation.without_serial(problem)
    chosen = instead if instead in weighed.times else _chosen(weighed, enough_s, in_a_row)

    def verdict(spec: str, seconds: float) -> str:
        if spec == chosen:
            return "chosen"
        if chosen == instead:
            return why_not_serial
        if seconds > weighed.times[chosen]:
            return "slower"
        if spec != "serial" and seconds > enough_s[spec]:
            least = f" and {MIN_GAIN_S * 1e6:.0f} us" if spec not in in_a_row else ""
            return f"not {margin - 1:.0%}{least} faster than serial: predictions may be so far off"
        if chosen in in_a_row:
            late = f"{ROW_TIE - 1:.0%} or {ROW_TIE_S * 1e6:.0f} us"
            return f"within {late}, which its side streams may cost"
        if weighed.waits[spec] == weighed.waits[chosen]:
            return "as fast"
        return f"within {TIE - 1:.0%}, and late copies hold up the one chosen less"

    table = [Candidate(s, t, "simulated", verdict(s, t)) for s, t in weighed.times.items()]
    table += [
        Candidate(s, t, "closed form", f"not simulated: {MAX_SIMULATED} plans have better guesses")
        for s, t in weighed.guesses.items()
        if s not in weighed.times and s not in weighed.limits
    ]
    table.sort(key=lambda c: (c.basis == "closed form", c.seconds))
    table += [Candidate(s, nan, "refused", why) for s, why in weighed.limits.items()]
    compute_s, comm_s = parts_s(problem, machine, tiles)
    return Choice(problem, machine, chosen, tuple(table), eager, "model", compute_s, comm_s, tiles)


class _Weighed:
    """The plans of a problem: their times, guessed or simulated, or why none may be taken."""

    def __init__(self, problem: Problem, machine: Machine, eager: bool, tiles: Tiles) -> None:
        self.problem, self.machine, self.eager, self.tiles = problem, machine, eager, tiles
        self.times: dict[str, float] = {}
        self.waits: dict[str, int] = {}  # steps that wait for a signal
        self.guesses: dict[str, float] = {}
        self.limits: dict[str, str] = {}

    def closest(self, specs: list[str]) -> list[str]:
        """Those to simulate: all where they are few, else the fastest by closed forms."""
        if len(specs) <= MAX_SIMULATED:
            return specs
        self.guesses = {spec: self._guess_s(spec) for spec in specs}
        found: list[str] = []
        # what may not be taken takes no place among those that are simulated
        for spec in sorted(specs, key=self.guesses.__getitem__):
            if len(found) == MAX_SIMULATED:
                break
            if why := refusal(build(self.problem, spec, self.machine), self.machine):
                self.limits[spec] = why
            else:
                found.append(spec)
        return found

    def simulate(self, spec: str) -> float:
        """The time of a plan, if a chooser may take it; nan if not."""
        plan = build(self.problem, spec, self.machine)
        if spec != "serial" and (why := refusal(plan, self.machine)):
            self.limits[spec] = why
            return nan
        seconds = predicted_s(plan, self.machine, eager=self.eager, tiles=self.tiles)
        self.times[spec], self.waits[spec] = seconds, sum(bool(s.waits) for s in plan.steps)
        return seconds

    def _guess_s(self, spec: str) -> float:
        family, options = parse(self.problem, spec)
        guess = family.guess_s
        return guess(self.problem, options, self.machine, self.tiles) if guess else inf


def _chosen(weighed: _Weighed, enough_s: Mapping[str, float], in_a_row: Sequence[str]) -> str:
    """Of those that gain enough the fastest; of those as fast, kernels in a row or the finest."""
    times = {s: t for s, t in weighed.times.items() if s != "serial" and t <= enough_s[s]}
    if not times:
        return "serial"
    fastest_s = min(times.values())
    rows = [s for s in times if s in in_a_row]
    best = min(rows, key=times.__getitem__, default="")
    if best and times[best] <= max(fastest_s * ROW_TIE, fastest_s + ROW_TIE_S):
        return best
    close = [s for s, t in times.items() if t <= fastest_s * TIE]
    return min(close, key=lambda spec: (-weighed.waits[spec], times[spec]))


def candidates(problem: Problem, machine: Machine) -> tuple[list[str], list[str]]:
    """Specs besides serial that it allows: kernels in a row, and plans of several lanes."""
    if problem.ranks == 1:
        return [], []
    operation = problem.operation
    in_a_row: list[str] = []
    others: list[str] = []
    ruled_out, is_mesh = varying(problem, machine), machine.link.topology == "mesh"
    for spec in operation.candidates(problem):
        family = operation.family(spec.split()[0])
        assert family is not None, "an operation names its own"
        # where one pair of several has all of the bandwidth, an exchange with all peers gains
        # nothing, and smaller chunks cost: docs/results/losses.md
        too_fine = family.name in finer.NAMES and not (problem.ranks == 2 or is_mesh)
        if spec == "serial" or family.refusal(problem) or too_fine:
            continue
        if spec not in ruled_out:
            (in_a_row if family.in_a_row else others).append(spec)
    return in_a_row, others


def varying(problem: Problem, machine: Machine) -> dict[str, str]:
    """Specs by which bits would depend on M, where the problem is batch-invariant, and why."""
    found: dict[str, str] = {}
    for spec in problem.operation.candidates(problem) if problem.invariant else ():
        family, options = parse(problem, spec)
        if family.refusal(problem):
            continue
        if why := varies(family.build(problem, options, machine)):
            found[spec] = f"not batch-invariant: {why}"
    return found


def refusal(plan: Plan, machine: Machine) -> str:
    """Why no chooser may take `plan`, or ''."""
    if has_kernels(plan) and (why := kernels_refused(machine.device.capability)):
        return why
    limit, used = plan.problem.scratch_bytes_limit, plan.workspace_bytes
    too_much = limit and used > limit
    return f"needs {used} bytes of scratch, the limit is {limit}" if too_much else ""


def parts_s(problem: Problem, machine: Machine, tiles: Tiles = NO_TILES) -> tuple[float, float]:
    """Seconds of the matmuls (or lookups) alone, each in one piece, and of the communication alone.

    Lower bounds of every plan: the communication is that of copies without overhead or of the
    library, whichever is faster.
    """
    costs: Costs = machine.costs
    compute_s = 0.0
    count = max(problem.experts, 1)
    for rows, n, k in problem.operation.matmuls(problem):
        tile = tiles.get((rows // count, n, k))
        factor = own_matmul(rows) if problem.invariant else 1.0
        compute_s += factor * costs.matmul_s(
            rows // count, n, k, problem.operand_bytes, machine.sms, tile, count=count
        )
    compute_s *= costs.settling(compute_s)
    if computed_s := problem.operation.computed_s:
        compute_s += computed_s(problem, machine)  # by memory, at any clock
    rate = max(costs.copy_bytes_per_s, costs.collective_bytes_per_s)
    comm_s = problem.link_bytes * once(problem, 1) / rate
    if problem.islands > 1 and machine.nic is not None:
        # what every rank sends of its own, once to each other island; rows for experts and pooled
        # ones, to each rank
        size = problem.ranks // problem.islands
        to = (problem.islands - 1) * (size if problem.tables or problem.experts else 1)
        far = problem.link_bytes * once(problem, size) * to / (problem.ranks - 1)
        comm_s = max(comm_s, far / machine.nic.bytes_per_s)
    return compute_s, comm_s


def part_rows(problem: Problem) -> tuple[int, ...]:
    """How many rows a plan may multiply at a time: groups of shards, parts of one, and all."""
    operation = problem.operation
    families = (operation.family(spec.split()[0]) for spec in operation.candidates(problem))
    if all(family is not None and family.in_a_row for family in families):
        return (problem.m,) if problem.m else ()
    shard = max(problem.rows)
    parts = {shard * count for count in range(1, problem.ranks + 1)}
    parts |= {shard // chunks for chunks in (2, 4)} | {problem.m}
    return tuple(sorted(rows for rows in parts if rows))
