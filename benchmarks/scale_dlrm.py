"""What `counterpoint.scale` predicts of the DLRM of `bench steps`, whose tables have our gradients.

No constant of a prediction is fitted to these rows. Kernels are counted by what they read and
write, or, where a program waits for one load after another, by how many loads that is.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from benchmarks.dlrm import balanced
from benchmarks.tables import grid
from counterpoint.embedding.plan_seconds import READ_RATE, WRITTEN_COST
from counterpoint.machine import Machine
from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.mechanisms.sizes import sizes
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.operators import ITEM_BYTES, Overlap
from counterpoint.scale.recommenders.dlrm import DLRMS
from counterpoint.scale.recommenders.step import DlrmStep

# an index, then the row that it names: two loads, one after the other. The floor "only reading"
# of embedding-2x-h200.jsonl, of 64 tables one after the other, little to read of each: 92.6 us
CHAIN_S = 92.6e-6 / 64
# of each row that is named, beside its entries: where they begin, which bag is the first one's,
# where its table is; half of a chain each
ROW_CHAINS = 1.5
# of the kernel that the rows were measured with: its programs, and elements of dy at a time
PROGRAMS, TILE = 1 << 12, 1024


def dlrm_step(samples: int, rows: int, machine: Machine, overlap: Overlap) -> DlrmStep:
    """DLRM-DCNv2 with tables of at most so many rows, on all GPUs of a machine."""
    whole = DLRMS["dlrm-dcnv2"]
    model = replace(whole, rows=tuple(min(n, rows) for n in whole.rows))
    network, ranks = Network(machine, Fabric()), machine.num_devices
    return DlrmStep(model, Layout(dp=ranks, micro_batch=samples // ranks), network, overlap)


def dlrm_s(step: DlrmStep) -> float:
    """A step of benchmarks/dlrm.py: no optimizer; gradients of tables are dense, by our kernel."""
    parts, stages = step.run()
    gradients_s = step.sort_s() + max(gradients_of_ranks_s(step))
    return stages.seconds - parts["table update"] - parts["optimizer"] + gradients_s


def gradients_of_ranks_s(step: DlrmStep) -> list[float]:
    """Of each rank's tables, entries being sorted: after their all-to-all ranks differ by that."""
    owners, _ = balanced(step.model.pooling, step.group.size)
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


def puts_table() -> str:
    """What 128 nodes of paper C would save by puts that the GPU posts, by sizes."""
    paper, nodes = DLRMS["dlrm-paper"], 128
    network = Network(preset("h100-1"), Fabric(nic_bytes_per_s=25e9))
    step = DlrmStep(paper, Layout(dp=nodes, micro_batch=paper.batch // nodes), network, "none")
    lines = [
        [each.label, f"{each.seconds * 1e3:.2f}",
         *(f"{share:.1%}" for share in (each.ours, each.puts, each.of_forward, each.bound))]
        for each in sizes(step)
    ]  # fmt: skip
    return grid(["sizes", "step, ms", "ours saves", "GPU-initiated (not in this library)",
                 "of the forward", "at most"], lines)  # fmt: skip
