"""What ranks tell each other by the store of their process group, before anything else is there.

Slow, but it needs neither shared memory nor a collective that cannot say who is missing: every
wait is bounded, and names who has not come. Also the way between hosts.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import PeerTimeoutError, UnsupportedError

POLL_S = 2e-3


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


def gather_by_store(
    group: dist.ProcessGroup, name: str, timeout_s: float
) -> Callable[..., list[Any]]:
    """A function that all-gathers a picklable value, each time it is called, by all ranks alike.

    Args:
        group: whose ranks.
        name: of keys; a group may have several.
        timeout_s: of each wait.

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
        turn = (store.add(f"{name}/arrivals", 1) - 1) // ranks
    except RuntimeError as error:
        raise _gone(error) from error
    count = 0

    def gather(value: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
        nonlocal count
        count += 1
        keys = [f"{name}/{turn}/{count}/{r}" for r in range(ranks)]
        deadline_s = time.monotonic() + timeout_s
        try:
            store.set(keys[rank], pickle.dumps(value))
            for key in keys:
                while not store.check([key]):
                    check()
                    if time.monotonic() > deadline_s:
                        missing = [r for r in range(ranks) if not store.check([keys[r]])]
                        raise _late(missing, timeout_s)
                    time.sleep(POLL_S)
            if count > 1:  # all have come to this one, so all have read the one before
                store.delete_key(f"{name}/{turn}/{count - 1}/{rank}")
            return [pickle.loads(store.get(key)) for key in keys]
        except RuntimeError as error:
            raise _gone(error) from error

    return gather


def _alone(value: Any, check: object = None) -> list[Any]:
    return [value]


def _late(missing: list[int], timeout_s: float) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"counterpoint: ranks {missing} did not come to a meeting of the group within "
        f"{timeout_s:g} s; the group is unusable, restart its ranks (COUNTERPOINT_TIMEOUT_S is the "
        "bound)",
        rank=missing[0] if missing else None,
        step="workspace",
    )


def _gone(error: RuntimeError) -> PeerTimeoutError:
    text = f"the store of the group is gone ({error}); the group is unusable, restart its ranks"
    return PeerTimeoutError(f"counterpoint: {text}", step="workspace")
