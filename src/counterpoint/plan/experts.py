"""Families of all_to_all_matmul and matmul_all_to_all: experts with equally many rows of each rank.

A step is a group of experts with all its peers: its copies carry what all ranks have for these
experts, or what these have made for all ranks, and each weight is read once. The rows of one expert
for one rank are few; those of a group lie equally far apart on both sides, so the copy engine takes
them as one strided copy for each peer.

Rows lie by owner or by expert. By owner: block d is of rank d, and in it part e of the e-th expert
of that rank. By expert: part e of every block, one after the other, which is a buffer in pieces.
"""

from dataclasses import replace

from counterpoint.plan.all_gather_matmul import COMPUTE, COPY, OWN, SIGNAL, Peers
from counterpoint.plan.peers import Order, Piece
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Space, Step
from counterpoint.problem import Problem

# copies within a GPU, beside those to peers
LOCAL = Lane("local", "copy", priority=-1)


def operands(p: Problem) -> tuple[Buffer, ...]:
    """The user's tensors: w has the experts of this rank one under the other."""
    there = p.op == "all_to_all_matmul"
    x = _rows(p, "x", p.k, "input", by_expert=not there)
    y = _rows(p, "y", p.n, "output", by_expert=there)
    return x, Buffer("w", (p.experts * p.k, p.n), p.dtype, "input"), y


def alone(p: Problem) -> tuple[Step, ...]:
    """What a group of one rank does."""
    return _matmuls(p, 0, range(p.experts), "x", "y")


def serial(p: Problem) -> Plan:
    """The library's all-to-all with a pass that puts rows in order, and the matmuls."""
    exchange = {"all_to_all_matmul": ("x", "sorted"), "matmul_all_to_all": ("product", "y")}
    source, target = exchange[p.op]
    args = (("collective", "all_to_all"),)
    collective = Step(
        "all_to_all", "compute", "collective", (Region(source),), (Region(target),), args=args
    )
    if p.op == "all_to_all_matmul":
        between = _rows(p, "sorted", p.k, "scratch", by_expert=True)
        steps = (collective, *_matmuls(p, 0, range(p.experts), "sorted", "y"))
    else:
        between = _rows(p, "product", p.n, "scratch", by_expert=True)
        steps = (*_matmuls(p, 0, range(p.experts), "x", "product"), collective)
    return Plan(p, "serial", "", "ring", (*operands(p), between), (COMPUTE,), steps)


def grouped(p: Problem, groups: tuple[int, ...], peers: Peers) -> Plan:
    """Groups of experts of those sizes: the copies of one beside the matmuls of another.

    all_to_all_matmul: rows go to their place by expert, and a group is multiplied when those of all
    ranks have come. matmul_all_to_all: what a group has made goes to its owners' symmetric memory,
    and from there to y, which is the user's, as it comes.
    """
    order = Order(peers, p.ranks)
    starts = [sum(groups[:i]) for i in range(len(groups))]
    spans = [range(start, start + size) for start, size in zip(starts, groups, strict=True)]
    if p.op == "all_to_all_matmul":
        between = (_rows(p, "received", p.k, "symmetric", by_expert=True),)
        steps = _there(p, order, spans)
    else:
        between = (
            _rows(p, "product", p.n, "scratch", by_expert=True),
            _rows(p, "returned", p.n, "symmetric", by_expert=False),
        )
        steps = _back(p, order, spans)
    variant = f"{'/'.join(map(str, groups))} {peers}"
    lanes = (COMPUTE, SIGNAL, COPY, LOCAL)
    steps = (order.barrier("open", "signal", 0), *steps)
    return Plan(p, "grouped", variant, peers, (*operands(p), *between), lanes, steps)


