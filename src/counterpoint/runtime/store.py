"""What ranks tell each other by the store of their process group, before anything else is there.

Slow, but it needs neither shared memory nor a collective that cannot say who is missing: every
wait is bounded, and names who has not come. Also the way between hosts.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, PeerTimeoutError, UnsupportedError

POLL_S = 2e-3
ANSWER_S = 1.5  # a store that takes longer is cut off
REFUSED = "refused"  # behind the name of a meeting: why a rank does not come to it
T = TypeVar("T")


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
    group: dist.ProcessGroup, name: str, timeout_s: float, names: Sequence[str] = ()
) -> Callable[..., list[Any]]:
    """A function that all-gathers a picklable value, each time it is called, by all ranks alike.

    Args:
        group: whose ranks.
        name: of keys; a group may have several.
        timeout_s: of each wait.
        names: of ranks, for errors: as they are then; their numbers where there are none.

    Returns:
        Its second argument may be a function that raises where nobody will come any more.

    Raises:
        PeerTimeoutError: the store is gone. Its function: or a rank did not come.
        CounterpointError: its function, at its first call: a rank has refused to come, and why.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return _alone
    try:
        store = store_of(group)
        turn = answer_of(_turn, store, name, rank, within_s=timeout_s)
    except RuntimeError as error:
        raise _gone(f"{error}") from error
    count, called = 0, names or [f"rank {r}" for r in range(ranks)]

    def gather(value: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
        nonlocal count
        count += 1
        keys = [f"{name}/{turn}/{count}/{r}" for r in range(ranks)]
        deadline_s, awaited = time.monotonic() + timeout_s, rank

        def answer(call: Callable[..., Any], *args: Any) -> Any:
            return answer_of(call, *args, within_s=max(deadline_s - time.monotonic(), ANSWER_S))

        try:
            answer(store.set, keys[rank], pickle.dumps(value))
            for r, key in enumerate(keys):
                awaited = r
                while not answer(store.check, [key]):
                    check()
                    if count == 1 and answer(store.check, [f"{name}/{turn}/{REFUSED}"]):
                        raise pickle.loads(answer(store.get, f"{name}/{turn}/{REFUSED}"))
                    if time.monotonic() > deadline_s:
                        missing = [r for r in range(ranks) if not answer(store.check, [keys[r]])]
                        if missing:  # else the last one has just come
                            raise _late(missing, timeout_s, [called[r] for r in missing])
                    time.sleep(POLL_S)
            awaited = rank
            if count > 1:  # all have come to this one, so all have read the one before
                answer(store.delete_key, f"{name}/{turn}/{count - 1}/{rank}")
            return [pickle.loads(answer(store.get, key)) for key in keys]
        except RuntimeError as error:
            waited = f" while waiting for {called[awaited]}" if awaited != rank else ""
            raise _gone(f"{error}{waited}") from error

    return gather


def refuse_by_store(group: dist.ProcessGroup, name: str, error: CounterpointError) -> None:
    """Tell the ranks that come to their first `gather_by_store` that this one will not.

    It counts as having come: whoever hears of it is in step with this rank again.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return

    def tell() -> None:
        store = store_of(group)
        turn = _turn(store, name, rank)
        store.set(f"{name}/{turn}/{REFUSED}", pickle.dumps(error))

    with suppress(RuntimeError, UnsupportedError):  # the store is gone, and the others hear of that
        answer_of(tell, within_s=ANSWER_S)


def _turn(store: Any, name: str, rank: int) -> int:
    """How often this rank has come to the first meeting: again, after what it had was released."""
    return store.add(f"{name}/arrivals/{rank}", 1)


def _alone(value: Any, check: object = None) -> list[Any]:
    return [value]


def _late(missing: Sequence[int], timeout_s: float, names: Sequence[str]) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"counterpoint: {', '.join(names)} did not come to a meeting of the group within "
        f"{timeout_s:g} s; the group is unusable, restart its ranks (COUNTERPOINT_TIMEOUT_S is the "
        "bound)",
        rank=missing[0],
        step="workspace",
    )


def _gone(why: str) -> PeerTimeoutError:
    text = f"the store of the group is gone ({why}); the group is unusable, restart its ranks"
    return PeerTimeoutError(f"counterpoint: {text}", step="workspace")
