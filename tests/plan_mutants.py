"""Every single mutation of a plan: what a slip of the hand could make of it.

Each mutant carries what was changed, in words; the first words up to ":" are its kind.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

from counterpoint.plan.steps import Buffer, Lane, Peer, Plan, Region, Signal, Step

Mutant = tuple[str, Plan]
EXTRA_LANE = Lane("copy_2", "copy")


def mutants(plan: Plan) -> Iterator[Mutant]:
    """All mutants of `plan`, none equal to it."""
    for make in (
        _without_steps, _without_edges, _without_signals, _other_slots, _other_signal_peers,
        _other_regions, _without_reads, _without_writes, _other_settings, _shrunken_pairs, _swapped,
        _other_lanes, _other_buffers, _other_activations,
    ):  # fmt: skip
        for what, mutant in make(plan):
            assert mutant != plan, what
            yield what, mutant


def with_step(plan: Plan, i: int, **changes: Any) -> Plan:
    """`plan` with some fields of step i changed."""
    steps = list(plan.steps)
    steps[i] = replace(steps[i], **changes)
    return replace(plan, steps=tuple(steps))


def _but(items: tuple[Any, ...], i: int, *instead: Any) -> tuple[Any, ...]:
    return (*items[:i], *instead, *items[i + 1 :])


def _without_steps(plan: Plan) -> Iterator[Mutant]:
    """With and without the signals that pair with its own; its edges go on to its successors."""
    for i, gone in enumerate(plan.steps):
        rest = [replace(step, after=_inherited(step, gone)) for step in _but(plan.steps, i)]
        yield f"step: without {gone.name}", replace(plan, steps=tuple(rest))
        slots = {s.slot for s in gone.posts + gone.waits}
        if slots:
            quiet = tuple(_deaf(step, slots) for step in rest)
            yield f"step: without {gone.name} and its signals", replace(plan, steps=quiet)


def _inherited(step: Step, gone: Step) -> tuple[str, ...]:
    if gone.name not in step.after:
        return step.after
    kept = [name for name in step.after if name != gone.name]
    return (*kept, *(name for name in gone.after if name not in kept))


def _deaf(step: Step, slots: set[int]) -> Step:
    waits = tuple(s for s in step.waits if s.slot not in slots)
    posts = tuple(s for s in step.posts if s.slot not in slots)
    return replace(step, waits=waits, posts=posts)


def _without_edges(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for j, name in enumerate(step.after):
            mutant = with_step(plan, i, after=_but(step.after, j))
            yield f"edge: {step.name} not after {name}", mutant


def _without_signals(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for j, s in enumerate(step.waits):
            mutant = with_step(plan, i, waits=_but(step.waits, j))
            yield f"wait: {step.name} without wait {s.slot}", mutant
        for j, s in enumerate(step.posts):
            mutant = with_step(plan, i, posts=_but(step.posts, j))
            yield f"post: {step.name} without post {s.slot}", mutant
            both = replace(plan, steps=tuple(_deaf(other, {s.slot}) for other in plan.steps))
            yield f"signal: {step.name} without signal {s.slot}", both


def _other_slots(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for field in ("waits", "posts"):
            signals: tuple[Signal, ...] = getattr(step, field)
            for j, s in enumerate(signals):
                for slot in (s.slot - 1, s.slot + 1, plan.num_slots):
                    instead = _but(signals, j, replace(s, slot=slot))
                    what = f"slot: {step.name} {field} {slot} for {s.slot}"
                    yield what, with_step(plan, i, **{field: instead})
    # two posts exchange their slots: all pairs up, but other waits hear of other posts
    posts = [(i, s.slot) for i, step in enumerate(plan.steps) for s in step.posts]
    for (i, a), (j, b) in combinations(posts, 2):
        steps = list(plan.steps)
        for k, old, new in ((i, a, -1), (j, b, a), (i, -1, b)):
            posted = tuple(replace(s, slot=new) if s.slot == old else s for s in steps[k].posts)
            steps[k] = replace(steps[k], posts=posted)
        names = f"{plan.steps[i].name} and {plan.steps[j].name}"
        yield f"slots: {names} exchange {a} and {b}", replace(plan, steps=tuple(steps))


def _peers(plan: Plan, but: Peer) -> list[Peer]:
    """Every peer but that one; () and (0,) are both me."""
    ranks, islands = plan.problem.ranks, plan.problem.islands
    if plan.peers == "grid":
        size = ranks // islands
        a, b = but or (0, 0)
        grid = product(range(islands), range(size))
        return [peer if any(peer) else () for peer in grid if peer != (a % islands, b % size)]
    return [(p,) if p else () for p in range(ranks) if p != (but or (0,))[0] % ranks]


def _other_signal_peers(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for field in ("waits", "posts"):
            signals: tuple[Signal, ...] = getattr(step, field)
            for j, s in enumerate(signals):
                for peer in _peers(plan, s.at):
                    instead = _but(signals, j, replace(s, at=peer))
                    what = f"signal peer: {step.name} {field} {s.slot} at {peer}"
                    yield what, with_step(plan, i, **{field: instead})


def _other_regions(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for field in ("reads", "writes"):
            regions: tuple[Region, ...] = getattr(step, field)
            for j, region in enumerate(regions):
                for what, instead in _changed(plan, region):
                    kind, _, how = what.partition(": ")
                    mutant = with_step(plan, i, **{field: _but(regions, j, instead)})
                    yield f"{kind}: {step.name} {field} {region.buffer} {how}", mutant


def _changed(plan: Plan, region: Region) -> Iterator[tuple[str, Region]]:
    buffer = plan.buffer(region.buffer)
    for peer in _peers(plan, region.at):
        yield f"at: {peer}", replace(region, at=peer)
    for i, shard in enumerate(region.shards):
        for peer in _peers(plan, shard):
            yield f"shard: {i} {peer}", replace(region, shards=_but(region.shards, i, peer))
        if len(region.shards) > 1:
            yield f"shard: without {i}", replace(region, shards=_but(region.shards, i))
    if buffer.split and buffer.holds != "own" and not region.shards:
        for peer in ((0, 0) if plan.peers == "grid" else (0,), *_peers(plan, ())):
            yield f"shard: only {peer}", replace(region, shards=(peer,))
    part, of = region.chunk
    for chunk in ((part - 1, of), (part + 1, of), (part, of - 1), (part, of + 1)):
        if buffer.split and 0 <= chunk[0] < chunk[1]:
            yield f"chunk: {chunk}", replace(region, chunk=chunk)
    if region.cols == "own":
        yield "cols: all", replace(region, cols=None)
        for peer in _peers(plan, region.of):
            yield f"cols: of {peer}", replace(region, of=peer)
    for cols in _shifted(region.cols, buffer.shape[1]):
        yield f"cols: {cols}", replace(region, cols=cols)
    if not buffer.split:
        for shifted in _shifted(region.rows, buffer.shape[0]):
            yield f"rows: {shifted}", replace(region, rows=shifted)
    for other in plan.buffers:
        if other != buffer:
            yield f"buffer: {other.name}", replace(region, buffer=other.name)


def _shifted(interval: Any, size: int) -> list[tuple[int, int]]:
    """Either edge, or both, moved by one; not out of the buffer, which is plain to see."""
    a, b = interval if isinstance(interval, tuple) else (0, size)
    moved = [(a - 1, b), (a + 1, b), (a, b - 1), (a, b + 1), (a - 1, b - 1), (a + 1, b + 1)]
    return [(x, y) for x, y in moved if 0 <= x <= y <= size]


def _shrunken(interval: Any, size: int) -> list[tuple[int, int]]:
    a, b = interval if isinstance(interval, tuple) else (0, size)
    return [(a + 1, b), (a, b - 1)] if a < b else []


def _without_reads(plan: Plan) -> Iterator[Mutant]:
    for i, step in enumerate(plan.steps):
        for j, region in enumerate(step.reads):
            what = f"read: {step.name} without {j} {region.buffer}"
            yield what, with_step(plan, i, reads=_but(step.reads, j))
            if step.kind in ("copy", "spread", "fold") and j < len(step.writes):
                writes = _but(step.writes, j)
                pair = with_step(plan, i, reads=_but(step.reads, j), writes=writes)
                yield f"pair: {step.name} without copy {j}", pair
        for j, (name, value) in enumerate(step.args):
            if name == "batch":
                yield f"batch: {step.name} in none", with_step(plan, i, args=_but(step.args, j))
                for other in (int(value) - 1, int(value) + 1):
                    args = _but(step.args, j, (name, other))
                    yield f"batch: {step.name} in {other}", with_step(plan, i, args=args)
                continue
            yield f"arg: {step.name} without {name}", with_step(plan, i, args=_but(step.args, j))
            if name == "to":
                for to in range(plan.problem.islands + 1):
                    if to != value:
                        args = _but(step.args, j, (name, to))
                        yield f"arg: {step.name} to {to}", with_step(plan, i, args=args)
            if name == "bias":
                bare = {"args": _but(step.args, j), "reads": step.reads[:-1]}
                yield f"bias: {step.name} without bias", with_step(plan, i, **bare)
        if step.kind in ("matmul", "move", "reduce") and plan.problem.bias and not step.args:
            more = {"args": (("bias", 1),), "reads": (*step.reads, Region("bias"))}
            yield f"bias: {step.name} with bias", with_step(plan, i, **more)


def _without_writes(plan: Plan) -> Iterator[Mutant]:
    """Of a kernel of ours, one of several writes; of other steps that is a missing pair."""
    for i, step in enumerate(plan.steps):
        for j, region in enumerate(step.writes if step.spins else ()):
            mutant = with_step(plan, i, writes=_but(step.writes, j))
            yield f"write: {step.name} without {j} {region.buffer}", mutant


def _other_settings(plan: Plan) -> Iterator[Mutant]:
    """How a kernel of ours is launched, which kernel it is, and that it waits for its peers."""
    for i, step in enumerate(plan.steps):
        if not step.spins:
            continue
        yield f"spins: {step.name} does not", with_step(plan, i, spins=False)
        for j, (name, value) in enumerate(step.args):
            others = (2 * value, value - 1) if isinstance(value, int) else ("two_shot", "serial")
            for other in (o for o in others if o != value):
                args = _but(step.args, j, (name, other))
                yield f"setting: {step.name} {name} {other}", with_step(plan, i, args=args)


def _shrunken_pairs(plan: Plan) -> Iterator[Mutant]:
    """What is read and written changes together, so that shapes still fit."""
    for i, step in enumerate(plan.steps):
        if step.kind == "copy":
            # a table of counts is read behind what is copied
            for j, (read, write) in enumerate(zip(step.reads, step.writes, strict=False)):
                for cols in _shrunken(read.cols, plan.buffer(read.buffer).shape[1]):
                    reads = _but(step.reads, j, replace(read, cols=cols))
                    writes = _but(step.writes, j, replace(write, cols=cols))
                    mutant = with_step(plan, i, reads=reads, writes=writes)
                    yield f"pair: {step.name} copies columns {cols}", mutant
        if step.kind == "matmul" and step.arg("contract"):
            x, dy, dw = *step.reads, step.writes[0]
            for a, b in _shrunken(x.cols, plan.buffer(x.buffer).shape[1]):
                reads, writes = (replace(x, cols=(a, b)), dy), (replace(dw, rows=(a, b)),)
                mutant = with_step(plan, i, reads=reads, writes=writes)
                yield f"pair: {step.name} of columns {a}:{b} of x", mutant
            for a, b in _shrunken(dy.cols, plan.buffer(dy.buffer).shape[1]):
                reads, writes = (x, replace(dy, cols=(a, b))), (replace(dw, cols=(a, b)),)
                mutant = with_step(plan, i, reads=reads, writes=writes)
                yield f"pair: {step.name} of columns {a}:{b} of dy", mutant
            if all(plan.buffer(r.buffer).holds == "all" for r in step.reads):
                for peer in range(plan.problem.ranks):
                    reads = tuple(replace(r, shards=((peer,),)) for r in step.reads)
                    if reads != step.reads:
                        mutant = with_step(plan, i, reads=reads)
                        yield f"pair: {step.name} over shard {peer}", mutant
        elif step.kind == "matmul":
            x = step.reads[0]
            for a, b in _shrunken(x.cols, plan.buffer(x.buffer).shape[1]):
                rest = step.reads[1 + step.weights :]
                cut = (replace(w, rows=(a, b)) for w in step.reads[1 : 1 + step.weights])
                reads = (replace(x, cols=(a, b)), *cut, *rest)
                yield f"pair: {step.name} over k {a}:{b}", with_step(plan, i, reads=reads)


def _other_activations(plan: Plan) -> Iterator[Mutant]:
    """One where there is none, another one, and gate and up exchanged."""
    name = plan.problem.activation
    for i, step in enumerate(plan.steps if name else ()):
        if not step.arg("activation"):
            args = (*step.args, ("activation", name))
            yield f"activation: {step.name} has one, too", with_step(plan, i, args=args)
            continue
        for other in ("relu", "silu_mul", "gelu_mul"):
            args = tuple((k, other if k == "activation" else v) for k, v in step.args)
            if args != step.args:
                yield f"activation: {step.name} has {other}", with_step(plan, i, args=args)
        if step.weights > 1:
            x, gate, up, *rest = step.reads
            mutant = with_step(plan, i, reads=(x, up, gate, *rest))
            yield f"activation: {step.name} of up", mutant
            mutant = with_step(plan, i, reads=(x, gate, gate, *rest))
            yield f"activation: {step.name} times gate", mutant


def _swapped(plan: Plan) -> Iterator[Mutant]:
    for i, (a, b) in enumerate(pairwise(plan.steps)):
        swapped = (*plan.steps[:i], b, a, *plan.steps[i + 2 :])
        yield f"swap: {a.name} and {b.name}", replace(plan, steps=swapped)


def _other_lanes(plan: Plan) -> Iterator[Mutant]:
    engines = {lane.name: lane.engine for lane in plan.lanes}
    for i, step in enumerate(plan.steps):
        for lane in (*plan.lanes, EXTRA_LANE):
            if lane.name != step.lane and lane.engine == engines[step.lane]:
                lanes = plan.lanes if lane in plan.lanes else (*plan.lanes, lane)
                mutant = replace(with_step(plan, i, lane=lane.name), lanes=lanes)
                yield f"lane: {step.name} on {lane.name}", mutant


def _other_buffers(plan: Plan) -> Iterator[Mutant]:
    """The plan's own memory: its space, dtype, and how it is stored."""
    own = [i for i, b in enumerate(plan.buffers) if b.space not in ("input", "output")]
    for i, buffer in ((i, plan.buffers[i]) for i in own):
        changes: list[dict[str, Any]] = [
            {"space": space}
            for space in ("scratch", "symmetric", "input", "output", "words")
            if space != buffer.space
        ]
        changes += [
            {"dtype": dtype}
            for dtype in ("bfloat16", "float16", "float32")
            if dtype != buffer.dtype
        ]
        holds = ("all", "peers", "own", "slots", *["island"] * (plan.problem.islands > 1))
        changes += [{"holds": h} for h in holds if h != buffer.holds]
        chunks = {1, plan.problem.ranks, buffer.chunks - 1, buffer.chunks + 1} - {buffer.chunks}
        changes += [{"chunks": n} for n in sorted(chunks)]
        changes.append({"split": not buffer.split})
        for change in changes:
            ((field, value),) = change.items()
            changed: Buffer = replace(buffer, **change)
            what = f"memory: {buffer.name} {field} {value}"
            yield what, replace(plan, buffers=_but(plan.buffers, i, changed))
