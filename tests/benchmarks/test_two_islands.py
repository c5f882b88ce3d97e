"""Two islands on one host: the benchmark in miniature on CPU ranks, and its table."""

from typing import Any

import pytest
import torch
from island_bodies import on_islands
from rank_bodies import by_reference, world
from rankpool import RankPool

import counterpoint as cp
from benchmarks import two_islands
from benchmarks.declare import Bench
from counterpoint.choose.known import Knowledge
from counterpoint.group.ranks import spawn
from counterpoint.group.workspace import workspace_of
from counterpoint.presets import preset

CPU = torch.device("cpu")
SMALL = {
    two_islands.GATHER: two_islands.matmul_case(two_islands.GATHER, 32, 16, 32),
    two_islands.SCATTER: two_islands.matmul_case(two_islands.SCATTER, 32, 16, 32),
    two_islands.BAGS: two_islands.bags_case(2, 8, 32, 16),
}
ARMS = {"compute", "exchange", "serial", "auto", *(f"chunks={n}" for n in two_islands.CHUNKS)}


def inside(rank: int, ranks: int, op: str) -> list[dict[str, Any]]:
    """As a rank that is on its island, of a machine that is known."""
    with on_islands(rank, ranks // 2), by_reference():
        workspace = workspace_of(world(), CPU)
        workspace.knowledge = Knowledge(preset("h200-2"), {"tuned before": "serial"})
        rows = two_islands.inside(SMALL[op], Bench(world(), CPU, rounds=2))
        assert not workspace.knowledge.tuned
        return rows


@pytest.mark.drawn(1)
@pytest.mark.parametrize("op", SMALL)
@pytest.mark.parametrize("ranks", [2, 4])
def test_arms_between_islands_are_right_and_give_rows(pool: RankPool, op: str, ranks: int):
    rows, *_ = pool.run(inside, ranks, op, timeout_s=120)
    timed = {row["arm"]: row for row in rows}
    parts = {"compute", "exchange"} | (set() if op == two_islands.BAGS else {"wire"})
    assert set(timed) == ARMS | parts and all(row["median_s"] > 0 for row in rows)
    assert {arm for arm, row in timed.items() if "error" not in row} == parts
    first = SMALL[op]["first"]
    found = rows[0]["pooling"] if op == two_islands.BAGS else max(rows[0]["n"], rows[0]["k"])
    assert found >= first // 16 and found % (first // 16) == 0
    assert all(row["islands"] == 2 and row["of_ranks"] == ranks for row in rows)
    assert rows[0]["nic_bytes_per_s"] > 0 and not rows[0]["shared"]
    assert timed["auto"]["pick"].split()[0] in ("serial", "islands")


def started(rank: int, ranks: int) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_islands, "LIMIT_S", 600.0)  # however busy the cores are
        return two_islands.rows(SMALL[two_islands.GATHER], Bench(world(), CPU, rounds=2))


def test_ranks_of_islands_are_started_and_all_get_their_rows():
    first, second = spawn(started, 2, timeout_s=600)
    assert first == second and {row["arm"] for row in first} == {*ARMS, "wire"}
    assert all(row["islands"] == 2 for row in first)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_nccl_is_told_that_islands_are_hosts(gpus: int):
    """Where ranks share a GPU too; of four ranks two are on each."""
    ranks = max(gpus, 2)
    found = [two_islands.environment(rank, ranks, gpus) for rank in range(ranks)]
    for each in found:
        assert each["NCCL_HOSTID"] == each["COUNTERPOINT_ISLAND"]
        assert (each["NCCL_NET"], each["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
        shared = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in each
        assert shared == (gpus < ranks)
    names = [each["NCCL_HOSTID"] for each in found]
    assert names == ["island0"] * (ranks // 2) + ["island1"] * (ranks // 2)
    assert "NCCL_NET" not in two_islands.environment(0, 2, 0)
    larger, stock = (two_islands.environment(0, ranks, gpus, chunk_kib) for chunk_kib in (512, 0))
    assert larger.items() - stock.items() == {("NCCL_P2P_NET_CHUNKSIZE", "524288")}


@pytest.mark.parametrize("op", [two_islands.GATHER, two_islands.SCATTER])
def test_matmuls_alone_leave_sms_to_exchanges(op: str):
    plan = two_islands.leaving(cp.Problem(op, 64, 32, 16, 2, islands=2), 128)
    assert {lane.name: lane.num_sms for lane in plan.lanes} == {"compute": 128, "nic": None}
    cp.validate(plan)


HEAD = {"op": "all_gather_matmul", "case": "all_gather_matmul, chunks of 512 KiB", "chunk_kib": 512,
        "m": 8192, "n": 140288, "k": 8192, "mode": "eager", "islands": 2, "shared": False,
        "gpu": "H200", "ranks": 2, "driver": "1",
        "torch": "2", "triton": "3", "nccl": "4", "multicast": False, "date": "2026-11-24",
        "commit": "abc"}  # fmt: skip
BAGS = {
    "op": two_islands.BAGS,
    "case": two_islands.BAGS,
    "chunk_kib": 0,
    "batch": 65536,
    "each": 8,
    "pooling": 500,
}
TIMES = {"compute": 28.0, "exchange": 25.0, "wire": 26.0, "serial": 54.0, "auto": 32.0,
         "chunks=1": 54.0, "chunks=2": 40.0, "chunks=4": 32.0, "chunks=8": 33.0}  # fmt: skip


def test_the_table_says_what_of_the_shorter_part_is_hidden():
    rows = [HEAD | {"arm": arm, "median_s": s * 1e-3} for arm, s in TIMES.items()]
    rows[4]["pick"] = "islands chunks=4"
    bags_rows = [row | BAGS for row in rows if row["arm"] != "wire"]
    left = two_islands.left_name(two_islands.LEFT[0])
    rows += [HEAD | {"arm": left, "median_s": 0.031}, *bags_rows]
    _, _, matmul, bags, _, note = two_islands.speedups(rows).splitlines()
    speedups = "1.00x, 1.35x, 1.69x, 1.64x"
    assert matmul == (
        "| `all_gather_matmul`, chunks of 512 KiB | 8192, 140288, 8192 | "
        "28.000 + 25.000 (26.000) ms | "
        f"{speedups}, 1.74x | 1.69x, 84% hidden, islands chunks=4 | 88%, {left} |"
    )
    assert bags.endswith(
        "65536 bags, 8 tables, 500 indices | 28.000 + 25.000 ms | "
        f"{speedups} | 1.69x, 84% hidden, islands chunks=4 | 84%, chunks=4 |"
    )
    assert "over the loopback" in note and "share the GPU" not in note
    assert "share the GPU" in two_islands.speedups([row | {"shared": True} for row in rows])
