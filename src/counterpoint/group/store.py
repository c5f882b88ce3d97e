"""What ranks tell each other by the store of their process group, before anything else is there.

Slow, but it needs neither shared memory nor a collective that cannot say who is missing: every
wait is bounded, and names who has not come. Also the way between hosts.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, PeerTimeoutError, UnsupportedError
from counterpoint.group.messages import decode, encode

POLL_S = 2e-3
ANSWER_S = 1.5  # a store that takes longer is cut off
SAY_AFTER_S = 10.0  # of a wait: who waits for whom; with a shorter bound at half of it
REFUSED = "refused"  # behind the name of a meeting: why a rank does not come to it

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def mark_told(error: E) -> E:
    """Mark an error that other ranks know of, or raise, too: see `notice_board.is_told`."""
    error.is_told = True  # type: ignore[attr-defined]
    return error


def store_of(group: dist.ProcessGroup) -> Any:
    """The store by which the ranks of `group` have met.

    Raises:
        UnsupportedError: this torch does not give it.
    """
    # private, as torch has no public way to it; only used here
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None:
        raise UnsupportedError(f"store_of: torch {torch.__version__} shows no stores of groups")
    return find(group)


def answer_of(call: Callable[..., T], *args: Any, within_s: float) -> T:
    """What a call of a store returns. A host that has been cut off answers never, and says nothing.

    Raises:
        RuntimeError: it did not return in time, or it raised that.
    """
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(*args), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="counterpoint-store", daemon=True).start()
    try:
        found, error = answers.get(timeout=max(within_s, POLL_S))
    except Empty:
        raise RuntimeError(f"it did not answer within {within_s:.2g} s") from None
    if error is not None:
        raise error
    return cast(T, found)


def gather_by_store(
    group: dist.ProcessGroup, name: str, timeout_s: float, names: Sequence[str] = (),
    bound: str = "COUNTERPOINT_TIMEOUT_S",
) -> Callable[..., list[Any]]:  # fmt: skip
    """A function that all-gathers a value of a message, each time it is called, by all ranks alike.

    Args:
        name: of keys; a group may have several.
        timeout_s, bound: of each wait, and whose that is, in words.
        names: of ranks, for errors: as they are then; their numbers where there are none.

    Returns:
        Its second argument is a function that raises where nobody will come any more.

    Raises:
        CounterpointError: the store is gone; its function: a rank is late, has refused or left.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return _alone
    try:
        store = store_of(group)
        turn = answer_of(_turn, store, name, rank, within_s=timeout_s)
    except RuntimeError as error:
        raise _gone(f"{error}") from error
    called, refusal = names or [f"rank {r}" for r in range(ranks)], f"{name}/{turn}/{REFUSED}"
    count = 0

    def gather(value: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
        nonlocal count
        count += 1
        keys = [f"{name}/{turn}/{count}/{r}" for r in range(ranks)]
        awaited, waits = rank, _Wait(called, rank, timeout_s, bound)

        def answer(call: Callable[..., Any], *args: Any) -> Any:
            return answer_of(call, *args, within_s=max(waits.left_s(), ANSWER_S))

        def has_come(r: int) -> bool:
            if (there := answer(store.check, [keys[r]])) or not answer(store.check, [refusal]):
                return there
            raise mark_told(decode(answer(store.get, refusal)))

        try:
            answer(store.set, keys[rank], encode(value))
            for awaited in range(ranks):
                waits.until(has_come, awaited, check)
            awaited = rank
            if count > 1:  # all have come to this one: they have read the one before
                answer(store.delete_key, f"{name}/{turn}/{count - 1}/{rank}")
            return [decode(answer(store.get, key)) for key in keys]
        except CounterpointError:
            raise
        except (RuntimeError, ValueError) as error:
            waited = f" while waiting for {called[awaited]}" if awaited != rank else ""
            gone = _gone(f"{called[rank]}: {error}{waited}", rank)
            with suppress(RuntimeError):
                answer(store.set, refusal, encode(gone))
            raise gone from error

    return gather


class _Wait:
    """The time of one meeting.

    Args:
        names: of ranks.
        rank: this one.
        timeout_s, bound: see `gather_by_store`.
    """

    def __init__(self, names: Sequence[str], rank: int, timeout_s: float, bound: str) -> None:
        self._names, self._rank, self._timeout_s, self._bound = names, rank, timeout_s, bound
        self._start_s, self._said = time.monotonic(), False

    def left_s(self) -> float:
        """What is left of it."""
        return self._start_s + self._timeout_s - time.monotonic()

    def until(
        self, has_come: Callable[[int], bool], r: int, check: Callable[[], None]
    ) -> None:  # fmt: skip
        """Wait for rank `r`.

        Args:
            check: raises where nobody will come any more.
        """
        while not has_come(r):
            check()
            if self.left_s() < 0:
                self.end([each for each in range(len(self._names)) if not has_come(each)])
            self.say(r)
            time.sleep(POLL_S)

    def say(self, r: int) -> None:
        """Say once on stderr, after a while, who waits for rank `r`."""
        waited_s = self._timeout_s - self.left_s()
        if waited_s > min(SAY_AFTER_S, self._timeout_s / 2) and not self._said:
            self._said = True
            text = f"{self._names[self._rank]} waits for {self._names[r]} at a meeting of the group"
            text += f" since {waited_s:.1f} s, and gives up after {self._timeout_s:g} s"
            print(f"counterpoint: {text}", file=sys.stderr, flush=True)

    def end(self, missing: Sequence[int]) -> None:
        """Raise, unless the last of those that are missing has just come."""
        if missing:
            names = ", ".join(self._names[r] for r in missing)
            raise PeerTimeoutError(
                f"counterpoint: {names} did not come to a meeting of the group within "
                f"{self._timeout_s:g} s; the group is unusable, restart its ranks ({self._bound} "
                "is the bound)",
                rank=missing[0],
                step="workspace",
            )


def refuse_by_store(group: dist.ProcessGroup, name: str, error: CounterpointError) -> None:
    """Tell the ranks that come to their first `gather_by_store` that this one will not.

    It counts as having come: whoever hears of it is in step with this rank again.
    """
    _refuse(group, name, error, 1)


def leave_by_store(group: dist.ProcessGroup, name: str, error: CounterpointError) -> None:
    """Tell the ranks that are in a `gather_by_store` that this one comes no more."""
    _refuse(group, name, error, 0)


def _refuse(group: dist.ProcessGroup, name: str, error: CounterpointError, turns: int) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return

    def tell() -> None:
        store = store_of(group)
        turn = store.add(f"{name}/arrivals/{rank}", turns)
        store.set(f"{name}/{turn}/{REFUSED}", encode(error))

    with suppress(RuntimeError, UnsupportedError):  # the store is gone, and the others hear of that
        answer_of(tell, within_s=ANSWER_S)


def _turn(store: Any, name: str, rank: int) -> int:
    """How often this rank has come to the first meeting: again, after what it had was released."""
    return store.add(f"{name}/arrivals/{rank}", 1)


def _alone(value: Any, check: object = None) -> list[Any]:
    return [value]


def _gone(why: str, rank: int | None = None) -> PeerTimeoutError:
    text = f"the store of the group is gone ({why}); the group is unusable, restart its ranks"
    return PeerTimeoutError(f"counterpoint: {text}", rank=rank, step="workspace")
