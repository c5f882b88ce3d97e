"""The proof of a plan: it cannot deadlock, races with nothing, and computes its op on every rank.

Two calls are unrolled, because what a call leaves behind must not disturb the next; the user
writes inputs before and reads outputs after each.
"""

from collections.abc import Iterator
from typing import NamedTuple

from counterpoint.errors import PlanError
from counterpoint.plan import values
from counterpoint.plan.activated import activated
from counterpoint.plan.attended import ATTENTION
from counterpoint.plan.bind import BoundStep, Box, Part, Program, bind
from counterpoint.plan.form import check_form
from counterpoint.plan.happens_before import HappensBefore
from counterpoint.plan.scaled import check_scaled
from counterpoint.plan.steps import OWN_PROTOCOL, Buffer, Plan
from counterpoint.plan.values import Cell, Contradiction, Memory, Piece
from counterpoint.ranges import instance

CALLS = 2
MAX_PAIRS = 2**19  # of accesses to the same cells: two seconds


class Access(NamedTuple):
    """A read or a write of one box between two events."""

    box: Box
    writes: bool
    begin: int
    end: int
    part: int = -1  # of the step, where each cell of the box is read just before it is written


def validate(plan: Plan) -> None:
    """Prove `plan`, or raise.

    Checks that steps are well formed; that posts and waits pair and nothing waits in a cycle; that
    each read is covered by writes of the same call that happen before it, and every other access
    that conflicts with it is ordered; that each output box holds what the op defines.

    Args:
        plan: built by a family, composed or written by hand.

    Raises:
        InputError: `plan` is no Plan.
        PlanError: names the plan, the step and what is wrong.
    """
    instance("validate", "plan", plan, Plan)
    check_form(plan)
    programs = tuple(bind(plan, rank) for rank in range(plan.problem.ranks))
    order = HappensBefore(programs, CALLS)
    _check_opening(plan, programs, order)
    _check_accesses(plan, programs, order)
    _check_values(plan, programs, order)


def _check_opening(plan: Plan, programs: tuple[Program, ...], order: HappensBefore) -> None:
    """A barrier of an island comes before every other signal and all use of symmetric memory.

    It advances the epoch that the others post; and calls of other plans use the same slots and
    the same memory in other ways, so all ranks have to have left them.
    """
    symmetric = {b.name for b in plan.buffers if b.space == "symmetric"}
    size = plan.problem.ranks // plan.problem.islands
    for rank, program in enumerate(programs):
        first = program.opens
        for i, bound in enumerate(program.steps):
            signals = bool(bound.waits or bound.posts)
            shares = any(r.buffer in symmetric for r in bound.step.reads + bound.step.writes)
            if not (signals or shares):
                continue
            opens = first >= 0 and program.steps[first].step.kind == "barrier"
            later = i == first or (
                opens and order.before(order.end(0, rank, first), order.begin(0, rank, i))
            )
            if not (opens and later):
                what = "signals" if signals else "uses symmetric memory"
                problem = f"{what} before or beside the barrier that opens the call"
                raise PlanError(plan.spec, problem, step=bound.step.name)
            first_mate = rank // size * size
            mates = {*range(first_mate, first_mate + size)} - {rank}
            heard = {arrival.rank for arrival in bound.waits}
            if i == first and not heard.issuperset(mates):
                problem = "opens the call, so every rank has to wait in it for every other"
                raise PlanError(plan.spec, problem, step=bound.step.name)


def _check_accesses(plan: Plan, programs: tuple[Program, ...], order: HappensBefore) -> None:
    by_buffer: dict[tuple[int, str, int], list[Access]] = {}
    own_protocol = {b.name for b in plan.buffers if b.space in OWN_PROTOCOL}
    # so does it what it writes on peers, of the caller's memory
    written = (r for s in plan.steps if s.kind == "fused" for r in s.writes)
    own_protocol |= {r.buffer for r in written if r.at}
    for access in _accesses(plan, programs, order):
        box = access.box
        if not box.empty and box.buffer not in own_protocol:
            by_buffer.setdefault((box.rank, box.buffer, box.slot), []).append(access)
    pairs = 0
    for accesses in by_buffer.values():
        writers: dict[int, list[Access]] = {i: [] for i, a in enumerate(accesses) if not a.writes}
        for i, j in _overlapping(accesses):
            first, second = accesses[i], accesses[j]
            pairs += 1
            if pairs > MAX_PAIRS:
                problem = (
                    f"more than {MAX_PAIRS} pairs of accesses to the same cells: too long to prove"
                )
                raise PlanError(plan.spec, problem)
            _check_ordered(plan, second, first, order)
            if first.writes != second.writes:
                read, write = (i, second) if second.writes else (j, first)
                writers[read].append(write)
        for i, writes in writers.items():
            _check_covered(plan, accesses[i], writes, order)


