"""Whole steps: what holds of every prediction, and what is refused."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import python

from benchmarks.rows import results
from counterpoint import scale
from counterpoint.errors import InputError
from counterpoint.presets import preset
from counterpoint.scale import Fabric, Layout, Model, constants, pipeline, predict
from counterpoint.scale.assumptions import GROUPS, listed
from counterpoint.scale.layer import Layers
from counterpoint.scale.models import MODELS
from counterpoint.scale.network.fabric import Group, Network
from counterpoint.scale.prediction import WIDEST
from counterpoint.timeline import Timeline

LLAMA = Layout.on(16384, tp=8, pp=16, virtual_stages=4)
TINY = Model(
    name="tiny", hidden=1024, layers=8, heads=16, kv_heads=4, ffn=4096, vocab=32000, sequence=2048
)
TAKEN = constants.BESIDE.value
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
                          (Layout(dp=16, data_parallel_sharding="fsdp"), TINY),
                          (Layout(tp=2, pp=4, schedule="zero-bubble"), TINY)):  # fmt: skip
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


@pytest.mark.parametrize(
    ("layout", "model"),
    [(Layout(tp=2, pp=4, recompute="full"), TINY), (Layout(dp=8, ep=8, pp=4), "mixtral-8x7b"),
     (Layout(tp=2, pp=4, sequence_parallel=False), TINY)],
)  # fmt: skip
def test_zero_bubble_is_the_same_work_in_another_order(layout: Layout, model: Any):
    plain, apart = (
        predict(model, replace(layout, schedule=each)) for each in ("1f1b", "zero-bubble")
    )
    assert apart.parts["bubble"] < 0.7 * plain.parts["bubble"]
    for name in plain.parts.keys() - {"bubble", "data parallel"}:
        assert apart.parts[name] == pytest.approx(plain.parts[name]), name


def test_gradients_that_only_the_last_gradients_of_weights_complete_have_less_beside_them():
    layout, fabric = Layout(pp=2, dp=64, micro_batch=4), Fabric(nic_bytes_per_s=2e9)
    plain, apart = (predict(TINY, replace(layout, schedule=each), fabric).parts["data parallel"]
                    for each in ("1f1b", "zero-bubble"))  # fmt: skip
    assert apart > plain > 0


def test_a_step_has_as_many_events_whatever_the_replicas(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    ordered = pipeline.order

    def counting(*given: Any) -> Iterator[pipeline.Event]:
        events = list(ordered(*given))
        counts.append(len(events))
        return iter(events)

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


def test_tensor_parallel_ranks_of_several_islands_take_plans_between_them():
    """16 ranks on 8-GPU islands: the NIC has a lane."""
    network = Network(preset("h200-8"), Fabric())
    machine = network.as_islands(Group(16, 1))
    assert machine is not None and machine.nic is not None
    assert machine.nic.bytes_per_s == pytest.approx(network.nic.bytes_per_s)
    assert machine.costs.copy_bytes_per_s == network.machine.costs.copy_bytes_per_s
    assert network.as_islands(Group(8, 1)) is None
    layout = Layout.on(64, tp=16, dp=4)
    ours, none = (
        predict("llama3-405b", layout, machine="h200-8", overlap=o) for o in ("ours", "none")
    )
    assert ours.seconds < none.seconds


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
    found = predict("deepseek-v3", Layout.on(64, ep=64), overlap="ours")
    text = " ".join(found.explain().split())
    for said in (
        "not checked experts well enough", "against any published step: latent attention, plans "
        "across islands; the band is the widest", "assumed nic_share = 0.9",
        "model deepseek-v3, arXiv 2412.19437", "derived from the datasheet",
    ):  # fmt: skip
        assert said in text
    groups = {line.partition(": ")[0] for line in found.assumptions}
    assert groups <= set(GROUPS)


def test_facts_are_listed_by_group_and_none_is_lost():
    lines = ["fabric: a", "model: " + "long " * 40, "other: b", "fabric: c", "ASSUMED: d: e"]
    text = listed(lines, 60)
    rows = text.splitlines()
    assert rows[0] == "stands on:" and max(map(len, rows)) <= 60
    assert text.count("long") == 40
    short = ["fabric        a", "              c", "assumed       d: e", "              other: b"]
    assert [row for row in rows if row in short] == short and rows[1].startswith(
        "model         long"
    )
    assert rows[2].startswith(" " * 16 + "long")  # what is wrapped hangs


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
        ({"virtual_stages": 2, "schedule": "zero-bubble"},
         "virtual_stages must be 1 with schedule zero-bubble, which has no interleaved form here, "
         "got 2"),
        ({"schedule": "zb"}, "schedule must be"),
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
    """But for the first gather and the last scatter, which lie beside no layer."""
    model = replace(TINY, vocab=1)

    def exposed_s(nic: float, **options: Any) -> float:
        layout = Layout(dp=64, data_parallel_sharding="fsdp", **options)
        return predict(model, layout, Fabric(nic_bytes_per_s=nic)).parts["data parallel"]

    whole_s = exposed_s(50e9, micro_batch=32, asynchronous=False)
    found_s = exposed_s(50e9, micro_batch=32)
    assert TAKEN * whole_s < found_s < (TAKEN + (1 - TAKEN) / model.layers) * whole_s
    # of links too slow for that, all but the computation beside them
    slow_s, all_s = exposed_s(1e9), exposed_s(1e9, asynchronous=False)
    assert whole_s < slow_s < all_s


@pytest.mark.parametrize("gpus", [2, 4])
def test_fsdp2_steps_are_near_what_was_measured_of_them(gpus: int):
    """Six Llama-8B layers as torch runs them, without an optimizer; and computation alone.

    Hosts differ: of 1024 tokens 2 GPUs took 40 and 47 ms, and 4 GPUs 35.
    """
    rows = {
        (row["arm"], row["tokens"]): row["median_s"] for row in results("fsdp")[gpus]
        if row["form"] == "eager" and not row["adamw"] and row["memory"] == "kept"
    }  # fmt: skip
    for tokens, off in ((1024, 0.3), (4096, 0.06), (8192, 0.06)):
        model = Model(name="8B", hidden=4096, layers=6, heads=32, kv_heads=8, ffn=14336, vocab=1,
                      sequence=tokens)  # fmt: skip
        alone, sharded = (
            predict(model, Layout(dp=n, data_parallel_sharding="fsdp"), machine=f"h200-{gpus}")
            for n in (1, gpus)
        )
        for found, arm, near in ((alone, "compute", 0.06), (sharded, "as is", off)):
            seconds = found.seconds - found.parts["optimizer"]
            assert seconds == pytest.approx(rows[arm, tokens], rel=near), (arm, tokens)
        assert sharded.parts["FSDP copies"] > 0 == alone.parts.get("FSDP copies", 0)


def test_eager_experts_of_transformers_are_bound_by_the_host():
    """A Qwen3-MoE without its optimizer: of 8192 tokens, what its host takes adds to the GPUs'."""
    sizes: dict[str, Any] = {
        "hidden": 2048, "layers": 8, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 0,
        "experts": 128, "top_k": 8, "expert_ffn": 768,
    }  # fmt: skip
    rows = [row for row in results("transformers_experts")[2] if row["arm"] == "all_to_all"]
    assert {row["tokens"] for row in rows} == {4096, 8192}
    for row in rows:
        model = Model(name="Qwen3-MoE", vocab=25344, sequence=row["tokens"], **sizes)
        layout = Layout(dp=2, ep=2, data_parallel_sharding="fsdp")
        found = predict(model, layout, machine="h200-2")
        seconds = found.seconds - found.parts["optimizer"]
        assert seconds == pytest.approx(row["gradients_s"], rel=0.16)
        assert found.parts["host"] > 0.2 * seconds


