"""Seconds of a whole training step on many GPUs, where they go, and what that stands on.

Ranks that do the same at the same time are folded into one of each pipeline stage: layers and
collectives are closed forms, the order of a pipeline is simulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.ranges import instance
from counterpoint.scale import chakra, memory
from counterpoint.scale.assumptions import NOT_CHECKED, assumptions, listed
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.memory import Memory
from counterpoint.scale.models import Model, model_of
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.operators import OVERLAPS, Overlap
from counterpoint.scale.recommenders import assumptions as dlrm_assumptions
from counterpoint.scale.recommenders.dlrm import Dlrm
from counterpoint.scale.recommenders.step import DlrmStep
from counterpoint.scale.step import Stages, Step
from counterpoint.spans import Span
from counterpoint.timeline import Timeline

# of simulated over reported: what `checked.band` makes of all known steps without experts
BAND = (0.72, 1.38)
# of the prediction: of experts, and of what no published step had; no band is wider
WIDEST = (0.65, 1.40)


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
        assumptions: what the numbers stand on, with sources, a line each, which begins with what
            it is about and a colon: "machine: ...", "assumed: ...", "not checked: ...".
        memory: of the fullest GPU: whether the step fits, and what to change if not.
        stages: when each stage does what; `timeline` is made of it.
        notes: a line each: of a `Dlrm`, what fusing saves and what bounds it; of FSDP2, that
            `cp.overlap` is not priced.
    """

    model: Model | Dlrm
    layout: Layout
    machine: str
    overlap: Overlap
    seconds: float
    parts: dict[str, float]
    items: int
    assumptions: tuple[str, ...] = field(repr=False)
    memory: Memory
    stages: Stages = field(repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def widest(self) -> bool:
        """Whether the step has experts, or what no published step had: its band is the widest."""
        return any(line.startswith(NOT_CHECKED) for line in self.assumptions)

    @property
    def band_s(self) -> tuple[float, float]:
        """Seconds from and to, by how far papers' steps were from their predictions.

        Of experts, of what no published step had, and of a `Dlrm`, of which only two are known,
        0.65 to 1.40 of the prediction.
        """
        low, high = WIDEST if self.widest else (1 / BAND[1], 1 / BAND[0])
        return self.seconds * low, self.seconds * high

    @property
    def unit(self) -> str:
        """What `items` counts: tokens or samples."""
        return "samples" if isinstance(self.model, Dlrm) else "tokens"

    @property
    def flop_per_s(self) -> float:
        """Of one GPU: products of the model alone, nothing that is recomputed."""
        model, layout = self.model, self.layout
        if isinstance(model, Dlrm):
            return self.items * model.flop / self.seconds / layout.num_gpus
        used = model.multiplied
        idle = model.experts - model.top_k
        used -= (model.layers - model.num_dense) * idle * model.mlp_parameters(model.expert_ffn)
        # causal attention, as flash attention computes it
        wide = model.layers * model.heads * (model.key_width + model.width)
        length = layout.length(model)
        flop = self.items * (6 * used + 3 * model.attended(length) / length * wide)
        return flop / self.seconds / layout.num_gpus

    @property
    def title(self) -> str:
        """What is predicted, in one line."""
        layout = self.layout
        degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "ep")
                   if getattr(layout, name) > 1]  # fmt: skip
        said = degrees or ["one GPU"]
        if isinstance(self.model, Dlrm):
            said.append(f"{layout.micro_batch} samples a GPU")
        else:
            batches = layout.micro_batches
            said.append(
                f"{batches} micro-batch{'es' * (batches > 1)} of "
                f"{layout.micro_batch} x {layout.length(self.model)} tokens"
            )
        said += [f"{layout.virtual_stages} virtual stages"] * (layout.virtual_stages > 1)
        said += ["zero-bubble"] * (layout.schedule == "zero-bubble")
        return f"{self.model.name} on {layout.num_gpus} GPUs ({self.machine}): {', '.join(said)}"

    @property
    def timeline(self) -> Timeline:
        """What the first rank of each pipeline stage does, on a lane: made when it is asked for.

        All that one event of a stage spends, communication within it included, is one span.
        `timeline.save("step.json")` is a trace for ui.perfetto.dev.
        """
        ranks = range(0, self.layout.num_gpus, self.layout.num_gpus // self.layout.pp)
        spans: list[Span] = []
        for stage, rank in enumerate(ranks):
            for (doing, part, batch), start_s, end_s in self.stages.events(stage):
                kind = "collective" if doing == "data parallel" else "opaque"
                label = doing
                if doing not in ("data parallel", "optimizer"):
                    label = f"{doing} {batch}" + f" of part {part}" * (
                        self.layout.virtual_stages > 1
                    )
                spans.append(Span(rank, f"stage {stage}", start_s, end_s, kind, label))
        source = f"predicted for {self.machine}, overlap {self.overlap}"
        return Timeline(tuple(spans), self.title, source)

    def save(
        self, path: str | Path, *, beside: "Sequence[Prediction]" = (), dark: bool = False
    ) -> Path:
        """Write a picture: pipeline stages over time, and below a bar of parts and their numbers.

        Args:
            path: ends in .png, .svg or .pdf; folders that are missing are made.
            beside: other predictions, at most 7, that get a bar each: another overlap or layout.
            dark: draw for a dark page.

        Returns:
            The path written.

        Raises:
            InputError: the suffix is none of these, or there are more predictions.
        """
        # here, not at the top: matplotlib takes a while to import, and most predictions are read
        from counterpoint.measure.draw_step import draw_step

        return draw_step(self, beside, path, dark=dark)

    def save_chakra(self, folder: str | Path) -> list[Path]:
        """Write Chakra execution traces: step.<rank>.et of the first rank of each pipeline stage.

        The other ranks of a stage do the same. A node is the computation of one event of a stage, a
        kind of collective beside it (all layers together), or a message to another stage;
        comm_groups.json has the ranks of each group. Nodes have the predicted seconds, and no
        `num_ops`: simulators replay computation, and time communication by its bytes.

        Args:
            folder: is made if it is missing; files of these names are replaced.

        Returns:
            The traces, by stages.

        Raises:
            InputError: there are more nodes, or ranks of groups, than can be written in seconds.
        """
        return chakra.save(Path(folder), self.stages, self.layout, self.title)

    def explain(self) -> str:
        """The step in words and a table: where time goes, and every assumption with its source."""
        why = "the widest" if self.widest else "by the residuals of published steps"
        band = "{:.3f} to {:.3f}, {}".format(*self.band_s, why)
        lines = [
            self.title,
            f"overlap {self.overlap}: {self.seconds:#.4g} s a step ({band}), "
            f"{self.items / self.seconds:,.0f} {self.unit}/s, "
            f"{self.flop_per_s / 1e12:.0f} Tflop/s a GPU",
            str(self.memory),
            "",
        ]
        places = 4 if self.seconds > 0.1 else 6
        lines += [f"{name:18}{seconds:10.{places}f} s {seconds / self.seconds:6.1%}"
                  for name, seconds in self.parts.items() if seconds]  # fmt: skip
        lines += ["", *self.notes] if self.notes else []
        return "\n".join([*lines, "", listed(self.assumptions)])


def predict(
    model: Model | Dlrm | str | Path,
    layout: Layout,
    fabric: Fabric | None = None,
    machine: MachineLike = "h100-8",
    *,
    overlap: Overlap = "none",
) -> Prediction:
    """Predict one training step: forward, backward, gradients and optimizer.

    Time does not grow with `dp`, and linearly with stages and micro-batches. No rank is slower
    than another. Between nodes ours are plans of islands, or serial. A step that does not fit into
    memory is predicted all the same: `memory.fits` says so.

    Args:
        model: sizes, or a name: llama3-8b, llama3-70b, llama3-405b, gpt3-175b, mixtral-8x7b,
            deepseek-v3, qwen3-235b, dlrm-dcnv2, dlrm-paper, or the path of a Hugging Face
            `config.json`.
        layout: degrees of parallelism and micro-batches; of a `Dlrm`, `dp` and `micro_batch`
            samples of each GPU.
        fabric: NICs and levels above; None: 400 Gb/s a GPU, not oversubscribed.
        machine: of one node (NVLink island), given as to `choose`.
        overlap: how tensor-parallel matmuls and experts are priced: "none": by serial plans,
            "ours": by the plans that `choose` takes, "ideal": by the longer of matmuls and
            communication. Of a `Dlrm` likewise pooling and its all-to-all.

    Returns:
        The prediction: `seconds`, `parts`, `memory`, `assumptions`, `explain()`.

    Raises:
        InputError: no such model, machine or mode, the layout does not fit the model, a level of
            the fabric is smaller than an island, or its torus has not as many islands.

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
        return _recommender(known, layout, network, overlap)
    layout.fits(known)
    network.covers(layout.num_gpus)
    layers = Layers(known, layout, network, overlap)
    parts, stages = Step(layers).run()
    items = layout.micro_batch * layout.micro_batches * layout.dp * layout.length(known)
    held = memory.training(known, layout, where, fabric)
    return Prediction(known, layout, where.name, overlap, stages.seconds, parts, items,
                      tuple(assumptions(layers)), held, stages,
                      tuple(_not_priced(layout, parts)))  # fmt: skip


def _not_priced(layout: Layout, parts: Mapping[str, float]) -> list[str]:
    """What we could win that no column has."""
    if layout.data_parallel_sharding != "fsdp" or not parts.get("data parallel"):
        return []
    return [
        "cp.overlap is not priced: data parallel is FSDP2's own, in every column; --what-if "
        "prices it"
    ]


def _recommender(model: Dlrm, layout: Layout, network: Network, overlap: Overlap) -> Prediction:
    step = DlrmStep(model, layout, network, overlap)
    network.covers(layout.num_gpus)
    parts, stages = step.run()
    machine = network.machine
    return Prediction(
        model, layout, machine.name, overlap, stages.seconds, parts,
        layout.micro_batch * layout.dp, tuple(dlrm_assumptions.assumptions(step)),
        memory.recommender(model, layout, machine), stages, tuple(dlrm_assumptions.said(step)),
    )  # fmt: skip
