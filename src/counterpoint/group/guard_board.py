"""The notice board of a guarded group: what its ranks call of torch.distributed, and who parts.

A rank writes the digest of each collective, its number and where it was called, and goes on. It
meets nobody. A thread compares the lines: see guard.py.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.group.notice_board import (
    AWAITS,
    CALLS,
    FORWARD,
    HEAD,
    LEFT,
    MAX_FACTS,
    NUMBERS,
    RESTART,
    RING,
    NoticeBoard,
    Refused,
    digest_of,
    read_note,
    write_note,
)

BUSY = FORWARD  # word of a line: whether the rank waits for another one, in any group
PATIENCE_S = 1.0  # for ranks that have yet to come to a call of which two differ
ELSEWHERE_S = 3.0  # longer for one that waits in another group: who holds it up is named there
STANDS_S = 3.0  # for which a rank that awaits a dead one must not have moved
# files, or where they begin, whose frames are no caller's: wrappers of torch's functions, too
OURS = (torch.__path__[0], str(Path(__file__).parents[1]), "<frozen", contextlib.__file__,
        typing_extensions.__file__)  # fmt: skip
MOST_FRAMES = 32  # up to the caller's
NAMES = 48  # of calls, and of places, that a line has in words
USERS_FRAME = 4  # above `jot`: a method, a function of torch.distributed, and torch's log of it
UNKNOWN = "a call that is not known here"
Call = tuple[str, int, Any, int]  # kind, elements (-1: ranks may differ), dtype, root (-1: none)

_getframe, _current_frames = sys._getframe, sys._current_frames  # pyright: ignore
_ours = set[str]()  # files of theirs


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame outside of torch and of this library, or the innermost one."""
    at = frame
    for _ in range(MOST_FRAMES):
        if at is None:
            break
        if (file := at.f_code.co_filename) not in _ours and not _is_ours(file):
            return at
        at = at.f_back
    return frame


def _is_ours(file: str) -> bool:
    if file.startswith(OURS):
        _ours.add(file)
    return file in _ours