def test_a_step_waits_for_its_slowest_gpu_and_its_fullest_rank():
    def parts_of(model: Model, **layout: Any) -> dict[str, float]:
        return predict(model, Layout(**layout)).parts

    few, some, many = (parts_of(TINY, dp=dp) for dp in (4, 64, 4096))
    assert few["stragglers"] == 0 < some["stragglers"] < many["stragglers"]
    assert many["stragglers"] < 0.06 * many["matmuls"] * 2
    assert few["small kernels"] == some["small kernels"]
    moe = replace(TINY, experts=16, top_k=2, expert_ffn=2048)
    one, shared, spread = (parts_of(moe, dp=16, ep=ep) for ep in (1, 4, 16))
    assert one["imbalance"] == one["host"] == 0 < one["routing"]
    less, more = (
        each["imbalance"] / (each["experts"] + each["all-to-all"]) for each in (shared, spread)
    )
    assert 0.05 < less < more < 0.3
    assert shared["host"] == pytest.approx(moe.layers * constants.COUNTS_S.value)
    assert predict(moe, Layout(dp=16, ep=4), overlap="ours").parts["host"] == 0


def test_a_band_is_the_widest_where_no_published_step_was_alike():
    for layout, wide in ((Layout(tp=2, pp=4), False), (Layout(dp=8, ep=8), True),
                         (Layout(dp=8, cp=2), True),
                         (Layout(dp=8, data_parallel_sharding="fsdp"), False)):  # fmt: skip
        model = MODELS["mixtral-8x7b"] if layout.ep > 1 else TINY
        found = predict(model, layout)
        low, high = (edge / found.seconds for edge in found.band_s)
        assert found.widest is wide and low < 1 < high
        assert (low, high) == pytest.approx(WIDEST) if wide else WIDEST[0] < low
        assert high < WIDEST[1] + 1e-9 and ("the widest" in found.explain()) is wide


