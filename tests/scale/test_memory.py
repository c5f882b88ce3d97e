"""Whether a step fits: setups that are published, their peaks, and what is said instead."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from counterpoint.presets import preset
from counterpoint.scale import Fabric, Layout, Model, predict
from counterpoint.scale.layer import Layers
from counterpoint.scale.memory import CLOSE, Memory, in_flight, stage_bytes, training
from counterpoint.scale.models import MODELS
from counterpoint.scale.network.fabric import Network
from counterpoint.scale.pipeline import Stage, order
from counterpoint.scale.step import Step

GIB = 2**30


def gpt(hidden: int, layers: int, heads: int) -> Model:
    return Model(name="gpt", hidden=hidden, layers=layers, heads=heads, kv_heads=heads,
                 ffn=4 * hidden, vocab=51200, sequence=2048, gated=False)  # fmt: skip


LLAMA2_13B = Model(name="13b", hidden=5120, layers=40, heads=40, kv_heads=40, ffn=13824,
                   vocab=32000, sequence=4096)  # fmt: skip
LLAMA2_70B = Model(name="70b", hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672,
                   vocab=32000, sequence=4096)  # fmt: skip
FSDP: dict[str, Any] = {"data_parallel_sharding": "fsdp"}
UNFUSED: dict[str, Any] = {"flash_attention": False}


class Setup(NamedTuple):
    """One that was run, or that ran out of memory; GB of its GPUs."""

    model: Model
    layout: Layout
    gb: int
    fits: bool
    peak_gib: float = 0.0


def titan(model: Model, gpus: int, gib: float, **more: Any) -> Setup:
    return Setup(model, Layout.on(gpus, **FSDP, **more), 96, True, gib)


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s of 96 GB, peak of what torch
# reserves. Its tables 5 and 6 are left out: torch keeps the weights of a pipeline stage gathered
LLAMA_8B = MODELS["llama3-8b"]
MEASURED = {
    "8B on 8, eager": titan(LLAMA_8B, 8, 82.4, micro_batch=2, recompute="selective"),
    "8B on 8, compiled": titan(LLAMA_8B, 8, 77.0, micro_batch=2, recompute="selective"),
    "8B on 128, eager": titan(LLAMA_8B, 128, 67.0, micro_batch=2, recompute="selective"),
    "8B on 128, compiled": titan(LLAMA_8B, 128, 62.0, micro_batch=2, recompute="selective"),
    **{f"8B on 8, cp {cp}": titan(LLAMA_8B, 8, gib, cp=cp, sequence=32768 * cp, recompute="full")
       for cp, gib in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5))},
    "70B on 256": titan(MODELS["llama3-70b"], 256, 71.9, tp=8, micro_batch=16, recompute="full"),
}  # fmt: skip
# arXiv 2205.05198, table 3 and figure 1: A100s of 80 GB
KORTHIKANTI = {
    "22B": (gpt(6144, 48, 64), 8, {"tp": 8, "micro_batch": 4}),
    "175B": (gpt(12288, 96, 96), 64, {"tp": 8, "pp": 8, "num_micro_batches": 64,
                                      "virtual_stages": 3}),
    "530B": (gpt(20480, 105, 128), 280, {"tp": 8, "pp": 35, "num_micro_batches": 280,
                                         "virtual_stages": 3}),
    "1T": (gpt(25600, 128, 160), 512, {"tp": 8, "pp": 64, "num_micro_batches": 512}),
}  # fmt: skip


def a100s(model: Model, fits: bool, **more: Any) -> Setup:
    """torchtitan, docs/performance.md of 2024-08: 64 A100s of 80 GB; one ran out of memory."""
    return Setup(model, Layout.on(64, **FSDP, **more), 80, fits)


SETUPS = {
    **MEASURED,
    **{f"{name}, {'attention again' if fits else 'as it was'}":
       Setup(model, Layout.on(gpus, **UNFUSED, **degrees, **(
           {"recompute": "attn"} if fits else {"sequence_parallel": False})), 80, fits)
       for name, (model, gpus, degrees) in KORTHIKANTI.items() for fits in (True, False)},
    "8B on 64": a100s(LLAMA_8B, True, recompute="selective"),
    "70B on 64": a100s(MODELS["llama3-70b"], True, recompute="full"),
    "13B on 64": a100s(LLAMA2_13B, True, micro_batch=2),
    "13B on 64, selective": a100s(LLAMA2_13B, True, micro_batch=2, recompute="selective"),
    "2-70B on 64": a100s(LLAMA2_70B, True, recompute="selective"),
    "2-70B on 64, two": a100s(LLAMA2_70B, False, micro_batch=2, recompute="selective"),
    "2-70B on 64, two, full": a100s(LLAMA2_70B, True, micro_batch=2, recompute="full"),
    # the same document, later: 128 H100s of 94 GB ran out of memory without tensor parallelism
    "405B on 128": Setup(MODELS["llama3-405b"], Layout.on(128, micro_batch=2, recompute="full",
                                                          **FSDP), 94, False),
    "405B on 128, tp": Setup(MODELS["llama3-405b"], Layout.on(128, tp=8, micro_batch=2,
                                                              recompute="full", **FSDP), 94, True),
}  # fmt: skip
SMALLER = {  # the largest GPU that holds less than the peak; none by more than 1.5 times
    "8B on 8, eager": 80, "8B on 128, eager": 64, "70B on 256": 64, "8B on 8, cp 1": 80,
    "8B on 8, cp 2": 80, "8B on 8, cp 4": 80, "8B on 8, cp 8": 80,
}  # fmt: skip
SETUPS |= {
    f"{name}, on {gb} GB": MEASURED[name]._replace(gb=gb, fits=False)
    for name, gb in SMALLER.items()
}


def held(setup: Setup) -> Memory:
    machine = preset("h100-8")
    machine = replace(machine, device=replace(machine.device, hbm_bytes=setup.gb * 1e9))
    return training(setup.model, setup.layout, machine, Fabric())


@pytest.mark.parametrize("name", SETUPS)
def test_the_verdict_on_published_setups(name: str):
    setup = SETUPS[name]
    found = held(setup)
    assert found.fits == setup.fits, str(found)
    assert found.num_bytes == pytest.approx(sum(found.parts.values()))
    assert bool(found.changes) != found.fits
    if setup.peak_gib and setup.gb < 96:
        assert setup.gb * 1e9 < setup.peak_gib * GIB < 1.5 * setup.gb * 1e9


@pytest.mark.parametrize("name", MEASURED)
def test_the_peak_is_near_what_was_measured(name: str):
    setup = MEASURED[name]
    near = CLOSE if setup.layout.tp == 1 else 0.11  # of loss_parallel, which keeps more
    assert held(setup).num_bytes / GIB == pytest.approx(setup.peak_gib, rel=near)


@pytest.mark.parametrize(("model", "layout"), [
    ("llama3-405b", Layout.on(8, tp=8)), ("llama3-8b", Layout.on(8)),
    ("deepseek-v3", Layout.on(64, ep=8)), ("qwen3-235b", Layout.on(8, ep=8, **FSDP)),
    ("llama3-70b", Layout.on(16, tp=2, pp=8, micro_batch=2)),
])  # fmt: skip
def test_what_is_said_instead_fits(model: str, layout: Layout):
    """Each line is a layout; it changes what it says, and that alone."""
    known, machine = MODELS[model], preset("h100-8")
    found = training(known, layout, machine, Fabric())
    assert not found.fits and str(found).startswith("DOES NOT FIT") and 1 <= len(found.changes) <= 3
    for line in found.changes:
        words = dict(word.rsplit(" ", 1)[:: 1 if not word.endswith("GPUs") else -1]
                     for word in line.split(", "))  # fmt: skip
        gpus = int(words.pop("GPUs", layout.num_gpus))
        names = {"sharding": "data_parallel_sharding", "micro-batch": "micro_batch"}
        changed: dict[str, Any] = {
            names.get(key, key): int(value) if value.isdigit() else value
            for key, value in words.items()
        }
        kept = {
            key: getattr(layout, key)
            for key in ("tp", "pp", "ep", "micro_batch", "recompute", "data_parallel_sharding")
        }
        other = Layout.on(gpus, **(kept | changed))
        assert training(known, other, machine, Fabric()).fits, line


def test_a_step_says_whether_it_fits_before_what_it_gains():
    found = predict("llama3-405b", Layout.on(8, tp=8))
    assert not found.memory.fits and found.memory.num_bytes > 0.9e12
    assert "DOES NOT FIT" in found.explain().splitlines()[2]
    tables = predict("dlrm-dcnv2", Layout(dp=8, micro_batch=64)).memory
    assert tables.fits and tables.parts["tables"] == pytest.approx(6.6e9, rel=0.02)
    small = replace(preset("a40-8"), device=replace(preset("a40-8").device, hbm_bytes=4e9))
    assert predict("dlrm-dcnv2", Layout(dp=8, micro_batch=64), machine=small).memory.changes == (
        "16 GPUs",
    )


def test_each_means_takes_its_share():
    """Fewer bytes by each change, and by as much as it is known to bring."""

    def of(**more: Any) -> Memory:
        return held(Setup(LLAMA_8B, Layout.on(64, **more), 80, True))

    none, zero1, fsdp = (of(data_parallel_sharding=how) for how in ("none", "zero1", "fsdp"))
    assert none.parts["optimizer"] == pytest.approx(64 * zero1.parts["optimizer"])
    assert zero1.parts["gradients"] == pytest.approx(64 * fsdp.parts["gradients"])
    again = [
        of(recompute=how).parts["activations"] for how in ("none", "attn", "selective", "full")
    ]
    assert again == sorted(again, reverse=True) and again[0] > 5 * again[-1]
    shares = of(tp=8), of(tp=8, sequence_parallel=False)
    assert shares[0].parts["activations"] < shares[1].parts["activations"]


@pytest.mark.parametrize(("pp", "parts", "batches", "schedule"), [
    (1, 1, 4, "1f1b"), (4, 1, 8, "1f1b"), (4, 1, 2, "1f1b"), (8, 1, 16, "zero-bubble"),
    (4, 1, 2, "zero-bubble"), (4, 2, 8, "1f1b"), (4, 8, 16, "1f1b"), (8, 4, 8, "1f1b"),
    (2, 4, 8, "1f1b"),
])  # fmt: skip
def test_micro_batches_in_flight_are_those_of_the_pipeline(
    pp: int, parts: int, batches: int, schedule: Any
):
    layout = Layout(pp=pp, virtual_stages=parts, num_micro_batches=batches, schedule=schedule)
    ones = (1.0,) * parts
    stages = [Stage(ones, ones, ones if schedule == "zero-bubble" else ())] * pp
    for stage in range(pp):
        held = most = 0
        for event in order(stage, stages, batches):
            # what a backward of weights apart reads is kept until then
            ends = "weight gradients" if schedule == "zero-bubble" else "backward"
            held += (event.kind == "forward") - (event.kind == ends)
            most = max(most, held)
        assert in_flight(layout, stage) == pytest.approx(most / parts), stage


@pytest.mark.parametrize(("model", "layout"), [
    ("deepseek-v3", Layout.on(2048, pp=16, ep=8, recompute="selective", num_micro_batches=16)),
    ("llama3-405b", Layout.on(16384, tp=8, pp=16, virtual_stages=4, recompute="selective")),
    ("llama3-8b", Layout.on(64, pp=4, schedule="zero-bubble", num_micro_batches=8)),
])  # fmt: skip
def test_the_fullest_stage_counts(model: str, layout: Layout):
    """It may be none at an end: those have fewer layers, or dense ones."""
    machine = preset("h100-8")
    step = Step(Layers(MODELS[model], layout, Network(machine, Fabric()), "none"))
    each = [sum(stage_bytes(step, stage).values()) for stage in range(layout.pp)]
    assert training(MODELS[model], layout, machine, Fabric()).num_bytes == max(each)


def test_what_is_gathered_or_grows_with_the_batch_counts():
    of = {again: predict("llama3-8b", Layout.on(64, pp=4, recompute=again, **FSDP)).memory
          for again in ("none", "attn")}  # fmt: skip
    assert of["attn"].num_bytes == of["none"].num_bytes  # flash attention keeps no scores
    long = predict("gpt3-175b", Layout.on(2048, cp=512, sequence=2**20, recompute="full", **FSDP))
    # keys and values of all tokens, and their gradients, in bf16
    assert long.memory.parts["activations"] > 2 * 2**20 * 2 * 12288 * 2
    few, many = (predict("dlrm-dcnv2", Layout(dp=8, micro_batch=n)).memory.parts["activations"]
                 for n in (64, 2**20))  # fmt: skip
    assert many == 2**14 * few > 55e9
    freed = predict("llama3-8b", Layout.on(64, tp=8, sequence=2**20, recompute="full"))
    assert "cp 8" in freed.memory.changes[0]
