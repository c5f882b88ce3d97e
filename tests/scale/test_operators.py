"""Operators of groups on several islands: which plans they are priced by, and what always holds."""

from dataclasses import replace
from math import comb
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.choose.choose import choose
from counterpoint.machine import Machine
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.scale import Fabric, Layout, predict
from counterpoint.scale.layer import Layers
from counterpoint.scale.models import MODELS
from counterpoint.scale.network.fabric import MAX_PLANNED, Group, Network
from counterpoint.scale.operators import OVERLAPS, pair_s, placed
from counterpoint.scale.parts import Sent
from counterpoint.scale.recommenders.dlrm import DLRMS
from counterpoint.scale.recommenders.step import DlrmStep

DEEPSEEK, PAPER = MODELS["deepseek-v3"], DLRMS["dlrm-paper"]
NETWORK = Network(preset("h200-8"), Fabric())
# one level of pods, rails, islands of one GPU, a torus: all of 64 GPUs
PODS, RAILS = Fabric(levels=((16, 4.0),)), Fabric(rails=True)


def layers(ep: int, overlap: Any, network: Network = NETWORK, **options: Any) -> Layers:
    return Layers(DEEPSEEK, Layout(dp=ep, ep=ep, **options), network, overlap)


def machine_of(network: Network, group: Group) -> Machine:
    found = network.as_islands(group)
    assert found is not None and found.nic is not None
    return found


def nic_of(fabric: Fabric, gpus: int = 64, node: str = "h200-8") -> float:
    """Of the NIC's own rate, what plans between islands see."""
    network = Network(preset(node), fabric)
    nic = machine_of(network, Group(gpus, 1)).nic
    assert nic is not None
    return nic.bytes_per_s / network.nic.bytes_per_s


def test_a_nic_has_the_rate_of_an_all_to_all():
    assert nic_of(Fabric()) == nic_of(RAILS) == nic_of(Fabric(), node="h200-1") == pytest.approx(1)
    assert nic_of(Fabric(nic_bytes_per_s=5e8)) == pytest.approx(1)
    # of 56 ranks on other islands, 48 are past the pod, at a quarter of the rate
    assert nic_of(PODS) == pytest.approx(56 / (48 * 4))
    # 8 x 1 islands: 8 messages go over each link, each way, of 4 links that share a NIC
    assert nic_of(Fabric(torus=(8, 1), nic_latency_s=0.0)) == pytest.approx(7 / (8 * 4))
    # the last of 7 messages is stored on the switch
    assert nic_of(Fabric(congestion="events")) == pytest.approx(7 / 8)


@pytest.mark.parametrize("fabric", [Fabric(), PODS, RAILS, Fabric(torus=(8,))], ids=str)
@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_serial_between_islands_is_an_all_to_all_on_links_of_its_rate(op: str, fabric: Fabric):
    network, group = Network(preset("h200-8"), fabric), Group(64, 1)
    problem = Problem(op, m=64 * 512, n=4096, k=7168, ranks=64, experts=4)
    between = placed(problem, network, group)
    flat = between._replace(problem=problem, machine=network.as_machine(group))
    late_s = 2 * network.nic.latency_s
    assert between.problem.islands == 8 and between.planned and not between.late_s
    assert pair_s(between, "none")[0] == pytest.approx(pair_s(flat, "none")[0] + late_s, rel=1e-3)


def test_experts_between_islands_go_by_routes_once_to_an_island():
    """What `choose` takes for that problem, and the bytes of a row for each island."""
    ours, none = layers(64, "ours").experts(), layers(64, "none").experts()
    rows, group = 4096 * DEEPSEEK.top_k, Group(64, 1)
    problem = Problem(
        "all_to_all_matmul", m=rows, n=4096, k=7168, ranks=64, islands=8, experts=4,
        counts="routed", top_k=8,
    )  # fmt: skip
    choice = choose(problem, machine_of(NETWORK, group))
    combine = replace(problem, op="matmul_all_to_all", n=7168, k=2048)
    back = choose(combine, machine_of(NETWORK, group))
    assert choice.spec == back.spec == "islands"
    exposed_s = choice.seconds - choice.compute_s + back.seconds - back.compute_s
    assert ours.forward["all-to-all"] == pytest.approx(exposed_s)
    assert ours.forward["experts"] == pytest.approx(none.forward["experts"])
    assert ours.seconds < 0.7 * none.seconds
    # of 256 experts, each of 8 islands has 32: how likely none of a token's 8 is among these
    none_there = comb(224, 8) / comb(256, 8)
    key = Sent("all-to-all", "all_to_all", group)
    assert none.forward.sent[key] == 2 * rows * 7168 * 2
    assert ours.forward.sent[key] == pytest.approx(none.forward.sent[key] * (1 - none_there))


def test_rows_by_routes_are_put_in_order_by_the_plan():
    """And their gradients weighted: 4 bytes of a row, 8 of a number between its matmuls."""
    ours, none = layers(64, "ours"), layers(64, "none", expert_rows="fused")
    rows = 4096 * DEEPSEEK.top_k
    both = ours.experts(), none.experts()
    for saved_s, (of, without) in (
        (ours.memory_s(6 * rows * 7168), [each.forward for each in both]),
        (ours.memory_s(8 * rows * 7168) - ours.memory_s(4 * rows * (7168 + 2 * 2048)),
         [each.backward for each in both]),
    ):  # fmt: skip
        assert without["memory"] - of["memory"] == pytest.approx(saved_s)