def _there(p: Problem, order: Order, spans: list[range]) -> tuple[Step, ...]:
    """Each group's rows to their experts, the own ones too; its matmuls when all are there."""
    copies: list[Step] = []
    products: list[Step] = []
    for g, span in enumerate(spans):
        after = () if g else ("open",)
        copies.append(_push(p, order, g, span, "x", "received", after))
        kept = [Region("x", shards=OWN, piece=(e, p.experts)) for e in span]
        there = [Region("received", shards=OWN, piece=(e, p.experts)) for e in span]
        copies.append(Step(f"keep_{g}", "local", "copy", tuple(kept), tuple(there), after))
        first, *rest = _matmuls(p, g, span, "received", "y")
        waits = tuple(order.wait((g + 1) * p.ranks + d, d) for d in order.distances)
        products += [replace(first, after=(f"keep_{g}",), waits=waits), *rest]
    return *copies, *products


def _back(p: Problem, order: Order, spans: list[range]) -> tuple[Step, ...]:
    """The matmuls of a group, then its rows to their owners, who put them into y."""
    steps: list[Step] = []
    unpacked: tuple[Step, ...] = ()
    for g, span in enumerate(spans):
        multiplied = _matmuls(p, g, span, "x", "product")
        after = (multiplied[-1].name, *(() if g else ("open",)))
        steps += [*multiplied, _push(p, order, g, span, "product", "returned", after)]
        # behind the next group's matmuls: until then nothing has come
        steps += unpacked
        pieces = [(e, p.experts) for e in span]
        own, mine = (
            tuple(Region(name, shards=OWN, piece=piece) for piece in pieces)
            for name in ("product", "y")
        )
        # later ones come behind `unpack` on their lane, and so behind the matmuls
        steps.append(Step(f"keep_{g}", "local", "copy", own, mine, () if g else after[:1]))
        unpacked = _unpack(p, order, g, pieces)
    return *steps, *unpacked


def _unpack(p: Problem, order: Order, g: int, pieces: list[Piece]) -> tuple[Step, ...]:
    """What peers have sent of a group, into y.

    Waited for between matmuls: a kernel that waits beside one takes a place where it would run.
    """
    waits = tuple(order.wait((g + 1) * p.ranks + d, d) for d in order.distances)
    sources = [(order.source(d),) for d in order.distances]
    come, mine = (
        tuple(Region(name, shards=source, piece=piece) for source in sources for piece in pieces)
        for name in ("returned", "y")
    )
    return (
        Step(f"come_{g}", "compute", "barrier", after=() if g else ("open",), waits=waits),
        Step(f"unpack_{g}", "local", "copy", come, mine, (f"come_{g}",)),
    )


def _push(
    p: Problem, order: Order, g: int, span: range, source: str, target: str, after: tuple[str, ...]
) -> Step:
    """What each peer gets of a group, nearest first, and behind it all the signals."""
    each = [(order.to(d), (e, p.experts)) for d in order.distances for e in span]
    return Step(
        f"push_{g}",
        "copy",
        "copy",
        tuple(Region(source, shards=(peer,), piece=piece) for peer, piece in each),
        tuple(Region(target, peer, OWN, piece) for peer, piece in each),
        after,
        posts=tuple(order.post((g + 1) * p.ranks + d, d) for d in order.distances),
    )


def _matmuls(p: Problem, g: int, span: range, x: str, y: str) -> tuple[Step, ...]:
    """A matmul for each expert of a group, of one launch where there is one for several."""
    return tuple(
        Step(f"matmul_{e}", "compute", "matmul",
             (Region(x, piece=(e, p.experts)), Region("w", rows=(e * p.k, (e + 1) * p.k))),
             (Region(y, piece=(e, p.experts)),), args=(("batch", g),))
        for e in span
    )  # fmt: skip


def _rows(p: Problem, name: str, cols: int, space: Space, *, by_expert: bool) -> Buffer:
    pieces = p.experts if by_expert else 1
    return Buffer(name, (p.m, cols), p.dtype, space, split=True, pieces=pieces)
