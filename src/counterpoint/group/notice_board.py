"""Who calls what, in memory that all ranks of a host see: nobody waits for one who does not come.

Each rank has a line that it alone writes: how many calls it has made, digests of the last ones,
whom it waits for, what it has refused, and its verdict once it has given up. A rank notes a call
before it does anything else of it. It compares one neighbour's digests then, and those of all while
it waits. Who gives up leaves a verdict, so that all others name the first cause, and not the first
who left.

Ranks also meet here: each has a page for what it says, and reads those of the others.

Ranks on several hosts have no such memory. They meet by the store of their process group, and each
copies the line of the next one through it: see far_lines.py.
"""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from itertools import cycle
from threading import Event, get_ident
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
import torch.utils.checkpoint
from numpy.typing import NDArray

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError, UnsupportedError
from counterpoint.group.far_lines import PERIOD_S, FarLines
from counterpoint.group.messages import decode, encode
from counterpoint.group.ranks import describe_process
from counterpoint.group.store import (
    gather_by_store,
    leave_by_store,
    mark_told,
    refuse_by_store,
)
from counterpoint.group.symmetric_cpu import allocate_cpu
from counterpoint.group.symmetric_memory import SymmetricMemory

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Facts = dict[str, str]  # of a call, in words; "op" first

RING = 1024  # calls whose digests, and numbers, a line holds
X86 = ("x86_64", "AMD64")
MAX_REFUSALS = 1 << 20  # of one call
REFUSED_BIT = 40  # from which on a digest also says how often its call was refused before
# words of a line: calls made, the call that was refused and how often, 1 + the rank that is waited
# for, whether there is a verdict, pages shown, pages of the others that were read, bytes of all,
# whether the rank has left the group, and twice the number of the forward whose backward it is in
CALLS, REFUSES, AWAITS, VERDICT, SHOWN, READ, SIZE, LEFT, FORWARD, HEAD = range(10)
NOTE_BYTES = 8 << 10  # of a verdict or a refusal, and of the facts of a call
PAGE_BYTES = 256 << 10
NUMBERS = HEAD + RING  # where those begin that ranks say at a call: see `NoticeBoard.numbers`
LINE_BYTES = 8 * (NUMBERS + RING)
BOARD_BYTES = LINE_BYTES + 2 * NOTE_BYTES + PAGE_BYTES
MAX_FACTS = 4096  # calls that are known in words

YIELDS = 300  # some tenths of a millisecond, then sleep: ranks may outnumber cores
SLEEPS_S = 50e-6, 2e-3  # at least and at most; between them a sixteenth of what has been waited
LOOK_EVERY_S = 0.02
SAY_AFTER_S = 10.0  # who waits for whom; with a shorter bound at half of it
DEAD_S = 1.0  # for which a GPU may still be at work that a rank which has died has posted
GONE = "has left the group"
# by which torch ends the recomputation of a checkpoint, on all ranks at the same place; private
STOPS: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
RESTART = "; the group is unusable, restart its ranks"


class Awaited(NamedTuple):
    """What a wait is for, as its error says it: "op: rank 1 did not DEED within 2 s"."""

    op: str
    deed: str
    step: str


def is_told(error: BaseException) -> bool:
    """Whether other ranks know of an error that is none of ours, or raise it, too."""
    return isinstance(error, STOPS) or bool(getattr(error, "is_told", False))


class Refused(Exception):
    """A rank has refused the call that others have come to, and why.

    Attributes:
        error: of a call of which nothing has run.
        fault: the same of one that may have: what made the group unusable.
    """

    def __init__(self, error: CounterpointError) -> None:
        super().__init__(error)
        self.error, self.fault = error, _told(error, f"{error}{RESTART}")


