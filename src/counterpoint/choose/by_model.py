"""The plan with the smallest predicted time: closed forms sort out, simulations decide.

Serial is a candidate like the others, and wins unless another is faster by more than predictions
are off: see MARGINS.
"""

from counterpoint.choose.choice import Candidate, Choice
from counterpoint.costs import NO_TILES, Costs, Tiles
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan import finer
from counterpoint.plan.families import build, parse
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

MAX_SIMULATED = 5  # besides serial
# a plan has to be predicted this much faster than serial: on measured machines predictions are off
# by 5 % in the median, most of it common to all plans of a shape; a datasheet may be far off
MARGINS = {True: 1.03, False: 1.15}
# and this much: an eager call of a plan is the launch of a graph, which starts that much later than
# two kernels do (4xH200, 2026-11)
MIN_GAIN_S = 10e-6
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
    ours, specs = candidates(problem, machine)
    guesses: dict[str, float] = {}
    limits: dict[str, str] = {}
    if len(specs) > MAX_SIMULATED:
        guesses = {spec: _guess_s(problem, spec, machine, tiles) for spec in specs}
        specs = sorted(specs, key=guesses.__getitem__)
        # what may not be taken takes no place among those that are simulated
        first: list[str] = []
        while specs and len(first) < MAX_SIMULATED:
            spec = specs.pop(0)
            if why := refusal(build(problem, spec, machine)):
                limits[spec] = why
            else:
                first.append(spec)
        specs = first
    specs += ours
    serial_s = predicted_s(build(problem, "serial", machine), machine, eager=eager, tiles=tiles)
    times: dict[str, float] = {}
    steps: dict[str, int] = {}
    for spec in specs:
        plan = build(problem, spec, machine)
        why = refusal(plan)
        if words_limit is not None and plan.num_bytes("words") > words_limit:
            why = "needs memory for words, which cannot be made now"
        if why:
            limits[spec] = why
            continue
        times[spec] = predicted_s(plan, machine, eager=eager, tiles=tiles)
        steps[spec] = sum(bool(step.waits) for step in plan.steps)

    margin = MARGINS[machine.measured is not None]

    def enough_s(spec: str) -> float:
        """What a plan has to be faster than; kernels in a row start no later than serial."""
        return min(serial_s / margin, serial_s - (0.0 if spec in ours else MIN_GAIN_S))

    chosen = "serial"
    if times:
        fastest_s = min((times[spec] for spec in times if times[spec] <= enough_s(spec)), default=0)
        close = [spec for spec in times if times[spec] <= min(fastest_s * TIE, enough_s(spec))]
        chosen = min(close, key=lambda spec: (-steps[spec], times[spec]), default="serial")
        best = min((s for s in ours if s in times), key=times.__getitem__, default="")
        close_s = max(fastest_s * ROW_TIE, fastest_s + ROW_TIE_S)
        if best and times[best] <= min(close_s, enough_s(best)):
            chosen = best

    def verdict(spec: str, seconds: float) -> str:
        if spec == chosen:
            return "chosen"
        if spec == "serial":
            return "slower"
        if seconds > enough_s(spec):
            least = f" and {MIN_GAIN_S * 1e6:.0f} us" if spec not in ours else ""
            return f"not {margin - 1:.0%}{least} faster than serial"
        if seconds > times[chosen]:
            return "slower"
        return "as fast, and of more parts" if chosen in ours else "as fast, and no more waits"

    table = [Candidate("serial", serial_s, "simulated", verdict("serial", serial_s))]
    table += [Candidate(s, t, "simulated", verdict(s, t)) for s, t in times.items()]
    table += [
        Candidate(s, t, "closed form", "not among the closest")
        for s, t in guesses.items()
        if s not in times and s not in limits
    ]
    table.sort(key=lambda c: (c.basis == "closed form", c.seconds))
    table += [Candidate(s, float("nan"), "refused", why) for s, why in limits.items()]
    compute_s, comm_s = parts_s(problem, machine, tiles)
    return Choice(problem, machine, chosen, tuple(table), eager, "model", compute_s, comm_s, tiles)


def candidates(problem: Problem, machine: Machine) -> tuple[list[str], list[str]]:
    """Specs besides serial that it allows: kernels in a row, and plans of several lanes."""
    if problem.ranks == 1:
        return [], []
    operation = operation_of(problem.op)
    in_a_row: list[str] = []
    others: list[str] = []
    for spec in operation.candidates(problem):
        family = operation.family(spec.split()[0])
        assert family is not None, "an operation names its own"
        # where one pair has all of the bandwidth, an exchange with all peers gains nothing, and
        # smaller chunks cost: docs/losses.md
        finer_than_shards = family.name in finer.NAMES and machine.link.topology != "mesh"
        if spec != "serial" and not family.refusal(problem) and not finer_than_shards:
            (in_a_row if family.in_a_row else others).append(spec)
    return in_a_row, others


def refusal(plan: Plan) -> str:
    """Why no chooser may take `plan`, or ''."""
    limit, used = plan.problem.scratch_bytes_limit, plan.workspace_bytes
    if limit and used > limit:
        return f"needs {used} bytes of scratch, the limit is {limit}"
    sums = any(b.dtype == "float32" != plan.problem.dtype for b in plan.buffers)
    return "sums in an fp32 scratch, which only an explicit plan= may take" if sums else ""


def parts_s(problem: Problem, machine: Machine, tiles: Tiles = NO_TILES) -> tuple[float, float]:
    """Seconds of the matmuls alone, each in one piece, and of the communication alone.

    Lower bounds of every plan: the communication is that of copies without overhead or of the
    library, whichever is faster.
    """
    costs: Costs = machine.costs
    compute_s = 0.0
    count = max(problem.experts, 1)
    for rows, n, k in operation_of(problem.op).matmuls(problem):
        tile = tiles.get((rows, n, k))
        compute_s += costs.matmul_s(
            rows // count, n, k, problem.item_bytes, machine.sms, tile, count=count
        )
    rate = max(costs.copy_bytes_per_s, costs.collective_bytes_per_s)
    return compute_s * costs.settling(compute_s), problem.link_bytes / rate


def part_rows(problem: Problem) -> tuple[int, ...]:
    """How many rows a plan may multiply at a time: groups of shards, parts of one, and all."""
    shard = max(problem.rows)
    parts = {shard * count for count in range(1, problem.ranks + 1)}
    parts |= {shard // pieces for pieces in (2, 4)} | {problem.m}
    return tuple(sorted(rows for rows in parts if rows))


def _guess_s(problem: Problem, spec: str, machine: Machine, tiles: Tiles) -> float:
    """A guess at the time of a plan that need not be built for it."""
    family, options = parse(problem, spec)
    guess = family.guess_s
    return guess(problem, options, machine, tiles) if guess else float("inf")
