"""Messages on links that send one at a time: an event loop, where routes are unequal.

A message is stored on each hop before it goes on. It waits for a link in the order of arrival,
keeps it for bytes / rate, and arrives after latency + bytes / rate. What closed forms of equal
links cannot see is simulated here: who waits for whom on the links of a ring, a torus or a pod.

With `tick_s` of its links, time is in whole ticks and events of one tick come in the order in which
they were made: ASTRA-sim's congestion-aware numbers then come out exactly.

Source: ASTRA-sim's analytical network backend, congestion aware, commit 599a047.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import prod
from operator import mul
from typing import NamedTuple

from counterpoint.errors import InputError
from counterpoint.scale.network.collectives import Link

MAX_HOPS = 2**20  # 3 s of plain Python, 200 MB


class Message(NamedTuple):
    """Bytes from one rank to another.

    Args:
        route: numbers of the links, in order; none: a wait.
        num_bytes: of the message.
        after: numbers of the messages that must have arrived before it is sent.
        delay_s: from their arrival, or from the start, until it is sent.
    """

    route: Sequence[int]
    num_bytes: float
    after: tuple[int, ...] = ()
    delay_s: float = 0.0


class Topology(NamedTuple):
    """Directed links, and the way from one rank to another.

    Args:
        ranks: that send and receive, from 0.
        links: by their numbers.
        route: of two ranks, the numbers of the links between them.
    """

    ranks: int
    links: Sequence[Link]
    route: Callable[[int, int], Sequence[int]]


class Dimension(NamedTuple):
    """One dimension of a torus.

    Args:
        size: ranks along it.
        link: from a rank to the next, each way.
        closed: whether the last one is linked with the first.
    """

    size: int
    link: Link
    closed: bool = True


def arrivals_s(links: Sequence[Link], messages: Iterable[Message]) -> list[float]:
    """Simulate messages on links.

    Args:
        links: by their numbers; all with one `tick_s`.
        messages: a message's `after` names earlier and later ones by their places.

    Returns:
        For each message the seconds until it has arrived.

    Raises:
        InputError: messages x hops are more than can be simulated in seconds.
    """
    sent = _counted(messages)
    tick = links[0].tick_s if links else 0.0
    followers: list[list[int]] = [[] for _ in sent]
    missing = [len(each.after) for each in sent]
    ended, at = [-1.0] * len(sent), _Events(links, sent)
    for i, each in enumerate(sent):
        for earlier in each.after:
            followers[earlier].append(i)
        if not each.after:
            at.add(_units(each.delay_s, tick), i)
    while at.times:
        now = heappop(at.times)
        for event in at.of[now]:  # grows while it is read
            if event < 0:
                at.free(now, ~event)
            elif at.hops[event] < len(sent[event].route):
                at.enter(now, event)
            else:
                ended[event] = now
                for later in followers[event]:
                    missing[later] -= 1
                    if not missing[later]:
                        at.add(now + _units(sent[later].delay_s, tick), later)
        del at.of[now]
    assert min(ended, default=0) >= 0, "messages wait for each other in a circle"
    return [end * tick for end in ended] if tick else ended


class _Events:
    """What is due when: messages i that have arrived, and links i that are free again, as ~i."""

    def __init__(self, links: Sequence[Link], sent: Sequence[Message]) -> None:
        self.links, self.sent = links, sent
        self.times: list[float] = []
        self.of: dict[float, list[int]] = {}
        self.hops = [0] * len(sent)
        self.queues: dict[int, deque[int]] = {}  # of links that are busy
        self.taken: dict[tuple[Link, float], tuple[float, float]] = {}

    def add(self, time: float, event: int) -> None:
        """After all others of that time."""
        if time in self.of:
            self.of[time].append(event)
        else:
            self.of[time] = [event]
            heappush(self.times, time)

    def enter(self, now: float, i: int) -> None:
        """A message takes the next link of its route, or waits for it."""
        link = self.sent[i].route[self.hops[i]]
        self.hops[i] += 1
        if link in self.queues:
            self.queues[link].append(i)
        else:
            self.queues[link] = deque()
            self.send(now, i, link)

    def free(self, now: float, link: int) -> None:
        """A link takes the message that has waited longest, if any does."""
        if self.queues[link]:
            self.send(now, self.queues[link].popleft(), link)
        else:
            del self.queues[link]

    def send(self, now: float, i: int, link: int) -> None:
        """A message is sent on a link."""
        key = self.links[link], self.sent[i].num_bytes
        if key not in self.taken:
            self.taken[key] = _ticks(*key)
        busy, arrives = self.taken[key]
        self.add(now + arrives, i)
        self.add(now + busy, ~link)


def _units(seconds: float, tick: float) -> float:
    """In ticks, if there are any."""
    return round(seconds / tick) if tick else seconds


def _ticks(link: Link, num_bytes: float) -> tuple[float, float]:
    """For how long a message keeps a link, and when it arrives."""
    busy_s = num_bytes / link.bytes_per_s
    both = link.down(busy_s), link.down(link.latency_s + busy_s)
    return _units(both[0], link.tick_s), _units(both[1], link.tick_s)


def refuse_beyond(hops: int) -> None:
    """Refuse more messages x hops than can be simulated in seconds.

    Raises:
        InputError: there are more.
    """
    if hops > MAX_HOPS:
        want = f'of at most {MAX_HOPS} messages x hops; congestion="closed" has no limit'
        raise InputError("links", "messages", want=want, got="more")


def _counted(messages: Iterable[Message]) -> list[Message]:
    found: list[Message] = []
    hops = 0
    for each in messages:
        hops += max(len(each.route), 1)
        refuse_beyond(hops)
        found.append(each)
    return found


def switch(ranks: int, link: Link) -> Topology:
    """One switch: a link from each rank, and one to it."""
    return fat_tree(ranks, link)


def fully_connected(ranks: int, link: Link) -> Topology:
    """A link from each rank to each other one.

    Raises:
        InputError: there are more links than can be simulated.
    """
    if ranks**2 > MAX_HOPS:
        want = f"at most {int(MAX_HOPS**0.5)}, each linked with each"
        raise InputError("links", "ranks", want=want, got=ranks)

    def route(src: int, dst: int) -> Sequence[int]:
        return (src * ranks + dst,)

    return Topology(ranks, (link,) * ranks**2, route)


def ring(ranks: int, link: Link) -> Topology:
    """A ring, both ways; messages take the shorter one, and the ascending one if both are equal."""

    def route(src: int, dst: int) -> Sequence[int]:
        ahead = (dst - src) % ranks
        if ahead <= ranks - ahead:
            return [(src + i) % ranks for i in range(ahead)]
        return [ranks + (src - i) % ranks for i in range(ranks - ahead)]

    return Topology(ranks, (link,) * (2 * ranks), route)


def torus(dimensions: Sequence[Dimension]) -> Topology:
    """Rings of each dimension, the first one innermost in the numbers of ranks.

    A message takes one dimension after another, each the shorter way; where both are equal, those
    of even places ascend and the others descend.
    """
    sizes = [each.size for each in dimensions]
    ranks = prod(sizes)
    strides = list(accumulate(sizes[:-1], mul, initial=1))
    links = [each.link for each in dimensions for _ in range(2 * ranks)]

    def route(src: int, dst: int) -> Sequence[int]:
        found: list[int] = []
        for i, (each, stride) in enumerate(zip(dimensions, strides, strict=True)):
            here, there = src // stride % each.size, dst // stride % each.size
            base = src - here * stride
            for place, ascends in _places(each, here, there):
                found.append((2 * i + (not ascends)) * ranks + base + place * stride)
            src = base + there * stride
        return found

    return Topology(ranks, links, route)


def _places(of: Dimension, here: int, there: int) -> list[tuple[int, bool]]:
    """Where a message is before each hop along a dimension, and whether it ascends."""
    ahead = (there - here) % of.size
    back = of.size - ahead
    ascends = ahead < back or (ahead == back and here % 2 == 0)
    if not of.closed:
        ascends = here <= there
        ahead, back = there - here, here - there
    step, count = (1, ahead) if ascends else (-1, back)
    return [((here + step * i) % of.size, ascends) for i in range(count)]


def fat_tree(
    ranks: int, nic: Link, levels: Sequence[tuple[int, Link]] = (), island: Link | None = None
) -> Topology:
    """Ranks with a NIC each, each a different island's, in pods, and these in larger ones.

    A message leaves by its NIC, climbs to the lowest pod that holds both ranks through the pooled
    links of all below it, and comes down through those of the other side.

    Args:
        ranks: one of each island stands for all of it.
        nic: of one rank, each way.
        levels: (ranks, pooled link) of each level of pods, ascending.
        island: that messages take to reach the right NIC, of rails; None: there is one switch.
    """
    links = [nic] * (2 * ranks) + ([island] * ranks if island else [])
    starts: list[int] = []
    for size, pooled in levels:
        starts.append(len(links))
        links += [pooled] * (2 * -(-ranks // size))

    def route(src: int, dst: int) -> Sequence[int]:
        up, down = [2 * ranks + src] if island else [], [ranks + dst]
        up.append(src)
        for (size, _), start in zip(levels, starts, strict=True):
            one, other = src // size, dst // size
            if one == other:
                break
            up.append(start + 2 * one)
            down.append(start + 2 * other + 1)
        return [*up, *reversed(down)]

    return Topology(ranks, links, route)
