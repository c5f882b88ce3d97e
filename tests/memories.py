"""What a launch of a fused kernel needs of each rank, in one process, between guards."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from counterpoint.plan.steps import Plan

GUARD = 64  # elements on both sides that nobody may write to
CANARY = 1234.0  # also in fp16
EMPTY = -(1 << 31)


def memories(ranks: int, num_bytes: int) -> list[Any]:
    """As `FusedMemory`, of `num_bytes` of each kind: the ranks' memory is a tensor each."""
    kept = {
        name: [guarded(num_bytes // 4, fill) for _ in range(ranks)]
        for name, fill in (("words", -0.0), ("turns", 0.0), ("flags", 0.0))
    }

    def shared(rank: int) -> dict[str, Any]:
        return {
            name: SimpleNamespace(
                bases=torch.tensor([t[GUARD:].data_ptr() for t in each]), half_bytes=num_bytes // 2,
                reserve=lambda _: None, memory=SimpleNamespace(
                    local=lambda each=each: each[rank][GUARD:-GUARD].view(torch.uint8)),
            )
            for name, each in kept.items()
        }  # fmt: skip

    def workspace(rank: int) -> Any:
        group = SimpleNamespace(size=lambda: ranks)
        return SimpleNamespace(
            group=group, rank=rank, timeout_s=1e6, device=torch.device("cpu"),
            refuse_growth=lambda _: None,
        )  # fmt: skip

    made = [
        SimpleNamespace(
            **shared(rank), kept=kept, workspace=workspace(rank),
            state=torch.zeros(6, dtype=torch.int32), fault=torch.zeros(1, dtype=torch.int64),
            over=torch.zeros(1, dtype=torch.int64), launches={},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for memory in made:
        memory.workspace.fused = memory
    return made


def places_of(memory: Any, plan: Plan) -> Any:
    """As `Places`, where each box is the operand of its buffer's name."""
    return SimpleNamespace(
        workspace=memory.workspace, plan=plan, of=lambda box: lambda operands: operands[box.buffer]
    )


def site_of(memory: Any, plan: Plan, **settings: int) -> Any:
    """The one step of a fused plan on this rank, with other settings where they are given.

    Args:
        memory: of `memories`.
    """
    (step,) = plan.steps
    args = tuple((name, settings.get(name, value)) for name, value in step.args)
    bound = SimpleNamespace(step=replace(step, args=args))
    return SimpleNamespace(bound=bound, places=places_of(memory, plan), tag=0)


def guarded(count: int, fill: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`count` elements between guards; what is between: [GUARD:-GUARD]."""
    room = torch.full((count + 2 * GUARD,), fill, dtype=dtype)
    room[:GUARD] = room[-GUARD:] = CANARY
    return room


def left(memory: Any, results: list[torch.Tensor]) -> str:
    """What calls have left that they must not: a written guard, a word that nobody took; or ''.

    Args:
        memory: of `memories`.
        results: made by `guarded`.
    """
    rooms = [*results, *(room for each in memory.kept.values() for room in each)]
    if any((room[:GUARD] != CANARY).any() or (room[-GUARD:] != CANARY).any() for room in rooms):
        return "a guard was written to"
    words = [room[GUARD:-GUARD].view(torch.int32) for room in memory.kept["words"]]
    return "a word was not taken" if any((w != EMPTY).any() for w in words) else ""
