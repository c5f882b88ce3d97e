"""What a DLRM's step stands on, in lines as `assumptions` has them, and what bounds fusing."""

from dataclasses import replace

from counterpoint.scale import constants
from counterpoint.scale.assumptions import NOT_CHECKED
from counterpoint.scale.operators import ONLY_SERIAL
from counterpoint.scale.recommenders.counts import COUNTS
from counterpoint.scale.recommenders.step import DlrmStep


def said(step: DlrmStep) -> list[str]:
    """What fusing saves at most of a step, in lines."""
    found, ms = step.pooled, 1e3
    if step.group.size == 1:
        return ["one GPU: nothing is sent"]
    seconds = replace(step, overlap="none").run()[1].seconds
    saved_s = found.serial_s - step.ours_s
    return [
        f"fusing saves {saved_s * ms:.3f} ms of {seconds * ms:.3f} ({saved_s / seconds:.1%}); at "
        f"most {found.bound_s * ms:.3f} ({found.bound_s / seconds:.1%})",
        f"that is min(embedding {found.lookup_s * ms:.3f} ms, exposed all-to-all "
        f"{min(found.links_s, found.serial_s - found.lookup_s) * ms:.3f} ms), and "
        f"{(found.bound_s - found.hidden_s) * ms:.3f} ms that only separate kernels take: "
        "a concat, starts, a slower all-to-all",
    ]


def assumptions(step: DlrmStep) -> list[str]:
    """What a step stands on, in lines."""
    machine, fabric, model = step.network.machine, step.network.fabric, step.model
    how = "measured" if machine.measured else "derived from the datasheet, as on 4xH200"
    given = step.problem.tables[0]
    found = [
        f"model: {model.name}, {model.source}",
        f"machine: {machine.name}, {machine.source}",
        f"machine: matmuls, kernels and collectives of a node {how}",
        "layout: tables are whole on ranks, balanced by what is looked up" if step.whole else
        f"assumed: all ranks have as much of the tables, in rows of {given[0]} columns",
        "assumed: samples name rows evenly; indices are there when a step begins",
    ]  # fmt: skip
    if step.leaves:
        found.append(f"fabric: NIC {fabric.nic_bytes_per_s / 1e9:g} GB/s a GPU: {fabric.source}")
        found += [f"fabric: past {size} GPUs 1:{factor:g}, given" for size, factor in fabric.levels]
    shared = {n: c for n, c in constants.CONSTANTS.items() if n.startswith("nic_") and step.leaves}
    gradient = {"gradient_bytes": constants.GRADIENT_BYTES}
    found += [
        f"{each.basis}: {name} = {each.value:g} {each.unit}: {each.source}"
        for name, each in (shared | gradient | COUNTS).items()
    ]
    if step.leaves:
        how = "by plans of islands, or serially" if step.place.planned else ONLY_SERIAL
        found.append(f"layout: between nodes ours pools and sends {how}")
    found.append(
        f"{NOT_CHECKED}against any but two published steps (counterpoint scale --check); "
        "the band is the widest"
    )
    return [*found, "not modelled: what runs beside pooling and its all-to-all but each other",
            "not modelled: stragglers, failures, input, host time"]  # fmt: skip
