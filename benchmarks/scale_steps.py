"""Whole steps that were measured here, against what `counterpoint.scale` predicts of them.

No constant of a prediction is fitted to these rows. Kernels are counted by what they read and
write, or, where a program waits for one load after another, by how many loads that is.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from statistics import median
from typing import NamedTuple

from benchmarks.dlrm import balanced
from benchmarks.rows import results, taken
from counterpoint.machine_of import machine_of
from counterpoint.plan.embedding_seconds import READ_RATE, WRITTEN_COST
from counterpoint.runtime.launch_embedding_gradient import PROGRAMS, TILE
from counterpoint.scale.dlrm import DLRMS
from counterpoint.scale.dlrm_step import DlrmStep
from counterpoint.scale.fabric import Fabric, Network
from counterpoint.scale.layer import ITEM_BYTES, Overlap
from counterpoint.scale.layout import Layout

# an index, then the row that it names: two loads, one after the other. The floor "only reading"
# of embedding-2x-h200.jsonl, of 64 tables one after the other, little to read of each: 92.6 us
CHAIN_S = 92.6e-6 / 64
# of each row that is named, beside its entries: where they begin, which bag is the first one's,
# where its table is; half of a chain each
ROW_CHAINS = 1.5
ARMS: dict[str, Overlap] = {"lookup": "none", "fused": "ours"}


class Measured(NamedTuple):
    """One step on GPUs.

    Args:
        case: model and size.
        arm: how it ran: serial ways, or ours.
        measured_s: median of the slowest rank.
        predicted_s: for the machine that was measured.
    """

    case: str
    arm: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def steps() -> list[Measured]:
    """All that are predicted."""
    return dlrm_steps()


def dlrm_steps(what: str = "forward + backward") -> list[Measured]:
    """DLRM-DCNv2 on 2 GPUs, its tables looked up by this library; torch's bags are not modelled.

    Args:
        what: "forward + backward", or "forward".
    """
    found: list[Measured] = []
    for ranks, rows in results("steps").items():
        for case in taken(rows, "model", "size"):
            if not case.head["model"].startswith("DLRM"):
                continue
            for arm, overlap in ARMS.items():
                step = dlrm_step(case.head["size"], case.head["rows"], ranks, overlap)
                predicted_s = step.embedding().seconds + step.dense().forward.seconds
                if what != "forward":
                    predicted_s = dlrm_s(step)
                name = f"DLRM-DCNv2, {case.head['size']} samples"
                found.append(Measured(name, arm, case.s(f"{what}, by {arm}"), predicted_s))
    return found


def dlrm_step(samples: int, rows: int, ranks: int, overlap: Overlap) -> DlrmStep:
    """DLRM-DCNv2 with tables of at most so many rows, on H200s as they were measured."""
    whole = DLRMS["dlrm-dcnv2"]
    model = replace(whole, rows=tuple(min(n, rows) for n in whole.rows))
    network = Network(machine_of("scale_steps", f"h200-{ranks}"), Fabric())
    return DlrmStep(model, Layout(dp=ranks, micro_batch=samples // ranks), network, overlap)


def dlrm_s(step: DlrmStep) -> float:
    """A step of benchmarks/dlrm.py: no optimizer; gradients of tables are dense, by our kernel."""
    seconds, parts = step.run()
    gradients_s = step.sort_s() + max(gradients_of_ranks_s(step))
    return seconds - parts["table update"] - parts["optimizer"] + gradients_s


def gradients_of_ranks_s(step: DlrmStep) -> list[float]:
    """Of each rank's tables, entries being sorted: after their all-to-all ranks differ by that."""
    owners, _ = balanced(step.group.size)
    return [
        table_gradients_s(step, [t for t, owner in enumerate(owners) if owner == rank])
        for rank in range(step.group.size)
    ]


def table_gradients_s(step: DlrmStep, tables: Iterable[int]) -> float:
    """Zeros for all rows of these tables, then a sum for each row that is named.

    The kernel has `PROGRAMS` programs, all at work at a time; each takes rows in turn, a few
    entries of a row at a step, and each load waits for the one before. The row that is named most
    is one program's, which has as many others as all programs have.
    """
    model, bags = step.model, step.samples * step.group.size
    costs, named = step.alone.costs, step.model.named(bags)
    written_s = WRITTEN_COST / (READ_RATE * costs.hbm_bytes_per_s)
    at_once = max(TILE // model.dim, 1)
    zeros_s = chains = longest = moved = 0.0
    for t in tables:
        entries = bags * model.pooling[t]
        zeros_s += model.rows[t] * model.dim * ITEM_BYTES * written_s
        chains += named[t] * ROW_CHAINS + max(entries / at_once, named[t])
        longest = max(longest, ceil(entries / model.rows[t] / at_once))
        moved += (entries + named[t]) * (model.dim * ITEM_BYTES + 8)
    waited_s = (longest + chains / PROGRAMS) * CHAIN_S
    return zeros_s + max(costs.memory_s(round(moved)), waited_s)


def errors(found: Iterable[Measured]) -> tuple[float, float]:
    """Median and largest of |predicted / measured - 1|."""
    each = [abs(step.error) for step in found]
    return median(each), max(each)


if __name__ == "__main__":
    for step in steps():
        print(f"{step.case:28}{step.arm:10}{step.measured_s * 1e3:9.3f} ms measured"
              f"{step.predicted_s * 1e3:9.3f} predicted {step.error:+7.1%}")  # fmt: skip
    print("median {:.1%}, worst {:.1%}".format(*errors(steps())))
