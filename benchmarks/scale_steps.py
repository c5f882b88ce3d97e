"""How near `counterpoint.scale` comes to steps that were measured: published ones, and our own.

Our own are rows of `bench compile`, `bench training` and `bench steps` on 2 GPUs: serial plans, and
ours. A step without a host wait is what a prediction knows, so of experts the serial arm is torch's
with known counts, and ours the one with `max_rows=`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import blocks, experts, pictures
from benchmarks.pictures import Point
from benchmarks.rows import Row, results, taken
from benchmarks.scale_dlrm import dlrm_s, dlrm_step, puts_table
from benchmarks.scale_scored import scored_table
from benchmarks.steps_experts import BOTH
from benchmarks.tables import grid, measured, ms
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.scale.checked import (
    MLPERF_BESIDE_S,
    RUNS,
    Checked,
    band,
    dense,
    fitted_error,
    held,
    mean_error,
    published,
    recommenders,
)
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.operators import Overlap

GPU, RANKS = "h200", 2
# of a model whose MLP alone is asked for
ANY: dict[str, Any] = {"heads": 2, "kv_heads": 2, "layers": 1, "vocab": 2}


class Own(NamedTuple):
    """One step of ours: who ran it, and how, and its row."""

    kind: str
    overlap: Overlap
    predicted_s: float
    row: Row

    @property
    def point(self) -> Point:
        """As pictures take it."""
        label = f"{self.row['case']}, {'serial' if self.overlap == 'none' else 'ours'}"
        return Point(label, self.kind, self.predicted_s, self.row["median_s"])


def own_steps(machine: Machine | None = None) -> list[Own]:
    """Every whole step that was measured on 2 GPUs, and what is predicted of it."""
    where = machine or machine_of("scale_steps", f"{GPU}-{RANKS}")
    of: dict[str, Callable[[Row, Machine], Iterator[Own]]] = {
        "compile": _layers, "training": _mlp, "steps": _whole,
    }  # fmt: skip
    cases = {name: taken(results(name, gpu=GPU)[RANKS], "case") for name in of}
    return [own for name, read in of.items() for case in cases[name] for row in case.rows
            for own in read(row, where)]  # fmt: skip


def _layers(row: Row, machine: Machine) -> Iterator[Own]:
    """Unmodified Llama layers under torch.compile: plain, and with our pass."""
    overlaps: Mapping[str, Overlap] = {"compile": "none", "counterpoint": "ours"}
    if row.get("step") != "train" or row.get("mode") != "graph" or row["arm"] not in overlaps:
        return
    width = blocks.WIDTHS[row["width"]]
    model = Model(
        name=row["width"],
        hidden=width.dim,
        layers=row["layers"],
        heads=width.heads,
        kv_heads=width.kv_heads,
        ffn=width.hidden,
        vocab=2,
        sequence=row["sequence"],
    )
    layout = Layout(tp=RANKS, micro_batch=row["batch"])
    overlap = overlaps[row["arm"]]
    layer = Layers(model, layout, Network(machine, Fabric()), overlap).dense()
    yield Own("tensor parallel", overlap, row["layers"] * layer.seconds, row)


def _mlp(row: Row, machine: Machine) -> Iterator[Own]:
    """A gated MLP over the ranks."""
    overlaps: Mapping[str, Overlap] = {"serial": "none", "ours": "ours"}
    if row["mode"] != "graph" or row["arm"] not in overlaps:
        return
    overlap = overlaps[row["arm"]]
    model = Model(name=row["case"], hidden=row["hidden"], ffn=row["ffn"], sequence=row["m"], **ANY)
    layers = Layers(model, Layout(tp=RANKS), Network(machine, Fabric()), overlap)
    yield Own("tensor parallel", overlap, layers.mlp(model.ffn).seconds, row)


def _whole(row: Row, machine: Machine) -> Iterator[Own]:
    """A recommendation model, or a layer of experts, forward and backward."""
    if row["mode"] != "eager" or row.get("named") == "zipf":  # as they were all measured first
        return
    if row["model"] != "DLRM-DCNv2":
        yield from _experts(row, machine)
        return
    # torch's own bags are not modelled
    overlaps: Mapping[str, Overlap] = {f"{BOTH}, by lookup": "none", f"{BOTH}, by fused": "ours"}
    if (overlap := overlaps.get(row["arm"])) is not None:
        step = dlrm_step(row["size"], row["rows"], machine, overlap)
        yield Own("DLRM", overlap, dlrm_s(step), row)


def _experts(row: Row, machine: Machine) -> Iterator[Own]:
    overlaps: Mapping[str, Overlap] = {
        f"{BOTH}, by torch, counts": "none",
        f"{BOTH}, by fused": "ours",
    }
    sizes = {model.name: model for model in experts.MODELS}.get(row["model"])
    if sizes is None or row["arm"] not in overlaps:
        return
    overlap = overlaps[row["arm"]]
    model = Model(
        name=sizes.name,
        hidden=sizes.hidden,
        ffn=0,
        sequence=row["tokens"],
        experts=RANKS * sizes.experts,
        top_k=sizes.top,
        expert_ffn=sizes.ffn,
        **ANY,
    )
    layers = Layers(model, Layout(dp=RANKS, ep=RANKS), Network(machine, Fabric()), overlap)
    yield Own("experts", overlap, layers.experts().seconds, row)


def published_table() -> str:
    """Every published step, and how far off each paper is in the mean."""
    steps = published()
    lines = [[s.name, f"{s.reported_s:.2f}", f"{s.simulated_s:.2f}", f"{s.ratio:.2f}"]
             for s in steps]  # fmt: skip
    low, high = band(dense())
    return "\n\n".join([
        grid(["step", "reported, s", "simulated, s", "simulated / reported"], lines),
        grid(["paper", "steps", "mean error", "worst"], [*map(_of_paper, RUNS), _of_paper("")]),
        f"With one factor for each machine, fitted to other papers: {fitted_error(steps):.1%}. "
        f"Band of steps without experts, these and those below: {low:.2f} to {high:.2f} of what is "
        f"reported; made of other papers it holds {held(dense())} of {len(dense())}.",
    ])  # fmt: skip


def _of_paper(paper: str) -> list[str]:
    steps = tuple(step for step in published() if step.paper.startswith(paper))
    worst = max((step.ratio - 1 for step in steps), key=abs)
    return [paper or "all", str(len(steps)), f"{mean_error(steps):.1%}", f"{worst:+.1%}"]


def recommenders_table() -> str:
    """MLPerf's steps, which are none of the published ones above."""
    lines = [[s.name, f"{s.reported_s * 1e3:.2f}", f"{s.simulated_s * 1e3:.2f}", f"{s.ratio:.2f}",
              f"{(s.simulated_s + MLPERF_BESIDE_S) / s.reported_s:.2f}"]
             for s in recommenders()]  # fmt: skip
    beside = f"with {MLPERF_BESIDE_S * 1e3} ms of launches and input, assumed"
    return grid(["step", "reported, ms", "simulated, ms", "simulated / reported", beside], lines)


