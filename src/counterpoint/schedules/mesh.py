"""Copies on a full mesh: a lane for each peer, as each pair of GPUs has a link of its own.

Behind a switch one pair may use all of the bandwidth, so a step that copies to all peers does it
one after another on one lane. On a mesh that would leave all links but one idle. Plans whose steps
are of one peer each, as shard_p2p, stay on one lane there, too.
"""

from collections.abc import Iterator
from dataclasses import replace

from counterpoint.plan.compose import behind, without_implied_edges
from counterpoint.plan.steps import Peer, Plan, Region, Step


def lane_for_each_peer(plan: Plan) -> Plan:
    """The plan whose copies to several peers at a time have a lane for each of them.

    Such a step becomes one for each peer. What it copies on this rank keeps its name, and what came
    behind the step comes behind that; peers are told by signals as before.

    Returns:
        A plan that is not yet proved; one without such steps as it is.
    """
    engines = {lane.name: lane.engine for lane in plan.lanes}
    steps: list[Step] = []
    cut: dict[str, tuple[str, ...]] = {}  # what stands for each step that was cut
    before: dict[str, tuple[str, ...]] = {}  # of a copy lane, what its steps up to here came after
    for step in plan.steps:
        after = tuple(new for name in step.after for new in cut.get(name, (name,)))
        if engines[step.lane] == "copy":  # the order of one lane was an edge, too
            after = tuple(dict.fromkeys((*before.get(step.lane, ()), *after)))
            before[step.lane] = after
        parts = [*_by_peer(step)]
        if len(parts) > 1:
            local = tuple(part.name for part in parts if part.lane == step.lane)
            cut[step.name] = local or tuple(part.name for part in parts)
        steps += (behind(part, after) for part in parts)
    if not cut:
        return plan
    lanes = {lane.name: lane for lane in plan.lanes}
    for step in steps:
        if step.lane not in lanes:
            lanes[step.lane] = replace(lanes[step.lane.rpartition("_")[0]], name=step.lane)
    return replace(plan, lanes=tuple(lanes.values()), steps=without_implied_edges(steps))


def _by_peer(step: Step) -> Iterator[Step]:
    """A copy step to several peers by peer; any other step as it is."""
    if step.kind != "copy" or step.waits:
        yield step
        return
    pairs = list(zip(step.reads, step.writes, strict=False))
    peers = list(dict.fromkeys(_peer(*pair) for pair in pairs))
    told = {post.at for post in step.posts}
    several = len([peer for peer in peers if any(peer)]) > 1
    if not several or not told.issubset(peers):
        yield step
        return
    counts = step.reads[len(pairs) :]
    for peer in peers:
        reads, writes = zip(*(pair for pair in pairs if _peer(*pair) == peer), strict=True)
        tail = f"_{peer[0]}" if any(peer) else ""
        yield replace(
            step, name=f"{step.name}{tail and '_to'}{tail}", lane=step.lane + tail,
            reads=(*reads, *counts), writes=writes,
            posts=tuple(post for post in step.posts if post.at == peer),
        )  # fmt: skip


def _peer(source: Region, target: Region) -> Peer:
    """Whom a copy reaches; () is nobody."""
    return target.at or source.at
