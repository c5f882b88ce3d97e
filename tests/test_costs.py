"""Costs: the closed forms against what holds for every machine, and unit slips that are refused."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.costs import (
    NO_TILES,
    OWN_MATMUL,
    ROW_BYTES,
    TILE_POWER,
    TILE_REUSE,
    Costs,
    Sms,
    own_matmul,
)
from counterpoint.errors import InputError
from counterpoint.model.work import work_s
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.presets import preset
from counterpoint.problem import Problem

COSTS = preset("h200-8").costs
SMS = preset("h200-8").sms
TILES = (None, (128, 256), (64, 128), (256, 128))

sizes = st.integers(1, 20000)
quickly = settings(max_examples=300)


def test_every_constant_is_checked():
    for field in fields(Costs):
        with pytest.raises(InputError, match=f"Costs: {field.name} must be"):
            replace(COSTS, **{field.name: -1.0})


@given(sizes, sizes, sizes, st.integers(1, 3), st.sampled_from(TILES), st.sampled_from([2, 4]))
@quickly
def test_a_larger_matmul_never_takes_less(
    rows: int, n: int, k: int, more: int, tile: tuple[int, int] | None, item_bytes: int
):
    seconds = COSTS.matmul_s(rows, n, k, item_bytes, SMS, tile)
    assert seconds > 2 * COSTS.kernel_s
    for larger in ((rows + more, n, k), (rows, n + more, k), (rows, n, k + more)):
        # but for the last bit: sums of products are rounded
        assert COSTS.matmul_s(*larger, item_bytes, SMS, tile) >= seconds * (1 - 1e-12)


def in_two(first: int, second: int, n: int, k: int, tile: tuple[int, int] | None = None) -> float:
    """Seconds of a matmul of some rows, and of one of the others."""
    return sum(COSTS.matmul_s(rows, n, k, 2, SMS, tile) for rows in (first, second))


@given(sizes, sizes, sizes, sizes, st.sampled_from(TILES[1:]))
@quickly
def test_cutting_rows_never_saves_time(
    first: int, second: int, n: int, k: int, tile: tuple[int, int]
):
    whole_s = COSTS.matmul_s(first + second, n, k, 2, SMS, tile)
    parts_s = in_two(first, second, n, k, tile)
    assert parts_s >= whole_s * (1 - 1e-12)
    assert parts_s * COSTS.settling(parts_s) >= whole_s * COSTS.settling(whole_s) * (1 - 1e-12)


@given(sizes, sizes, sizes, sizes)
@settings(quickly, max_examples=1000)
def test_cutting_rows_saves_little_where_each_part_may_take_its_own_tile(
    first: int, second: int, n: int, k: int
):
    # of 100,000 random shapes cutting saves time in 8 %, where one more wave would have a few
    # tiles, and at most 21 %, where there are few columns
    whole_s = COSTS.matmul_s(first + second, n, k, 2, SMS)
    assert in_two(first, second, n, k) >= 0.75 * whole_s


def test_waves_by_hand():
    """132 SMs, tiles of 128 x 256: one row of tiles of 33 x 256 columns is a quarter of a wave."""
    costs = replace(COSTS, kernel_s=3.5e-6)
    n, k, tile = 33 * 256, 4096, (128, 256)
    wave_s = 2 * 128 * 256 * k * 132 / costs.gemm_flop_per_s

    def waves(rows: int, known: bool) -> float:
        seconds = costs.matmul_s(rows, n, k, 2, SMS, tile if known else None)
        return (seconds - 7e-6) / wave_s

    assert waves(4 * 128, True) == pytest.approx(1)
    assert waves(4 * 128, False) == pytest.approx(1)
    # a known tile takes the whole of its last wave, an unknown one is taken to be one that fits
    assert waves(4 * 128 + 1, True) == pytest.approx(2)
    assert 1 < waves(4 * 128 + 1, False) < 1.5
    assert waves(12 * 128, True) == pytest.approx(3)


def test_a_wave_of_few_tiles_is_one():
    """Four SMs and tiles that cannot be halved: five tiles are two waves."""
    costs = replace(COSTS, kernel_s=0.0, hbm_bytes_per_s=9e17)
    k, sms = 10**9, Sms(4, (1, 1))
    wave_s = 2 * k * 4 / costs.gemm_flop_per_s
    for tile in (None, (1, 1)):
        assert costs.matmul_s(5, 1, k, 2, sms, tile) == pytest.approx(2 * wave_s)


def test_a_small_tile_is_less_efficient():
    costs = replace(COSTS, kernel_s=0.0)
    # whole waves of each tile
    largest_s, half_s, small_s = (
        costs.matmul_s(132 * 128, 256 * 4, 8192, 2, SMS, tile)
        for tile in ((128, 256), (128, 128), (64, 64))
    )
    assert largest_s == pytest.approx(half_s)  # its loads do not bound it yet
    # 64 x 64: 32 products for each number that is loaded, the largest 85
    part = 32 / (TILE_REUSE * 128 * 256 / (128 + 256))
    assert largest_s / small_s == pytest.approx(part**TILE_POWER)
    assert costs.matmul_s(132 * 128, 256 * 4, 8192, 2, SMS) == pytest.approx(largest_s)


def test_an_unknown_tile_is_one_that_fits():
    """What cuBLAS takes on an H200: 128 x 112 for 512 x 7168, where 128 x 256 would leave a wave
    of 112 tiles, and 128 x 176 for 2048 x 7168."""
    for rows, tile in ((512, (128, 112)), (2048, (128, 176))):
        known_s = COSTS.matmul_s(rows, 7168, 8192, 2, SMS, tile)
        assert COSTS.matmul_s(rows, 7168, 8192, 2, SMS) == pytest.approx(known_s)
        assert known_s < 0.99 * COSTS.matmul_s(rows, 7168, 8192, 2, SMS, (128, 256))


def test_few_rows_are_bound_by_memory():
    n, k = 8192, 8192
    weight_s = n * k * 2 / COSTS.hbm_bytes_per_s
    assert COSTS.matmul_s(1, n, k, 2, SMS) == pytest.approx(
        2 * COSTS.kernel_s + weight_s + (n + k) * 2 / COSTS.hbm_bytes_per_s
    )
    # 16 times the rows, and hardly more time; many rows take what their products take
    assert COSTS.matmul_s(16, n, k, 2, SMS) < 1.01 * COSTS.matmul_s(1, n, k, 2, SMS)
    products_s = 2 * 8192 * n * k / COSTS.gemm_flop_per_s
    assert products_s < COSTS.matmul_s(8192, n, k, 2, SMS) < 1.1 * products_s


def test_a_weight_that_the_l2_has_is_not_read_again():
    costs = replace(COSTS, kernel_s=0.0)
    assert SMS.l2_bytes == preset("h200-8").device.l2_bytes
    n, k = 8192, SMS.l2_bytes // 2 // 8192 // 2  # half of the L2
    moved, weight = (16 * k + 16 * n) * 2, n * k * 2
    first_s, again_s = (costs.matmul_s(16, n, k, 2, SMS, again=again) for again in (False, True))
    assert first_s == pytest.approx((moved + weight) / costs.hbm_bytes_per_s)
    assert again_s == pytest.approx((moved + weight / 2) / costs.hbm_bytes_per_s)
    # of one as large as the L2 nothing is left, of one that is bound by products nothing is gained
    for rows, columns in ((16, 2 * n), (8192, n)):
        sizes = (rows, columns, k, 2, SMS)
        assert costs.matmul_s(*sizes, again=True) == costs.matmul_s(*sizes)


def test_fp32_products_take_twice_the_time():
    costs = replace(COSTS, kernel_s=0.0)
    shape = (8192, 8192, 8192)
    assert costs.matmul_s(*shape, 4, SMS) == pytest.approx(2 * costs.matmul_s(*shape, 2, SMS))


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_an_empty_matmul_takes_no_time(shape: tuple[int, int, int]):
    assert COSTS.matmul_s(*shape, 2, SMS) == 0
    assert COSTS.matmul_s(*shape, 2, SMS, (128, 256)) == 0


@pytest.mark.parametrize("tile", [(1, 1), (1, 2), (2, 2), (8, 1), (256, 128)])
def test_the_smallest_of_tiles_can_be_halved(tile: tuple[int, int]):
    assert COSTS.matmul_s(3, 5, 7, 2, Sms(1, tile)) > 0


def test_clocks_settle_and_copies_slow_the_more_the_longer_matmuls_are():
    costs = replace(COSTS, gemm_settled=1.2, gemm_settling_s=4e-4, matmul_beside_copy=1.5)
    lengths_s = (0, 1e-5, 1e-4, 4e-4, 1e-2, 1.0)
    for factor_of, limit in ((costs.settling, 1.2), (costs.beside_copy, 1.5)):
        factors = [factor_of(s) for s in lengths_s]
        assert factors == sorted(factors)
        assert factors[0] == 1
        assert factors[3] == pytest.approx((1 + limit) / 2)
        assert factors[-1] == pytest.approx(limit, rel=1e-3)
    at_once = replace(costs, gemm_settling_s=0.0)
    assert at_once.settling(0) == 1
    assert at_once.settling(1e-5) == pytest.approx(1.2, rel=1e-3)
    assert replace(costs, gemm_settled=1.0).settling(1.0) == 1


def test_copies_by_hand():
    costs = replace(COSTS, copy_overhead_s=6e-6, copy_bytes_per_s=400e9)
    assert costs.copy_s(0) == 6e-6
    assert costs.copy_s(4_000_000) == pytest.approx(16e-6)
    # 1000 rows of 4000 bytes: each costs as much as ROW_BYTES more
    strided_s = costs.copy_s(4_000_000, 4000)
    assert strided_s == pytest.approx(16e-6 + 1000 * ROW_BYTES / 400e9)
    # the longer the rows, the less it matters
    times = [costs.copy_s(4_000_000, row) for row in (100, 1000, 10000, 100000)]
    assert times == sorted(times, reverse=True) and times[-1] > costs.copy_s(4_000_000)


def test_kernels_and_collectives_by_hand():
    costs = replace(COSTS, kernel_s=2e-6, hbm_bytes_per_s=4e12, all_gather_s=30e-6,
                    reduce_scatter_s=20e-6, collective_small_s=8e-6,
                    collective_bytes_per_s=300e9)  # fmt: skip
    assert costs.memory_s(8_000_000) == pytest.approx(4e-6)
    assert costs.collective_s("all_gather", 0) == 8e-6
    assert costs.collective_s("all_gather", 6_000_000) == pytest.approx(50e-6)
    assert costs.collective_s("reduce_scatter", 6_000_000) == pytest.approx(40e-6)
    assert costs.collective_s("reduce_scatter", 600_000) == pytest.approx(13e-6)


@pytest.mark.parametrize(
    "name", ["a100-8", "a40-4", "h100-8", "h200-8", "b200-8", "gb200-72", "mi300x-8"]
)
def test_a_datasheet_is_not_reached(name: str):
    machine = preset(name)
    costs = machine.costs
    assert costs.gemm_flop_per_s < machine.device.bf16_flop_per_s
    assert costs.hbm_bytes_per_s < machine.device.hbm_bytes_per_s
    assert costs.copy_bytes_per_s < machine.link.bytes_per_s
    assert costs.collective_bytes_per_s < machine.link.bytes_per_s
    assert costs.copy_overhead_s == machine.link.copy_overhead_s
    measured = replace(machine, measured=replace(costs, kernel_s=9e-6))
    assert measured.costs.kernel_s == 9e-6


def test_our_own_matmul_is_as_measured_and_between():
    for (rows, factor), most in zip(OWN_MATMUL, (1.05, 1.29, 1.05), strict=True):
        assert own_matmul(rows) == pytest.approx(factor) and factor < most
    assert own_matmul(1) == own_matmul(64) and own_matmul(10**6) == own_matmul(8192)
    assert own_matmul(64) < own_matmul(128) < own_matmul(256) > own_matmul(1024) > own_matmul(8192)


def test_batch_invariant_plans_are_priced_so():
    machine = preset("h200-8")
    for m in (256, 8192):
        plain = Problem("matmul_all_reduce", m, 8192, 3584, 8)
        seconds, own = (
            sum(work_s(step, plan, machine, NO_TILES)
                for step in bind(plan, 0).steps if step.step.kind == "matmul")
            for plan in (build(replace(plain, invariant=each), "serial") for each in (False, True))
        )  # fmt: skip
        assert own == pytest.approx(seconds * own_matmul(m))
