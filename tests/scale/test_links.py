"""Messages on links that send one at a time: ASTRA-sim's numbers, closed forms, what is conserved.

Numbers of single messages and of the gather of all from all are in test/test_congestion_aware.cpp
of astra-sim/astra-network-analytical (599a047).
"""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.scale import schedules
from counterpoint.scale.network import links
from counterpoint.scale.network.collectives import (
    Link,
    all_to_all_s,
    ring_all_gather_s,
    ring_all_reduce_s,
)
from counterpoint.scale.network.links import (
    Dimension,
    Message,
    Topology,
    arrivals_s,
    fat_tree,
    fully_connected,
    ring,
    switch,
    torus,
)
from counterpoint.scale.schedules import Kind, direct_s, halving_doubling_s, ring_s

GIB, NS = 2**30, 1e-9
SWITCH = Link(25 * GIB, 700 * NS, 10 * NS, tick_s=NS)
HOP = Link(50 * GIB, 500 * NS, 10 * NS, memory_bytes_per_s=50e9, tick_s=NS)
FREE = Link(1e9)
MADE: dict[str, Callable[[int, Link], Topology]] = {
    "switch": switch,
    "ring": ring,
    "fully connected": fully_connected,
    "torus": lambda n, link: torus([Dimension(2, link), Dimension(n // 2, link)]),
    "line": lambda n, link: torus([Dimension(n, link, closed=False)]),
    "pods": lambda n, link: fat_tree(n, link, [(2, link)], island=link),
}


def ns(seconds: float) -> float:
    return round(seconds / NS, 6)


@pytest.mark.parametrize(("made", "want"), [(ring, 60_093), (fully_connected, 20_031),
                                            (switch, 40_062)])  # fmt: skip
def test_astra_sims_message(made: Callable[[int, Link], Topology], want: int):
    topology = made(16, HOP)
    (arrived,) = arrivals_s(topology.links, [Message(topology.route(1, 4), 2**20)])
    assert ns(arrived) == want


def test_astra_sims_gather_of_all_from_all_on_a_ring():
    """AllGatherOnRing there: 1 MiB from each of 16 to each other one, all at once."""
    topology = ring(16, HOP)
    messages = [
        Message(topology.route(i, j), 2**20) for i in range(16) for j in range(16) if i != j
    ]
    assert ns(max(arrivals_s(topology.links, messages))) == 704_116


def test_astra_sims_all_to_all_on_a_switch():
    assert ns(direct_s(switch(128, SWITCH), "all_to_all", 8_000_000, 4)) == 303_664


EXAMPLE = HOP._replace(memory_bytes_per_s=1600e9)
HGX = Link(400 * GIB, 936.25 * NS, 10 * NS, memory_bytes_per_s=3350e9, tick_s=NS)


@pytest.mark.parametrize(
    ("topology", "kind", "mebibytes", "active", "want"),
    [
        # tests/rt_template of astra-sim/astra-sim (518bd51): refs/stdout.txt
        (ring(8, HOP), "all_reduce", 1, 1, 117_780),
        # its documentation: quick example, examples/.../Ring_allgather_16npus.sh, 1 MiB of each
        (ring(16, EXAMPLE), "all_gather", 16, 1, 323_560),
        # its documentation: AllReduce_1MB of examples/network_analytical, until August 2025
        (ring(8, EXAMPLE), "all_reduce", 1, 1, 64_440),
        # as a user of it documents examples/.../Ring_reducescatter_4npus.sh
        (ring(4, EXAMPLE), "reduce_scatter", 1, 1, 22_240),
        # as a user of it ran examples/.../HGX-H100-validated.sh, two splits at a time
        (switch(8, HGX), "all_reduce", 1, 2, 57_426),
    ],
)
def test_astra_sims_rings(topology: Topology, kind: Kind, mebibytes: int, active: int, want: int):
    """Of four splits, with the inputs that lie beside the scripts."""
    assert ns(ring_s(topology, kind, mebibytes * 2**20, 4, active)) == want


# bytes and how often, of examples/text_converter/text_workloads/Resnet50_DataParallel.txt there
RESNET_50 = {
    16384: 1, 37632: 1, 65536: 6, 131072: 1, 147456: 3, 262144: 7, 524288: 2, 589824: 4,
    1048576: 11, 2097152: 2, 2359296: 6, 4194304: 5, 8192000: 1, 8388608: 1, 9437184: 3,
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "rate", "want"), [(8, 400, 3_307_886), (4, 741.34, 1_454_270)])
def test_astra_sims_resnet_50(ranks: int, rate: float, want: int):
    """All gradients, a layer's after another's, as a user of it ran them on its HGX-H100s."""
    topology = switch(ranks, HGX._replace(bytes_per_s=rate * GIB))
    each = {size: ns(ring_s(topology, "all_reduce", size, 4, 2)) for size in RESNET_50}
    assert sum(each[size] * count for size, count in RESNET_50.items()) == want


SIZES = st.integers(1, 2**30), st.integers(2, 12), st.integers(1, 3)


@given(*SIZES)
def test_events_on_equal_links_are_the_closed_forms(total_bytes: int, ranks: int, splits: int):
    """With latency, endpoints and memory in ticks for those that have them, and without all."""
    for link in (HOP, FREE):
        for made in (ring, fully_connected):
            found = ring_s(made(ranks, link), "all_reduce", total_bytes, splits)
            want = ring_all_reduce_s(link, total_bytes, ranks, splits)
            assert found == pytest.approx(want, rel=1e-9)
        found = direct_s(switch(ranks, link), "all_to_all", total_bytes, splits)
        assert found == pytest.approx(all_to_all_s(link, total_bytes, ranks, splits), rel=1e-9)


@given(*SIZES)
def test_gathers_without_latency_are_the_closed_form(total_bytes: int, ranks: int, splits: int):
    want = pytest.approx(ring_all_gather_s(FREE, total_bytes, ranks))
    kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter")
    for kind in kinds:
        assert ring_s(ring(ranks, FREE), kind, total_bytes, splits) == want
        assert (
            direct_s(fully_connected(ranks, FREE), kind, total_bytes, splits) * (ranks - 1) == want
        )


@given(st.integers(1, 2**30), st.integers(1, 4))
def test_halving_and_doubling_sends_what_a_ring_does_in_fewer_messages(total: int, power: int):
    ranks = 2**power
    kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    for kind, both in zip(kinds, (1, 1, 2), strict=True):
        found = halving_doubling_s(fully_connected(ranks, FREE), kind, total)
        assert found == pytest.approx(both * ring_all_gather_s(FREE, total, ranks))
        slow = Link(1e30, latency_s=1.0)
        assert halving_doubling_s(fully_connected(ranks, slow), kind, total) == both * power


def _of_all(topology: Topology, num_bytes: float) -> list[Message]:
    n = topology.ranks
    pairs = [(i, (i + ahead) % n) for ahead in range(1, n) for i in range(n)]
    return [Message(topology.route(i, j), num_bytes) for i, j in pairs]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", MADE)
@given(ranks=st.sampled_from([2, 4, 6, 8]), num_bytes=st.integers(1, 2**30))
def test_no_byte_is_lost(name: str, ranks: int, num_bytes: int):
    """A link is busy for as long as all its bytes take: what comes last on it waits for them."""
    topology = MADE[name](ranks, FREE)
    messages = _of_all(topology, num_bytes)
    loads = Counter(link for each in messages for link in each.route)
    assert loads.total() == sum(len(each.route) for each in messages)
    for link, load in loads.items():
        busy_s = load * num_bytes / FREE.bytes_per_s
        alone = [each._replace(route=(link,)) for each in messages if link in each.route]
        assert max(arrivals_s(topology.links, alone)) == pytest.approx(busy_s)
        assert max(arrivals_s(topology.links, messages)) >= busy_s * (1 - 1e-9)


@pytest.mark.parametrize("name", MADE)
def test_a_message_takes_the_shortest_way(name: str):
    topology = MADE[name](8, FREE)
    hops = Counter(len(topology.route(i, j)) for i in range(8) for j in range(8) if i != j)
    want = {
        "switch": {2: 56}, "fully connected": {1: 56}, "ring": {1: 16, 2: 16, 3: 16, 4: 8},
        # 2 x 4: one neighbour, two along the ring, the one across it, and each of these there
        "torus": {1: 24, 2: 24, 3: 8}, "line": {i: 2 * (8 - i) for i in range(1, 8)},
        "pods": {3: 8, 5: 48},
    }  # fmt: skip
    assert hops == want[name]


def test_a_torus_loads_its_links_alike():
    topology = torus([Dimension(8, FREE), Dimension(4, FREE), Dimension(4, FREE)])
    loads = Counter(link for each in _of_all(topology, 1) for link in each.route)
    assert len(loads) == 6 * 128
    for i, size in enumerate((8, 4, 4)):
        # a ring of n has n / 8 of its messages on each link, each way
        of = {load for link, load in loads.items() if link // 256 == i}
        assert of == {size * 128 // 8}


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MADE)), st.sampled_from([2, 4, 8]), st.integers(1, 2**30),
    st.floats(0, 1e-3), st.floats(1, 16),
)  # fmt: skip
def test_more_bandwidth_is_never_slower(
    name: str, ranks: int, total_bytes: int, latency_s: float, factor: float
):
    slow, fast = (MADE[name](ranks, Link(1e9 * f, latency_s, 1e-6)) for f in (1, factor))
    kinds: tuple[Kind, ...] = ("all_reduce", "all_to_all", "all_reduce")
    for run, kind in zip((ring_s, direct_s, halving_doubling_s), kinds, strict=True):
        assert run(fast, kind, total_bytes) <= run(slow, kind, total_bytes) * (1 + 1e-9)


def test_pooled_links_are_shared_by_a_pod():
    nic, pooled = Link(1e9), Link(0.5e9)
    flat, pods = fat_tree(8, nic), fat_tree(8, nic, [(4, pooled)])
    assert direct_s(flat, "all_to_all", 8e9) == pytest.approx(8.0)
    # 4 ranks send 4 blocks each out of their pod; the first one climbs, and the last comes down
    assert direct_s(pods, "all_to_all", 8e9) == pytest.approx(16 / 0.5 + 1 + 2 + 1, rel=0.1)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(InputError, match="most 64 messages x hops"):
        patch.setattr(links, "MAX_HOPS", 64)
        direct_s(switch(2**20, FREE), "all_to_all", 2**30)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="messages x hops"):
        patch.setattr(schedules, "_run_s", None)  # before any message is made
        direct_s(switch(2048, FREE), "all_to_all", 2**30)
    with pytest.raises(InputError, match="ranks must be at most 1024, each linked with each"):
        fully_connected(2**20, FREE)
    with pytest.raises(InputError, match="ranks must be a power of two"):
        halving_doubling_s(switch(6, FREE), "all_reduce", 2**20)
    with pytest.raises(InputError, match="kind must be one without two phases"):
        direct_s(switch(6, FREE), "all_reduce", 2**20)
