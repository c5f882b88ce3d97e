"""What each mechanism of this library would bring for a training step that `scale` predicts.

Each is priced alone, over the step of serial plans; fp8 on top of the layers that it is of. Puts
that the GPU posts are priced too, though this library has none: they stand last, and apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from counterpoint.advice.remedies import MECHANISMS
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.scale import constants
from counterpoint.scale.layout import Layout
from counterpoint.scale.mechanisms import fp8, puts
from counterpoint.scale.mechanisms.chosen import (
    ChosenDlrm,
    ChosenLayers,
    ChosenStep,
    Name,
    within_a_node,
)
from counterpoint.scale.mechanisms.sizes import Sized, sizes
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric, Group, Network
from counterpoint.scale.operators import ONLY_SERIAL, between
from counterpoint.scale.prediction import Prediction, predict
from counterpoint.scale.recommenders.dlrm import Dlrm

NOT_OURS = "not in this library"
LEAST = 1e-4  # of a step: what saves less saves nothing
# by mechanism: what it does, and how it is turned on
WORDS: Mapping[Name, tuple[str, str]] = {
    "tensor parallel": ("tensor-parallel matmuls", MECHANISMS["tensor parallel"].line),
    "fp8": (
        "tensor parallel in fp8", "counterpoint.nn.to_fp8(model) under torch.compile, on top"
    ),
    "experts": ("experts' all-to-alls", MECHANISMS["experts"].line),
    "routes": (
        "tokens once to a rank",
        "counterpoint.exchange_routes; ExpertParallelMLP takes it itself between nodes",
    ),
    "attention": (
        "keys beside attention", "counterpoint.all_gather_attention(q, k, v, causal=True)"
    ),
    "FSDP": ("FSDP2 in place", MECHANISMS["overlap"].line),
    "embedding": ("embeddings' all-to-all", MECHANISMS["embeddings"].line),
    "puts": ("GPU-initiated exchange", NOT_OURS),
}  # fmt: skip
UPON: Mapping[Name, Name] = {"fp8": "tensor parallel"}


@dataclass(frozen=True)
class Mechanism:
    """One mechanism, and what it would bring.

    Args:
        name: what it does.
        line: how it is turned on, or that this library has it not.
        why: it does not apply, or saves nothing; "" where it saves something.
        saves_s: of the step, alone; 0 where it does not apply.
        speedup: of the step of serial plans over one that takes so much less.
    """

    name: str
    line: str
    why: str
    saves_s: float
    speedup: float


@dataclass(frozen=True)
class WhatIf:
    """A step by serial plans, and what mechanisms would save of it.

    Args:
        step: by serial plans, as `predict` has it.
        ours: mechanisms of this library that save something, the largest first.
        without: those that do not apply, or save nothing, with the reason.
        together_s: the step with all of `ours`.
        puts: what is not in this library.
        beyond_s: what that would save of `together_s`.
        sizes: of a DLRM: what it would save at other sizes.
        assumptions: what all that stands on, beside what the step does, in lines as it has them.
    """

    step: Prediction
    ours: tuple[Mechanism, ...]
    without: tuple[Mechanism, ...]
    together_s: float
    puts: Mechanism
    beyond_s: float
    sizes: tuple[Sized, ...]
    assumptions: tuple[str, ...]


def what_if(model: Model | Dlrm, layout: Layout, fabric: Fabric, machine: Machine) -> WhatIf:
    """Price a step with each mechanism.

    Args:
        model: what is trained.
        layout: how it is laid out.
        fabric: between nodes.
        machine: of one node.

    Raises:
        InputError: as `scale.predict` does.
    """
    step = predict(model, layout, fabric, machine)
    network = Network(machine, fabric)
    why = _reasons(model, layout, network)
    run = _runner(model, layout, network)

    def found(name: Name) -> Mechanism:
        title, line = WORDS[name]
        if why[name]:
            return Mechanism(title, line, why[name], 0.0, 1.0)
        upon: frozenset[Name] = frozenset({UPON[name]} if name in UPON else ())
        saves_s = run(upon) - run(upon.union((name,)))
        if saves_s < LEAST * step.seconds:
            return Mechanism(title, line, _nothing(saves_s), 0.0, 1.0)
        return Mechanism(title, line, "", saves_s, step.seconds / (step.seconds - saves_s))

    every: dict[Name, Mechanism] = {name: found(name) for name in WORDS}
    last = every.pop("puts")
    on: frozenset[Name] = frozenset(name for name, each in every.items() if not each.why)
    together_s = run(on)
    beyond_s = 0.0 if last.why else together_s - run(on.union(("puts",)))
    ours = sorted((e for e in every.values() if not e.why), key=lambda e: -e.saves_s)
    others = tuple(each for each in every.values() if each.why)
    of_sizes: tuple[Sized, ...] = ()
    if isinstance(model, Dlrm) and not last.why:
        of_sizes = sizes(ChosenDlrm(model, layout, network, "none"))
    stands = _assumptions(on, last_applies=not last.why)
    return WhatIf(step, tuple(ours), others, together_s, last, beyond_s, of_sizes, stands)


def _nothing(saves_s: float) -> str:
    late = f"predicted to be {-saves_s * 1e3:.3g} ms slower" if saves_s < -1e-9 else ""
    return late or "what is serial is as fast"


def _runner(
    model: Model | Dlrm, layout: Layout, network: Network
) -> Callable[[frozenset[Name]], float]:
    """Seconds of the step with the mechanisms named."""

    @cache
    def run(on: frozenset[Name]) -> float:
        if isinstance(model, Dlrm):
            return ChosenDlrm(model, layout, network, "none", on).run()[1].seconds
        layers = ChosenLayers(model, layout, network, "none", on)
        return ChosenStep(layers).run()[1].seconds

    return run


def _reasons(model: Model | Dlrm, layout: Layout, network: Network) -> dict[Name, str]:
    """Why mechanisms do not apply; "" of those that do."""
    if isinstance(model, Dlrm):
        near = network.near(Group(layout.dp, 1)) == layout.dp
        found: dict[Name, str] = dict.fromkeys(WORDS, "a recommender has none")
        found["embedding"] = "one GPU: nothing is sent" if layout.dp == 1 else ""
        found["puts"] = "all ranks are on one node" if near else ""
        return found
    tp = Group(layout.tp, 1)
    experts = _why_not_experts(model, layout)
    group = Group(layout.ep, layout.tp)
    near = network.near(group) == group.size
    routes = "" if near or between(network, group) > 1 else ONLY_SERIAL.removeprefix("serially: ")
    exchanging = [tp] * (layout.tp > 1) + [group] * (not experts)
    far = any(network.near(each) < each.size for each in exchanging)
    return {
        "tensor parallel": "" if layout.tp > 1 else "tp is 1",
        "fp8": _why_not_fp8(model, layout, network),
        "experts": experts,
        "routes": experts or routes,
        "attention": _why_not_attention(model, layout, network),
        "FSDP": _why_not_fsdp(layout, network),
        "embedding": "the model is no recommender",
        "puts": "" if far else "no operator of ours exchanges between nodes",
    }  # fmt: skip


def _why_not_experts(model: Model, layout: Layout) -> str:
    if not model.experts:
        return "the model has no experts"
    return "" if layout.ep > 1 else "ep is 1: each rank has all experts"


def _why_not_fp8(model: Model, layout: Layout, network: Network) -> str:
    if layout.tp == 1 or not layout.sequence_parallel:
        return "tp is 1" if layout.tp == 1 else "the sequence is not shared out between matmuls"
    device = network.machine.device
    if not fp8.multiplies_fp8(device):
        return f"it needs compute capability 8.9; not on {device.name}"
    layers = ChosenLayers(model, layout, network, "none", frozenset({"fp8"}))
    return _refused(layers.dense if model.num_dense else layers.sparse)


def _why_not_attention(model: Model, layout: Layout, network: Network) -> str:
    group = Group(layout.cp, layout.tp)
    if layout.cp == 1:
        return "cp is 1"
    if network.near(group) < group.size:
        return "ranks that share a sequence are on several nodes"
    if model.key_rank or model.windowed or not layout.flash_attention:
        return "it has no latent attention, no sliding windows, and is a flash attention"
    return _refused(ChosenLayers(model, layout, network, "none", frozenset()).attention_saves_s)


def _refused(priced: Callable[[], object]) -> str:
    """Why no plan takes sizes of a step; "" if one does."""
    try:
        priced()
    except InputError as error:
        return str(error)
    return ""


def _why_not_fsdp(layout: Layout, network: Network) -> str:
    group = Group(layout.dp * layout.cp, layout.tp)
    if layout.data_parallel_sharding != "fsdp":
        return "parameters are not FSDP2's: sharding is " + layout.data_parallel_sharding
    if group.size == 1:
        return "one rank has all parameters"
    if not within_a_node(layout, network):
        nodes = -(-group.size // network.near(group))
        return f"shards lie on {nodes} nodes: it takes those of one node, as HSDP has them"
    return ""


def _assumptions(on: frozenset[Name], *, last_applies: bool) -> tuple[str, ...]:
    used: dict[str, constants.Constant] = dict(fp8.CONSTANTS) if "fp8" in on else {}
    used |= puts.CONSTANTS if last_applies else {}
    found = [f"{c.basis}: {name} = {c.value:g} {c.unit}: {c.source}" for name, c in used.items()]
    if "FSDP" in on:
        found.append(
            "measured: FSDP2 as it is and in place, as cp.overlap predicts them: six Llama-8B "
            "layers of 4096 tokens and more on 2 and 4 H200s take within 3 % of that"
        )
    if "routes" in on:
        found.append("layout: the host waits for routes; that is not modelled")
    return tuple(found)
