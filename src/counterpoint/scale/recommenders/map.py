"""Which proportions of a DLRM's step give which saving, and where models lie among them.

e = pooling as a share of the step, r = the exposed all-to-all over pooling; of one hidden behind
the other, a step saves e min(1, r), and its forward is at least e (1 + r) of it. A training step
sends as much back, and reads as many rows again to update them: e (2 + 2 r) <= 1, before any MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.recommenders.dlrm import DLRMS, Dlrm
from counterpoint.scale.recommenders.step import DlrmStep

PAPER_SAVING = 0.21  # of a step on 128 nodes, simulated: arXiv 2305.06942
RATES = tuple(50e9 * 2 ** (i / 4) for i in range(-12, 13))  # bytes/s of a NIC: 50 to 3200 Gb/s


class Place(NamedTuple):
    """Where a step lies on the map.

    Args:
        label: of the model and its GPUs.
        share: e, of the step whose pooling and all-to-all come one after the other.
        ratio: r.
        bound: of that step, what fusing saves at most.
    """

    label: str
    share: float
    ratio: float
    bound: float


@dataclass(frozen=True)
class Map:
    """Steps, and one of them at other link rates.

    Args:
        title: of the step that it is about.
        source: what the numbers stand on.
        places: that step on fewer GPUs and on all of them, last; then published ones.
        at_rates: it, at `RATES`; empty on one node.
    """

    title: str
    source: str
    places: tuple[Place, ...]
    at_rates: tuple[Place, ...]

    def verdict(self) -> str:
        """Whether the step, at its own link rate or at another, saves what the paper says."""
        step = next(each for each in self.places if each.label == self.title)
        text = (
            f"{PAPER_SAVING:.0%} needs pooling and the exposed all-to-all of {PAPER_SAVING:.0%} of "
            f"the step each; here {step.share:.1%} and {step.share * step.ratio:.1%}"
        )
        if not self.at_rates:
            return text
        best = max(range(len(RATES)), key=lambda i: self.at_rates[i].bound)
        low, high = ratios_of_training(PAPER_SAVING)
        return (
            f"{text}. At other link rates it saves at most {self.at_rates[best].bound:.1%} "
            f"({RATES[best] * 8 / 1e9:.0f} Gb/s). A training step can get there only where the "
            f"all-to-all takes {low:.2f} to {high:.2f} of pooling, and pooling, both all-to-alls "
            "and an update that reads the rows again are nearly all of it"
        )


def saving(share: float, ratio: float) -> float:
    """Of the step, what hiding saves: e min(1, r); 0 where there is no such step: e (1 + r) > 1."""
    return share * min(1.0, ratio) if share * (1 + ratio) <= 1 else 0.0


def share_for(wanted: float, ratio: float) -> float:
    """The least share of pooling at which a step saves so much; above 1 / (1 + r) there is none."""
    return wanted / min(1.0, ratio)


def ratios_of_training(wanted: float) -> tuple[float, float]:
    """From and to: outside, no training step saves so much. None does above a quarter.

    w / min(1, r) = 1 / (2 + 2 r), solved for r below and above 1.
    """
    return 2 * wanted / (1 - 2 * wanted), 1 / (2 * wanted) - 1


def place_of(step: DlrmStep, label: str = "") -> Place:
    """Where a step lies."""
    found = step.pooled
    seconds = replace(step, overlap="none").run()[1].seconds
    exposed_s = max(found.serial_s - found.lookup_s, 0.0)
    return Place(label or _label(step), found.lookup_s / seconds, exposed_s / found.lookup_s,
                 found.bound_s / seconds)  # fmt: skip


def map_of(step: DlrmStep) -> Map:
    """The map of a step: on an eighth of its GPUs to all of them, all with the batch of these."""
    gpus, batch = step.group.size, step.group.size * step.samples
    counts = [gpus // n for n in (8, 4, 2, 1) if gpus // n > 1 and batch % (gpus // n) == 0]
    places = [place_of(replace(step, layout=replace(step.layout, dp=count,
                                                    micro_batch=batch // count)))
              for count in counts or [gpus]]  # fmt: skip
    fabric, network = step.network.fabric, step.network
    far = network.near(step.group) < gpus
    at_rates = [
        place_of(replace(step, network=replace(network, fabric=replace(
            fabric, nic_bytes_per_s=rate))))
        for rate in RATES if far
    ]  # fmt: skip
    nic = f", NIC {fabric.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s" if far else ""
    source = f"predicted, {network.machine.name}{nic}; global batch {batch}"
    if step.model.name == "dlrm-paper":
        source += "; all sizes assumed: the text that we have gives none"
    return Map(_label(step), source, (*places, *_published(step.model)), tuple(at_rates))


def _published(but: Dlrm) -> Sequence[Place]:
    """DLRM-DCNv2 as MLPerf's steps ran, on nodes of 8 H100."""
    model = DLRMS["dlrm-dcnv2"]
    if but.name == model.name:
        return ()
    network = Network(preset("h100-8"), Fabric())
    layouts = (Layout(dp=gpus, micro_batch=model.batch // gpus) for gpus in (64, 128))
    return [place_of(DlrmStep(model, layout, network, "ours")) for layout in layouts]


def _label(step: DlrmStep) -> str:
    return f"{step.model.name}, {step.group.size} GPUs"
