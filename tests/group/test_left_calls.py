"""A call that one rank leaves: later calls of all ranks are right, or name it. See left_calls."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from left_calls import POOL_ENV, Trial, problems_of, trial_of
from on_ranks import on_ranks
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError, UnsupportedError
from counterpoint.group import notice_board
from counterpoint.group.notice_board import NoticeBoard
from counterpoint.group.workspace import Workspace, workspaces

E = torch.eye(2)


def gather(number: float, group: dist.ProcessGroup | None = None) -> list[float]:
    return cp.all_gather_matmul(torch.full((1, 2), float(number)), E, group=group)[:, 0].tolist()


@pytest.fixture(scope="module")
def trials() -> RankPool:
    with RankPool(env=POOL_ENV) as pool:
        yield pool  # type: ignore[misc]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(20))
def test_a_call_that_is_left_at_some_line(trials: RankPool, seed: int):
    """As many of each call, kind and age; `make interrupts` has more of them."""
    assert problems_of(trial_of(seed, ranks=4 if seed % 5 == 4 else 2), trials) == []


def making(rank: int, ranks: int, file: str, line: int) -> list[str]:
    """What goes wrong where rank 1 is interrupted at a line of `__init__` as a group is made."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()  # the other rank may have ended before this one has the group

    def entered(frame: FrameType, event: str, _: object) -> Any:
        here = frame.f_code.co_filename.endswith(file) and frame.f_code.co_name == "__init__"
        return at if here else None

    def at(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lineno - frame.f_code.co_firstlineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return at

    found: list[str] = []
    # who has its board by then waits there, and names the rank when it gives up
    os.environ["COUNTERPOINT_TIMEOUT_S"] = "5"
    for number in range(3):
        sys.settrace(entered if (rank, number) == (1, 0) else None)
        try:
            result = gather(10 * number + rank, group)
        except (KeyboardInterrupt, CounterpointError) as error:
            if "rank 1" not in str(error) and (rank, number) != (1, 0):
                found.append(f"call {number}: {error}")
        else:
            if result != [10 * number, 10 * number + 1]:
                found.append(f"call {number} is {result}")
        finally:
            sys.settrace(None)
    os.environ |= POOL_ENV
    return found


LINES = [
    (file, line - code.co_firstlineno)
    for file, code in (("workspace.py", Workspace.__init__.__code__),
                       ("notice_board.py", NoticeBoard.__init__.__code__))
    for line in sorted({line for *_, line in code.co_lines() if line})
]  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("file", "line"), LINES)
def test_a_group_whose_making_is_interrupted(trials: RankPool, file: str, line: int):
    """The other rank may have its part by then: it hears who has left, as that rank does."""
    assert trials.run(making, 2, file, line) == [[], []]


@pytest.mark.apart("make test-all")
def test_a_trial_sees_calls_that_pair_with_others(
    trials: RankPool, monkeypatch: pytest.MonkeyPatch
):
    """A group whose interrupted calls poison nothing."""
    assert problems_of(Trial(2, 0, "gathers", True, 500, "interrupt"), trials) == []
    seen = False
    for line in (500, 400, 600, 300, 700):  # how many lines there are depends on what is waited for
        found = trials.run(unpoisoned, 2, Trial(2, 0, "gathers", True, line, "interrupt"))
        seen = seen or any("right is" in problem for each in found for problem in each)
        if seen:
            break
    assert seen


def unpoisoned(rank: int, ranks: int, trial: Trial) -> list[str]:
    from left_calls import suffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice_board.NoticeBoard, "end", lambda *_, **__: None)
        patch.setenv("COUNTERPOINT_TIMEOUT_S", "4")  # of a call that no other pairs with
        return suffer(rank, ranks, trial)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
def test_an_interrupt_while_it_waits(rank: int, ranks: int):
    """As Ctrl-C in a notebook: the other rank hears of it at once, in the call that it is in."""
    gather(0)
    if rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)  # Ctrl-C itself reaches no rank of a test
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            gather(1)
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1.5)
    for turn in range(2):
        with pytest.raises(PeerTimeoutError, match="rank 0 has not ended this call, Keyb") as info:
            gather(2 + turn)
        assert info.value.rank == 0


@on_ranks(2)
def test_backwards_in_another_order(rank: int, ranks: int):
    """Gradients would pair with those of another call."""
    x, w = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for warm in (False, True):
        ys = [cp.all_gather_matmul(x, w) for _ in range(3)]
        first, second = (ys[0], ys[1]) if rank == 0 else (ys[1], ys[0])
        with pytest.raises(InputError, match=r"backward must be equal on all ranks, of call \d"):
            first.sum().backward()
        if warm:
            break
        with pytest.raises(InputError, match="backward must be equal"):
            second.sum().backward()
        ys[2].sum().backward()  # ranks had met, and nothing had run


@on_ranks(2)
def test_a_rank_that_is_alive_is_waited_for(rank: int, ranks: int):
    """Who waits says so after a while, and for how long it will."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COUNTERPOINT_TIMEOUT_S")
        patch.setattr(notice_board, "SAY_AFTER_S", 0.2)
        gather(0)
        if rank:
            time.sleep(1.5)
        assert gather(rank + 1.0) == [1.0, 2.0]


@on_ranks(2, 3)
def test_a_rank_that_has_returned_is_told_at_once(rank: int, ranks: int):
    """It lives, and so would be waited for."""
    gather(0)
    if rank == 0:
        return
    start_s = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="it has left the group") as info:
        gather(1)
    assert info.value.rank == 0 and time.monotonic() - start_s < 60


@on_ranks(2)
def test_a_group_that_torch_destroys_is_let_go(rank: int, ranks: int):
    """Without `release`: 30 of them leave no descriptor, whoever holds the last of them."""
    held = []
    before = 0
    for turn in range(33):
        group = dist.new_group()
        assert gather(rank + 1.0, group) == [1.0, 2.0]
        dist.destroy_process_group(group)
        if turn % 2:
            held = [group]  # destroyed, and yet alive: found at the next group
        if turn == 2:
            before = len(os.listdir("/proc/self/fd"))
    assert len(workspaces) <= 2, [*workspaces]
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    del held


@on_ranks(2)
def test_a_copy_of_a_rank_is_refused(rank: int, ranks: int):
    """As a loader's worker: it must not speak for the rank, nor end for it."""
    gather(0)
    own = dist.new_group()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for group in (None, own):
            try:
                gather(9, group)
                said.append("ran")
            except UnsupportedError as error:
                said.append(str(error))
        os.write(write, "|".join(said).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode().split("|")
    assert len(said) == 2 and all("is a copy (a fork) of a rank" in each for each in said), said
    assert gather(rank + 1.0) == [1.0, 2.0] and gather(rank + 1.0, own) == [1.0, 2.0]


@on_ranks(2)
def test_two_threads_in_one_group(rank: int, ranks: int):
    """The second one is refused, and the ranks are told: nobody knows in which order they came."""
    gather(0)
    found: list[BaseException] = []

    def call() -> None:
        try:
            gather(1)
        except Exception as error:
            found.append(error)

    if rank == 0:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "by one thread at a time" in str(found[0])
    else:
        time.sleep(1)
    with pytest.raises(InputError, match="one thread at a time"):
        gather(2)
