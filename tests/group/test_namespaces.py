"""Islands of CPU ranks in network namespaces: bytes on the NIC, and faults."""

from typing import Any

import pytest
from loud_skips import NOT_TESTED

from benchmarks import island_bags, islands_experts
from benchmarks.namespaces import Job, can_run, run

why = " ".join(can_run().split())
pytestmark = pytest.mark.skipif(
    bool(why), reason=f"{NOT_TESTED}islands in network namespaces ({why})"
)

BOUND_S = 3.0
HEADERS = 1.25  # of large messages over TCP, a barrier, and a word a second while ranks are slow


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("flat", "blocks"), [(False, 2), (True, 4)])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_what_goes_to_another_island_goes_once(op: str, flat: bool, blocks: int):
    """Of two islands of two, each rank sends one block; flat, one for each rank over there."""
    rows, columns = 64, 4096
    shape = (rows, 8, columns) if op == "all_gather_matmul" else (4 * rows, columns, 8)
    block = 4 * rows * columns
    job = Job("benchmarks.islands:operator", args=(op, *shape, "islands chunks=2"), flat=flat)
    for found in run(job):
        assert blocks * block < found["sent"] < HEADERS * blocks * block


@pytest.mark.apart("make islands")
def test_pooled_rows_go_to_another_island_once():
    """As many bytes as of any plan, by rails; against gloo's results."""
    rows = 2 * island_bags.BAGS // 2 * island_bags.TABLES * island_bags.COLUMNS * 4
    for found in run(Job("benchmarks.island_bags:timed", args=(1, ("chunks=2",)))):
        assert rows < found["chunks=2"]["sent"] < HEADERS * rows


@pytest.mark.apart("make islands")
@pytest.mark.parametrize("size", [2, 3])
def test_a_token_goes_to_another_island_once(size: int):
    """With the list of its experts, and its sum comes back; flat, once to each rank."""
    for flat in (False, True):
        args = (size, (48, 2048, 2, 3), "islands", flat)
        job = Job("benchmarks.islands_experts:layer", size=size, args=args, flat=flat)
        for found in run(job):
            assert found["rule"] < found["sent"] < HEADERS * found["rule"]


@pytest.mark.apart("make islands")
@pytest.mark.parametrize(("way", "times"), [("ours", 1), ("flat", 2)])
def test_every_token_goes_to_another_island_once_where_no_host_knows_its_experts(
    way: str, times: int
):
    """By kernels, interpreted, which reach no other island; and each sum comes back.

    Flat, where each of the four ranks is an island, it goes to both ranks over there.
    """
    tokens, features, _, _ = islands_experts.DEVICE_LAYER
    rule = times * 2 * 2 * tokens * features * 2  # two ranks, there and back, of fp16
    for found in run(islands_experts.job_of((2, 2), "", way, device=True)):
        assert found["rule"] == rule < found["sent"] < HEADERS * rule


@pytest.mark.drawn(1)
@pytest.mark.parametrize("fault", ["kill", "stop", "cut"])
@pytest.mark.parametrize("op", ["matmul_all_reduce", "experts"])
def test_who_is_left_ends_in_time_and_names_a_rank_and_its_island(op: str, fault: str):
    job = Job(
        "benchmarks.islands:until_a_fault", args=(op, 64, 32, 256),
        env={"COUNTERPOINT_TIMEOUT_S": str(BOUND_S)}, fault=fault, after_s=0.5, begins=True,
    )  # fmt: skip
    found: list[Any] = run(job)
    assert all(found[:2]) and all(found[2:]) == (fault == "cut")
    for each in filter(None, found):
        assert each["error"].startswith("PeerTimeoutError: ")
    assert any("(island 1)" in each["error"] for each in found[:2])
