"""Plans out of plans: `p | q` side by side, `p >> q` in order, `part` of a larger problem.

What comes out is a plan as any other: `validate` proves it, and refuses one in which a step of one
part reads what a step of the other has not surely written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from counterpoint.errors import PlanError
from counterpoint.problem import Problem

if TYPE_CHECKING:  # a Plan has these as its operators: its file imports this one
    from counterpoint.plan.steps import Buffer, Lane, Peer, Plan, Region, Signal, Step


def side_by_side(p: Plan, q: Plan) -> Plan:
    """`p | q`: both at the same time, on lanes that they share by name.

    Each lane takes the steps of both by their depth: how often the longest chain of lane order,
    edges and signals that leads to a step, within its own plan, passes from one lane or rank to
    another. So what one plan computes stands beside what the other moves. Of equal depth, the steps
    of `p` come first. Buffers of one name are shared, and one barrier opens the call.

    Args:
        p: of two steps that may run next on a lane, its step runs first.
        q: for the same problem; no step has the name of one of `p`.

    Returns:
        A plan that is not yet proved.

    Raises:
        PlanError: the plans differ in problem, peers, or a buffer or lane of one name; both have a
            step of one name; or the steps of one wait for one another.
    """
    spec = f"({p.spec} | {q.spec})"
    rest = _shared_opening(spec, p, q)
    depths = _depths(spec, p, [p.steps, rest])
    ordered = sorted(zip(depths, (*p.steps, *rest), strict=True), key=lambda pair: pair[0])
    return _union(spec, p, q, [step for _, step in ordered])


def in_order(p: Plan, q: Plan) -> Plan:
    """`p >> q`: on every lane, q begins when p has ended on all lanes of the rank.

    So q may read what p left in scratch and symmetric memory. It need not have ended on other
    ranks: one barrier opens the call of both.

    Args:
        p: what comes first.
        q: for the same problem; no step has the name of one of `p`.

    Returns:
        A plan that is not yet proved.

    Raises:
        PlanError: the plans differ in problem, peers, or a buffer or lane of one name; or both
            have a step of one name.
    """
    spec = f"({p.spec} >> {q.spec})"
    ends = {step.lane: step.name for step in p.steps}
    begun: set[str] = set()
    rest: list[Step] = []
    for step in _shared_opening(spec, p, q):
        if step.lane not in begun:
            step = replace(step, after=(*step.after, *ends.values()))
        begun.add(step.lane)
        rest.append(step)
    return _union(spec, p, q, [*p.steps, *rest])


def part(plan: Plan, problem: Problem, *, buffers: Mapping[str, str], prefix: str = "") -> Plan:
    """`plan`, which solves a part of `problem`, as a plan for `problem` that others complete.

    Args:
        plan: for a problem on the same rows.
        problem: what the parts solve together.
        buffers: new names of buffers by their old ones; the others keep theirs.
        prefix: what comes before the names of steps; that of the opening barrier stays.

    Returns:
        A plan that computes some of the outputs of `problem`.

    Raises:
        PlanError: the ranks have other rows, a buffer to rename is not there, or two buffers would
            have one name.
    """
    if plan.problem.rows != problem.rows:
        have, want = plan.problem.rows, problem.rows
        raise PlanError(plan.spec, f"a part has the rows of its problem, {want}, got {have}")
    for name in buffers:
        plan.buffer(name)
    renamed = tuple(replace(b, name=buffers.get(b.name, b.name)) for b in plan.buffers)
    names = [b.name for b in renamed]
    if len(set(names)) < len(names):
        raise PlanError(plan.spec, f"two buffers would have one name: {', '.join(names)}")
    opening = _opening(plan.steps)
    new = {s.name: s.name if s is opening else prefix + s.name for s in plan.steps}

    def moved(regions: Iterable[Region]) -> tuple[Region, ...]:
        return tuple(replace(r, buffer=buffers.get(r.buffer, r.buffer)) for r in regions)

    steps = tuple(
        replace(s, name=new[s.name], reads=moved(s.reads), writes=moved(s.writes),
                after=tuple(new.get(name, name) for name in s.after))
        for s in plan.steps
    )  # fmt: skip
    return replace(plan, problem=problem, buffers=renamed, steps=steps)


def _opening(steps: Iterable[Step]) -> Step | None:
    """The barrier that opens the call: the first step that signals."""
    first = next((s for s in steps if s.waits or s.posts), None)
    return first if first is not None and first.kind == "barrier" else None


def _shared_opening(spec: str, p: Plan, q: Plan) -> list[Step]:
    """The steps of q behind those of p: other slots, and no opening barrier where p has one."""
    if p.problem != q.problem:
        raise PlanError(spec, f"one is for {p.problem}, the other for {q.problem}")
    if p.peers != q.peers:
        raise PlanError(spec, f"one pairs ranks by {p.peers}, the other by {q.peers}")
    ours, theirs = _opening(p.steps), _opening(q.steps)
    rest: list[Step] = []
    follows = False  # whether the lane of their opening comes next to what was behind it
    for step in q.steps:
        after = step.after
        if ours is not None and theirs is not None:
            if step is theirs:
                follows = True
                continue
            instead = (ours.name, *theirs.after)
            if follows and step.lane == theirs.lane:
                after, follows = (*instead, *after), False
            edges = ((instead if name == theirs.name else (name,)) for name in after)
            after = tuple(dict.fromkeys(chain.from_iterable(edges)))
        waits, posts = (tuple(_later(s, p.num_slots) for s in both) for both in
                        (step.waits, step.posts))  # fmt: skip
        rest.append(replace(step, after=after, waits=waits, posts=posts))
    clash = sorted({s.name for s in p.steps} & {s.name for s in rest})
    if clash:
        raise PlanError(spec, f"both have a step {', '.join(map(repr, clash))}")
    return rest


def _later(signal: Signal, slots: int) -> Signal:
    return replace(signal, slot=signal.slot + slots)


def _union(spec: str, p: Plan, q: Plan, steps: Sequence[Step]) -> Plan:
    buffers = {b.name: b for b in p.buffers}
    lanes = {lane.name: lane for lane in p.lanes}
    for buffer in q.buffers:
        _same(spec, "buffer", buffers.setdefault(buffer.name, buffer), buffer)
    for lane in q.lanes:
        _same(spec, "lane", lanes.setdefault(lane.name, lane), lane)
    return replace(p, family=spec, variant="", buffers=tuple(buffers.values()),
                   lanes=tuple(lanes.values()), steps=without_implied_edges(steps))  # fmt: skip


def _same(spec: str, what: str, one: Buffer | Lane, other: Buffer | Lane) -> None:
    if one != other:
        raise PlanError(spec, f"both have a {what} {one.name!r}, and differ: {one}, {other}")


def without_implied_edges(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps, without an edge to what has ended before their lane or another edge lets them."""
    earlier: dict[str, set[str]] = {}  # what has ended before each step
    last: dict[str, str] = {}
    kept: list[Step] = []

    def ended(name: str) -> set[str]:
        return {name} | earlier.get(name, set())

    for step in steps:
        before = ended(last[step.lane]) if step.lane in last else set[str]()
        edges = [name for name in dict.fromkeys(step.after) if name not in before]
        edges = [a for a in edges if not any(a in earlier.get(b, ()) for b in edges)]
        earlier[step.name] = before.union(*map(ended, edges))
        last[step.lane] = step.name
        kept.append(behind(step, tuple(edges)))
    return tuple(kept)


