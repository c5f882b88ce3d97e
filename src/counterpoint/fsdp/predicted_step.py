"""What a training step takes, torch's way and overlapped, before any has run.

A step is its computation, what stands in its way, and a part of what runs beside it: that takes
memory's bandwidth, power and SMs from it. Nothing of it imports torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.costs import Costs

# of the time that communication and copies take alone, what computation loses while they run beside
# it, be they NCCL's or copy engines'; 2xH200 and 4xH200, six Llama-8B layers, 2026-11
BESIDE = 0.34
CHUNK_CAT = 2.1  # torch's packing of gradients takes so much longer than its bytes would
# host time of a group in a step, in our operators' calls, which are known of each machine
TORCHS_CALLS, OUR_CALLS = 100, 50


class Sizes(NamedTuple):
    """One parameter group.

    Args:
        numel: elements of its parameters.
        trained: of those that have gradients.
        item: bytes of a gathered element.
        master: bytes of an element that the optimizer writes.
        gathers: in a step, torch's and ours.
        ours: whether it is gathered in place.
    """

    numel: int
    trained: int
    item: int = 2
    master: int = 4
    gathers: tuple[int, int] = (2, 2)
    ours: bool = True


class Way(NamedTuple):
    """Seconds of one group: each gather, the scatter, copies that computation awaits; the host."""

    gather_s: float
    scatter_s: float
    waited_s: float
    gathers: int
    host_s: float


class PredictedStep(NamedTuple):
    """Seconds of a step as it is, and overlapped."""

    as_is_s: float
    ours_s: float

    def __str__(self) -> str:
        times = f"{self.as_is_s * 1e3:.1f} ms a step as is, {self.ours_s * 1e3:.1f} overlapped"
        return f"predicted: {times}, {self.as_is_s / self.ours_s:.2f}x"


def predicted_step(
    groups: Sequence[Sizes], ranks: int, costs: Costs, computation_s: float, host_s: float = 0.0
) -> PredictedStep:
    """Predict a step of both ways.

    Args:
        groups: of the model.
        ranks: that share each.
        costs: of the machine.
        computation_s: of a step on one GPU without FSDP2, and of the optimizer on its shards.
        host_s: of that, until the host has launched it.
    """
    torchs = [_torchs(g, ranks, costs) for g in groups]
    ours = [
        _ours(g, ranks, costs) if g.ours else way for g, way in zip(groups, torchs, strict=True)
    ]
    # torch's gathers and scatters share a communicator
    return PredictedStep(
        _step_s(torchs, computation_s, host_s, in_turn=True),
        _step_s(ours, computation_s, host_s, in_turn=False),
    )


def _step_s(groups: Sequence[Way], computation_s: float, host_s: float, *, in_turn: bool) -> float:
    first, last = max(g.gather_s for g in groups), max(g.scatter_s for g in groups)
    gathers, scatters = (
        sum(g.gathers * g.gather_s for g in groups),
        sum(g.scatter_s for g in groups),
    )
    beside = gathers - first + scatters - last
    busy = computation_s + sum(g.waited_s for g in groups) + first + last + BESIDE * beside
    moving = gathers + scatters if in_turn else max(gathers, scatters)
    return max(busy, moving, host_s + sum(g.host_s for g in groups))


def _torchs(g: Sizes, ranks: int, costs: Costs) -> Way:
    """A cast, a copy, NCCL and a copy apart; gradients packed and reduced in fp32."""
    whole, shard = g.numel * g.item, g.numel * g.item // ranks
    cast = costs.memory_s(shard + g.numel * g.master // ranks) + costs.memory_s(2 * shard)
    gather = cast + costs.collective_s("all_gather", whole - shard)
    packed = CHUNK_CAT * costs.memory_s(g.trained * (g.item + 4)) if g.trained else 0.0
    reduced = costs.collective_s("reduce_scatter", 4 * g.trained * (ranks - 1) // ranks)
    waited = g.gathers[0] * costs.memory_s(2 * whole) + packed
    return Way(gather, reduced if g.trained else 0.0, waited, g.gathers[0],
               TORCHS_CALLS * costs.host_call_s)  # fmt: skip


def _ours(g: Sizes, ranks: int, costs: Costs) -> Way:
    """A cast and copies; copies and a sum in fp32."""
    shard, sent = g.numel * g.item // ranks, g.trained * g.item // ranks
    cast = costs.memory_s(shard + g.numel * g.master // ranks)
    gather = cast + (ranks - 1) * costs.copy_s(shard) + costs.memory_s(2 * shard)
    pushed = (ranks - 1) * costs.copy_s(sent) + costs.memory_s(2 * sent)
    scatter = pushed + costs.memory_s(ranks * sent + 4 * g.trained // ranks)
    return Way(gather, scatter if g.trained else 0.0, 0.0, g.gathers[1],
               OUR_CALLS * costs.host_call_s)  # fmt: skip