class GuardBoard(NoticeBoard):
    """The lines of a guarded group. Collective to make.

    Args:
        group: whose ranks.
        timeout_s, bound: of every wait for a rank that is alive, and whose bound that is.

    Attributes:
        group_name: torch's.
        ranks_of_world: the number of each rank in torch's default group, by which it is named.
        raised: this rank has raised the fault.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, bound: str) -> None:
        super().__init__(group, "guard", timeout_s, bound)
        self.group_name = group.group_name
        self.ranks_of_world = [dist.get_global_rank(group, r) for r in range(self.ranks)]
        self.names[:] = [f"rank {r}" for r in self.ranks_of_world]
        whole = self.ranks == dist.get_world_size()
        self._of = "" if whole else f" of {self._named([*range(self.ranks)])}"
        self._digests = self._mine[HEAD : HEAD + RING]
        self._places = self._mine[NUMBERS : NUMBERS + RING]
        # by a call, and the instruction that makes it; the code is kept, as its id is in the key
        self._known: dict[tuple[Call, int, int], tuple[int, int, CodeType]] = {}
        self._names: dict[int, str] = {}  # of digests
        self._shown: object = None  # of what is in words
        self._still: dict[Hashable, tuple[int, float]] = {}
        self._messages = 0
        self.raised = False

    def jot(self, call: Call) -> None:
        """Say that a collective begins.

        Raises:
            CounterpointError: the group is unusable.
        """
        if self.fault is not None:
            self.check()
        try:
            at = _getframe(USERS_FRAME)
        except ValueError:
            at = _getframe(1)
        code = at.f_code
        while code.co_filename in _ours and (above := at.f_back) is not None:
            at, code = above, above.f_code
        known = self._known.get((call, id(code), at.f_lasti))
        digest, place, _ = known or self._learn(call, at)
        calls = self.calls = self.calls + 1
        slot = calls % RING
        self._digests[slot] = digest
        self._places[slot] = place
        if self._messages:
            self._messages = self._mine[AWAITS] = 0
        self._mine[CALLS] = calls  # behind what it counts: others read it first

    def jot_to(self, peer: int) -> None:
        """Say that a message begins, to or from a rank of the group: those are not compared.

        Raises:
            CounterpointError: the group is unusable.
        """
        if self.fault is not None:
            self.check()
        self._messages = self._mine[AWAITS] = peer + 1

    def _learn(self, call: Call, frame: FrameType) -> tuple[int, int, CodeType]:
        if len(self._known) > MAX_FACTS:
            self._known.clear()
            self._names.clear()
        frame = _caller(frame) or frame
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        kind, elements, dtype, root = call
        words = kind if dtype is None else f"{kind} of "
        if dtype is not None:
            words += f"{elements} {dtype}" if elements >= 0 else f"{dtype}"
        words = words.replace("torch.", "") + (f" from or to rank {root}" if root >= 0 else "")
        digests = digest_of(words), digest_of(place)
        self._names |= dict(zip(digests, (words, place), strict=True))
        found = self._known[call, id(frame.f_code), frame.f_lasti] = *digests, frame.f_code
        return found

    def check(self) -> None:
        """Raise what made the group unusable, if anything did."""
        self.raised = self.fault is not None
        super().check()

    def publish(self, stands: str) -> None:
        """Show in words what the numbers of this rank's line mean, where that is new.

        Args:
            stands: where its main thread is.
        """
        shown = len(self._names), stands
        if shown != self._shown:
            self._shown = shown
            names = [*self._names.items()][-NAMES:]
            write_note(self._words[self.rank], {
                "op": "guard", "stands": stands[-300:],
                "names": [(number, name[-120:]) for number, name in names],
            })  # fmt: skip

    def waits(self) -> bool:
        """Whether this rank has come to a call that another rank has not."""
        return any(self._lines[r][CALLS] < self.calls for r in self._peers)

    def show_busy(self, waits: bool) -> None:
        """Say whether this rank waits for another one in any group."""
        self._mine[BUSY] = int(waits)

    def wrong(self) -> CounterpointError | None:
        """What is wrong with anybody; None where nothing is."""
        try:
            return self.look() or self._who_is_missing()
        except Refused:  # nobody refuses a call here
            return None

    def _who_is_missing(self) -> CounterpointError | None:
        """Who makes no call that this rank has made: it is dead, has left, or is too late."""
        now_s, lines = time.monotonic(), self._lines
        behind = self._behind()
        for r in behind:
            if self.lost(r):
                return self._missing(r, "")
        for r in behind:
            within_s = self.timeout_s + (ELSEWHERE_S if lines[r][BUSY] else 0.0)
            if self._still_for(r, lines[r][CALLS], now_s) > within_s:
                return self._ahead_of_most(r) or self._missing(r, f" within {self.timeout_s:g} s")
        return None

    def _behind(self) -> list[int]:
        """Who has made fewer collectives than this rank, the last one first."""
        lines = self._lines
        behind = (r for r in self._peers if lines[r][CALLS] < self.calls)
        return sorted(behind, key=lambda r: lines[r][CALLS])

    def crossed(self, other: "GuardBoard") -> CounterpointError | None:
        """Whether this rank waits here for one that waits for it in another group: both parted.

        Either may have made a call too few: nobody can tell which.
        """
        now_s = time.monotonic()
        for r in self._behind():
            number = self.ranks_of_world[r]
            there = other.ranks_of_world.index(number) if number in other.ranks_of_world else -1
            if there < 0 or other._lines[there][CALLS] <= other.calls:
                continue
            if self._still_for(r, self._lines[r][CALLS], now_s) > self.timeout_s:
                mine, theirs = self._lines[r][CALLS] + 1, other.calls + 1
                text = f"guard: ranks {self.ranks_of_world[self.rank]} and {number} wait for each "
                text += f"other: {self._call_by(self.rank, mine)}, and "
                text += f"{other._call_by(there, theirs)}{RESTART}"
                return PeerTimeoutError(text, rank=number, step="call")
        return None

    def _call_by(self, r: int, call: int) -> str:
        return f"{self.names[r]} in collective {call}{self._of}, {self._described(r, call)}"

    def _ahead_of_most(self, r: int) -> PeerTimeoutError | None:
        """The ranks that have made a collective, where rank `r` and the most exchange messages."""
        call = self._lines[r][CALLS] + 1
        ahead = [each for each, line in enumerate(self._lines) if line[CALLS] >= call]
        if not (self.shared and self._lines[r][AWAITS]) or 2 * len(ahead) >= self.ranks:
            return None
        text = f"guard: {self._named(ahead)} made collective {call}{self._of}, "
        text += f"{self._described(ahead[0], call)}, which {self.names[r]} did not within "
        text += f"{self.timeout_s:g} s{self._message_of(r)}{RESTART}"
        return PeerTimeoutError(text, rank=self.ranks_of_world[ahead[0]], step="call")

    def _message_of(self, r: int) -> str:
        peer = self._lines[r][AWAITS] - 1
        return f"; it waits for a message from or to {self.names[peer]}" if peer >= 0 else ""

    def _still_for(self, what: Hashable, state: int, now_s: float) -> float:
        """For how long something has been in one state, as far as this rank has looked."""
        before, since_s = self._still.get(what, (None, 0.0))
        if before != state:
            self._still[what] = state, now_s
            return 0.0
        return now_s - since_s

    def stuck(self, stood_s: float) -> CounterpointError | None:
        """Who holds up this rank, which has made no more calls than others and does not move.

        Args:
            stood_s: for how long its main thread has been at one instruction.
        """
        peer = self._mine[AWAITS] - 1
        for r in self._peers if stood_s > STANDS_S else ():
            if self.state(r).endswith("dead") and not self._lines[r][LEFT]:
                return self._missing(r, "")
        if peer >= 0 and stood_s > self.timeout_s and self._lines[peer][CALLS] <= self.calls:
            return self._missing(self.culprit(peer), f" within {self.timeout_s:g} s")
        return None

    def first_cause(self) -> CounterpointError | None:
        """Who is to blame for an error that has ended a call of this rank, if anybody is by now."""
        for r in self._peers:
            if self.state(r).endswith("dead"):
                return self._missing(r, "")
        return None

    def late(self) -> CounterpointError | None:
        """The rank that has made the fewest calls, of those that have made fewer than this one."""
        r = min(self._peers, key=lambda r: self._lines[r][CALLS], default=self.rank)
        return self._missing(r, "") if self._lines[r][CALLS] < self.calls else None

    def ended_by(self, error: BaseException) -> CounterpointError:
        """The fault of a rank that an error of its own has ended."""
        text = f"{type(error).__name__}: {error}"[:600]
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        if where is not None:
            text += f" ({where.tb_frame.f_code.co_filename}:{where.tb_lineno})"
        name, last = self.names[self.rank], self._call_of(self.rank, self.calls)
        text = f"guard: {name} has ended by {text}, {last}{RESTART}"
        return PeerTimeoutError(text, rank=self.ranks_of_world[self.rank], step="call")

    def _missing(self, r: int, within: str) -> PeerTimeoutError:
        there = self._lines[r][CALLS]
        if there < self.calls:
            what = f"did not make collective {there + 1}{self._of}{within}: "
            what += f"{self._described(self.rank, there + 1)} on {self.names[self.rank]}"
        elif self._mine[AWAITS]:
            what = f"did not take part in a message{self._of}{within}"
        else:
            what = f"is lost in collective {there}{self._of}, or after it"
        said = read_note(self._words[r]) or {}
        stands = f"; its main thread is at {said['stands']}" if said.get("stands") else ""
        text = f"guard: {self.names[r]} {what} ({self.state(r)}); {self._call_of(r, there)}"
        text += f"{self._message_of(r)}{stands}{RESTART}"
        return PeerTimeoutError(text, rank=self.ranks_of_world[r], step="call")

    def _call_of(self, r: int, call: int) -> str:
        if not call:
            return "it has made no collective here"
        return f"its last was collective {call}, {self._described(r, call)}"

    def _described(self, r: int, call: int) -> str:
        """A call of a rank, and where it was made, in words."""
        line, slot = self._lines[r], call % RING
        said = dict((read_note(self._words[r]) or {}).get("names", ())) if r != self.rank else {}
        names = said | self._names
        if line[CALLS] - call >= RING - 1:
            return "long ago"
        where = names.get(line[NUMBERS + slot])
        return names.get(line[HEAD + slot], UNKNOWN) + (f" at {where}" if where else "")

    def _disagreement(self, r: int, call: int) -> CounterpointError | None:
        """The error of ranks that have made another call than the most; None: others may come."""
        sides: dict[int, list[int]] = {}
        absent = False
        for each in sorted({self.rank, *self._peers}):
            line = self._lines[each]
            if call <= line[CALLS] < call + RING - 1:
                sides.setdefault(line[HEAD + call % RING], []).append(each)
            else:
                absent |= not self.lost(each) and line[CALLS] < call
        most = sorted(sides.values(), key=len, reverse=True)
        even = len(most) > 1 and len(most[0]) == len(most[1])
        waited_s = self._still_for("disagreement", call, time.monotonic())
        (want, got), more = most[:2], most[2:]
        wanted = self._described(want[0], call)
        others = [f"{self._described(r, call)} on {self.names[r]}"
                  for r in got + [each for side in more for each in side]]  # fmt: skip
        unsaid = any(UNKNOWN in each for each in (wanted, *others))  # in words, so far
        # another look sees what the first one may have seen half
        if not waited_s or (((even and absent) or unsaid) and waited_s < PATIENCE_S):
            return None
        return InputError(
            "guard", f"collective {call}{self._of}",
            want=f"{wanted}, as on {self._named(want)}", got=" and ".join(others),
            fix=RESTART[2:],
        )  # fmt: skip

    def _named(self, ranks: list[int]) -> str:
        numbers = [self.ranks_of_world[r] for r in ranks]
        return f"{'ranks' if numbers[1:] else 'rank'} {', '.join(map(str, numbers))}"


def where_main_stands() -> tuple[Hashable, str]:
    """Where the main thread of this process is: equal while it does not move; and in words."""
    frame = _current_frames().get(threading.main_thread().ident or 0)
    at = _caller(frame)
    if frame is None or at is None:
        return None, ""
    return (id(frame), frame.f_lasti), f"{at.f_code.co_filename}:{at.f_lineno}"
