"""Steps along rails of plans whose routes the device alone knows: see experts/plan_islands.py.

Buffers "rail" and "got" have a block of rows for each island, one for each token of a rank, without
gaps. Sizes are those of the tensors of a call: no step reads what its routes say.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from counterpoint.experts.fused.launch_sums import Source, sum_rows
from counterpoint.group.notice_board import Awaited
from counterpoint.group.wire import wire_of
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box

Action = Callable[[Operands], object]
DISPATCH = "all_to_all_matmul"


class Rails:
    """Where the tokens of a rail are, on one rank.

    Attributes:
        island: of this rank.
    """

    def __init__(self, places: Places) -> None:
        p = places.plan.problem
        self._places, self._number = places, p.islands
        self.island, self._tokens = places.rank // (p.ranks // p.islands), "y"
        if p.op == DISPATCH:
            self._tokens = "x"

    def blocks(self, buffer: str, operands: Operands) -> Tensor:
        """Those of a buffer: [islands, tokens, columns]."""
        rows, cols = self._places.plan.buffer(buffer).shape
        memory = self._places.fixed(Box(self._places.rank, buffer, 0, 0, rows, 0, cols))
        assert memory is not None, "scratch"
        tokens = len(operands[self._tokens])
        return memory[: self._number * tokens].view(self._number, tokens, cols)

    def block(self, buffer: str, island: int, operands: Operands) -> Tensor:
        """That of an island; of the tokens themselves there is one."""
        return operands["x"] if buffer == "x" else self.blocks(buffer, operands)[island]


def exchange(bound: BoundStep, places: Places) -> Action:
    """A block to another island, and one from another."""
    rails, plan, step = Rails(places), places.plan, bound.step
    wire, size = wire_of(places.workspace), plan.problem.ranks // plan.problem.islands
    to, sender = plan.met(step, places.rank)
    deed = f"take part in exchange {step.name!r} of plan {plan.spec} with rank {places.rank}"
    awaited = Awaited(plan.problem.op, deed, step.name)
    source, target = step.reads[0].buffer, step.writes[0].buffer

    def run(operands: Operands) -> None:
        sent = rails.block(source, to // size, operands)
        kept = rails.block(target, sender // size, operands)
        wire.exchange([(sent, to)], [(kept, sender)], awaited)

    return run


def keep(bound: BoundStep, places: Places) -> Action:
    """Own tokens, beside those of other islands."""
    rails, target = Rails(places), bound.step.writes[0].buffer
    return lambda operands: rails.block(target, rails.island, operands).copy_(operands["x"])


def collect(bound: BoundStep, places: Places) -> Action:
    """What all islands have made of own tokens: summed in fp32, its own first, then in order."""
    rails = Rails(places)
    own, others = bound.step.reads[0].buffer, bound.step.reads[1].buffer
    islands = [i for i in range(places.plan.problem.islands) if i != rails.island]

    def run(operands: Operands) -> None:
        y = operands["y"]
        token = torch.arange(len(y), device=y.device)[:, None]
        come = rails.blocks(others, operands)
        far = torch.cat([token + i * len(y) for i in islands], 1)
        mine = Source(rails.block(own, rails.island, operands), token)
        sum_rows(y, mine, Source(come.flatten(0, 1), far))

    return run


ACTIONS: dict[str, Callable[[BoundStep, Places], Action]] = {
    "exchange": exchange,
    "spread": keep,
    "fold": collect,
}
