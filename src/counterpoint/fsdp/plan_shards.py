"""The plans of one parameter group: who copies what from whom in which order, and what it takes.

The plans are those of fsdp/plan_gather_shards.py and fsdp/plan_scatter_shards.py, of the whole group: a row
of a rank stands for its rows of all parameters. launch_shards.py takes its order from them.
"""

from typing import NamedTuple

from counterpoint.fsdp import plan_gather_shards as gather_shards
from counterpoint.fsdp import plan_scatter_shards as scatter_shards
from counterpoint.machine import Machine
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.bind import bind
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

GATHER, SCATTER = "gather_shards", "scatter_shards"
SLOWER = 1.5  # a prediction beside nothing knows neither the host nor what hides it
COPY_S = 0.5e-6  # of each further copy of a batch, by batches of one GPU's copies to another


class Predicted(NamedTuple):
    """Seconds of a group's gather and scatter beside nothing, in place and by torch.

    Those of a scatter are 0 where it has none.
    """

    gather_s: float
    torchs_gather_s: float
    scatter_s: float
    torchs_scatter_s: float

    def __str__(self) -> str:
        text = f"gather {self.gather_s * 1e3:.2f} ms, torch's {self.torchs_gather_s * 1e3:.2f}"
        if not self.scatter_s:
            return text
        return (
            f"{text}; scatter {self.scatter_s * 1e3:.2f}, torch's {self.torchs_scatter_s * 1e3:.2f}"
        )

    @property
    def slower(self) -> bool:
        """Whether torch's own way takes so much less that its host's longer time is no matter."""
        ours, torchs = self.gather_s + self.scatter_s, self.torchs_gather_s + self.torchs_scatter_s
        return ours > SLOWER * torchs


def peers_in_order(plan: Plan, rank: int) -> tuple[int, ...]:
    """The peers that a rank copies from, or to, in the order of the plan; itself left out."""
    copies = (bound for bound in bind(plan, rank).steps if bound.step.kind == "copy")
    boxes = ([*(box for part in b.parts for box in (*part.reads, part.write))] for b in copies)
    peers = ([box.rank for box in each if box.rank != rank] for each in boxes)
    return tuple(found[0] for found in peers if found)


def gather_plan(ranks: int, numel: int = 1, *, kept: bool = True) -> Plan:
    """The gather in place of so many elements of each rank, from memory of their own or in turn."""
    build = gather_shards.in_place if kept else gather_shards.in_turn
    return build(Problem(GATHER, m=ranks, n=numel, ranks=ranks))


def scatter_plan(ranks: int, numel: int = 1) -> Plan:
    """The scatter in place of gradients of so many elements for each rank."""
    return scatter_shards.in_place(Problem(SCATTER, m=ranks, n=numel, ranks=ranks))


def predicted(
    ranks: int, numel: int, trained: int, parameters: int, machine: Machine, *, kept: bool = True
) -> Predicted:
    """What a group takes on a machine.

    Args:
        ranks: that share it.
        numel: elements of a rank's shard.
        trained: of those that have gradients, and are scattered in place.
        parameters: copies of a batch.
        machine: whose constants are asked.
        kept: whether shards are published in memory of their own.
    """
    more_s = COPY_S * (parameters - 1) * (ranks - 1)
    gather = gather_plan(ranks, numel, kept=kept)
    torchs = gather_shards.serial(gather.problem)
    gathers = predicted_s(gather, machine) + more_s, predicted_s(torchs, machine)
    if not trained:
        return Predicted(*gathers, 0.0, 0.0)
    scatter = scatter_plan(ranks, trained)
    theirs = scatter_shards.serial(scatter.problem)
    return Predicted(*gathers, predicted_s(scatter, machine) + more_s, predicted_s(theirs, machine))