def own_table(steps: Sequence[Own]) -> str:
    """Our own steps, measured and predicted."""
    lines = [
        ([step.row["case"], *_overlap_mode(step), ms(step.row["median_s"]), ms(step.predicted_s),
          f"{step.point.error:+.1%}"], [step.row])
        for step in steps
    ]  # fmt: skip
    errors = sorted(abs(step.point.error) for step in steps)
    note = f"Times in ms. Median error {median(errors):.1%}, worst {errors[-1]:.1%}."
    head = ["step", "arm", "mode", "measured", "predicted", "error"]
    return measured(head, lines, note)


def _overlap_mode(step: Own) -> tuple[str, str]:
    return "serial" if step.overlap == "none" else "ours", step.row["mode"]


def picture(folder: Path) -> Path:
    """Published steps: simulated over reported, papers by colour."""
    points = [_point(step) for step in published()]
    return pictures.errors(
        {"published steps": points},
        folder / "scale-errors.svg",
        title="Published training steps, no constant fitted to any",
        source="predicted by counterpoint.scale; reported by four papers",
    )


def _point(step: Checked) -> Point:
    return Point(step.name, step.paper, step.simulated_s, step.reported_s)


def sections() -> dict[str, str]:
    """Marked sections of docs/scale.md."""
    return {
        "scale-published": published_table(),
        "scale-second": scored_table("second"), "scale-scored": scored_table("first"),
        "scale-own": own_table(own_steps()), "scale-mlperf": recommenders_table(),
        "scale-puts": puts_table(),
    }  # fmt: skip
