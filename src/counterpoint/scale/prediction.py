"""Seconds of a whole training step on many GPUs, where they go, and what that stands on.

Ranks that do the same at the same time are folded into one of each pipeline stage: layers and
collectives are closed forms, the order of a pipeline is simulated.
"""

from dataclasses import dataclass, field

from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.ranges import instance
from counterpoint.scale import dlrm_assumptions
from counterpoint.scale.assumptions import assumptions
from counterpoint.scale.dlrm import Dlrm
from counterpoint.scale.dlrm_step import DlrmStep
from counterpoint.scale.fabric import Fabric, Network
from counterpoint.scale.layer import OVERLAPS, Layers, Overlap
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model, model_of
from counterpoint.scale.step import Step

# of simulated over reported: what `published.band` makes of all published steps
BAND = (0.81, 1.19)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step, predicted.

    Args:
        model: what is trained.
        layout: how it is laid out.
        machine: the name of the GPUs' machine.
        overlap: how matmuls and the collectives beside them were priced.
        seconds: of the step.
        parts: seconds by what the busiest pipeline stage spends them on; they add up to `seconds`.
        items: tokens of the step, or samples of a `Dlrm`, over all replicas.
        assumptions: what the numbers stand on, with sources, a line each.
        notes: of a `Dlrm`, what fusing saves and what bounds it, a line each.
    """

    model: Model | Dlrm
    layout: Layout
    machine: str
    overlap: Overlap
    seconds: float
    parts: dict[str, float]
    items: int
    assumptions: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def band_s(self) -> tuple[float, float]:
        """Seconds from and to, by how far published steps of transformers were from predictions."""
        low, high = BAND
        return self.seconds / high, self.seconds / low

    @property
    def flop_per_s(self) -> float:
        """Of one GPU: products of the model alone, nothing that is recomputed."""
        model, layout = self.model, self.layout
        if isinstance(model, Dlrm):
            return self.items * model.flop / self.seconds / layout.num_gpus
        used = model.parameters - model.vocab * model.hidden  # an embedding is looked up
        idle = model.experts - model.top_k
        used -= (model.layers - model.num_dense) * idle * model.mlp_parameters(model.expert_ffn)
        # causal attention, as flash attention computes it
        wide = model.layers * model.heads * (model.key_width + model.width)
        flop = self.items * (6 * used + 3 * layout.length(model) * wide)
        return flop / self.seconds / layout.num_gpus

    def explain(self) -> str:
        """The step in words and a table: where time goes, and every assumption with its source."""
        layout, model = self.layout, self.model
        degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "ep")
                   if getattr(layout, name) > 1]  # fmt: skip
        batch = f"{layout.micro_batch} samples a GPU"
        if isinstance(model, Model):
            batch = (
                f"{layout.micro_batches} micro-batches of {layout.micro_batch} x "
                f"{layout.length(model)} tokens, {layout.virtual_stages} virtual stages"
            )
        lines = [
            f"{model.name} on {layout.num_gpus} GPUs ({self.machine}): "
            f"{', '.join(degrees) or 'one GPU'}, {batch}",
            f"overlap {self.overlap}: {self.seconds:#.4g} s a step ({self._band()}), "
            f"{self.items / self.seconds:,.0f} {self.unit}/s, "
            f"{self.flop_per_s / 1e12:.0f} Tflop/s a GPU",
            "",
        ]
        places = 4 if self.seconds > 0.1 else 6
        lines += [f"{name:18}{seconds:10.{places}f} s {seconds / self.seconds:6.1%}"
                  for name, seconds in self.parts.items() if seconds]  # fmt: skip
        lines += ["", *self.notes] if self.notes else []
        return "\n".join([*lines, "", "stands on:", *(f"- {each}" for each in self.assumptions)])

    @property
    def unit(self) -> str:
        """What `items` counts: tokens or samples."""
        return "samples" if isinstance(self.model, Dlrm) else "tokens"

    def _band(self) -> str:
        if isinstance(self.model, Dlrm):
            return "no band: only two published steps of such a model are known"
        low, high = self.band_s
        return f"{low:.3f} to {high:.3f} by the residuals of published steps"


def predict(
    model: Model | Dlrm | str,
    layout: Layout,
    fabric: Fabric | None = None,
    machine: MachineLike = "h100-8",
    *,
    overlap: Overlap = "none",
) -> Prediction:
    """Predict one training step: forward, backward, gradients and optimizer.

    Time does not grow with `dp`, and linearly with stages and micro-batches. Memory is not
    checked, and no rank is slower than another.

    Args:
        model: sizes, or a name: llama3-8b, llama3-70b, llama3-405b, gpt3-175b, mixtral-8x7b,
            deepseek-v3, qwen3-235b, dlrm-dcnv2, dlrm-paper.
        layout: degrees of parallelism and micro-batches; of a `Dlrm`, `dp` and `micro_batch`
            samples of each GPU.
        fabric: NICs and levels above; None: 400 Gb/s a GPU, not oversubscribed.
        machine: of one node (NVLink island), given as to `choose`.
        overlap: how tensor-parallel matmuls and experts are priced: "none": by serial plans,
            "ours": by the plans that `choose` takes, "ideal": by the longer of matmuls and
            communication. Of a `Dlrm` likewise pooling and its all-to-all.

    Returns:
        The prediction: `seconds`, `parts`, `assumptions`, `explain()`.

    Raises:
        InputError: no such model, machine or mode, the layout does not fit the model, or a level
            of the fabric is smaller than an island.

    Example:
        >>> layout = Layout.on(16384, tp=8, pp=16, virtual_stages=4, num_micro_batches=16)
        >>> 5 < predict("llama3-405b", layout).seconds < 8
        True
    """
    known = model_of("predict", model)
    instance("predict", "layout", layout, Layout)
    where = machine_of("predict", machine)
    fabric = instance("predict", "fabric", Fabric() if fabric is None else fabric, Fabric)
    if overlap not in OVERLAPS:
        raise InputError("predict", "overlap", want=f"one of {', '.join(OVERLAPS)}", got=overlap)
    network = Network(where, fabric)
    if isinstance(known, Dlrm):
        step = DlrmStep(known, layout, network, overlap)
        seconds, parts = step.run()
        return Prediction(known, layout, where.name, overlap, seconds, parts,
                          layout.micro_batch * layout.dp, tuple(dlrm_assumptions.assumptions(step)),
                          tuple(dlrm_assumptions.said(step)))  # fmt: skip
    layout.fits(known)
    layers = Layers(known, layout, network, overlap)
    seconds, parts = Step(layers).run()
    tokens = layout.micro_batch * layout.micro_batches * layout.dp * layout.length(known)
    return Prediction(known, layout, where.name, overlap, seconds, parts, tokens,
                      tuple(assumptions(layers)))  # fmt: skip