class NoticeBoard:
    """The lines of all ranks of a group, as one of them sees them. Collective to make.

    Args:
        group: whose ranks.
        device: "cpu" or "cuda": a group may have a board for each.
        timeout_s: of every wait for a rank that is alive.
        bound: whose that bound is, in words.

    Attributes:
        fault: what made the group unusable; None: nothing.
        calling: the thread of this rank that is in a call; 0: none.
        calls: how many this rank has begun; equal on all ranks in one call.
        forward: twice the number of the forward call whose backward this rank is in; 0: of none.
        shared: ranks are on one host, an x86 one. Else only the next rank is looked at, from afar.
        alarms: words of the host that are not 0 once a kernel has found something wrong, and what
            says what it is. The last ones explain what those before them have found.

    Raises:
        PeerTimeoutError: a rank did not come.
        OSError: a rank is out of memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: str, timeout_s: float, bound: str) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s, self.bound = timeout_s, bound
        self.calling = 0
        self.forward = 0
        self.names = [f"rank {r}" for r in range(self.ranks)]  # for errors
        self.fault: CounterpointError | None = None
        self.facts: dict[int, Facts] = {}
        self.alarms: list[tuple[NDArray[np.int64], Callable[[], CounterpointError | None]]] = []
        self._by_store = gather_by_store(group, _place(device), timeout_s, self.names, bound)
        memory: SymmetricMemory | None = None
        on_gpu = device == "cuda"
        # x86 keeps the order of stores; elsewhere a digest may be seen after the call's number
        if self.ranks > 1 and (platform.machine() in X86 or not on_gpu):
            try:
                memory = allocate_cpu(BOARD_BYTES, group, self._by_store, range(self.ranks))
            except (UnsupportedError, OSError) as error:  # on all ranks alike
                if not (on_gpu or isinstance(error, UnsupportedError)):
                    raise
        self.shared = memory is not None
        self.calls = 0
        self._compares = False  # a call that is new, of which nothing has run
        self._far: FarLines | None = None
        self._peers = [r for r in range(self.ranks) if r != self.rank]
        if memory is None:
            arrays = self._afar(group, device)
        else:
            self.pids = memory.peer_pids
            arrays = [memory.peer(r).numpy() for r in range(self.ranks)]
        # plain Python reads words of a memoryview in half the time of an array's
        self._lines: list[Any] = [a[:LINE_BYTES].view(np.int64).data for a in arrays]
        self._notes = [a[LINE_BYTES : LINE_BYTES + NOTE_BYTES] for a in arrays]
        self._words = [a[LINE_BYTES + NOTE_BYTES : -PAGE_BYTES] for a in arrays]
        self._pages = [a[-PAGE_BYTES:] for a in arrays]
        self._mine = self._lines[self.rank]
        self._compared = [0] * self.ranks
        after = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self._next = cycle([self._lines[r] for r in after]).__next__

    def _afar(self, group: dist.ProcessGroup, device: str) -> list[Bytes]:
        """Memory of this rank alone: its own line, and the only one that it sees of others."""
        own, other = (np.zeros(BOARD_BYTES, np.uint8) for _ in range(2))
        self._copied = own[:-PAGE_BYTES], other[:-PAGE_BYTES]
        if self.ranks > 1:
            (turn, *_) = self._by_store(time.time_ns())
            self._far = FarLines(group, f"{_place(device)}/{turn}", self.timeout_s)
            self._peers = [(self.rank + 1) % self.ranks]
            self._far.beat(*self._copied)
        return [own if r == self.rank else other for r in range(self.ranks)]

    def note(self, digest: int) -> None:
        """Say that a call begins whose arguments ranks have compared before.

        Args:
            digest: of its facts, see `digest_of`.

        Raises:
            InputError: the neighbour whose turn it is has made another call.
            CounterpointError: the group is unusable, as a rank has found.
        """
        if self.fault is not None:
            self.check()
        if self.calling and self.calling != get_ident():
            self._refuse_second_thread()
        for words, _ in self.alarms:
            if words[0]:
                self.check()
        self.calling = get_ident()
        mine = self._mine
        calls = self.calls = self.calls + 1
        word = digest ^ self.forward
        if (times := mine[REFUSES] - calls * MAX_REFUSALS) > 0:
            word ^= times << REFUSED_BIT
        mine[HEAD + calls % RING] = word
        mine[CALLS] = calls  # x86 keeps the order of stores
        if not self.shared:
            return
        theirs = self._next()
        there = theirs[CALLS]
        at = HEAD + (calls if there > calls else there) % RING
        if theirs[VERDICT] or (theirs[at] != mine[at] and -RING < there - calls + 1 < RING):
            self.raise_what_is_wrong()

    def note_new(self, digest: int, facts: Facts) -> None:
        """Say that a call begins whose arguments ranks will now compare.

        Args:
            digest: of its facts. The line has it with its lowest bit set: two ranks that both go
                on to compare need no digest to find that they differ.
            facts: in words.
        """
        self._know(digest, facts)
        self._begin(digest)

    def _begin(self, digest: int) -> None:
        """Say that a call begins at which ranks meet."""
        self._compares = True
        calls = self.calls = self.calls + 1
        times = self._refusals(self.rank, calls) << REFUSED_BIT
        self._mine[HEAD + calls % RING] = (digest ^ self.forward ^ times) | 1
        self._mine[CALLS] = calls

    def numbers(self, digest: int, facts: Facts, number: int, awaited: Awaited) -> list[int] | None:
        """Begin a call that ranks have compared before, and learn the number that each brings.

        None returns before each has come to it; no word is encoded, so it takes microseconds.

        Returns:
            In rank order; None: this one and another have come to calls that differ, which all see
            alike, and now compare in words.

        Raises:
            PeerTimeoutError: a rank did not come.
            InputError: a rank has refused the call, or made another one.
        """
        if digest not in self.facts:
            self._know(digest, facts)
        at = (self.calls + 1) % RING
        self._mine[NUMBERS + at] = number
        self._begin(digest)
        calls = self.calls
        try:
            self._wait(CALLS, calls, Late(self, awaited, launched=False))
            for r in self._peers:
                self._check_refusal(r)
        except Refused as refused:
            raise self._refused(refused) from None
        lines = self._lines
        if any(line[HEAD + at] != self._mine[HEAD + at] for line in lines):
            return None
        found = [line[NUMBERS + at] for line in lines]
        if any(line[CALLS] - calls >= RING for line in lines):
            late = f"counterpoint: {self.names[self.rank]} is {RING} calls behind{RESTART}"
            raise self.fail(PeerTimeoutError(late, rank=self.rank, step=awaited.step))
        self._compares = False
        return found

    def note_op(self, op: str, **more: str) -> None:
        """Say that a call begins of which ranks compare the operator, and what is more, by digests.

        Raises:
            InputError: a rank has called something else, as far as this one sees by now.
            CounterpointError: the group is unusable, as a rank has found.
        """
        digest = _digest_of_op(op, **more)
        if digest not in self.facts:
            self._know(digest, {"op": op} | more)
        self.note(digest)

    def _know(self, digest: int, facts: Facts) -> None:
        """Keep the facts of a call in words, and show them to ranks that have made another one."""
        if len(self.facts) >= MAX_FACTS:
            self.facts.pop(next(iter(self.facts)))
        self.facts[digest] = facts
        _write(self._words[self.rank], facts)

    def refuse(self, error: CounterpointError) -> None:
        """Say that this rank has refused a call before it noted it: peers may have come to it."""
        if self._far is not None:  # none of them looks while it waits
            self.fail(_told(error, f"{error} (rank {self.rank} has refused the call){RESTART}"))
        elif self.fault is None:
            _write(self._notes[self.rank], error)
            times = self._refusals(self.rank, self.calls + 1) + 1
            self._mine[REFUSES] = (self.calls + 1) * MAX_REFUSALS + min(times, MAX_REFUSALS - 1)

    def _refusals(self, r: int, call: int) -> int:
        """How often rank `r` has refused what would have been that call, before it made it."""
        of, times = divmod(self._lines[r][REFUSES], MAX_REFUSALS)
        return times if of == call else 0

    def fail(self, error: CounterpointError) -> CounterpointError:
        """Leave a verdict for the others: the group is unusable. Returns the first one."""
        if self.fault is None:
            # one that has been raised holds the frames that it went through, and all in them
            self.fault = copy(error)
            _write(self._notes[self.rank], error)
            self._mine[VERDICT] = 1
            if self._far is not None:
                self._far.tell(error)
        return copy(self.fault)

    def end(self, error: BaseException | None, calls: int | None = None, op: str = "") -> None:
        """Say that this rank is in no call any more.

        One that an error of others has ended (an interrupt, a lack of memory, an error of torch's)
        may have run in part: its peers would pair it with this rank's next call, and each later
        call with another one.

        Args:
            error: what has ended it; None: it has run.
            calls: how many had begun before it; None: as many as there are, but this one.
            op: of a call that has not begun.
        """
        begun = self.calling if calls is None else self.calls != calls
        self.calling = 0
        if error is None or not begun or isinstance(error, CounterpointError):
            if error is not None and begun:
                mark_told(error)  # of a call that counts
            return
        if not is_told(error) and self.fault is None:
            mark_told(error)
            op = op or self._facts_of(self.rank, self.calls).get("op", "counterpoint")
            text = f"{op}: {self.names[self.rank]} has not ended this call"
            why = f", {type(error).__name__} has ended it there{RESTART}"
            self.fail(PeerTimeoutError(text + why, rank=self.rank, step="call"))

    @contextmanager
    def whole(self) -> Generator[None]:
        """Around calls that this rank makes together or not at all: see `end`."""
        calls = self.calls
        try:
            yield
        except BaseException as error:
            self.end(error, calls)
            raise
        self.end(None)

    @contextmanager
    def backward_of(self, forward: int) -> Generator[None]:
        """Around calls of a backward, which are compared as that of one forward call.

        Ranks whose autograd runs backwards in another order would else pair gradients of others.

        Args:
            forward: its number, see `calls`.
        """
        before = self.forward
        self.forward = self._mine[FORWARD] = forward << 1
        try:
            yield
        finally:
            self.forward = self._mine[FORWARD] = before

    def _refuse_second_thread(self) -> None:
        want = "called by one thread at a time, in one order on all ranks"
        raise self.fail(InputError("counterpoint", "group", want=want, got=f"two threads{RESTART}"))

    def leave(self) -> None:
        """Say for the last time what this rank has called; it looks no more."""
        self.alarms.clear()
        self._mine[LEFT] = 1
        if self._far is not None:
            self._far.leave(self._copied[0])

    def end_in_copy(self, error: CounterpointError) -> None:
        """Refuse all calls of this process, which is no rank, and leave shared memory alone."""
        self.fault = error
        self._far = None
        self._mine = memoryview(bytearray(LINE_BYTES)).cast("q")

    def check(self) -> None:
        """Raise what made the group unusable, if anything did.

        Raises:
            CounterpointError: a new copy each time.
        """
        if self.fault is None and any(words[0] for words, _ in self.alarms):
            self.settle()
        if self.fault is not None:
            raise copy(self.fault)

    def settle(self) -> None:
        """Find the fault that alarms stand for."""
        for _, explain in reversed(self.alarms):
            if (found := explain()) is not None:
                self.fail(found)
                return

    def wrong(self) -> CounterpointError | None:
        """What is wrong with anybody while some of a call may have run; None where nothing is."""
        compares = self._compares
        try:
            found = self.look()
        except Refused as refused:  # a meeting hears of it by itself, and nothing has run then
            return None if compares or self._compares else refused.fault
        if found is None and (r := self.gone()) is not None:
            op = self._facts_of(self.rank, self.calls).get("op")
            text = f"{op or 'counterpoint'}: {self.names[r]} did not come ({self.state(r)})"
            return PeerTimeoutError(text + RESTART, rank=r, step="call")
        return found

    def raise_what_is_wrong(self) -> None:
        """Raise what `wrong` finds, as a fault of the group.

        Raises:
            CounterpointError: what it found.
        """
        if (wrong := self.wrong()) is not None:
            raise self.fail(wrong)

    def look(self) -> CounterpointError | None:
        """What is wrong with anybody; None where nothing is.

        Raises:
            Refused: a rank has refused the call that this one is in. Nothing of it has run.
        """
        if self._far is not None and (verdict := self._far.exchange(*self._copied)) is not None:
            return verdict
        for r in self._peers:
            if self._lines[r][VERDICT] and (verdict := _read(self._notes[r])) is not None:
                return verdict
        for r in self._peers:
            if (wrong := self._different(r)) is not None:
                return wrong
        for r in self._peers:
            if self._lines[r][CALLS] < self.calls:
                self._check_refusal(r)
        return None

    def heard(self) -> CounterpointError | None:
        """The verdict of another rank, given a little time to come; None: none has left one."""
        for _ in range(3 if self._far is not None else 1):
            found = self.look()
            if found is not None or self._far is None:
                return found
            time.sleep(PERIOD_S)
        return None

    def _check_refusal(self, r: int) -> None:
        """Raise what rank `r` has refused more often than this one, before the call it is in.

        Raises:
            Refused: there is something.
        """
        here, there = (self._refusals(each, self.calls) for each in (self.rank, r))
        error: CounterpointError | None = _read(self._notes[r]) if there > here else None
        if error is not None:
            raise Refused(_told(error, f"{error} (rank {r} has refused the call)"))

    def gone(self) -> int | None:
        """A rank that has not made the call that this one is in, and never will."""
        for r in self._peers:
            if self._lines[r][CALLS] < self.calls and self.lost(r):
                return r
        return None

    def lost(self, r: int) -> bool:
        """Whether a rank makes no more calls: it is dead, or has left the group."""
        return self.state(r).endswith(("dead", GONE))

    def died(self) -> bool:
        """Whether a rank has died in the midst of its calls."""
        return any(self.state(r).endswith("dead") for r in self._peers)

    def _different(self, r: int) -> CounterpointError | None:
        """What rank `r` has called that this rank has not, among the last calls.

        Raises:
            Refused: it has refused the call that this rank is in.
        """
        line, mine = self._lines[r], self._mine
        both = min(self.calls, line[CALLS])
        first = max(self._compared[r], self.calls - RING, line[CALLS] - RING)
        for call in range(max(first, 0) + 1, both + 1):
            here, there = mine[HEAD + call % RING], line[HEAD + call % RING]
            if here == there:
                continue
            if call == self.calls:
                self._check_refusal(r)  # it has gone on to another one, then
            if self._unheard(r, call):
                return None
            if here & there & 1:  # ranks that meet will say so there
                continue
            slot, last = HEAD + call % RING, max(line[CALLS], self.calls)
            if last - call >= RING - 1:  # overwritten by now
                continue
            if line[CALLS] < call or (mine[slot], line[slot]) != (here, there):
                return None  # one has heard of a refusal meanwhile: looked at again
            return self._disagreement(r, call)
        # a rank may still go back from the call that this one is in, and come to it as another one
        self._compared[r] = min(both, self.calls - 1)
        return None

    def _ahead(self, r: int, call: int) -> bool:
        """Whether this rank has refused, before that call, one that rank `r` has not yet."""
        passed = self._lines[r][REFUSES] // MAX_REFUSALS > call
        return not passed and self._refusals(self.rank, call) > self._refusals(r, call)

    def _unheard(self, r: int, call: int) -> bool:
        """Whether rank `r` still waits in a call that this rank has refused and left behind."""
        line = self._lines[r]
        if not self._ahead(r, call) or line[CALLS] != call:
            return False
        there = line[HEAD + call % RING]
        return bool(there & 1) and there != self._mine[HEAD + call % RING]

    def _disagreement(self, r: int, call: int) -> CounterpointError:
        ours = self._facts_of(self.rank, call)
        theirs = self._facts_of(r, call) or _read(self._words[r]) or {}
        times = {self._refusals(each, call): each for each in (self.rank, r)}
        if ours == theirs and len(times) > 1:  # what one has refused the other one has made
            by = times[max(times)]
            error: CounterpointError | None = _read(self._notes[by])
            if error is not None:
                return _told(error, f"{error} (rank {by} has refused the call){RESTART}")
        of_ours, of_theirs = (self._lines[each][FORWARD] >> 1 for each in (self.rank, r))
        if ours == theirs and of_ours != of_theirs:
            ours, theirs = ({**ours, "backward": f"of call {of}"} for of in (of_ours, of_theirs))
        elif ours == theirs:  # one rank alone has forgotten that they were compared
            ours, theirs = {"memory": "one of this call"}, {"memory": "none of this call"}
        (low, one), (high, other) = sorted(((self.rank, ours), (r, theirs)), key=lambda e: e[0])
        name, want, got = difference(one, other)
        want = f"equal on all ranks, {want} as on rank {low}"
        fix = "the group is unusable, restart its ranks"
        op, got = one.get("op", "counterpoint"), f"{got} on rank {high}"
        return InputError(op, name, want=want, got=got, fix=fix)

    def _facts_of(self, r: int, call: int) -> Facts:
        """The facts of a call by what the line of rank `r` has of it; {}: they are not known."""
        line, times = self._lines[r], self._refusals(r, call) << REFUSED_BIT
        return self.facts.get((line[HEAD + call % RING] & ~1) ^ line[FORWARD] ^ times, {})

    def state(self, r: int) -> str:
        """Whether the process of a rank lives, in words."""
        if self._lines[r][LEFT]:
            return f"it {GONE}"
        if self._far is not None:
            return self._far.state() if r in self._peers else "on another host, or island"
        return describe_process(self.pids[r])

    def culprit(self, r: int) -> int:
        """Who holds rank `r` up: whom it waits for, whom that one waits for, and so on."""
        if self._far is not None:  # of most ranks no line is seen
            return r
        for _ in range(self.ranks):
            after = self._lines[r][AWAITS] - 1
            if after < 0 or after == self.rank or not self.state(r).endswith("alive"):
                break
            r = after
        return r

    def holds_up(self) -> tuple[int, int, float] | None:
        """A rank for which work on this rank's GPU may wait.

        One that is dead, or else one that has made fewer calls.

        Returns:
            The rank, how many calls it has made, and how long the GPU may wait for it; None: there
            is no such rank.
        """
        for r in self._peers:
            if self.state(r).endswith("dead"):
                return r, self._lines[r][CALLS], min(DEAD_S, self.timeout_s)
        for r in self._peers:
            if self._lines[r][CALLS] < self.calls:
                return r, self._lines[r][CALLS], self.timeout_s
        return None

    def gather(self, value: T, awaited: Awaited) -> list[T]:
        """What all ranks say: none returns before each has come to it.

        Raises:
            PeerTimeoutError: a rank did not come.
            InputError: a rank has refused the call, or made another one.
        """
        if not self.shared:
            return self._gather_by_store(value)
        mine = np.frombuffer(encode(value), np.uint8)
        try:
            found = self.gather_bytes(mine, awaited, launched=False)
        except Refused as refused:
            raise self._refused(refused) from None
        finally:
            self._compares = False
        return [decode(each.tobytes()) for each in found]

    def _refused(self, refused: Refused) -> CounterpointError:
        """What ends a meeting that another rank has refused to come to."""
        compares, self._compares = self._compares, False
        self.awaits(None)
        if not compares:  # what it was called for is not what this rank meets for
            return self.fail(refused.fault)
        calls = self.calls = self._mine[CALLS] = self.calls - 1  # it counts on no rank
        self._compared = [min(calls, each) for each in self._compared]
        self.refuse(refused.error)
        return mark_told(refused.error)

    def _gather_by_store(self, value: T) -> list[T]:
        try:
            return self._by_store(value, self.check)
        except PeerTimeoutError as error:
            raise self.fail(error) from None
        finally:
            self._compares = False

    def gather_bytes(self, mine: Bytes, awaited: Awaited, *, launched: bool = True) -> list[Bytes]:
        """What all ranks show, [any] bytes of each; a page at a time.

        Args:
            mine: what this rank shows.
            awaited: for errors.
            launched: whether some of the call may have run by now.

        Raises:
            PeerTimeoutError: a rank did not come.
            InputError: a rank has refused the call, or made another one.
            Refused: a rank has refused the call, of which nothing has run.
        """
        if not self.shared:
            told = self._gather_by_store(mine.tobytes())
            return [np.frombuffer(bytearray(each), np.uint8) for each in told]
        if self.fault is not None:  # who comes late must not find a page of those who gave up
            raise copy(self.fault)
        line, sizes = self._mine, [len(mine)] * self.ranks
        found: list[Bytes] = []
        start = 0
        while start == 0 or start < max(sizes):
            shown = line[SHOWN] + 1
            self._wait(READ, shown - 1, Late(self, awaited, launched=launched))  # of the last page
            part = mine[start : start + PAGE_BYTES]
            self._pages[self.rank][: len(part)] = part
            line[SIZE] = len(mine)
            line[SHOWN] = shown
            try:
                self._wait(SHOWN, shown, Late(self, awaited, launched=launched))
                self.compare(launched=launched)
            except BaseException:
                line[SHOWN] = shown - 1  # who comes later finds nobody there
                raise
            if not found:
                sizes = [each[SIZE] for each in self._lines]
                found = [np.empty(size, np.uint8) for size in sizes]
            for r, each in enumerate(found):
                part = each[start : start + PAGE_BYTES]
                part[:] = self._pages[r][: len(part)]
            line[READ] = shown
            start += PAGE_BYTES
        return found

    def compare(self, *, launched: bool = True) -> None:
        """Refuse what has come from peers, if it is of another call: all have noted theirs by then.

        Args:
            launched: whether some of the call may have run by now.

        Raises:
            InputError: it is.
            Refused: a rank has refused the call, of which nothing has run.
        """
        for r in self._peers if self.shared else ():
            try:
                wrong = self._different(r)
            except Refused as refused:
                if not launched:
                    raise
                wrong = refused.fault
            if wrong is not None:
                raise self.fail(wrong)

    def awaits(self, r: int | None) -> None:
        """Let the others see whom this rank waits for."""
        self._mine[AWAITS] = 0 if r is None else r + 1

    def _wait(self, word: int, count: int, late: "Late") -> None:
        """Wait until that word of all lines has come to `count`."""
        for r in self._peers:
            line = self._lines[r]
            # who has yet to hear that this rank has refused an earlier one is in that, and says so
            # before it comes to this one
            while (word != READ and self._ahead(r, self.calls)) or line[word] < count:
                late.wait(r)
        late.end()


class Late:
    """One wait for peers: gives them time, looks at all now and then, and gives up in the end.

    Args:
        board: of the group.
        awaited: what is waited for.
        launched: whether some of the call may have run by now.
    """

    def __init__(self, board: NoticeBoard, awaited: Awaited, *, launched: bool = True) -> None:
        self._board, self._awaited, self._launched = board, awaited, launched
        self._polls = 0
        self._start_s = self._look_s = 0.0
        self._said = False

    def wait(self, r: int, done: Event | None = None) -> None:
        """Give rank `r` a little time.

        Args:
            done: what is waited for says so by itself; None: its word is looked at soon again.

        Raises:
            PeerTimeoutError: somebody is dead, or too late.
            InputError: somebody has made another call.
            Refused: somebody has refused this call.
        """
        self._polls += 1
        if self._polls < YIELDS and done is None:
            os.sched_yield()
            return
        now_s = time.monotonic()
        if not self._start_s:
            self._start_s = self._look_s = now_s
        if done is None:
            time.sleep(sorted((*SLEEPS_S, (now_s - self._start_s) / 16))[1])
        elif done.wait(LOOK_EVERY_S):
            return
        if now_s - self._look_s > LOOK_EVERY_S:
            self._look_s = now_s
            self._look(r, now_s - self._start_s)

    def end(self) -> None:
        """What was waited for is there."""
        if self._look_s > self._start_s:
            self._board.awaits(None)

    def _look(self, r: int, waited_s: float) -> None:
        board = self._board
        if board.fault is not None:
            raise copy(board.fault)
        board.awaits(r)
        try:
            wrong = board.look()
        except Refused as refused:
            if not self._launched:
                raise
            wrong = refused.fault
        if wrong is not None:
            raise board.fail(wrong)
        gone = board.gone()
        culprit = board.culprit(r) if gone is None else gone
        state = board.state(culprit)
        if gone is not None or state.endswith("dead") or waited_s >= board.timeout_s:
            raise board.fail(self._too_late(r, culprit, state, waited_s))
        if waited_s > min(SAY_AFTER_S, board.timeout_s / 2) and not self._said:
            self._said = True
            text = f"{self._awaited.op}: rank {board.rank} waits for rank {culprit} ({state})"
            text += f" since {waited_s:.1f} s, and gives up after {board.timeout_s:g} s"
            print(f"counterpoint: {text}", file=sys.stderr, flush=True)

    def _too_late(self, r: int, culprit: int, state: str, waited_s: float) -> PeerTimeoutError:
        op, deed, step = self._awaited
        names = self._board.names
        why = "" if culprit == r else f"{names[culprit]} holds it up, "
        return PeerTimeoutError(
            f"{op}: {names[r]} did not {deed} within {waited_s:.2f} s ({why}{state}); the group is "
            f"unusable, restart its ranks ({self._board.bound} is the bound)",
            rank=culprit,
            step=step,
        )


class HeldUp:
    """The wait of a host for its GPU, whose work may wait for ranks that never come.

    Kernels of ours end by themselves then; the library's collectives do not.
    """

    def __init__(self, board: NoticeBoard) -> None:
        self._board = board
        self._by: tuple[int, int, float] | None = None
        self._since_s = 0.0

    def look(self) -> None:
        """To be called again and again while the GPU is not done.

        Raises:
            PeerTimeoutError: a rank has held it up: it is dead, or it has made fewer calls, and
                none for as long as the bound of every wait.
        """
        board, by, now_s = self._board, self._board.holds_up(), time.monotonic()
        if by is None or by != self._by:
            self._by, self._since_s = by, now_s
        elif now_s - self._since_s > by[2]:
            raise board.fail(PeerTimeoutError(
                f"counterpoint: {board.names[by[0]]} did not make its calls within "
                f"{by[2]:g} s, and the GPU is not done ({board.state(by[0])}); the group is "
                f"unusable, restart its ranks ({board.bound} is the bound)",
                rank=by[0],
                step="check",
            ))  # fmt: skip


def refuse_first(error: CounterpointError, group: dist.ProcessGroup, device: str) -> None:
    """Say that this rank has refused the first call of a group, which has no board by then."""
    text = f"{error} (rank {dist.get_rank(group)} has refused the call)"
    refuse_by_store(group, _place(device), _told(error, text))


def leave_first(error: BaseException, group: dist.ProcessGroup, device: str) -> PeerTimeoutError:
    """Say that an error of others has ended making the board of a group here, and return that."""
    rank = dist.get_rank(group)
    text = f"counterpoint: rank {rank} has not come to a meeting of the group"
    why = f", {type(error).__name__} has ended its call{RESTART}"
    left = PeerTimeoutError(text + why, rank=rank, step="workspace")
    leave_by_store(group, _place(device), left)
    return left


def _place(device: str) -> str:
    """Where ranks that make a board meet, in the store of their group."""
    return f"counterpoint/{device}"


def digest_of(facts: object) -> int:
    """A number that is equal on all ranks if facts are, and even: see `NoticeBoard.note_new`."""
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) << 1


@lru_cache(maxsize=MAX_FACTS)
def _digest_of_op(op: str, **more: str) -> int:
    return digest_of({"op": op} | more)


def difference(here: Facts, there: Facts) -> tuple[str, str, str]:
    """The first fact that differs between two calls: its name, and its two values."""
    for name, want in here.items():
        got = there.get(name, f"op {there.get('op', 'another')}")
        if got != want:
            return name, want, got
    for name, got in there.items():
        if name not in here:
            return name, "none", got
    return "call", "a known call", "another call"


def _told(error: CounterpointError, text: str) -> CounterpointError:
    """The error of a rank as the others raise it."""
    kind: Callable[..., CounterpointError] = type(error).__new__
    told = kind(type(error), text)
    told.args = (text,)
    told.__dict__.update(error.__dict__)
    return told


def _write(place: Bytes, value: object) -> None:
    """Put a value into a place of a line; one that is too long is cut."""
    blob = encode(value)
    if len(blob) > len(place) - 8:
        if isinstance(value, CounterpointError):
            blob = encode(_told(value, f"{str(value)[:1000]}..."))
        else:
            assert isinstance(value, dict)
            blob = encode({"op": value.get("op", "")})  # pyright: ignore
    place[:8].view(np.int64)[0] = len(blob)
    place[8 : 8 + len(blob)] = np.frombuffer(blob, np.uint8)


def _read(place: Bytes) -> Any:
    """What `_write` has put there; None where nothing is, or its writer has died."""
    for _ in range(1000):  # a second
        size = int(place[:8].view(np.int64)[0])
        try:
            return decode(place[8 : 8 + size].tobytes()) if size else None
        except ValueError:  # half of one value and half of another: another process writes there
            time.sleep(1e-3)
    return None
