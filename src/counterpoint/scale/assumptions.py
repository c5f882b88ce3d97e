"""What a prediction stands on, in lines: sizes, rates, constants, and what nobody has checked.

A line begins with the group that it is of, and a colon.
"""

from collections.abc import Iterable
from textwrap import wrap

from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.network.fabric import settled
from counterpoint.scale.operators import ONLY_SERIAL
from counterpoint.scale.overheads import straggling

GROUPS = ("model", "machine", "fabric", "layout", "datasheet", "measured", "assumed", "counted",
          "not checked", "not modelled")  # fmt: skip
NOT_CHECKED = "not checked: "  # its lines say why a band is the widest
CHECKED = ("A100 SXM 40GB", "A100 SXM 80GB", "H100 SXM", "H200 SXM")  # GPUs of published steps
NAME_WIDTH = max(map(len, GROUPS)) + 2


def listed(lines: Iterable[str], width: int = 100) -> str:
    """Lines by their groups, which stand before them, none wider than that many letters."""
    groups: dict[str, list[str]] = {name: [] for name in (*GROUPS, "")}
    for line in lines:
        name, _, text = line.partition(": ")
        known = name.lower() in GROUPS
        groups[name.lower() if known else ""].append(text if known else line)
    shown = ["stands on:"]
    for name, texts in groups.items():
        for i, text in enumerate(texts):
            first = f"{'' if i else name:{NAME_WIDTH}}"
            shown += wrap(text, max(width, 3 * NAME_WIDTH), initial_indent=first,
                          subsequent_indent=" " * (NAME_WIDTH + 2))  # fmt: skip
    return "\n".join(shown)


def _used(layers: Layers) -> list[str]:
    """Names of the constants that a prediction stands on."""
    layout, machine = layers.layout, layers.network.machine
    replicas, fsdp = layout.dp * layout.cp > 1, layout.data_parallel_sharding == "fsdp"
    experts = bool(layers.model.experts)
    exchanged = experts and layout.ep > 1
    used = {
        "nic_": layout.num_gpus > machine.num_devices,
        "ampere_": settled(machine) != machine.costs.gemm_settled,
        "score_": not layout.flash_attention, "flash_": layout.flash_attention,
        "gradient_": replicas, "parameter_": replicas,
        "beside": replicas and (layout.asynchronous or fsdp), "fsdp_": replicas and fsdp,
        "fsdp_expert_": experts,
        "straggler_": straggling(layout) > 0,
        "routed_weights_": layers.routes, "routing_": experts,
        "routed_bytes": experts and layers.rows_by == "fused",
        "routed_backward_": experts and layers.rows_by == "fused",
        "torch_rows_": experts and layers.rows_by == "torch",
        "megatron_rows_": experts and layers.rows_by == "megatron",
        "counts_": exchanged and layers.hosts_wait, "expert_": exchanged,
    }  # fmt: skip
    unused = tuple(name for name, given in used.items() if not given)
    return [name for name in constants.CONSTANTS if not name.startswith(unused)]


def assumptions(layers: Layers) -> list[str]:
    """What a prediction stands on."""
    machine, fabric = layers.network.machine, layers.network.fabric
    layout, model = layers.layout, layers.model
    how = "measured" if machine.measured else "derived from the datasheet, as on 4xH200"
    found = [
        f"model: {model.name}, {model.source}",
        f"machine: {machine.name}, {machine.source}",
        f"machine: matmuls, kernels and collectives of a node {how}",
        f"fabric: NIC {fabric.nic_bytes_per_s / 1e9:g} GB/s a GPU: {fabric.source}",
        *(f"fabric: past {size} GPUs 1:{factor:g}, given" for size, factor in fabric.levels),
    ]
    if fabric.torus:
        shape = " x ".join(map(str, fabric.torus))
        found.append(f"fabric: islands form a torus {shape}, given; its links share out their NICs")
    if fabric.rails:
        found.append("fabric: rails, given: a NIC reaches those of its own place in other islands")
    if fabric.congestion == "events":
        found.append("fabric: all-to-alls between islands: message by message on FIFO links")
    for name in _used(layers):
        each = constants.CONSTANTS[name]
        found.append(f"{each.basis}: {name} = {each.value:g} {each.unit}: {each.source}")
    if layers.overlap == "ours":
        found.append(
            "machine: our plans are chosen as on a measured machine: a gain of 3 % is enough"
        )
    far = layout.ep > 1 and layout.ep * layout.tp > machine.num_devices
    if far and layers.overlap != "none":
        how = "once to a node, by routes that the host waits for (not modelled), where that gains"
        found.append(f"layout: tokens go to experts {how if layers.routes else ONLY_SERIAL}")
    if model.experts:
        how = "given" if layout.expert_rows != "auto" else "as frameworks with such sharding do it"
        how = how if layers.rows_by == layout.rows_by else "this library's"
        found.append(f"layout: rows of experts are put in order by {layers.rows_by}, {how}")
    if layout.pp > 1:
        found.append(f"layout: virtual stages {layout.virtual_stages}, given: they matter a lot")
    if model.tied and layout.pp > 1:
        found.append("layout: the first and the last stage have the tied embedding; the sum of its "
                     "gradients over both is not modelled")  # fmt: skip
    if layers.apart and layout.tp > 1:
        found.append("layout: gradients of inputs and of weights are operators of their own, so "
                     "neither hides communication of the other (zero-bubble)")  # fmt: skip
    found += _not_checked(layers)
    return [*found, "not modelled: failures, input, launches but for FSDP2's and experts'"]


def _not_checked(layers: Layers) -> list[str]:
    """What no published step has, or where they were far off."""
    machine, fabric = layers.network.machine, layers.network.fabric
    layout, model = layers.layout, layers.model
    unchecked = {
        "zero-bubble schedules": layers.apart,
        "context parallelism": layout.cp > 1, "latent attention": bool(model.key_rank),
        "sliding windows": bool(model.windowed),
        "torus": bool(fabric.torus), "rails": fabric.rails,
        f"{machine.device.name}": machine.device.name not in CHECKED,
        "plans across islands": layout.tp > machine.num_devices
        or layout.ep * layout.tp > machine.num_devices,
    }  # fmt: skip
    found: list[str] = []
    if model.experts:
        found.append(
            f"{NOT_CHECKED}experts well enough: published steps of 5 papers take up to three times "
            "as long; the band is the widest"
        )
    if names := [name for name, given in unchecked.items() if given]:
        found.append(
            f"{NOT_CHECKED}against any published step: {', '.join(names)}; the band is the widest"
        )
    return found
