"""The residency model: figures worked out by hand, and what must hold for all of them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.residency_model import (
    Constants,
    Residency,
    Setting,
    Sharing,
    best,
    rate,
    regridded,
    residency,
    time_ratio,
)
from counterpoint import presets
from counterpoint.errors import InputError
from counterpoint.gpu.occupancy import Kernel

RING = Kernel(544, 96, 21568, 82240)
LEAN = Kernel(256, 32)
TILE = 8192  # bytes of a step of 64x64x32
PAIR = Sharing(
    device=presets.H200.device, compute=Kernel(128, 64, 0, 24576), num_blocks=16384,
    step_bytes=TILE, compute_s=4e-3, comm=RING, num_comm_blocks=24, comm_s=4e-3,
)  # fmt: skip
# an SM is full from four blocks of TILE on, at once
SHARP = Constants(full_blocks=4, full_bytes=0, sharpness=200, crowding=0, drain_waves=1)
SETTINGS = [Setting(k, urgent) for k in (None, 5, 4, 2, 1) for urgent in (False, True)]


def test_who_is_resident_on_an_h200():
    assert residency(PAIR) == Residency(8, 1, 24, 0, 8 * 108)
    assert residency(PAIR, 5) == Residency(5, 1, 24, 0, 5 * 108)
    # 256 threads and little shared memory: eight on an SM, and room for some of the matmul's
    lean = replace(PAIR, comm=LEAN, num_comm_blocks=17)
    held = residency(lean)
    assert (held.comm_blocks, held.sms_taken) == (8, 3)
    assert held.beside_blocks == 7 and held.left_blocks == 8 * 129 + 7 * 3
    assert residency(lean, 4).beside_blocks == 4
    with pytest.raises(InputError, match="blocks must be one of 8, 7, 6"):
        residency(PAIR, 9)


def test_rates_grow_until_an_sm_is_full():
    assert [round(rate(k, TILE, SHARP), 2) for k in (0, 1, 2, 4, 8)] == [0, 0.25, 0.5, 1, 1]
    crowded = replace(SHARP, crowding=0.1)
    assert rate(8, TILE, crowded) == pytest.approx(0.9, abs=0.01)
    by_bytes = replace(SHARP, full_blocks=0, full_bytes=4 * TILE)
    assert rate(2, 2 * TILE, by_bytes) == pytest.approx(1, abs=0.01)


def test_plain_overlap_waits_for_the_last_wave():
    """15.5 waves, so 16, of 250 us; the last one leaves SMs free, and the collective starts with
    it: a period of 15 waves and 4 ms."""
    want = (4e-3 + 3 * (15 * 250e-6 + 4e-3) + 4e-3) / (4 * 8e-3)
    assert time_ratio(PAIR, Setting(), SHARP) == pytest.approx(want)
    # 1056 blocks are one wave that stays to its end
    assert time_ratio(replace(PAIR, num_blocks=1056), Setting(), SHARP) == 1
    # one with a grid of 108 blocks leaves room from the start, and one of 109 does not
    assert time_ratio(replace(PAIR, num_blocks=108), Setting(), SHARP) == pytest.approx(5 / 8)
    assert time_ratio(replace(PAIR, num_blocks=109), Setting(), SHARP) == 1


def test_with_priority_the_next_holes_are_the_collectives():
    """It starts a wave late; the matmul goes on at 108 / 132, which costs it what it lacks."""
    left_s = 4e-3 - 250e-6
    period_s = 250e-6 + left_s * 132 / 108 if left_s * 132 / 108 < 4e-3 else 4e-3 + 24 / 132 * 4e-3
    want = (8e-3 + 3 * max(4.25e-3, period_s)) / (4 * 8e-3)
    assert time_ratio(PAIR, Setting(priority=True), SHARP) == pytest.approx(want)


def test_too_few_blocks_cost_more_than_they_free():
    quarter = time_ratio(PAIR, Setting(1, True), SHARP)
    assert quarter > 1.5 > time_ratio(PAIR, Setting(4, True), SHARP)
    assert best(PAIR, SETTINGS, SHARP).priority
    assert best(PAIR, [Setting(2), Setting(1)], SHARP) == Setting(2)


def test_a_block_that_fits_beside_needs_no_hole():
    lean = replace(PAIR, comm=LEAN, num_comm_blocks=17)
    assert time_ratio(lean, Setting(4), SHARP) == pytest.approx(5 / 8, abs=0.01)
    assert time_ratio(lean, Setting(), SHARP) > 0.9, "eight blocks leave no room"


def test_a_small_grid_uses_fewer_sms():
    assert regridded(PAIR, PAIR.num_blocks, SHARP).compute_s == pytest.approx(PAIR.compute_s)
    small = regridded(PAIR, 66, SHARP)
    # one block on an SM has a quarter of its rate, and half of the SMs have one
    assert small.compute_s == pytest.approx(PAIR.compute_s * 8 * 15.5 / 16, rel=0.01)
    assert time_ratio(small, Setting(), SHARP) < 1


@given(
    st.integers(1, 1 << 20), st.integers(0, 132), st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-1),
    st.sampled_from([None, 7, 4, 1]),
)  # fmt: skip
def test_priority_never_costs_and_overlap_never_beats_its_parts(
    num_blocks: int, comm_blocks: int, compute_s: float, comm_s: float, blocks: int | None
):
    pair = replace(PAIR, num_blocks=num_blocks, num_comm_blocks=comm_blocks, compute_s=compute_s,
                   comm_s=comm_s)  # fmt: skip
    plain, urgent = (time_ratio(pair, Setting(blocks, p), SHARP) for p in (False, True))
    longer = 4 * (compute_s + comm_s)
    bound = compute_s + 3 * max(compute_s, comm_s) + comm_s
    if blocks is None:
        assert plain <= 1 + 1e-9 and bound / longer <= min(plain, urgent) + 1e-9
    assert all(math.isfinite(x) and x > 0 for x in (plain, urgent))
