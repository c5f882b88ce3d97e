"""What a fault word of a GPU says, and that the watchdog says it: no GPU needed."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from counterpoint.errors import PeerTimeoutError
from counterpoint.group.islands import islands_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import Nccl
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.run.lanes_cuda import MAX_STEPS, CudaLanes, awaited_by
from counterpoint.run.watchdog import DEATHS_EVERY, PERIOD_S, Watchdog

RANK = 1


@pytest.fixture
def lanes() -> CudaLanes:
    """The part of a GPU's lanes that names steps; process 1 lives, 2^22 is no process."""
    made = object.__new__(CudaLanes)
    pads = SimpleNamespace(peer_pids=(1, 1, 2**22 + 1, 1))
    made.workspace = SimpleNamespace(rank=RANK, timeout_s=2.0, pads=pads, board=quiet())  # type: ignore[assignment]
    made._awaited, made._num_programs = {}, 0
    return made


def quiet() -> Any:
    """A notice board that has nothing to say."""
    facts = {"fault": None, "alarms": [], "bound": "a test"}
    return SimpleNamespace(
        wrong=lambda: None, settle=lambda: None, died=lambda: False, **facts
    )  # fmt: skip


def register(lanes: CudaLanes, plan: Plan) -> int:
    return lanes.register(plan.problem.op, plan.spec, awaited_by(bind(plan, RANK)))


def test_a_fault_word_names_ranks_and_step(lanes: CudaLanes, capfd: pytest.CaptureFixture[str]):
    plan = build(Problem("all_gather_matmul", 16, 8, 8, 4), "graded 1/3 ring")
    register(lanes, build(plan.problem, "shard_p2p"))
    tag = register(lanes, plan)
    assert tag == 2 * MAX_STEPS
    index = [step.name for step in plan.steps].index("matmul_1")
    word = np.zeros(1, dtype=np.int64)
    watchdog = Watchdog(word, lanes.describe, quiet(), int)
    assert watchdog.look() is None
    # matmul_1 waits for ranks 0, 3 and 2, in this order: the last two are late
    word[0] = (0b110 << 32) | (tag + index + 1)
    fault = watchdog.look()
    assert fault is not None
    assert isinstance(fault, PeerTimeoutError)
    assert (fault.rank, fault.step) == (2, "matmul_1"), "the one that is dead"
    want = (
        "all_gather_matmul: ranks [3, 2] did not signal step 'matmul_1' of plan graded 1/3 ring "
        "to rank 1 (pid 1 is alive, pid 4194305 is dead); the group is unusable"
    )
    assert str(fault).startswith(want)
    assert watchdog.look() is fault
    assert capfd.readouterr().err.count(want) == 1


def test_a_kernel_waits_for_the_ranks_of_its_island(lanes: CudaLanes):
    """And numbers them from 0."""
    facts = {"experts": 1, "counts": "device_routed", "islands": 2}
    plan = build(Problem("matmul_all_to_all", 64, 8, 8, 4, **facts), "islands")  # type: ignore[arg-type]
    tag = lanes.register(plan.problem.op, plan.spec, awaited_by(bind(plan, 3)))
    fault = lanes.describe(tag, 0b01)
    assert fault.rank == 2
    assert "ranks [2] did not signal step 'experts' of plan islands" in str(fault)


def test_the_thread_says_it_by_itself(lanes: CudaLanes, capfd: pytest.CaptureFixture[str]):
    plan = build(Problem("matmul_reduce_scatter", 16, 8, 8, 4), "shard_p2p")
    tag = register(lanes, plan)
    word = np.zeros(1, dtype=np.int64)
    watchdog = Watchdog(word, lanes.describe, quiet(), int)
    word[0] = (1 << 32) | (tag + 1)  # the barrier that opens, its first wait
    deadline_s = time.monotonic() + 60
    said = ""
    while "did not signal step 'open'" not in said and time.monotonic() < deadline_s:
        time.sleep(0.02)
        said += capfd.readouterr().err
    assert "ranks [0] did not signal step 'open'" in said
    assert watchdog.look() is not None


def test_a_wait_of_a_library_is_told_and_ended(capfd: pytest.CaptureFixture[str]):
    found: list[PeerTimeoutError] = []
    ended: list[bool] = []
    watchdog = Watchdog(np.zeros(1, dtype=np.int64), lambda *_: found[0], quiet(), int)
    watchdog.watch(lambda: found[0] if found else None, lambda: ended.append(True))
    assert watchdog.look() is None and not ended
    found.append(PeerTimeoutError("rank 1 (island 1) did not take part", rank=1, step="give_1"))
    deadline_s = time.monotonic() + 60
    while not ended and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert ended == [True] and watchdog.look() is found[0]
    assert capfd.readouterr().err.count("rank 1 (island 1) did not take part") == 1


def test_who_has_left_is_told_nothing(capfd: pytest.CaptureFixture[str]):
    found: list[PeerTimeoutError] = []
    watchdog = Watchdog(np.zeros(1, dtype=np.int64), lambda *_: found[0], quiet(), int)
    ended: list[bool] = []
    watchdog.watch(lambda: found[0] if found else None, lambda: ended.append(True))
    watchdog.end()
    time.sleep(4 * PERIOD_S)  # a look that had begun is over
    found.append(PeerTimeoutError("rank 1 did not come", rank=1, step="call"))
    time.sleep(4 * PERIOD_S)
    assert not ended and "did not come" not in capfd.readouterr().err


def test_an_exchange_has_its_time_from_when_it_is_seen():
    """As long as others end, however often the same one is under way, none is late."""
    wire = object.__new__(Nccl)
    islands = islands_of(["a", "b"], 0)
    wire._workspace = SimpleNamespace(timeout_s=0.05, islands=islands, board=quiet())  # type: ignore[assignment]
    wire._known = {(Awaited("all_gather_matmul", "exchange", "give_1"), 1, 1): 0}
    words = np.zeros((2, 2), dtype=np.int64)
    (wire._begun, wire._ended), wire._under_way, wire._since_s = words, 0, 0.0
    for number in range(1, 5):
        words[0, 0] = number  # the one before has ended
        words[1, 0] = number - 1
        assert wire._late() is None
        time.sleep(0.02)
    time.sleep(0.1)
    fault = wire._late()
    assert fault is not None and (fault.rank, fault.step) == (1, "give_1")
    assert str(fault).startswith(
        "all_gather_matmul: rank 1 (island 1) did not take part in exchange 'give_1': "
        "within 0.05 s; the group is unusable"
    )
    words[1, 0] = 4
    assert wire._late() is None


def no_word(*_: int) -> PeerTimeoutError:
    pytest.fail("no kernel has said so")


def test_waits_of_kernels_end_once_a_rank_has_died():
    """At the second look at processes: what a rank has posted before it died has come by then."""
    stops, died = list[bool](), list[bool]()
    board = quiet()
    board.died = lambda: bool(died)
    word = np.zeros(1, dtype=np.int64)
    watchdog = Watchdog(word, no_word, board, lambda: stops.append(True))
    watchdog.end()
    time.sleep(4 * PERIOD_S)  # its thread looks no more: looks are those below
    watchdog.ended, watchdog._looks = False, 0
    for _ in range(2 * DEATHS_EVERY):
        watchdog.look_for_deaths()
    assert not stops
    died.append(True)
    for _ in range(2 * DEATHS_EVERY - 1):
        watchdog.look_for_deaths()
    assert not stops
    for _ in range(3 * DEATHS_EVERY):
        watchdog.look_for_deaths()
    assert stops == [True], "once"
