"""Torus, rails and events between islands: closed forms, what events add, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.presets import preset
from counterpoint.scale import Layout, predict
from counterpoint.scale.network import torus
from counterpoint.scale.network.collectives import Link
from counterpoint.scale.network.fabric import Fabric, Group, Network
from counterpoint.scale.network.links import Dimension
from counterpoint.scale.network.links import torus as torus_of

NODE = preset("h100-8")
NIC = 0.9 * 50e9
FABRICS: list[dict[str, Any]] = [
    {}, {"rails": True}, {"levels": ((64, 2.0), (128, 4.0))}, {"torus": (8, 4)},
    {"rails": True, "levels": ((64, 2.0),)}, {"torus": (4, 4, 2)}, {"torus": (32,)},
]  # fmt: skip
GROUPS = st.sampled_from(
    [Group(256, 1), Group(64, 1), Group(32, 8), Group(4, 64), Group(16, 2), Group(128, 2)]
)


@given(st.sampled_from(FABRICS), GROUPS, st.integers(2**20, 2**30))
def test_events_are_never_faster_than_the_busiest_link(
    options: dict[str, Any], group: Group, total_bytes: int
):
    """Without latency: on few islands most is added by what is stored whole on each hop."""
    fabric = Fabric(nic_latency_s=0.0, **options)
    machine = replace(NODE, link=replace(NODE.link, latency_s=0.0))
    closed_s = Network(machine, fabric).all_to_all_s(total_bytes, group)
    events = replace(fabric, congestion="events")
    events_s = Network(machine, events).all_to_all_s(total_bytes, group)
    assert closed_s * (1 - 1e-9) <= events_s <= 2 * closed_s


@settings(deadline=None)
@given(
    st.sampled_from(FABRICS), GROUPS, st.sampled_from(["closed", "events"]), st.floats(1, 16),
    st.sampled_from(["all_reduce_s", "all_gather_s", "all_to_all_s"]),
)  # fmt: skip
def test_a_faster_nic_is_never_slower(
    options: dict[str, Any], group: Group, congestion: Any, factor: float, kind: str
):
    slow, fast = (
        getattr(Network(NODE, Fabric(nic_bytes_per_s=rate, congestion=congestion, **options)), kind)
        for rate in (25e9, 25e9 * factor)
    )
    assert fast(2**24, group) <= slow(2**24, group) * (1 + 1e-9)


def test_collectives_of_a_torus_use_all_its_links():
    """Of 8 x 8 islands, all NICs carry a gather; of an all-to-all each byte takes 4 hops."""
    network = Network(NODE, Fabric(torus=(8, 8), nic_latency_s=0.0))
    group, total_bytes = Group(64, 8), 2**30
    gathered_s = total_bytes * 63 / 64 / NIC
    assert network.all_gather_s(total_bytes, group) == pytest.approx(gathered_s)
    assert network.all_reduce_s(total_bytes, group) == pytest.approx(2 * gathered_s)
    # 2 hops in each dimension, over 4 links of a quarter of a NIC
    assert network.all_to_all_s(total_bytes, group) == pytest.approx(total_bytes * 4 / NIC)


def test_a_group_on_part_of_a_torus_has_an_open_line_and_shares_what_lies_between():
    link = Link(8e9, 1e-6)
    assert torus.dimensions((8, 8), 64, 1, link) == (Dimension(8, link), Dimension(8, link))
    assert torus.dimensions((8, 8), 4, 1, link) == (Dimension(4, link, closed=False),)
    assert torus.dimensions((8, 8), 8, 8, link) == (Dimension(8, link),)
    # every other island of a row, and then all rows
    (row, column) = torus.dimensions((8, 8), 32, 2, link)
    assert row == Dimension(4, Link(4e9, 2e-6)) and column == Dimension(8, link)
    # a ring on an open line comes back on the links of the other direction: half the rate
    ring_s = torus.all_gather_s([Dimension(4, link)], 8e9)
    line_s = torus.all_gather_s([Dimension(4, link, closed=False)], 8e9)
    assert line_s - 3e-6 == pytest.approx(2 * (ring_s - 3e-6))


@pytest.mark.parametrize("sizes", [(2,), (3,), (6,), (8,), (8, 4), (4, 4, 2)])
@pytest.mark.parametrize("closed", [True, False])
def test_the_busiest_link_is_that_of_the_routes(sizes: tuple[int, ...], closed: bool):
    along = [Dimension(size, Link(1.0), closed) for size in sizes]
    topology = torus_of(along)
    loads = [0] * len(topology.links)
    for src in range(topology.ranks):
        for dst in range(topology.ranks):
            for link in topology.route(src, dst):
                loads[link] += 1
    assert torus.all_to_all_s(along, 1.0) == max(loads)


def test_rails_cross_their_island_first():
    """A block for another place goes over NVLink too: seven of eight do."""
    group, total_bytes = Group(64, 1), 2**30
    slow = replace(NODE, link=replace(NODE.link, bytes_per_s=10e9))
    for congestion in ("closed", "events"):
        flat, rails = (Fabric(rails=rails, congestion=congestion) for rails in (False, True))
        times = [Network(slow, f).all_to_all_s(total_bytes, group) for f in (flat, rails)]
        assert times[1] > times[0]
        assert times[1] >= total_bytes * 7 / 8 / slow.costs.collective_bytes_per_s
    for kind in ("all_gather_s", "all_reduce_s"):  # those stay on their rails
        both = (getattr(Network(slow, Fabric(rails=r)), kind)(2**30, group) for r in (False, True))
        assert len(set(both)) == 1


def test_a_send_takes_the_shorter_way_round():
    network = Network(NODE, Fabric(torus=(8, 8), nic_latency_s=1e-6))
    for islands, hops in ((1, 1), (4, 4), (7, 1), (8, 1), (36, 8), (63, 2)):
        sent_s = 2**20 / (NIC / 4)
        assert network.send_s(2**20, 8 * islands) == pytest.approx(sent_s + hops * 1e-6)


def test_a_step_on_a_torus_says_so():
    layout = Layout(dp=64, ep=64)
    found = predict("deepseek-v3", layout, Fabric(torus=(4, 2), congestion="events"))
    flat = predict("deepseek-v3", layout, Fabric())
    assert found.parts["all-to-all"] > flat.parts["all-to-all"]
    assert "islands form a torus 4 x 2, given" in found.explain()
    assert "message by message on FIFO links" in found.explain()


def test_an_island_may_have_72_gpus():
    rack, node = (Network(preset(name), Fabric()) for name in ("gb200-72", "b200-8"))
    assert rack.near(Group(64, 1)) == 64 and rack.near(Group(36, 2)) == 36
    assert rack.all_to_all_s(2**30, Group(64, 1)) < node.all_to_all_s(2**30, Group(64, 1)) / 5
    two = Network(preset("gb200-72"), Fabric(torus=(2, 1)))
    two.covers(144)
    with pytest.raises(InputError, match="the 3 islands of 72 GPUs"):
        two.covers(216)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torus": (8, 4)}, r"torus must be such that it multiplies to the 64 islands of 8 GPUs "
         r"\(h100-8\), got 8x4; the nearest that fits: 8x8"),
        ({"torus": (3, 5, 4)}, "got 3x5x4; the nearest that fits: 4x4x4"),
        ({"torus": (8, 8), "levels": ((64, 2.0),)}, r"torus must be given without levels"),
        ({"torus": (8, 8), "rails": True}, r"torus must be given without rails"),
        ({"torus": (2, 2, 2, 2, 4)}, "torus must be of at most 4 dimensions"),
        ({"torus": (0, 8)}, r"torus\[0\] must be a whole number from 1 to "),
        ({"torus": 8}, "torus must be a tuple, got 8"),
        ({"congestion": "yes"}, "congestion must be one of closed, events, got 'yes'"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        predict("llama3-8b", Layout(dp=512), Fabric(**options))


def test_too_many_messages_are_refused_and_say_what_to_do():
    network = Network(NODE, Fabric(torus=(16, 32), congestion="events"))
    with pytest.raises(InputError, match='messages x hops; congestion="closed" has no limit'):
        network.all_to_all_s(2**30, Group(512, 8))