def test_gradients_are_hidden_behind_one_micro_batch_but_for_the_last_layers():
    def exposed_s(nic: float, **options: Any) -> float:
        layout = Layout(dp=64, num_micro_batches=4, **options)
        return predict(TINY, layout, Fabric(nic_bytes_per_s=nic)).parts["data parallel"]

    whole_s = exposed_s(50e9, asynchronous=False)
    last_s = whole_s / TINY.layers
    hidden_s = whole_s - last_s
    assert exposed_s(50e9, micro_batch=32) == pytest.approx(last_s + hidden_s * TAKEN)
    assert exposed_s(1e9) > exposed_s(1e9, asynchronous=False) / 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_timeline_has_a_lane_of_each_stage_and_fills_the_step(schedule: Any):
    layout = Layout(tp=2, pp=4, dp=16, num_micro_batches=6, schedule=schedule)
    found = predict(TINY, layout)
    timeline = found.timeline
    assert timeline.ranks == (0, 32, 64, 96)  # the first of each stage
    assert timeline.lanes(32) == ("stage 1",)
    assert timeline.start_s == 0 and timeline.end_s == pytest.approx(found.seconds)
    kinds = 3 if schedule == "zero-bubble" else 2
    assert len(timeline.spans) == 4 * (kinds * 6 + 2)
    ends = {span.label: span.end_s for span in timeline.spans if span.rank == 96}
    assert ends["forward 5"] < ends["backward 5"] < ends["data parallel"] < ends["optimizer"]
    parts, last = found.parts, ("data parallel", "optimizer")
    own = (s for s in timeline.spans if s.rank == 96)  # the busiest stage, which has the head
    worked_s = sum(span.duration_s for span in own if span.label not in last)
    other_s = sum(parts[name] for name in ("bubble", *last))
    assert worked_s == pytest.approx(found.seconds - other_s)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_prediction_is_as_good_after_a_pickle():
    found = predict(TINY, Layout(tp=2, pp=4, virtual_stages=2))
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.timeline == found.timeline
    assert found != predict(TINY, Layout(tp=2, pp=4))
    assert "array" not in repr(found)


