"""Time of one collective on equal links, by closed forms: rings, trees and direct exchanges.

n = ranks, S = bytes of the full (gathered, or sent) tensor, both over all `splits`. A link sends
one message at a time; its message arrives after latency + bytes / rate, and then goes on. With
`tick_s` every term is rounded down to that, as ASTRA-sim's analytical backends do: its numbers
then come out exactly.

Source: ASTRA-sim's analytical network backends, congestion aware and unaware, read as formulas.
"""

from math import ceil, floor, inf, log2
from typing import NamedTuple


class Link(NamedTuple):
    """One link, or hop, of a path.

    Args:
        bytes_per_s: of one direction.
        latency_s: of each message.
        endpoint_s: that a rank takes for each message.
        memory_bytes_per_s: at which a rank adds what arrives to what it has.
        tick_s: terms are rounded down to it; 0: they are not.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    endpoint_s: float = 0.0
    memory_bytes_per_s: float = inf
    tick_s: float = 0.0

    def down(self, seconds: float) -> float:
        """Rounded down to the tick; what floating point leaves out of a tick is forgiven."""
        return floor(seconds / self.tick_s + 1e-6) * self.tick_s if self.tick_s else seconds

    def whole(self, num_bytes: float) -> float:
        """Whole bytes, where time is in ticks, too."""
        return floor(num_bytes) if self.tick_s else num_bytes


def message_s(link: Link, num_bytes: float, hops: int = 1, *, stored: bool = True) -> float:
    """Seconds of one message over `hops` links.

    Args:
        stored: each hop takes the whole message before it sends it on; else only latencies add up.
    """
    if stored:
        return hops * link.down(link.latency_s + num_bytes / link.bytes_per_s)
    return link.down(hops * link.latency_s + num_bytes / link.bytes_per_s)


def all_to_all_s(
    link: Link, total_bytes: float, ranks: int, splits: int = 1, *, congested: bool = True
) -> float:
    """Seconds until all ranks, on one switch, have sent a block to each other directly.

    t = splits (2 d + (n - 2) m / B + 2 (L + m / B)), m = S / splits / n: a rank's link is where
    its blocks queue (the injection bound), and the last one is stored once, on the switch.

    Args:
        total_bytes: S, what one rank has for all, itself included.
        congested: messages share links; else each has all of a link for itself.
    """
    if ranks < 2:
        return 0.0
    block = link.whole(link.whole(total_bytes / splits) / ranks)
    ends_s = 2 * link.endpoint_s
    if not congested:
        return splits * (ends_s + message_s(link, block, 2, stored=False))
    queue_s = (ranks - 2) * link.down(block / link.bytes_per_s)
    return splits * (ends_s + queue_s + message_s(link, block, 2))


def ring_all_reduce_s(link: Link, total_bytes: float, ranks: int, splits: int = 1) -> float:
    """Seconds of a ring: n - 1 messages that are added up, and n - 1 that are not.

    t = splits ((2 n - 1) d + 2 (n - 1) (L + m / B) + 3 (n - 1) m / M), m = S / splits / n.
    """
    if ranks < 2:
        return 0.0
    block = link.whole(link.whole(total_bytes / splits) / ranks)
    added_s = 3 * link.down(block / link.memory_bytes_per_s)
    sent_s = 2 * message_s(link, block)
    return splits * ((2 * ranks - 1) * link.endpoint_s + (ranks - 1) * (sent_s + added_s))


def ring_all_gather_s(link: Link, total_bytes: float, ranks: int) -> float:
    """Seconds of a ring of n - 1 messages of S / n; a reduce-scatter takes as long."""
    return (ranks - 1) * message_s(link, total_bytes / ranks) if ranks > 1 else 0.0


def tree_all_reduce_s(link: Link, total_bytes: float, ranks: int) -> float:
    """Seconds of a pipelined double binary tree: up and down, S through each link both ways.

    t = 2 ceil(log2 n) L + 2 S / B.
    """
    if ranks < 2:
        return 0.0
    return 2 * ceil(log2(ranks)) * link.latency_s + 2 * total_bytes / link.bytes_per_s
