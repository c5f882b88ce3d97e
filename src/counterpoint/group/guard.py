"""`counterpoint.guard`: a rank that parts from the others is named on all, in any program.

Each collective leaves a note in memory that all ranks see: see guard_board.py. A thread of each
process compares the notes of all guarded groups. What it finds it says on stderr, and the next
collective raises it. A process that does not come to one, as its main thread waits in vain, is
ended.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Hashable
from itertools import permutations
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError
from counterpoint.group.guard_board import GuardBoard, where_main_stands
from counterpoint.group.guard_seams import Seams
from counterpoint.group.ranks import check_group
from counterpoint.group.workspace import bound_of

PERIOD_S = 0.05  # from one look at all notes to the next
GRACE_S = 5.0  # for the main thread to come to its next collective, while it does not move
CAUSE_S = 1.0  # for the cause of an error to be seen: a rank may be about to end


class _Guarded:
    """All guarded groups of this process, and the thread that watches them.

    Attributes:
        known: boards by the id of their group, and by its name; False: it is not guarded.
        all: groups are met at their first collective.
        held: ids of groups that are guarded by name.
    """

    def __init__(self) -> None:
        self.known: dict[int | str, GuardBoard | Literal[False]] = {}
        self.all = False
        self.held = set[int]()
        self._seams: Seams | None = None
        self._hook: Any = None
        self._stands: tuple[Hashable, float] = None, 0.0
        self._said: CounterpointError | None = None

    def meet(self, group: dist.ProcessGroup, *, named: bool = False) -> GuardBoard | Literal[False]:
        """The board of a group; if all are guarded, or it is `named`, one is made by all ranks."""
        board = self.known.get(id(group))
        if board is not None or not (named or self.all):
            return board or False
        board = False
        if group.size() > 1 and dist.get_backend(group) != "fake":
            device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
            board = GuardBoard(group, *bound_of(group, torch.device(device)))
        self.known[id(group)] = self.known[group.group_name] = board
        weakref.finalize(group, self.leave, id(group), group.group_name).atexit = False
        self._start()
        return board

    def _start(self) -> None:
        if self._seams is None:
            self._seams, self._said = Seams(self), None
            self._hook, sys.excepthook = sys.excepthook, self._at_the_end
            given = (self._seams,)
            name = "counterpoint-guard"
            threading.Thread(target=self._watch, args=given, name=name, daemon=True).start()

    def leave(self, key: int, name: str, error: BaseException | None = None) -> None:
        """Guard a group no more.

        Args:
            key, name: the id of the group, and its name.
            error: what ends this rank's part.
        """
        board = self.known.pop(key, False)
        if self.known.get(name) is board:
            del self.known[name]
        self.held.discard(key)
        if board:
            if error is not None:
                self._blame(error, [board])
            board.leave()
        if self._seams is not None and not self.all and not self.live():
            self._seams.undo()
            self._seams, sys.excepthook = None, self._hook
            self.known.clear()

    def leave_all(self, error: BaseException | None = None) -> None:
        """Guard only groups that are guarded by name."""
        self.all = False
        if error is not None:
            self._blame(error, self.live())
        for key, board in [*self.known.items()]:
            if isinstance(key, int) and key not in self.held:
                self.leave(key, board.group_name if board else "")

    def end(self) -> None:
        """The process ends: what others do from now on is no fault."""
        self.held.clear()
        self.leave_all()

    def end_in_copy(self) -> None:
        """Guard nothing in a process that was forked: it is no rank."""
        if self._seams is not None:
            self._seams.undo()
            sys.excepthook = self._hook
        self.__init__()

    def live(self) -> list[GuardBoard]:
        """The boards that there are."""
        return [board for key, board in [*self.known.items()] if board and isinstance(key, int)]

    def _watch(self, seams: Seams) -> None:
        while self._seams is seams:
            if (fault := self.look()) is not None:
                self._tell(fault)
                return
            time.sleep(PERIOD_S)

    def look(self) -> CounterpointError | None:
        """What is wrong in any group."""
        boards = self.live()
        stood_s, where = self._stood()
        busy = any(board.waits() for board in boards)
        for board in boards:
            board.show_busy(busy)
            board.publish(where)
        crossed = (a.crossed(b) for a, b in permutations(boards, 2))
        if not any(board.fault for board in boards) and (both := next(filter(None, crossed), None)):
            return both
        for board in boards:
            fault = board.fault or board.wrong() or board.stuck(stood_s)
            if fault is not None:
                return fault
        return None

    def _stood(self) -> tuple[float, str]:
        """For how long the main thread has been where it is, and where that is."""
        at, where = where_main_stands()
        calls = sum(board.calls for board in self.live())
        now_s, key = time.monotonic(), (at, calls)
        if self._stands[0] != key:
            self._stands = key, now_s
        return now_s - self._stands[1], where

    def _tell(self, fault: CounterpointError) -> None:
        """Say a fault here and in all groups; end this process, unless it goes on to raise it."""
        self.say(fault)
        since_s = time.monotonic()
        while (boards := self.live()) and not any(board.raised for board in boards):
            now_s = time.monotonic()
            stood_s, where = self._stood()
            if min(stood_s, now_s - since_s) > GRACE_S:
                at = f" at {where}" if where else ""
                text = f"this process waits in vain{at}, and ends"
                print(f"counterpoint: guard: {text}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(PERIOD_S)

    def say(self, fault: CounterpointError) -> None:
        """Say a fault on stderr, and leave it for the other ranks of each group."""
        for board in self.live():
            board.fail(fault)
        self._said = fault
        print(f"counterpoint: {fault}", file=sys.stderr, flush=True)

    def _blame(self, error: BaseException, boards: list[GuardBoard]) -> None:
        """Say what has ended this rank: what others have done, or an error of its own."""
        if self._said is not None or isinstance(error, CounterpointError) or not boards:
            return
        found: CounterpointError | None = None
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            until_s = time.monotonic() + CAUSE_S  # torch may have said so of what others did
            while found is None and time.monotonic() < until_s:
                for board in boards:
                    found = found or board.fault or board.wrong() or board.first_cause()
                time.sleep(PERIOD_S / 5)
            for board in boards:
                found = found or board.late()
        if found is None:
            found = boards[0].ended_by(error)
            for board in boards:
                board.fail(found)
        else:
            self.say(found)

    def _at_the_end(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """As the hook of errors that nobody has caught."""
        hook = self._hook
        self._blame(error, self.live())
        hook(kind, error, trace)


_guarded = _Guarded()
atexit.register(_guarded.end)
os.register_at_fork(after_in_child=_guarded.end_in_copy)


class Guard:
    """What `counterpoint.guard` returns: as a context manager, its end is that of the block."""

    def __init__(self, key: int | None, name: str, *, is_first: bool) -> None:
        self._key, self._name, self._is_first = key, name, is_first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._is_first:
            return
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if self._key is None:
            _guarded.leave_all(error)
        else:
            _guarded.leave(self._key, self._name, error)


def guard(group: dist.ProcessGroup | None = None) -> Guard:
    """Name the rank that parts from the others, in a program that calls torch.distributed alone.

    Each rank notes what it calls in memory that all see, and goes on. A thread compares the notes.
    A rank that dies, raises, calls another collective, or makes a call too few or too many is named
    on all ranks within a second; one that is stopped or late after COUNTERPOINT_TIMEOUT_S, else
    after the timeout of the group. It is named on stderr, with its last collective and the line
    that called it. The next collective of any guarded group raises the same; a process whose main
    thread waits in vain is ended, with exit code 1.

    Seen are torch.distributed's functions, functional collectives, compiled or not, FSDP2, DTensor,
    and DDP models that are made behind this call. Compared are what is called, its dtype, its root
    and its elements, except those of all-to-all. Not compared are reduce operations and messages
    between two ranks. Not seen are replays of CUDA graphs, and what goes past torch.distributed:
    other libraries' calls of NCCL.

    Guards that are there already stay as they are. A group that is destroyed is guarded no more.

    Args:
        group: guarded by itself; all its ranks call this. None: the default group now, and each
            other group from its first collective on.

    Returns:
        A context manager that ends it. Else it ends with the process.

    Raises:
        InputError: `group` is none; COUNTERPOINT_TIMEOUT_S is no time.
        PeerTimeoutError: a rank did not come.
        UnsupportedError: this torch shows no stores of groups.
    """
    found = check_group("guard", group)
    if group is None:
        is_first, _guarded.all = not _guarded.all, True
        _guarded.meet(found)
        if is_first:
            weakref.finalize(found, _guarded.leave_all).atexit = False
        return Guard(None, "", is_first=is_first)
    is_first = not _guarded.meet(found)
    _guarded.meet(found, named=True)
    if is_first:
        _guarded.held.add(id(found))
    return Guard(id(found), found.group_name, is_first=is_first)
