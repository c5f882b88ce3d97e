"""A plan as text: its buffers, and a line for each step."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.plan.steps import Buffer, Peer, Plan, Region, Signal, Step


def printed(plan: "Plan") -> str:
    """What `str(plan)` is."""
    lines = [f"plan {plan.spec}: {plan.problem}"]
    for b in plan.buffers:
        split = f", split over ranks, holds {b.holds}" if b.split else ""
        lines.append(f"  buffer {b.name:8} {b.space:9} {_shape(b)} {b.dtype}{split}")
    width = max((len(s.name) for s in plan.steps), default=0)
    for s in plan.steps:
        flow = f"{_regions(s.reads)} -> {_regions(s.writes)}" if s.writes else ""
        flow += "  contracts rows" if s.arg("contract") else ""
        flow += f"  {settings(s)}" if s.kind == "fused" else ""
        order = f"  after {', '.join(s.after)}" if s.after else ""
        waits = f"  waits {_signals(s.waits)}" if s.waits else ""
        posts = f"  posts {_signals(s.posts)}" if s.posts else ""
        lines.append(f"  {s.lane:8} {s.kind:10} {s.name:{width}}  {flow}{order}{waits}{posts}")
    return "\n".join(line.rstrip() for line in lines)


def settings(step: "Step") -> str:
    """What a fused kernel is launched with, as text."""
    return " ".join(f"{name}={value}" for name, value in step.args if name != "kernel")


def _shape(buffer: "Buffer") -> str:
    return f"[{buffer.shape[0]}, {buffer.shape[1]}]"


def _peer(peer: "Peer") -> str:
    return "+".join(map(str, peer)) if peer else "0"


def _regions(regions: "tuple[Region, ...]") -> str:
    def one(r: "Region") -> str:
        where = f"@{_peer(r.at)}" if r.at else ""
        shards = f"[{','.join(map(_peer, r.shards))}]" if r.shards else ""
        chunk = f" {r.chunk[0]}/{r.chunk[1]}" if r.chunk != (0, 1) else ""
        rows = f" rows {r.rows[0]}:{r.rows[1]}" if r.rows else ""
        cols = f" cols {':'.join(map(str, r.cols))}" if isinstance(r.cols, tuple) else ""
        cols = f" cols of {_peer(r.of)}" if r.of else " own cols" if r.cols == "own" else cols
        return f"{r.buffer}{where}{shards}{chunk}{rows}{cols}"

    return ", ".join(map(one, regions))


def _signals(signals: "tuple[Signal, ...]") -> str:
    return ", ".join(f"{s.slot}@{_peer(s.at)}" for s in signals)
