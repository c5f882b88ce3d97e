"""Steps with some mechanisms: what serial and ours are of them, and what puts of the GPU take."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from benchmarks.rows import results
from counterpoint.choose.by_model import parts_s
from counterpoint.machine_of import machine_of
from counterpoint.presets import preset
from counterpoint.scale import Fabric, Layout, predict
from counterpoint.scale.layer import Layers
from counterpoint.scale.mechanisms import puts
from counterpoint.scale.mechanisms.chosen import ChosenDlrm, ChosenLayers, ChosenStep, Name
from counterpoint.scale.mechanisms.fp8 import FP8_CAST_BYTES, multiplies_fp8
from counterpoint.scale.mechanisms.sizes import sizes
from counterpoint.scale.models import MODELS
from counterpoint.scale.network.fabric import Network
from counterpoint.scale.operators import pair_s
from counterpoint.scale.recommenders.dlrm import DLRMS
from counterpoint.scale.recommenders.step import DlrmStep

NETWORK = Network(preset("h100-8"), Fabric())
PAPER = DLRMS["dlrm-paper"]
NODES = Network(preset("h100-1"), Fabric(nic_bytes_per_s=25e9))


def seconds(model: str, layout: Layout, *on: Name) -> float:
    layers = ChosenLayers(MODELS[model], layout, NETWORK, "none", frozenset(on))
    return ChosenStep(layers).run()[1].seconds


def paper(gpus: int, *on: Name) -> ChosenDlrm:
    layout = Layout(dp=gpus, micro_batch=PAPER.batch // gpus)
    return ChosenDlrm(PAPER, layout, NODES, "none", frozenset(on))


@pytest.mark.parametrize(
    ("model", "on", "degrees"),
    [
        ("llama3-70b", ("tensor parallel",), {"tp": 8, "dp": 2, "data_parallel_sharding": "fsdp"}),
        ("llama3-8b", ("tensor parallel",), {"tp": 4, "pp": 2, "schedule": "zero-bubble"}),
        ("deepseek-v3", ("experts",), {"dp": 8, "ep": 8}),
        ("deepseek-v3", ("experts", "routes"), {"dp": 64, "ep": 64}),
    ],
)
def test_nothing_is_serial_and_all_that_a_column_has_is_ours(
    model: str, on: tuple[Name, ...], degrees: dict[str, Any]
):
    layout = Layout(**degrees)
    none, ours = (predict(model, layout, overlap=o).seconds for o in ("none", "ours"))
    assert seconds(model, layout) == pytest.approx(none)
    assert seconds(model, layout, *on) == pytest.approx(ours) and ours < none


def test_a_dlrm_has_the_same_two():
    none, ours = (DlrmStep(PAPER, paper(16).layout, NODES, o) for o in ("none", "ours"))
    assert paper(16).run()[0] == pytest.approx(none.run()[0])
    assert paper(16, "embedding").run()[0] == pytest.approx(ours.run()[0])


def test_puts_take_what_a_published_dispatch_does():
    """DeepEP's tokens for other nodes of 8, at the NIC's rate here, and the constant beside it."""
    for gpus, published_s in puts.PUBLISHED_S.items():
        far = (gpus - 8) / gpus
        sent_s = far * puts.PUBLISHED_PUTS * puts.PUT_BYTES.value / NETWORK.nic.bytes_per_s
        assert sent_s + puts.PUT_S.value == pytest.approx(published_s, rel=0.035)


def test_puts_hide_no_more_than_the_shorter_side():
    for place in (paper(16).place, paper(128).place):
        compute_s, links_s = parts_s(place.problem, place.machine)
        found_s, serial_s = puts.seconds(place, NODES), pair_s(place, "none")[0]
        assert max(compute_s, links_s) + puts.PUT_S.value < found_s < serial_s
    # so little to send that it is late anyway
    little = ChosenDlrm(PAPER, Layout(dp=128, micro_batch=1), NODES, "none").place
    assert puts.seconds(little, NODES) == pair_s(little, "none")[0]


def test_puts_are_between_nodes_alone():
    layout = Layout(dp=8, ep=8)
    assert seconds("deepseek-v3", layout, "puts") == seconds("deepseek-v3", layout)
    far = Layout(dp=64, ep=64)
    alone, with_ours, ours = (
        seconds("deepseek-v3", far, *on)
        for on in (("puts",), ("experts", "routes", "puts"), ("experts", "routes"))
    )
    assert with_ours < ours < alone < seconds("deepseek-v3", far)


def test_no_column_has_puts():
    step = predict("dlrm-paper", paper(128).layout, NODES.fabric, NODES.machine, overlap="ours")
    assert not any("put_s" in line for line in step.assumptions)
    assert step.seconds == pytest.approx(paper(128).run()[1].seconds)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_fsdp2_takes_what_was_measured(ranks: int, tokens: int):
    """Six Llama-8B layers, without the head: both ways, and what cp.overlap saves."""
    rows = [row for row in results("fsdp", gpu="h200")[ranks] if row["case"] == f"eager {tokens}"]
    measured = {row["arm"]: row["median_s"] for row in rows}  # the last ones
    model = replace(MODELS["llama3-8b"], layers=6, vocab=2)
    layout = Layout(dp=ranks, sequence=tokens, data_parallel_sharding="fsdp")
    network = Network(machine_of("test", f"h200-{ranks}"), Fabric())
    as_is, ours = (
        ChosenStep(ChosenLayers(model, layout, network, "none", frozenset(on))).run()
        for on in ((), ("FSDP",))
    )
    # this benchmark's step has no optimizer, but for one of its cases
    for (parts, stages), arm in ((as_is, "as is"), (ours, "ours")):
        assert stages.seconds - parts["optimizer"] == pytest.approx(measured[arm], rel=0.06)
    saved_s = as_is[1].seconds - ours[1].seconds
    assert saved_s == pytest.approx(measured["as is"] - measured["ours"], rel=0.2)


def test_shards_on_several_nodes_are_left_to_torch():
    layout = Layout(dp=16, data_parallel_sharding="fsdp")
    assert seconds("llama3-8b", layout, "FSDP") == seconds("llama3-8b", layout)
    of_experts = Layout(dp=8, ep=8, data_parallel_sharding="fsdp")
    assert seconds("mixtral-8x7b", of_experts, "FSDP") < seconds("mixtral-8x7b", of_experts)


def test_casts_are_as_measured():
    rows = [r for r in results("fp8", gpu="h100")[2] if r.get("arm") == "cast"]
    costs, found = NETWORK.machine.costs, list[float]()
    for row in rows:
        numbers = row["m"] * row["k"] / (2 if row["op"] == "all_gather_matmul" else 1)
        found.append((row["median_s"] - costs.kernel_s) * costs.hbm_bytes_per_s / numbers)
    assert len(found) == 10 and median(found) == pytest.approx(FP8_CAST_BYTES.value, rel=0.05)


def test_fp8_forwards_alone_are_faster():
    both: list[Any] = [
        ChosenLayers(MODELS["llama3-70b"], Layout(tp=8), NETWORK, "none", frozenset(on)).dense()
        for on in (("tensor parallel",), ("tensor parallel", "fp8"))
    ]
    assert both[1].backward == both[0].backward and both[1].weights == both[0].weights
    assert both[1].forward["matmuls"] < 0.7 * both[0].forward["matmuls"]
    assert both[1].forward["memory"] > both[0].forward["memory"]  # casts
    assert [multiplies_fp8(preset(f"{gpu}-8").device) for gpu in ("h100", "a100", "mi300x")] == [
        True, False, False
    ]  # fmt: skip


def test_keys_beside_attention_are_no_more_than_what_is_exposed():
    layout = Layout(cp=4, tp=2)
    layers = (
        Layers(MODELS["llama3-8b"], layout, NETWORK, "none"),
        ChosenLayers(MODELS["llama3-8b"], layout, NETWORK, "none", frozenset({"attention"})),
    )
    before, after = (each.dense() for each in layers)
    for one, other in ((before.forward, after.forward), (before.backward, after.backward)):
        assert 0 <= other["context parallel"] < one["context parallel"]
        assert other["attention"] == one["attention"]


def test_what_128_nodes_save_by_sizes():
    """5 % at the assumed sizes, 11 % where the step is hardly anything else; never the 21 %."""
    found = sizes(paper(128))
    given = found[0]
    assert given.label == "as given" and given.ours == 0
    assert 0.04 < given.puts < 0.05 and given.of_forward > 0.21
    assert len({each.label for each in found}) == len(found) == 8
    for each in found:
        assert each.ours <= each.puts <= each.bound < 0.12 and each.puts < each.of_forward
    assert max(found, key=lambda each: each.puts).label == "no hidden layers, 4x the batch"
    assert sizes(ChosenDlrm(PAPER, Layout(dp=128, micro_batch=2), NODES, "none"))[1].label == (
        "4x the batch"
    )
