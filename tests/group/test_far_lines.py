"""Ranks that share no memory, as on several hosts, hear of each other's calls all the same."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import world

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.group import far_lines, notice_board
from counterpoint.group.far_lines import PERIOD_S, FarLines
from counterpoint.group.notice_board import Awaited, NoticeBoard, digest_of
from counterpoint.run.watchdog import Watchdog

TOLD_S = 20  # of a test that fails
HERE = Awaited("op", "come", "step")


@contextmanager
def apart(timeout_s: float = TOLD_S) -> Iterator[tuple[NoticeBoard, Watchdog]]:
    """A board as ranks of several hosts have it, and the thread that looks at it."""

    def refuse(*_: object) -> None:
        raise UnsupportedError("several hosts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice_board, "allocate_cpu", refuse)
        board = NoticeBoard(world(), "cuda", timeout_s, "a test")
    assert not board.shared
    unsaid = np.zeros(1, np.int64)
    watchdog = Watchdog(unsaid, lambda *_: pytest.fail("no kernel has said so"), board, int)
    try:
        yield board, watchdog
    finally:
        dist.barrier()
        board.fault = board.fault or CounterpointError("over")
        del watchdog


CALLS = [{"op": "all_gather_matmul", "x.shape": f"({rows}, 4)"} for rows in range(10)]


def call(board: NoticeBoard, number: int, *, new: bool = False) -> None:
    """One of CALLS, that ranks know unless it is new."""
    board.facts |= {digest_of(facts): facts for facts in CALLS}
    facts = CALLS[number]
    if new:
        board.note_new(digest_of(facts), facts)
    else:
        board.note(digest_of(facts))


def told(board: NoticeBoard, number: int = -1) -> str:
    """What the watchdog leaves for that call or one behind it; "" if it has not by then."""
    end_s = time.monotonic() + TOLD_S
    try:
        if number >= 0:
            call(board, number)
        while time.monotonic() < end_s:
            board.check()
            time.sleep(1e-2)
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks(2, 3)
def test_calls_that_differ_are_told_on_all_ranks(rank: int, ranks: int):
    with apart() as (board, _):
        for i in range(5):
            call(board, i)
        error = told(board, 7 + (rank == 1))
        assert error.startswith("InputError: all_gather_matmul: x.shape"), error
        assert "(7, 4)" in error and "(8, 4)" in error and "on rank 1" in error, error


@on_ranks(3)
def test_equal_calls_are_no_fault_however_soon_they_come(rank: int, ranks: int):
    with apart() as (board, _):
        for i in range(5000):
            call(board, i % 7)
            if i % 1000 == 0:
                assert board.gather(i, HERE) == [i] * ranks
        shown = board._far._shown
        told_none = []
        while board._far._shown < shown + 3:
            told_none += [board.wrong()]
            time.sleep(1e-2)
        assert not any(told_none) and board.fault is None


@on_ranks(2, 3)
def test_who_waits_in_a_meeting_hears_that_nobody_comes(rank: int, ranks: int):
    """One rank compares a call that is new to it, and the others make one that they know."""
    with apart() as (board, _):
        call(board, 3)
        dist.barrier()
        if rank == 0:
            call(board, 4, new=True)
            with pytest.raises(InputError, match=r"x\.shape"):
                board.gather("facts", HERE)
        else:
            assert "x.shape" in told(board, 5)


@on_ranks(2, 3)
def test_a_refusal_is_heard_by_all(rank: int, ranks: int):
    with apart() as (board, _):
        call(board, 3)
        dist.barrier()
        if rank == ranks - 1:
            board.refuse(InputError("op", "rows", want="all", got="few"))
        error = told(board, -1 if rank == ranks - 1 else 3)
        assert "rows must be all, got few" in error and f"rank {ranks - 1} has refused" in error


@on_ranks(3)
def test_a_silent_rank_that_is_behind_is_named(rank: int, ranks: int):
    with apart(1.0) as (board, _):
        call(board, 3)
        assert board.gather(None, HERE) == [None] * ranks
        dist.barrier()
        if rank == 1:  # as if its host had gone
            board._far._store, kept = None, board._far._store
            while not kept.check([board._far._verdict]):
                time.sleep(1e-2)
            return
        error = told(board, 3)
        assert error.startswith("PeerTimeoutError: all_gather_matmul: rank 1 did not come"), error
        assert "silent for" in error and "dead" in error


@on_ranks(3)
def test_a_rank_that_leaves_after_its_last_call_has_made_it(rank: int, ranks: int):
    """At once, before its watchdog has shown that call; the others go on for long."""
    with apart(1.0) as (board, watchdog):
        while board._far._shown < 2:  # shown a moment ago
            time.sleep(1e-3)
        call(board, 3)
        if rank == 1:
            watchdog.end()
            board.leave()
        else:
            time.sleep(3 * board.timeout_s)
            assert board.wrong() is None and board.fault is None


@on_ranks(2)
def test_only_who_looks_finds_a_rank_silent(rank: int, ranks: int):
    """A rank's watchdog may begin long after its board, and its store may keep it waiting."""
    clock = SimpleNamespace(now_s=0.0)
    own, other = (np.zeros(8, np.uint8) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_lines, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
        lines = FarLines(world(), "only who looks", 4 * PERIOD_S)
        store = lines._store

        def look(after_s: float = PERIOD_S, held_s: float = 0.0) -> str:
            def put(key: str, value: bytes) -> None:
                clock.now_s += held_s
                store.set(key, value)

            clock.now_s += after_s
            lines._store = SimpleNamespace(set=put, check=store.check, get=store.get)
            lines.exchange(own, other)
            return lines.state().split()[-1]

        if rank == 0:
            assert look(100) == "alive", "the first time that it looks"
        dist.barrier()
        if rank == 1:
            assert look() == "alive"
        dist.barrier()
        if rank == 0:
            assert look() == "alive", "and now it hears it"
            assert look(held_s=100) == look(0) == "alive", "the store kept it waiting"
            silent = [look() for _ in range(5)]
            assert silent == ["alive"] * 2 + ["dead"] * 3
        dist.barrier()
