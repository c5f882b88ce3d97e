"""Islands that form a torus: what a group of ranks has of its links, and closed forms on them.

Every rank of an island has an equal share of the island's links, so times here are those of one
rank and its share, of one island each.
"""

from collections.abc import Iterator, Sequence
from math import prod

from counterpoint.scale.layout import divisors
from counterpoint.scale.network.collectives import Link, ring_all_gather_s
from counterpoint.scale.network.links import Dimension


def dimensions(
    sizes: Sequence[int], islands: int, stride: int, link: Link
) -> tuple[Dimension, ...]:
    """The dimensions along which a group lies, as a torus of its own.

    Groups that lie between each other share links: a hop of a group goes over `stride` links, each
    of which as many groups use.

    Args:
        sizes: of the torus, innermost first.
        islands: of the group.
        stride: how far apart they are in the numbers of all islands.
        link: of one rank's share, from an island to the next.
    """
    found: list[Dimension] = []
    for size in sizes:
        if stride >= size:
            stride = -(-stride // size)
            continue
        count = min(islands, -(-size // stride))
        if count > 1:
            shared = link._replace(
                bytes_per_s=link.bytes_per_s / stride, latency_s=link.latency_s * stride
            )
            found.append(Dimension(count, shared, closed=count * stride >= size))
        islands, stride = -(-islands // count), 1
    return tuple(found)


def all_gather_s(along: Sequence[Dimension], total_bytes: float) -> float:
    """Seconds of an all-gather, or of a reduce-scatter, by a ring in one dimension after another.

    The bytes are shared out over the dimensions, and each share begins in another one, so that all
    links are in use. A closed dimension has a ring each way; an open one has a single ring, that
    comes back on the links of the other direction.
    """
    total_s = 0.0
    for step in range(len(along)):
        slowest_s = 0.0
        for begin in range(len(along)):
            turn = [along[(begin + i) % len(along)] for i in range(len(along))]
            size, link, closed = turn[step]
            both = link._replace(bytes_per_s=link.bytes_per_s * (1 + closed))
            left = prod(each.size for each in turn[step + 1 :])
            slowest_s = max(
                slowest_s, ring_all_gather_s(both, total_bytes / len(along) / left, size)
            )
        total_s += slowest_s
    return total_s


def all_to_all_s(along: Sequence[Dimension], block_bytes: float) -> float:
    """Seconds of a direct all-to-all: of its busiest link, in one dimension after another.

    Along a closed dimension of n, n**2 / 8 messages go over each link each way, and along an open
    one n**2 / 4 over the middle one; each stands for those of all other dimensions.

    Args:
        along: dimensions of the group.
        block_bytes: from one island to another.
    """
    ranks = prod(each.size for each in along)
    busiest_s = max(
        _busiest(each) * (ranks // each.size) * block_bytes / each.link.bytes_per_s
        for each in along
    )
    hops = ((each.size // 2 if each.closed else each.size - 1) for each in along)
    return busiest_s + sum(n * each.link.latency_s for n, each in zip(hops, along, strict=True))


def _busiest(of: Dimension) -> int:
    """Messages on the busiest link, one from each place to each other one."""
    if not of.closed:
        return (of.size // 2) * -(-of.size // 2)
    # those to all places nearer than half of the way round, and half of those that are as far
    near = (of.size - 1) // 2
    return near * (near + 1) // 2 + (0 if of.size % 2 else -(-of.size // 4))


def hops(sizes: Sequence[int], stride: int) -> int:
    """Links between two islands whose numbers differ by `stride`, the shorter way round."""
    count = 0
    for size in sizes:
        stride, apart = divmod(stride, size)
        count += min(apart, size - apart)
    return max(count, 1)


def nearest(sizes: Sequence[int], islands: int) -> tuple[int, ...]:
    """The sizes nearest to those given, as many, that multiply to the islands."""

    def all_of(count: int, left: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (left,)
            return
        for size in divisors(left):
            for rest in all_of(count - 1, left // size):
                yield (size, *rest)

    def apart(found: tuple[int, ...]) -> float:
        return sum(max(a / b, b / a) for a, b in zip(found, sizes, strict=True))

    return min(all_of(len(sizes), islands), key=apart)
