"""The same advice before there is a trace: of a training step that `scale` predicts."""

from counterpoint.advice.advise import Report
from counterpoint.advice.losses import CAUSES, Losses
from counterpoint.advice.remedies import LEAST, MECHANISMS, Remedy, nearest
from counterpoint.advice.words import ms
from counterpoint.machine import Machine
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric
from counterpoint.scale.prediction import predict

# by part of a predicted step: the mechanism of ours that takes it
TAKEN = {
    "tensor parallel": "tensor parallel", "all-to-all": "experts", "data parallel": "overlap",
}  # fmt: skip
COMMUNICATES = (*TAKEN, "pipeline", "context parallel")


def advise_model(model: Model, layout: Layout, machine: Machine) -> Report:
    """What a training step would lose to communication, and what would win it back. Predicted.

    Args:
        model: e.g. `scale`'s model of a config.json.
        layout: of its ranks, on one island.
        machine: that island.
    """
    none, ours, ideal = (
        predict(model, layout, Fabric(), machine, overlap=mode)
        for mode in ("none", "ours", "ideal")
    )
    time_s = none.seconds
    exposed = {name: none.parts.get(name, 0.0) for name in COMMUNICATES}
    found: list[Remedy] = []
    for part, name in TAKEN.items():
        bound_s = exposed[part] - ideal.parts.get(part, 0.0)
        saves_s, gain = exposed[part] - ours.parts.get(part, 0.0), None
        if part == "data parallel":
            if layout.data_parallel_sharding != "fsdp":
                continue
            bound_s = exposed[part]
            gain = nearest(name, bound_s / time_s, layout.num_gpus, machine.device.name)
            saves_s = bound_s * gain.share if gain else 0.0
        if bound_s >= LEAST * time_s:
            found.append(Remedy(*MECHANISMS[name], bound_s, saves_s, gain))
    exposed_s = sum(exposed.values())
    losses = Losses(
        rank=0, time_s=time_s, computation_s=time_s - exposed_s, exposed_s=exposed_s, late_s=0.0,
        packing_s=0.0, idle_s=dict.fromkeys(CAUSES, 0.0), packed_s=0.0, slowed_s=0.0,
        beside_s=0.0, compared_s=0.0, collectives=(),
    )  # fmt: skip
    return Report(
        title=f"predicted, not measured: {ms(time_s)} ms for a step of {none.title}",
        losses=(losses,),
        notes=(
            *str(none.memory).splitlines(),
            *["  (as options of `counterpoint scale`)"] * (not none.memory.fits),
        ),
        remedies=tuple(sorted(found, key=lambda each: -(each.saves_s or 0.0))),
    )