def behind(step: Step, after: tuple[str, ...]) -> Step:
    """The step with those edges: itself where they are its own, as most are."""
    return step if step.after == after else replace(step, after=after)


def _depths(spec: str, p: Plan, parts: Sequence[Sequence[Step]]) -> list[int]:
    """Of the steps of all parts: how often the longest chain to each passes to another lane."""
    steps = [*chain.from_iterable(parts)]
    index = {step.name: i for i, step in enumerate(steps)}
    posters: dict[int, list[tuple[Peer, int]]] = {}
    for i, step in enumerate(steps):
        for post in step.posts:
            posters.setdefault(post.slot, []).append((post.at, i))
    chains: list[tuple[int, int, int]] = []
    last: dict[tuple[int, str], int] = {}
    places = [(number, step) for number, own in enumerate(parts) for step in own]
    for i, (number, step) in enumerate(places):
        if (number, step.lane) in last:
            chains.append((last[number, step.lane], i, 0))
        last[number, step.lane] = i
        edges = [index[name] for name in step.after if name in index]
        chains += [(j, i, int(steps[j].lane != step.lane)) for j in edges]
        for wait in step.waits:
            source = p.resolve(wait.at, 0)
            for at, j in posters.get(wait.slot, ()):
                if j != i and p.resolve(at, source) == 0:
                    # what waits for a barrier's post waits for what is before the barrier
                    chains.append((j, i, int(steps[j].kind != "barrier")))
    depths = [0] * len(steps)
    for _ in range(len(steps) + 1):
        before = list(depths)
        for j, i, passes in chains:
            depths[i] = max(depths[i], depths[j] + passes)
        if depths == before:
            return depths
    raise PlanError(spec, "its steps wait for one another in a circle")