def _overlapping(accesses: list[Access]) -> Iterator[tuple[int, int]]:
    """Pairs of accesses to the same cells, of which one writes; the earlier first."""
    begun: list[int] = []
    for i in sorted(range(len(accesses)), key=lambda i: accesses[i].box.r0):
        box, writes = accesses[i].box, accesses[i].writes
        begun = [j for j in begun if accesses[j].box.r1 > box.r0]
        for j in begun:
            other = accesses[j].box
            if (writes or accesses[j].writes) and other.c0 < box.c1 and box.c0 < other.c1:
                yield (i, j) if i < j else (j, i)
        begun.append(i)


def _accesses(plan: Plan, programs: tuple[Program, ...], order: HappensBefore) -> Iterator[Access]:
    for call in range(order.calls):
        for r, program in enumerate(programs):
            start, stop = order.start(call, r), order.stop(call, r)
            for buffer in plan.buffers:
                if buffer.space == "input":
                    yield Access(_whole(plan, buffer, r), True, start, start)
                elif buffer.space == "output":
                    yield Access(_whole(plan, buffer, r), False, stop, stop)
            for i, bound in enumerate(program.steps):
                begin, end = order.begin(call, r, i), order.end(call, r, i)
                reads: dict[Box, int] = {}
                for number, part in enumerate(bound.parts):
                    yield Access(part.write, True, begin, end, number)
                    for j, box in enumerate(part.reads):
                        cellwise = not (bound.step.kind == "matmul" and j <= bound.step.weights)
                        if bound.step.kind in ATTENTION:
                            cellwise = box == part.write
                        here = number if cellwise else -1
                        # parts may run in any order: a box that two of them read is not in place
                        reads[box] = here if reads.get(box, here) == here else -1
                yield from (Access(box, False, begin, end, n) for box, n in reads.items())


def _check_ordered(plan: Plan, a: Access, b: Access, order: HappensBefore) -> None:
    if a.begin == b.begin and a.box == b.box and a.part == b.part and a.writes != b.writes:
        return  # a step that updates in place
    step = order.locate(a.begin)[2]
    if a.begin == b.begin and step is not None and plan.steps[step].kind == "opaque":
        return  # what it does first is its own affair
    if not (order.before(a.end, b.begin) or order.before(b.end, a.begin)):
        first, second = order.name(b.begin), order.name(a.begin)
        verb = "write" if a.writes and b.writes else "read and write"
        problem = f"race: {first} and {second} {verb} {a.box.buffer!r} on rank {a.box.rank}"
        raise PlanError(plan.spec, problem)


def _check_covered(plan: Plan, read: Access, writes: list[Access], order: HappensBefore) -> None:
    call = order.locate(read.begin)[0]
    missing = [read.box]
    for write in writes:
        if order.locate(write.begin)[0] == call and order.before(write.end, read.begin):
            missing = [rest for box in missing for rest in values.subtract(box, write.box)]
    if missing:
        box = missing[0]
        place = f"rows {box.r0}:{box.r1}, columns {box.c0}:{box.c1} of {box.buffer!r}"
        problem = f"{order.name(read.begin)} reads {place} on rank {box.rank} before it is written"
        raise PlanError(plan.spec, problem)


def _whole(plan: Plan, buffer: Buffer, rank: int) -> Box:
    extent = plan.problem.rows[rank] if buffer.holds == "own" and buffer.split else buffer.shape[0]
    return Box(rank, buffer.name, 0, 0, extent, 0, buffer.shape[1])


def _check_values(plan: Plan, programs: tuple[Program, ...], order: HappensBefore) -> None:
    memory = Memory()
    for rank in range(plan.problem.ranks):
        for buffer in (b for b in plan.buffers if b.space == "input"):
            box = _whole(plan, buffer, rank)
            memory.write([(box, (Cell(rank, buffer.name, 0, 0),))])
    begun: dict[tuple[int, int], list[list[Piece]]] = {}
    for event in order.order:
        call, rank, i = order.locate(event)
        if call or i is None:
            continue
        bound = programs[rank].steps[i]
        try:
            if event == order.begin(0, rank, i):
                stacked = plan.problem.experts > 0
                # words behind the one part of a collective are its transport's own
                last = {"fused": 0, "opaque": 0, "collective": 1}.get(
                    bound.step.kind, len(bound.parts)
                )
                parts = bound.parts if bound.step.looks_up else bound.parts[:last]
                begun[rank, i] = [_result(bound, part, memory, stacked) for part in parts]
            elif bound.step.kind == "fused" and not bound.step.looks_up:
                memory.write(_declared(plan, bound, rank))
            elif bound.step.kind == "collective":
                everyone = [begun[r, i] for r in range(len(programs))]
                memory.write(_collective(plan, bound, rank, everyone))
            elif bound.step.kind == "exchange":
                sender = plan.met(bound.step, rank)[1]
                source = programs[sender].steps[i].parts[0].reads[0]
                memory.write(values.moved(begun[sender, i][0], source, bound.parts[0].write))
            else:
                memory.write(piece for pieces in begun[rank, i] for piece in pieces)
        except Contradiction as error:
            raise PlanError(plan.spec, str(error), step=bound.step.name) from error
    for rank in range(plan.problem.ranks):
        for box, want in plan.problem.operation.definition(plan.problem, rank):
            for place, got in memory.read(box):
                if got != want:
                    where = f"{box.buffer} of rank {rank}"
                    rows = f"rows {place.r0}:{place.r1}, columns {place.c0}:{place.c1}"
                    problem = f"{where}, {rows}, holds {got}, the op defines {want}"
                    raise PlanError(plan.spec, problem)


