"""Published training steps, predicted: simulated over reported, with no constant fitted to any.

Those of `published` were known from the start; those of `scored` were predicted once before anybody
had looked at them, and are known since. What a paper does not state, such as virtual stages, is
assumed; `source` of each step says so.
"""

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import exp, log, sqrt
from typing import Any, NamedTuple

from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric
from counterpoint.scale.operators import Overlap
from counterpoint.scale.prediction import WIDEST, Prediction, predict
from counterpoint.scale.recommenders.dlrm import DLRMS

# two-sided quantiles at 95 % of Student's t, by papers less one
T_QUANTILES = {2: 4.30, 3: 3.18, 4: 2.78, 10: 2.23, 11: 2.20}


class Run(NamedTuple):
    """What a paper says of all its runs beside their layouts.

    Args:
        machine: one node.
        fabric: what lies between.
        overlap: of tensor parallelism: "ours" where its collectives were cut into chunks, too.
        asynchronous: whether gradients and sends went beside computation.
    """

    machine: str
    fabric: Fabric
    overlap: Overlap
    asynchronous: bool


_HDR = Fabric(nic_bytes_per_s=25e9, source="8 HDR 200 Gb/s a node")
RUNS = {
    "Korthikanti": Run("a100-8", _HDR, "none", asynchronous=False),
    "Narayanan": Run("a100-8", _HDR, "none", asynchronous=False),
    # its README: tensor-, data- and pipeline-parallel communication beside computation
    "MCore-H100": Run("h100-8", Fabric(), "ours", asynchronous=True),
    # section 3.3: gradients and sends beside computation; nothing of tensor parallelism
    "Llama3": Run("h100-8", Fabric(levels=((3072, 7.0),)), "none", asynchronous=True),
}  # fmt: skip


# MLPerf training v4.0, DLRM-DCNv2 on nodes of 8 H100: GPUs, seconds between two evaluations over
# the iterations there
MLPERF = ((64, 2.41e-3), (128, 1.83e-3))
MLPERF_BESIDE_S = 0.5e-3  # of these, launches and input: inferred, and no part of a prediction


class Checked(NamedTuple):
    """One published step.

    Args:
        name: of the step; its first word is the paper.
        source: where it was published, and what was assumed.
        reported_s: seconds there.
        simulated_s: seconds predicted.
        kind: "pipeline" (and tensor parallel), "fsdp" or "experts".
    """

    name: str
    source: str
    reported_s: float
    simulated_s: float
    kind: str = "pipeline"

    @property
    def paper(self) -> str:
        """The first word of the name."""
        return self.name.split()[0]

    @property
    def ratio(self) -> float:
        """Simulated over reported."""
        return self.simulated_s / self.reported_s


@cache
def published() -> tuple[Checked, ...]:
    """Predict each published step that the library has, one after another.

    Returns:
        Name, source, reported and simulated seconds of each.
    """
    text = (files("counterpoint.scale") / "published_steps.json").read_text()
    return tuple(map(_checked, json.loads(text)))


def _model(row: dict[str, Any]) -> Model:
    sizes = dict(row["model"])
    return Model(
        name=row["name"], gated=sizes.pop("gated_mlp"), sequence=sizes.pop("seq_len"),
        source=row["source"], **sizes,
    )  # fmt: skip


def _checked(row: dict[str, Any]) -> Checked:
    run = RUNS[row["name"].split()[0]]
    layout = Layout(asynchronous=run.asynchronous, **row["layout"])
    found = predict(_model(row), layout, run.fabric, preset(run.machine), overlap=run.overlap)
    return Checked(row["name"], row["source"], row["reported_step_s"], found.seconds)


@cache
def scored() -> tuple[Checked, ...]:
    """Predict each step that was scored once, by what is modelled now.

    Returns:
        Name, source, reported and simulated seconds, and kind of each.
    """
    text = (files("counterpoint.scale") / "scored_steps.json").read_text()
    return tuple(
        Checked(row["name"], row["source"], row["reported_step_s"], predict_entry(row).seconds,
                row["kind"])
        for row in json.loads(text)["steps"]
    )  # fmt: skip


def predict_entry(row: dict[str, Any]) -> Prediction:
    """Predict a step of a set that is scored once, as its entry says."""
    machine = preset(row["node"]["preset"])
    machine = replace(machine, **{
        part: replace(getattr(machine, part), **row["node"].get(part, {}))
        for part in ("device", "link")
    })  # fmt: skip
    layout = Layout(asynchronous=row["asynchronous"], **row["layout"])
    return predict(_model(row), layout, Fabric(**row["fabric"]), machine)


def dense() -> tuple[Checked, ...]:
    """All known steps without experts, whose papers make the band."""
    return tuple(step for step in (*published(), *scored()) if step.kind != "experts")


@cache
def recommenders() -> tuple[Checked, ...]:
    """Predict DLRM-DCNv2 at MLPerf's batch, pooling and its all-to-all one after the other.

    These steps are no part of `published`, nor of its errors: their seconds are inferred, and what
    they have beside a step, `MLPERF_BESIDE_S`, is not modelled. Kernels are counted as torch has
    them; those of the submissions are fused further, and run in a graph.
    """
    model = DLRMS["dlrm-dcnv2"]
    source = "MLPerf training v4.0; time between evaluations over iterations, inferred"
    return tuple(
        Checked(f"MLPerf {model.name} {gpus} H100", source, reported_s, predict(
            model, Layout(dp=gpus, micro_batch=model.batch // gpus), Fabric(), preset("h100-8"),
        ).seconds)
        for gpus, reported_s in MLPERF
    )  # fmt: skip


def mean_error(steps: tuple[Checked, ...]) -> float:
    """Mean of |simulated / reported - 1|."""
    return sum(abs(step.ratio - 1) for step in steps) / len(steps)


def band(steps: tuple[Checked, ...]) -> tuple[float, float]:
    """Simulated over reported of a step of a new paper, from and to, as papers differ.

    A paper's mean is one draw, and a step's distance from that mean another. Papers are few, so
    the quantile is Student's; the band is no wider than `WIDEST`.
    """
    papers = {step.paper for step in steps}
    logs = [[log(step.ratio) for step in steps if step.paper == paper] for paper in papers]
    means = [sum(each) / len(each) for each in logs]
    mean = sum(means) / len(means)
    between = sum((each - mean) ** 2 for each in means) / (len(means) - 1)
    off = [one - own for each, own in zip(logs, means, strict=True) for one in each]
    within = sum(each**2 for each in off) / (len(off) - len(means))
    wide = T_QUANTILES[len(means) - 1] * sqrt(between * (1 + 1 / len(means)) + within)
    low, high = WIDEST
    return max(exp(mean - wide), 1 / high), min(exp(mean + wide), 1 / low)


def held(steps: tuple[Checked, ...]) -> int:
    """How many steps lie in the band that those of all other papers give."""
    count = 0
    for step in steps:
        low, high = band(tuple(other for other in steps if other.paper != step.paper))
        count += low <= step.ratio <= high
    return count


def fitted_error(steps: tuple[Checked, ...]) -> float:
    """Mean error with one factor a machine, fitted to the other papers' steps on that machine."""
    total = 0.0
    for step in steps:
        machine = RUNS[step.paper].machine
        kin = [each for each in steps if RUNS[each.paper].machine == machine]
        others = [log(each.ratio) for each in kin if each.paper != step.paper]
        total += abs(step.ratio / exp(sum(others) / len(others)) - 1)
    return total / len(steps)
