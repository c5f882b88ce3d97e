"""Collectives as messages that wait for each other, for the event loop of `links`.

They are those of ASTRA-sim's system layer: before a rank sends, and at its end, it takes
`endpoint_s`; before it goes on with what it must add up, three times the bytes go through its
memory. Splits of the data follow each other on each rank, one or more at a time. Where links are
equal they take as long as the closed forms of `collectives`: a ring on a ring or fully connected, a
direct all-to-all on a switch. On all other links only this knows.

Source: astra-sim/system/astraccl/native_collectives of ASTRA-sim, commit 518bd51.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from counterpoint.errors import InputError
from counterpoint.scale.network.links import Message, Topology, arrivals_s, refuse_beyond

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
# of one split: its number, the messages that its ranks begin after, and its first message's number
Split = Callable[[int, list[tuple[int, ...]], int], Iterator[Message]]


def ring_s(
    topology: Topology, kind: Kind, total_bytes: float, splits: int = 1, active: int = 1
) -> float:
    """Seconds of a ring: each rank sends to the next one what came from the one before.

    Of several splits that are active, half go the other way round.

    Args:
        topology: that the ranks are on; `endpoint_s` and memory are those of its first link.
        kind: "all_to_all" forwards each block until it is there: n (n - 1) / 2 messages a rank.
        total_bytes: of the full (gathered, or sent) tensor.
        splits: of the bytes.
        active: splits at a time; the next one of a rank begins when one has ended there.

    Raises:
        InputError: messages x hops are more than can be simulated in seconds.
    """
    n, link = topology.ranks, topology.links[0]
    block = link.whole(link.whole(total_bytes / splits) / n)
    added_s = 3 * link.down(block / link.memory_bytes_per_s)
    steps = {"all_reduce": 2 * (n - 1), "all_to_all": n * (n - 1) // 2}.get(kind, n - 1)
    added = n - 1 if kind in ("all_reduce", "reduce_scatter") else 0

    def split(number: int, begins: list[tuple[int, ...]], first: int) -> Iterator[Message]:
        ahead = 1 if active == 1 or number % active < active // 2 else -1
        for step in range(steps + 1):
            delay_s = link.endpoint_s + (added_s if 0 < step <= added else 0.0)
            for rank in range(n):
                before = first + (step - 1) * n + (rank - ahead) % n
                after = (before,) if step else begins[rank]
                route = topology.route(rank, (rank + ahead) % n) if step < steps else ()
                yield Message(route, block, after, delay_s)

    return _run_s(topology, split, splits, active)


def direct_s(topology: Topology, kind: Kind, total_bytes: float, splits: int = 1) -> float:
    """Seconds in which each rank sends a block to each other one at once.

    Args:
        topology: likewise.
        kind: not "all_reduce".
        total_bytes: likewise.
        splits: likewise.

    Raises:
        InputError: messages x hops are more than can be simulated in seconds, or an all-reduce.
    """
    if kind == "all_reduce":
        raise InputError("direct_s", "kind", want="one without two phases", got=kind)
    n, link = topology.ranks, topology.links[0]
    if n > 2:  # before all are made; rank 0 is at an end of a line, whose mean is two thirds of it
        refuse_beyond(splits * n * sum(len(topology.route(0, i)) for i in range(1, n)) * 2 // 3)
    block = link.whole(link.whole(total_bytes / splits) / n)
    added_s = 3 * link.down(block / link.memory_bytes_per_s) if kind == "reduce_scatter" else 0.0

    def split(_: int, begins: list[tuple[int, ...]], first: int) -> Iterator[Message]:
        for rank in range(n):
            for ahead in range(1, n):
                route = topology.route(rank, (rank + ahead) % n)
                yield Message(route, block, begins[rank], link.endpoint_s)
        for rank in range(n):
            # of the rank `ahead` before this one, its message of that number
            after = tuple(first + (rank - ahead) % n * (n - 1) + ahead - 1 for ahead in range(1, n))
            yield Message((), 0.0, after, link.endpoint_s + added_s)

    return _run_s(topology, split, splits)


def halving_doubling_s(
    topology: Topology, kind: Kind, total_bytes: float, splits: int = 1
) -> float:
    """Seconds of recursive halving and doubling: partners are a power of two apart.

    Args:
        topology: likewise; its ranks are a power of two.
        kind: not "all_to_all".
        total_bytes: likewise.
        splits: likewise.

    Raises:
        InputError: the ranks are no power of two, or an all-to-all.
    """
    n, link = topology.ranks, topology.links[0]
    if n < 2 or n & (n - 1) or kind == "all_to_all":
        want = "a power of two, and no all-to-all"
        raise InputError("halving_doubling_s", "ranks", want=want, got=f"{n}, {kind}")
    whole = link.whole(total_bytes / splits)
    halves = [(2**i, link.whole(whole / 2 ** (i + 1))) for i in range(n.bit_length() - 1)]
    rounds = {"all_gather": halves[::-1], "reduce_scatter": halves}.get(kind, halves + halves[::-1])
    # as many receipts are added up as ASTRA-sim does: those before a send of a smaller block
    added = 0 if kind == "all_gather" else len(halves) - 1

    def split(_: int, begins: list[tuple[int, ...]], first: int) -> Iterator[Message]:
        for step, (apart, block) in enumerate(rounds):
            added_s = 3 * link.down(block / link.memory_bytes_per_s) if 0 < step <= added else 0.0
            for rank in range(n):
                before = first + (step - 1) * n + (rank ^ rounds[step - 1][0])
                after = (before,) if step else begins[rank]
                route = topology.route(rank, rank ^ apart)
                yield Message(route, block, after, link.endpoint_s + added_s)
        last = first + (len(rounds) - 1) * n
        for rank in range(n):
            yield Message((), 0.0, (last + (rank ^ rounds[-1][0]),), link.endpoint_s)

    return _run_s(topology, split, splits)


def _run_s(topology: Topology, split: Split, splits: int, active: int = 1) -> float:
    """Seconds of all splits: each ends with a message of each rank."""
    n = topology.ranks

    def messages() -> Iterator[Message]:
        ends: list[list[tuple[int, ...]]] = [[()] * n for _ in range(active)]
        first = 0
        for number in range(splits):
            count = 0
            for each in split(number, ends[number % active], first):
                count += 1
                yield each
            first += count
            ends[number % active] = [(first - n + rank,) for rank in range(n)]

    return max(arrivals_s(topology.links, messages())) if n > 1 else 0.0