def _declared(plan: Plan, bound: BoundStep, rank: int) -> Iterator[Piece]:
    """What a fused kernel says that it does: its outputs hold what the op defines."""
    written = {part.write.buffer for part in bound.parts}
    for box, value in plan.problem.operation.definition(plan.problem, rank):
        if box.buffer in written:
            yield box, value


def _result(bound: BoundStep, part: Part, memory: Memory, stacked: bool) -> list[Piece]:
    """What a part of a step writes, from what memory holds at its begin."""
    step, target = bound.step, part.write
    if step.kind in ATTENTION:
        made = [region.buffer for region in step.writes].index(target.buffer)
        names = ("y", "lse") if step.kind == "attention" else ("dq", "dk", "dv")
        return values.attended(names[made], part, memory)
    reads = list(part.reads)
    bias: list[Piece] = []
    if step.arg("bias"):
        row = reads.pop()
        bias = values.as_rows(memory.read(row), row, target)
    if step.kind in ("collective", "exchange"):
        return memory.read(reads[0])
    added: list[list[Piece]] = [[]]
    if step.kind == "matmul":
        x, *weights = reads[: 1 + step.weights]
        reads = reads[1 + step.weights :]
        if step.arg("scales"):
            (x_scale, *scales), reads = reads[: 1 + step.weights], reads[1 + step.weights :]
            check_scaled(memory, x, x_scale, by_row=step.arg("scales") != "tensor")
            for w, w_scale in zip(weights, scales, strict=True):
                check_scaled(memory, w, w_scale, by_row=False)
        how = {"transposed": bool(step.arg("contract")), "stacked": stacked}
        added = [values.product(memory.read(x), memory.read(w), x, w, target, **how)
                 for w in weights]  # fmt: skip
    for box in reads:
        added[0] += values.moved(memory.read(box), box, target)
    sums = [values.total(target, each + bias) for each in added]
    return activated(str(step.arg("activation")), sums) if step.arg("activation") else sums[0]


def _collective(
    plan: Plan, bound: BoundStep, rank: int, everyone: list[list[list[Piece]]]
) -> list[Piece]:
    if not bound.parts:
        return []
    arrived: list[Piece] = []
    for s, source, target in _routes(plan, bound, rank):
        (pieces,) = everyone[s]
        inside = ((values.intersect(box, source), value) for box, value in pieces)
        kept = [(box, value) for box, value in inside if box is not None]
        arrived += values.moved(kept, source, target)
    return values.total(bound.parts[0].write, arrived) if bound.step.sums else arrived


def _routes(plan: Plan, bound: BoundStep, rank: int) -> Iterator[tuple[int, Box, Box]]:
    """Each rank, the box of its operand that `rank` gets, and where it gets it."""
    p, (part, *_) = plan.problem, bound.parts
    target, starts = part.write, p.row_starts
    for s in range(p.ranks):
        source = part.reads[0]._replace(rank=s)
        mine = source._replace(r0=starts[rank], r1=starts[rank + 1])
        match bound.step.arg("collective"):
            case "all_gather":
                whole = _whole(plan, plan.buffer(source.buffer), s)
                yield s, whole, target._replace(r0=starts[s], r1=starts[s + 1])
            case "all_reduce":
                yield s, target._replace(rank=s), target
            case "reduce_scatter":
                yield s, mine, target
            case _ if p.tables:  # rows of my bags, side by side, rank 0's columns first
                start, stop = p.column_starts[s : s + 2]
                yield s, mine._replace(c0=0, c1=stop - start), target._replace(c0=start, c1=stop)
            case _:
                for e in range(p.experts):
                    yield s, _rows_of(plan, source, rank, e), _rows_of(plan, target, s, e)


def _rows_of(plan: Plan, box: Box, owner: int, expert: int) -> Box:
    """What a rank has of the rows of one owner and one expert, by expert or by owner."""
    p = plan.problem
    by_expert = plan.buffer(box.buffer).chunks > 1
    place = expert * p.ranks + owner if by_expert else owner * p.experts + expert
    count = p.rows[0] // p.experts
    return box._replace(r0=place * count, r1=(place + 1) * count)