def test_within_an_island_a_row_goes_to_each_expert():
    ours, none = (layers(8, o, expert_rows="fused").experts() for o in ("ours", "none"))
    assert ours.forward.sent == none.forward.sent
    assert ours.forward["memory"] == none.forward["memory"]
    assert ours.seconds <= none.seconds


@settings(deadline=None, max_examples=5)
@given(
    st.sampled_from(["mixtral-8x7b", "qwen3-235b", "deepseek-v3"]), st.sampled_from([1, 2, 8]),
    st.sampled_from([2, 4, 8, 16, 64]), st.integers(1, 4096), st.floats(2e9, 4e11),
    st.sampled_from(["h100-8", "h100-1", "mi300x-8", "gb200-72"]),
)  # fmt: skip
def test_ideal_ours_none_of_experts(
    name: str, tp: int, ep: int, tokens: int, nic: float, node: str
):
    model = MODELS[name]
    ep = min(ep, model.experts)
    layout = Layout(tp=tp, dp=ep, ep=ep, sequence=8 * tokens)
    network = Network(preset(node), Fabric(nic_bytes_per_s=nic))
    times = [Layers(model, layout, network, o).experts().seconds for o in ("ideal", "ours", "none")]
    assert times[0] <= times[1] * (1 + 1e-9) and times[1] <= times[2] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("group", "node"),
    [(Group(65, 1), "h100-8"), (Group(12, 1), "h100-8"), (Group(65, 1), "h100-1"),
     (Group(MAX_PLANNED * 2, 1), "gb200-72"), (Group(2**20, 1), "h100-8"),
     (Group(256, 8), "h100-8")],
)  # fmt: skip
def test_where_no_plan_is_between_islands_all_is_serial(group: Group, node: str):
    """Of unequal parts, of more islands than a plan has messages for, of very many ranks."""
    network = Network(preset(node), Fabric())
    assert network.as_islands(group) is None
    problem = Problem("all_to_all_matmul", m=65536, n=512, k=1024, ranks=64, experts=2)
    place = placed(problem, network, group)
    assert not place.planned and place.problem == problem and place.machine.num_devices == 64
    times = [pair_s(place, overlap)[0] for overlap in OVERLAPS]
    assert times[1] == times[0] > times[2] > place.late_s > 0


@pytest.mark.parametrize("samples", [64, 8192])
def test_ranks_of_a_dlrm_are_told_apart_where_plans_are_between_islands(samples: int):
    """Up to 512; of many more no step takes longer, nor does it take longer to predict."""
    seconds: dict[int, float] = {}
    for gpus, ranks in ((128, 128), (1024, 64), (2**14, 64), (2**20, 64)):
        one = DlrmStep(PAPER, Layout(dp=gpus, micro_batch=samples), NETWORK, "ours")
        assert one.place.problem.ranks == ranks and one.place.planned == (gpus == 128)
        assert one.place.problem.islands == (16 if gpus == 128 else 1)
        seconds[gpus] = one.pooled.serial_s - one.pooled.lookup_s
        assert one.ours_s <= one.pooled.serial_s
    assert seconds[2**20] == pytest.approx(seconds[2**14], rel=1e-3)
    assert seconds[1024] == pytest.approx(seconds[2**14], rel=0.02)


def test_a_dlrm_between_islands_takes_the_plan_that_is_chosen_there():
    step = DlrmStep(PAPER, Layout(dp=16, micro_batch=8192), NETWORK, "ours")
    assert step.place.problem.islands == 2 and not step.place.problem.out
    choice = choose(step.place.problem, step.place.machine)
    assert choice.plan.family == "islands"
    assert step.ours_s == choice.seconds < step.pooled.serial_s
    parts = predict("dlrm-paper", Layout(dp=16, micro_batch=8192), machine=NETWORK.machine,
                    overlap="ours").parts  # fmt: skip
    assert parts["embedding"] == pytest.approx(step.pooled.lookup_s)
    back_s = step.exchange_s()
    assert parts["all-to-all"] == pytest.approx(choice.seconds - step.pooled.lookup_s + back_s)


def test_what_ours_is_between_nodes_is_said():
    def said(name: str, gpus: int, **options: Any) -> str:
        layout = Layout.on(gpus, **options)
        return " ".join(predict(name, layout, overlap="ours").explain().split())

    assert "once to a node, by routes" in said("deepseek-v3", 64, ep=64)
    assert "routed_weights_bytes" in said("deepseek-v3", 64, ep=64)
    assert "routes" not in said("deepseek-v3", 64, ep=8)
    assert "go to experts serially: no plan is between" in said("deepseek-v3", 2048, ep=256, tp=8)
    assert "go to experts" not in said("llama3-405b", 64, tp=16)
    assert "by plans of islands, or serially" in said("dlrm-dcnv2", 16)
    assert "sends serially: no plan is between" in said("dlrm-dcnv2", 65)
