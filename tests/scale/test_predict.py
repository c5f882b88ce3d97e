"""Whole steps: what holds of every prediction, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import python

from counterpoint import scale
from counterpoint.errors import InputError
from counterpoint.presets import preset
from counterpoint.scale import Fabric, Layout, Model, pipeline, predict
from counterpoint.scale.models import MODELS

LLAMA = Layout.on(16384, tp=8, pp=16, virtual_stages=4)
TINY = Model(
    name="tiny", hidden=1024, layers=8, heads=16, kv_heads=4, ffn=4096, vocab=32000, sequence=2048
)
PUBLISHED_SIZES = {
    "llama3-8b": 8.0e9, "llama3-70b": 70.6e9, "llama3-405b": 405e9, "gpt3-175b": 175e9,
    "mixtral-8x7b": 46.7e9, "deepseek-v3": 671e9, "qwen3-235b": 235e9,
}  # fmt: skip


@pytest.mark.parametrize("first", scale.__all__)
def test_public_names_are_found_in_any_order(first: str):
    """No file of the package has the name of a function, which importing it would replace."""
    code = (
        "import counterpoint as cp\n"
        f"cp.scale.{first}\n"
        "print(callable(cp.scale.predict), callable(cp.scale.Dlrm), dir(cp.scale))"
    )
    assert python("-c", code) == f"True True {scale.__all__}\n"


@pytest.mark.parametrize("name", MODELS)
def test_a_models_sizes_give_its_parameters(name: str):
    """As published; embeddings that are tied there are counted twice here."""
    assert MODELS[name].parameters == pytest.approx(PUBLISHED_SIZES[name], rel=0.01)
    assert MODELS[name].source


@pytest.mark.parametrize("overlap", ["none", "ours", "ideal"])
def test_parts_add_up_to_the_step(overlap: Any):
    for layout, model in ((LLAMA, "llama3-405b"), (Layout(tp=8, asynchronous=False), "llama3-8b"),
                          (Layout(dp=16, ep=8), "mixtral-8x7b"), (Layout(tp=2, cp=2), TINY),
                          (Layout(dp=16, data_parallel_sharding="fsdp"), TINY)):  # fmt: skip
        found = predict(model, layout, overlap=overlap)
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert min(found.parts.values()) >= -1e-9
        assert 0 < found.flop_per_s < preset("h100-8").device.bf16_flop_per_s


def test_overlap_saves_communication_and_nothing_else():
    none, ours, ideal = (
        predict("llama3-405b", LLAMA, overlap=o) for o in ("none", "ours", "ideal")
    )
    assert none.seconds > ours.seconds > ideal.seconds
    assert none.parts["tensor parallel"] > ours.parts["tensor parallel"]
    assert ideal.parts["tensor parallel"] == pytest.approx(0, abs=1e-9)
    for same in ("matmuls", "attention", "memory"):
        assert none.parts[same] == ours.parts[same] == ideal.parts[same]


def test_a_step_has_as_many_events_whatever_the_replicas(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    ordered = pipeline.order

    def counting(*sizes: int) -> list[pipeline.Event]:
        events = ordered(*sizes)
        counts.append(len(events))
        return events

    monkeypatch.setattr(pipeline, "order", counting)
    seen: set[int] = set()
    for dp in (1, 128, 8192):
        counts.clear()
        predict("llama3-405b", replace(LLAMA, dp=dp), Fabric(levels=((3072, 7.0),)))
        seen.add(sum(counts))
    assert seen == {2 * 16 * 4 * 16}  # 2,048, on up to 2**20 GPUs


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 16]),
    st.sampled_from(["none", "zero1", "fsdp"]), st.booleans(), st.floats(1, 8),
)  # fmt: skip
def test_a_faster_nic_is_never_slower(
    tp: int, pp: int, dp: int, sharding: Any, asynchronous: bool, factor: float
):
    layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=4, data_parallel_sharding=sharding,
                    asynchronous=asynchronous)  # fmt: skip
    slow, fast = (predict(TINY, layout, Fabric(nic_bytes_per_s=rate)).seconds
                  for rate in (25e9, 25e9 * factor))  # fmt: skip
    assert fast <= slow * (1 + 1e-9)


def test_more_micro_batches_take_longer_in_proportion():
    layout = Layout(tp=2, pp=4, num_micro_batches=4)
    times = [predict(TINY, replace(layout, num_micro_batches=n)).seconds for n in (4, 8, 12)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])


def test_recomputation_is_another_forward():
    found = {r: predict(TINY, Layout(tp=2, recompute=r)) for r in ("none", "attn", "full")}
    none, attn, full = (found[r].parts for r in ("none", "attn", "full"))
    assert none["matmuls"] == attn["matmuls"] < full["matmuls"]
    # forward and 2.5 of it; and the forward again
    assert attn["attention"] == full["attention"] == pytest.approx(4.5 / 3.5 * none["attention"])


def test_explain_says_what_it_stands_on():
    text = predict("deepseek-v3", Layout.on(64, ep=64), overlap="ours").explain()
    for said in ("not checked against any published step: experts", "plans across islands",
                 "nic_share 0.9", "arXiv 2412.19437", "by the residuals of published steps",
                 "derived from the datasheet"):  # fmt: skip
        assert said in text


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "tp must be a divisor of the 32 heads of llama3-8b, got 3; the nearest that "
         "fits: 4"),
        ({"pp": 64}, r"pp \* virtual_stages must be at most the 32 layers of llama3-8b, got 64; "
         r"the nearest that fits: 32 \* 1"),
        ({"ep": 8}, "ep must be 1: llama3-8b has no experts, got 8"),
        ({"pp": 2, "virtual_stages": 2, "num_micro_batches": 7},
         "num_micro_batches must be a multiple of the 2 stages, .* the nearest that fits: 8"),
        ({"cp": 3}, "cp must be a divisor of the 8192 tokens of a sequence"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit(degrees: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        predict("llama3-8b", Layout(**degrees))


def test_experts_are_shared_out_among_replicas():
    with pytest.raises(InputError, match=r"ep must be a divisor of the 256 experts .* fits: 64"):
        predict("deepseek-v3", Layout(ep=48, dp=48))
    with pytest.raises(InputError, match="ep must be a divisor of the 12 ranks of dp and cp"):
        predict("deepseek-v3", Layout(ep=8, dp=12))


def test_degrees_multiply_to_the_gpus():
    assert Layout.on(4096, tp=8, pp=4).dp == 128
    with pytest.raises(InputError, match=r"multiply to the 60 GPUs, .* GPUs: 56 or 64"):
        Layout.on(60, tp=8)
    with pytest.raises(InputError, match="got tp 8 x cp 1 x pp 1 x dp 4; take this many GPUs: 32"):
        Layout.on(64, tp=8, dp=4)
    with pytest.raises(InputError, match=r"tp \* cp \* pp \* dp must be for at most 16777216"):
        Layout(dp=2**20, pp=2**10)


def test_what_is_no_model_or_mode():
    with pytest.raises(InputError, match="did you mean 'llama3-8b'"):
        predict("llama-8b", Layout())
    with pytest.raises(InputError, match="overlap must be one of none, ours, ideal"):
        predict(TINY, Layout(), overlap="all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="top_k must be 1 to 8 experts, got 9"):
        replace(MODELS["mixtral-8x7b"], top_k=9)


def test_fsdp_hides_what_a_layers_computation_is_long_enough_for():
    def exposed_s(nic: float, **options: Any) -> float:
        layout = Layout(dp=64, data_parallel_sharding="fsdp", **options)
        return predict(TINY, layout, Fabric(nic_bytes_per_s=nic)).parts["data parallel"]

    assert exposed_s(50e9, micro_batch=32) == 0
    assert exposed_s(50e9, micro_batch=32, asynchronous=False) > 0
    # of links too slow for that, all but the computation beside them
    beside_s = exposed_s(1e9, asynchronous=False) - exposed_s(1e9)
    step = predict(TINY, Layout()).parts
    layers_s = step["matmuls"] + step["attention"] + step["memory"]
    assert 0 < beside_s < layers_s


def test_gradients_are_hidden_behind_one_micro_batch_but_for_the_last_layers():
    def exposed_s(nic: float, **options: Any) -> float:
        layout = Layout(dp=64, num_micro_batches=4, **options)
        return predict(TINY, layout, Fabric(nic_bytes_per_s=nic)).parts["data parallel"]

    whole_s = exposed_s(50e9, asynchronous=False)
    assert exposed_s(50e9, micro_batch=32) == pytest.approx(whole_s / TINY.layers)
    assert exposed_s(1e9) > exposed_s(1e9, asynchronous=False) / 2
