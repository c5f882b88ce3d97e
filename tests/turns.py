"""Calls of a kernel with all programs of all ranks in turn, in seeded orders; one walk for all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import planted
import pytest
import torch
from memories import left
from rankpool import RankPool

# the device function that each planted one stands for
STANDS_FOR = {
    "same_epoch": "next_epoch", "take_and_leave": "take_words", "post_relaxed": "post",
    "post_too_few": "post", "is_last_relaxed": "is_last", "is_last_always": "is_last",
    "is_last_when_all_are_there": "is_last",
}  # fmt: skip


class Scene(NamedTuple):
    """Calls of all ranks, without a meeting between them.

    Args:
        memories: of each rank, of `memories.memories`; or None, which are not looked at.
        run: a rank's calls.
        off: what is wrong with their results, empty if nothing.
        rooms: results between guards.
        landing: as of `Interleaved`.
    """

    memories: list[Any]
    run: Callable[[int], None]
    off: Callable[[], list[Any]]
    rooms: list[torch.Tensor]
    landing: float = 0.4


def plant(patch: pytest.MonkeyPatch, fault: str, *modules: Any) -> None:
    """Put a device function with a fault into kernels; any other fault is the scene's own."""
    if name := STANDS_FOR.get(fault):
        for module in modules:
            if hasattr(module, name):
                patch.setattr(module, name, getattr(planted, fault))


def wrong_after(
    rank: int, world: int, made: Callable[..., Scene], fault: str, seeds: range, arguments: Any
) -> list[str]:
    """For each seed: a deadlock, or calls that are off; "" if nothing. A fault shows once.

    Args:
        made: of what patches, the seed, the fault and `arguments`.
    """
    from counterpoint.testing.interleave import DeadlockError, Interleaved

    found: list[str] = []
    for seed in seeds:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            scene = made(patch, seed, fault, *arguments)
            try:
                bodies = [lambda r=r: scene.run(r) for r in range(len(scene.memories))]  # noqa: B023
                Interleaved(seed, landing=scene.landing).run(bodies)
            except DeadlockError as error:
                found.append(f"deadlock: {error}")
            else:
                wrong = f"calls {off} are off" if (off := scene.off()) else ""
                if not fault and scene.memories[0]:
                    over = any(memory.over.any() for memory in scene.memories)
                    wrong = wrong or "over" * over or left(scene.memories[0], scene.rooms)
                found.append(wrong)
        if fault and found[-1]:
            break
    return found


def all_right(pool: RankPool, made: Callable[..., Scene], seed: int, *arguments: Any) -> None:
    """No order of programs and stores mixes up calls, of whatever sizes."""
    seeds = range(seed, seed + 1)
    run = pool.run(wrong_after, 1, made, "", seeds, arguments, group=False, timeout_s=200)
    assert run == [[""]]


def shown(
    pool: RankPool, made: Callable[..., Scene], fault: str, text: str, *arguments: Any,
    seeds: int = 40,
) -> str:  # fmt: skip
    """What a planted fault shows as, with `text` in it, by one of some seeds."""
    arguments = made, fault, range(seeds), arguments
    (found,) = pool.run(wrong_after, 1, *arguments, group=False, timeout_s=200)
    assert found[-1] and text in found[-1], found
    return found[-1]