def test_rows_of_experts_fill_their_last_tile_by_half_in_the_mean():
    model = replace(TINY, experts=4, top_k=1, expert_ffn=4096)
    layers = Layers(model, Layout(), Network(preset("h100-8"), Fabric()), "none")
    rows = TINY.sequence
    of_each = rows / 4 + layers.alone.gemm_tile[0] / 2
    gate_up_s = layers.matmul_s(of_each, 2 * 4096, 1024, count=4)
    down_s = layers.matmul_s(of_each, 1024, 4096, count=4)
    forward = layers.sparse().forward
    assert forward["experts"] == pytest.approx(gate_up_s + down_s)


@pytest.mark.parametrize(
    ("options", "there", "back"),
    [
        ({"expert_rows": "fused"}, 6, 8), ({}, 24, 28), ({"expert_rows": "torch"}, 40, 64),
        ({"data_parallel_sharding": "fsdp"}, 40, 64),
        ({"data_parallel_sharding": "fsdp", "expert_rows": "megatron"}, 24, 28),
    ],
)  # fmt: skip
def test_rows_go_into_the_order_of_their_experts_and_back(
    options: dict[str, Any], there: int, back: int
):
    """By bytes of a number of a routed row, which a layer without experts has none of."""
    model = replace(TINY, experts=4, top_k=2, expert_ffn=2048)
    layers = Layers(model, Layout(**options), Network(preset("h100-8"), Fabric()), "none")
    layer, dense = layers.sparse(), replace(layers, model=TINY).dense()
    for num_bytes, part, without in ((there, layer.forward, dense.forward),
                                     (back, layer.backward, dense.backward)):  # fmt: skip
        seconds = layers.memory_s(num_bytes * 2 * TINY.sequence * TINY.hidden)
        assert part["memory"] - without["memory"] == pytest.approx(seconds)


def test_experts_that_we_share_out_have_fused_rows_whatever_the_framework():
    def memory_s(overlap: Any, **options: Any) -> float:
        moe = replace(TINY, experts=16, top_k=2, expert_ffn=2048)
        return predict(moe, Layout(dp=16, **options), overlap=overlap).parts["memory"]

    fused_s = memory_s("none", ep=4, expert_rows="fused")
    assert memory_s("ours", ep=4) == pytest.approx(fused_s)
    assert memory_s("none", ep=4) > fused_s
    assert memory_s("ours") == memory_s("none") > memory_s("ours", expert_rows="fused")


def test_selective_recomputation_keeps_no_grouped_matmul():
    """Half of the other matmuls and of the all-to-alls, and all of the experts."""
    moe = replace(TINY, experts=16, top_k=2, expert_ffn=2048)
    layers = (
        Layers(moe, Layout(dp=4, ep=4, recompute=how), Network(preset("h100-8"), Fabric()), "none")
        for how in ("none", "selective")
    )
    none, selective = (each.sparse() for each in layers)
    for name, share in (("matmuls", 0.5), ("all-to-all", 0.5), ("experts", 1.0)):
        again_s = selective.backward[name] - none.backward[name]
        assert again_s == pytest.approx(share * none.forward[name])


@pytest.mark.parametrize("overlap", ["none", "ours"])
def test_a_host_that_waits_for_counts_launches_no_experts_ahead(overlap: Any):
    """Then its calls add to what GPUs take; else a layer takes the longer of both."""

    def host_s(**options: Any) -> float:
        moe = replace(TINY, experts=16, top_k=2, expert_ffn=2048)
        layout = Layout(dp=16, data_parallel_sharding="fsdp", **options)
        return predict(moe, layout, overlap=overlap).parts["host"]

    call_s = preset("h100-8").costs.host_call_s
    waits_s = TINY.layers * (constants.FSDP_EXPERT_CALLS.value * call_s + constants.COUNTS_S.value)
    long_s = host_s(ep=4, micro_batch=64)
    assert long_s == pytest.approx(waits_s if overlap == "none" else 0.0)
    assert host_s(micro_batch=64) == 0 < host_s() and host_s(ep=4) > long_s
