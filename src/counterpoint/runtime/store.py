"""What ranks tell each other by the store of their process group, before anything else is there.

Slow, but it needs neither shared memory nor a collective that cannot say who is missing: every
wait is bounded, and names who has not come. Also the way between hosts.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from counterpoint.errors import PeerTimeoutError, UnsupportedError

POLL_S = 2e-3
ANSWER_S = 1.5  # a store that takes longer is cut off
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
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return _alone
    try:
        store = store_of(group)
        # a group may come to it anew, after what it had was released
        arrivals = answer_of(store.add, f"{name}/arrivals", 1, within_s=timeout_s)
        turn = (arrivals - 1) // ranks
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
