"""Ranks that die, stay away, freeze or are late: the others say which, in time; nothing hangs."""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import Case, operands, world, wrong
from rank_bodies import call as call_op
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import PeerTimeoutError
from counterpoint.group import notice_board
from counterpoint.group.ranks import describe_process
from counterpoint.group.workspace import workspace_of
from counterpoint.plan.bind import BoundStep
from counterpoint.run import execute_cpu

CPU = torch.device("cpu")
TIMEOUT_S = 2.0
TICK_S = 0.25
SLACK_S = 1.5
VICTIM = 1
GATHER = Case("all_gather_matmul", "graded 1/2 ring", (2,) * 3, 5, 4)
SCATTER = Case("matmul_reduce_scatter", "graded 1/2 ring", (2,) * 3, 5, 4)
SERIAL_GATHER = Case("all_gather_matmul", "serial", (2,) * 3, 5, 4)
SERIAL_SCATTER = Case("matmul_reduce_scatter", "serial", (2,) * 3, 5, 4)


class Clock:
    """A survivor's, for its waits: it stands until only the victim is missing, then ticks.

    After the first tick it stands until the other survivor has shown whom it waits for, too. So
    nobody is late because the machine is slow.
    """

    sleep, perf_counter = time.sleep, time.perf_counter

    def __init__(self, rank: int, fault: str, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.victim = workspace_of(world(), CPU).pads.peer_pids[VICTIM]
        self.state = {"killed": "dead", "stops": "stopped"}.get(fault.split()[0], "alive")
        self.now_s, self.ticks = 0.0, False

    def monotonic(self) -> float:
        if self.ticks:
            if self.now_s < TICK_S or all_said(self.folder, "shown", self.rank):
                self.now_s += TICK_S
        else:  # a wait looks at its signals before it looks at the clock again
            gone = describe_process(self.victim).endswith(self.state)
            self.ticks = all_said(self.folder, "waits", self.rank) and gone
        return self.now_s


def all_said(folder: Path, what: str, rank: int = VICTIM) -> bool:
    """Whether both survivors have left this note; a survivor that asks leaves its own."""
    if rank != VICTIM:
        (folder / f"{what}.{rank}").touch()
    return len(list(folder.glob(f"{what}.*"))) == 2


class Report(NamedTuple):
    """What a survivor was told."""

    rank: int | None
    step: str
    text: str


def survive(rank: int, world_size: int, case: Case, fault: str, folder: str) -> Report | None:
    """A good call, then the victim's fault: what the others see."""
    given = operands(case, rank, 0, CPU)
    with pytest.MonkeyPatch.context() as patch:
        call_op(case, given)
        workspace_of(world(), CPU).timeout_s = TIMEOUT_S
        if rank == VICTIM:
            fail(case, fault, Path(folder), patch)
            return None
        clock = Clock(rank, fault, Path(folder))
        patch.setattr(notice_board, "time", clock)
        start_s = 0.0
        with pytest.raises(PeerTimeoutError) as info:
            # what the victim has sent before its end may be enough for one call
            for _ in range(2):
                start_s = clock.now_s
                call_op(case, given)
        end_s = clock.now_s
        all_said(Path(folder), "shown", rank)
        assert end_s - start_s < TIMEOUT_S + SLACK_S

        with pytest.raises(PeerTimeoutError, match="unusable"):
            call_op(case, given)
        with pytest.raises(PeerTimeoutError, match="unusable"):
            cp.check()
        assert clock.now_s == end_s, "waited again"
    if all_said(Path(folder), "done", rank) and fault == "stops":
        os.kill(clock.victim, signal.SIGCONT)
    return Report(info.value.rank, info.value.step, str(info.value))


def fail(case: Case, fault: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The fault itself, on the victim."""
    given = operands(case, VICTIM, 0, CPU)
    match fault.split():
        case ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["killed", "in", step]:

            def note(call: object, bound: BoundStep, kind: str, start_s: float) -> None:
                if bound.step.name == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            patch.setattr(execute_cpu._Call, "_note", note)
            call_op(case, given)
        case ["returns"]:
            pass
        case ["sleeps"]:
            wait_for_survivors(folder)
        case ["stops"]:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the survivors let it go on
            workspace_of(world(), CPU).timeout_s = 0.1
            with pytest.raises(PeerTimeoutError):
                call_op(case, given)  # the others have gone on without it
        case _:
            raise AssertionError(fault)


def wait_for_survivors(folder: Path) -> None:
    while not all_said(folder, "done"):
        time.sleep(0.02)


def name(value: Case | str) -> str:
    """Of a test."""
    return value if isinstance(value, str) else f"{value.op} {value.plan}"


def reports_of(pool: RankPool, case: Case, fault: str, folder: Path) -> list[Report]:
    """What each survivor was told; all name the step that they were at."""
    dead = (VICTIM,) if fault.startswith("killed") else ()
    found = pool.run(survive, 3, case, fault, str(folder), expect_dead=dead)
    reports = [report for report in found if report is not None]
    assert len(reports) == 2
    for report in reports:
        at = f"step {report.step!r} of plan {case.plan}"
        if report.step == "compare":  # CPU ranks meet before each call that gloo takes part in
            assert case.plan == "serial"
            at = "come to compare its arguments"
        assert report.text.startswith(case.op) and at in report.text
    return reports


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (GATHER, "killed"), (GATHER, "killed in matmul_0"), (GATHER, "killed in push_1"),
        (SCATTER, "killed"), (SCATTER, "killed in push_1"), (SCATTER, "killed in reduce"),
        (SERIAL_GATHER, "killed"), (SERIAL_SCATTER, "killed in matmul"),
        # those that do not come, and those that are frozen
        (GATHER, "sleeps"), (SCATTER, "returns"), (SERIAL_SCATTER, "returns"),
        (GATHER, "stops"), (SCATTER, "stops"), (SERIAL_GATHER, "stops"),
    ],
    ids=name,
)  # fmt: skip
def test_a_rank_that_is_lost_is_named(pool: RankPool, tmp_path: Path, case: Case, fault: str):
    for report in reports_of(pool, case, fault, tmp_path):
        assert report.rank == VICTIM, report
        assert ("is dead" in report.text) == fault.startswith("killed")
        stopped = f"pid {pool.pids()[VICTIM]} is stopped" in report.text
        assert stopped == (fault == "stops")


@on_ranks(3)
def test_a_late_rank_is_waited_for(rank: int, world_size: int) -> list[str]:
    problems, cases = list[str](), [GATHER, SCATTER, SERIAL_GATHER, SERIAL_SCATTER]
    for i, case in enumerate(cases):
        if i % world_size == rank:
            time.sleep(0.3)
        problems += wrong(case, seed=i)
    return problems


def pooled(rank: int, world_size: int) -> None:
    """A call that meets each time on CPU ranks."""
    tables = [torch.randn(9, 4)]
    counts = torch.randint(9, (2 * world_size,))
    cp.embedding_bag_all_to_all(tables, counts, torch.arange(2 * world_size))


def meet_in_vain(rank: int, world_size: int, folder: str) -> Report | None:
    pooled(rank, world_size)
    if rank == VICTIM:
        wait_for_survivors(Path(folder))
        return None
    workspace_of(world(), CPU).timeout_s = TIMEOUT_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice_board, "time", Clock(rank, "sleeps", Path(folder)))
        with pytest.raises(PeerTimeoutError) as info:
            pooled(rank, world_size)
        with pytest.raises(PeerTimeoutError, match="unusable"):
            pooled(rank, world_size)
    all_said(Path(folder), "done", rank)
    return Report(info.value.rank, info.value.step, str(info.value))


def test_a_rank_that_does_not_come_to_compare_is_named(pool: RankPool, tmp_path: Path):
    """Alive, and somewhere else: the wait ends by its own bound, not by that of the group."""
    found = pool.run(meet_in_vain, 3, str(tmp_path))
    reports = [report for report in found if report is not None]
    assert len(reports) == 2
    for report in reports:
        assert (report.rank, report.step) == (VICTIM, "compare")
        text = f"embedding_bag_all_to_all: rank {VICTIM} did not come to compare its arguments"
        assert report.text.startswith(text) and "within 2." in report.text


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3 - 2**32], ids=["sign", "zero"])
@on_ranks(3)
def test_the_epoch_wraps(rank: int, world_size: int, epoch: int) -> list[str]:
    """Go on from `epoch`, with every word of every pad there."""
    assert wrong(GATHER) == []
    torch.distributed.barrier()
    workspace = workspace_of(world(), CPU)
    workspace.epoch = epoch
    workspace.pads.local().view(torch.int32).fill_(epoch)
    torch.distributed.barrier()
    problems = [problem for i, case in enumerate((GATHER, SCATTER))
                for problem in wrong(case, seed=i)]  # fmt: skip
    assert workspace.epoch != epoch
    return problems
