"""Blocks of two kernels on one SM: what stamps say, that kernels write them, and that there is
room for a block of the collective where the benchmark says so."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_bodies import world
from rankpool import RankError, RankPool

from benchmarks import paper_co_residency as co_residency
from benchmarks import stamps
from benchmarks.declare import Bench
from benchmarks.runner import measured
from benchmarks.stamps import Stay, Together, together
from counterpoint.gpu.limits import LIMITS
from counterpoint.gpu.occupancy import Kernel, beside, occupancy
from counterpoint.run.launch import INTERPRETED_BLOCKS
from counterpoint.testing import ptx

COMM = Stay(3, 100, 200)


@pytest.mark.parametrize(("matmul", "want"), [
    ([], Together(0, 0, 0.0)),
    ([Stay(4, 100, 200)], Together(0, 0, 0.0)),  # another SM
    ([Stay(3, 0, 100), Stay(3, 200, 300)], Together(0, 0, 0.0)),  # gone before, there after
    ([Stay(3, 0, 300)], Together(1, 1, 1.0)),
    ([Stay(3, 150, 300), Stay(3, 110, 160)], Together(2, 1, 0.9)),  # what both cover counts once
    ([Stay(3, 120, 180), Stay(3, 130, 140)], Together(2, 1, 0.6)),  # one within another
])  # fmt: skip
def test_blocks_are_together_on_one_sm_at_one_time(matmul: list[Stay], want: Together):
    found = together(matmul, [COMM])
    assert found[:2] == want[:2] and found.share == pytest.approx(want.share)
    more = together(matmul, [COMM, Stay(9, 0, 100)])  # beside nobody, as long
    assert more[:2] == want[:2] and more.share == pytest.approx(want.share / 2)
    assert together([COMM], []) == Together(0, 0, 0.0)


STAYS = st.lists(
    st.builds(lambda sm, start, length: Stay(sm, start, start + length),
              st.integers(0, 2), st.integers(0, 20), st.integers(0, 8)), max_size=6)  # fmt: skip


@given(STAYS, STAYS)
def test_of_any_stamps_as_counted_tick_by_tick(one: list[Stay], other: list[Stay]):
    found = together(one, other)
    beside_of = [
        [any(a.sm == b.sm and a.start_ns <= t < a.end_ns for a in one)
         for t in range(b.start_ns, b.end_ns)] for b in other
    ]  # fmt: skip
    ticks = sum(map(len, beside_of))
    assert found.share * ticks == pytest.approx(sum(map(sum, beside_of)))
    assert found.blocks == sum(map(any, beside_of))
    assert found.pairs == together(other, one).pairs >= found.blocks


def rows_of(rank: int, ranks: int) -> list[dict[str, Any]]:
    with mock.patch.object(co_residency, "DTYPE", torch.float32):  # the interpreter has no bf16 dot
        case = co_residency.case_of(4, m=128, n=192, k=64, numel=5000)
        bench = Bench(world(), torch.device("cpu"), rounds=2)
        return measured(co_residency.PAPER_CO_RESIDENCY, case, bench)


def test_both_kernels_are_right_and_say_when_they_ran(pool: RankPool):
    rows, *_ = pool.run(rows_of, 2, timeout_s=120)
    arms = {row["arm"]: row for row in rows}
    assert list(arms) == [co_residency.BASELINE, "matmul", "collective", *co_residency.ORDERS]
    for name, row in arms.items():
        assert ("matmul_s" in row) is (name != "collective")
        assert ("collective_s" in row) is (name != "matmul")
        assert all(row[span] > 0 for span in ("matmul_s", "collective_s") if span in row)
    for name in (co_residency.BASELINE, *co_residency.ORDERS):
        # one host thread: nothing is resident beside anything
        assert (arms[name]["pairs"], arms[name]["share_beside"]) == (0, 0)
        assert arms[name]["error"] < 1e-5
        assert arms[name]["comm_blocks"] == INTERPRETED_BLOCKS
        assert len(arms[name]["collective_after_s"]) == 2
    assert all(s > 0 for s in arms[co_residency.BASELINE]["collective_after_s"])
    assert arms["matmul"]["blocks_per_sm"] == 4


def test_a_piece_that_did_not_arrive_is_refused(pool: RankPool):
    with pytest.raises(RankError, match="one after the other: off by"):
        pool.run(without_a_piece, 2, timeout_s=120)


def without_a_piece(rank: int, ranks: int) -> list[dict[str, Any]]:
    def lossy(self: co_residency.Gather) -> None:
        self.kernel(co_residency.COMM_BLOCKS, **self.given)
        self.out[0, -1] = 0

    with mock.patch.object(co_residency.Gather, "__call__", lossy):
        return rows_of(rank, ranks)


@dataclass
class Made:
    """Both kernels for sm_90."""

    matmul: ptx.Compiled
    gather: ptx.Compiled


@pytest.fixture(scope="module")
def made() -> Made:
    matmul, gather = stamps.stamped_matmul_kernel, stamps.stamped_gather_kernel
    types = dict.fromkeys(matmul.arg_names, "*bf16") | {
        "stamps_ptr": "*i64", "M": "i32", "N": "i32", "K": "i32"}  # fmt: skip
    types = {n: t for n, t in types.items() if n not in co_residency.TILE}
    more = {"num_warps": 4, "num_stages": 3}
    by_tiles = ptx.compiled(matmul, 90, types, co_residency.TILE, aligned=(*types,), **more)
    types = dict.fromkeys(gather.arg_names, "i32") | {
        "source_ptr": "*bf16", "outs_ptr": "*i64", "stamps_ptr": "*i64", "bases_ptr": "*i64",
        "state_ptr": "*i32", "fault_ptr": "*i64", "timeout_ns": "i64"}  # fmt: skip
    constants = {"WORLD": 2, "BLOCK": co_residency.COMM_STEP}
    types = {n: t for n, t in types.items() if n not in constants}
    aligned = ("source_ptr", "outs_ptr", "stamps_ptr", "bases_ptr", "numel", "half_bytes")
    return Made(by_tiles, ptx.compiled(gather, 90, types, constants, aligned=aligned, **more))


def test_stamps_are_of_the_sm_and_of_the_clock_at_both_ends(made: Made):
    for found in (made.matmul, made.gather):
        assert found.ptx.count("%smid") == 1 and not found.spills
        first, last = found.ptx.find("%globaltimer"), found.ptx.rfind("%globaltimer")
        work = [found.ptx.find(word) for word in ("ld.global", "mma", "atom")]
        assert first < min(at for at in work if at >= 0)
        assert last > max(found.ptx.rfind(word) for word in ("mma", "atom", "bar.sync"))
    assert not ptx.wrong_order(made.gather.ptx)


def test_the_collective_has_room_beside_fewer_blocks_and_none_beside_all(made: Made):
    limits = LIMITS["sm_90"]
    matmul = Kernel(128, made.matmul.registers, 0, made.matmul.dynamic_bytes)
    gather = Kernel(128, made.gather.registers, 0, made.gather.dynamic_bytes)
    assert made.gather.registers <= 32, "few"
    most = occupancy(matmul, limits).blocks
    room = beside(matmul, gather, limits).blocks
    below = [n for n in co_residency.PER_SM if n]
    assert max(below) <= room < most, (room, most)
