"""Chakra traces of a step, read back by another decoder: what is in them, and what must agree."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scale.chakra_reader import trace, varint

from counterpoint.errors import InputError
from counterpoint.scale import Fabric, Layout, Model, Prediction, predict
from counterpoint.scale import chakra as writer

# examples/workload/microbenchmarks/all_to_all/4npus_1MB/all_to_all.2.et of astra-sim (518bd51)
SHIPPED = bytes.fromhex(
    "070a05302e302e344a0802121461"
    "6c6c5f746f5f616c6c5f346e7075735f314d421807520e0a0969735f6370755f6f70d80100"
    "520d0a09636f6d6d5f747970654806520f0a09636f6d6d5f73697a6548808040"
)
TINY = Model(
    name="tiny", hidden=1024, layers=8, heads=16, kv_heads=4, ffn=4096, vocab=32000, sequence=2048
)
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7


def test_the_reader_reads_what_astra_sim_ships():
    metadata, nodes = trace(SHIPPED)
    assert metadata == {"version": "0.0.4"}
    assert nodes == [{"id": 2, "name": "all_to_all_4npus_1MB", "type": COLLECTIVE,
                      "is_cpu_op": False, "comm_type": ALL_TO_ALL, "comm_size": 2**20}]  # fmt: skip


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_base_128(value: int):
    written = writer._varint(value)  # pyright: ignore[reportPrivateUsage]
    assert varint(written, 0) == (value, len(written))


def saved(folder: Path, found: Prediction) -> list[list[dict[str, Any]]]:
    """The nodes of each stage."""
    paths = found.save_chakra(folder / "made" / "here")
    stride = found.layout.num_gpus // found.layout.pp
    assert [path.name for path in paths] == [
        f"step.{i * stride}.et" for i in range(found.layout.pp)
    ]
    read = [trace(path.read_bytes()) for path in paths]
    assert all(metadata["version"] == "0.0.4" for metadata, _ in read)
    assert all(metadata["attr"][0]["string_val"] == found.title for metadata, _ in read)
    return [nodes for _, nodes in read]


STEPS = [
    (TINY, {"tp": 4, "pp": 4, "dp": 8, "virtual_stages": 2}, "none"),
    (TINY, {"tp": 2, "pp": 2, "cp": 2, "num_micro_batches": 4, "schedule": "zero-bubble"}, "ours"),
    (TINY, {"tp": 2, "pp": 4, "sequence_parallel": False, "asynchronous": False}, "ideal"),
    (TINY, {"dp": 16, "data_parallel_sharding": "fsdp"}, "none"),
    ("mixtral-8x7b", {"pp": 2, "dp": 16, "ep": 8, "num_micro_batches": 2}, "none"),
    ("mixtral-8x7b", {"dp": 16, "data_parallel_sharding": "none"}, "none"),
]


@pytest.mark.parametrize(("model", "degrees", "overlap"), STEPS)
def test_nodes_are_in_an_order_and_their_seconds_are_the_steps(
    model: Any, degrees: dict[str, Any], overlap: Any, tmp_path: Path
):
    found = predict(model, Layout(**degrees), overlap=overlap)
    ended = 0
    for stage, nodes in enumerate(saved(tmp_path, found)):
        seen: set[int] = set()
        for node in nodes:
            assert set(node.get("data_deps", ())) <= seen and node["is_cpu_op"] is False
            assert bool(seen) == ("data_deps" in node)
            seen.add(node["id"])
        assert len(seen) == len(nodes)
        took = [n.get("duration_micros", 0) for n in nodes if n["type"] in (COMPUTE, COLLECTIVE)]
        own = sum(end_s - start_s for _, start_s, end_s in found.stages.events(stage))
        if found.layout.asynchronous:
            assert sum(took) == pytest.approx(own * 1e6, abs=len(took))
        ended = max(ended, *(n["start_time_micros"] + n.get("duration_micros", 0)
                             for n in nodes if "start_time_micros" in n))  # fmt: skip
    assert ended == pytest.approx(found.seconds * 1e6, abs=1)


@pytest.mark.parametrize(("model", "degrees", "overlap"), STEPS)
def test_what_is_sent_is_received(
    model: Any, degrees: dict[str, Any], overlap: Any, tmp_path: Path
):
    found = predict(model, Layout(**degrees), overlap=overlap)
    stages = saved(tmp_path, found)
    stride = found.layout.num_gpus // found.layout.pp
    messages: dict[int, Counter[tuple[int, ...]]] = {SEND: Counter(), RECEIVE: Counter()}
    for stage, nodes in enumerate(stages):
        for node in nodes:
            if node["type"] in messages:
                place = tuple(node[f"comm_{name}"] for name in ("src", "dst", "tag", "size"))
                messages[node["type"]][place] += 1
                assert place[node["type"] == RECEIVE] == stage * stride
    assert messages[SEND] == messages[RECEIVE]
    chunks = found.layout.pp * found.layout.virtual_stages
    hops = 2 * (chunks - 1) * found.layout.micro_batches if found.layout.pp > 1 else 0
    assert len(messages[SEND]) == messages[SEND].total() == hops


def sizes(nodes: list[dict[str, Any]], part: str) -> Counter[int]:
    """Bytes of the collectives of a part of the step, by their kinds."""
    found: Counter[int] = Counter()
    for node in nodes:
        if node["type"] == COLLECTIVE and f": {part}, " in node["name"]:
            found[node["comm_type"]] += node["comm_size"]
    return found


def test_collectives_have_the_bytes_of_the_layers(tmp_path: Path):
    """Of each layer: a gather and a scatter of the hidden state for attention, and for the MLP."""
    layout = Layout(tp=4, dp=8, num_micro_batches=2)
    (nodes,) = saved(tmp_path, predict(TINY, layout))
    hidden = 2 * 2048 * 1024  # bytes of one micro-batch
    # forward and backward, and the backward of a gather gathers again, for the weights
    assert sizes(nodes, "tensor parallel") == {
        ALL_GATHER: 2 * 8 * 2 * 3 * hidden // 4, REDUCE_SCATTER: 2 * 8 * 2 * 2 * hidden,
    }  # fmt: skip
    assert sizes(nodes, "data parallel") == {
        ALL_GATHER: TINY.parameters // 4 * 2 // 8, REDUCE_SCATTER: TINY.parameters // 4 * 4,
    }  # fmt: skip
    named = {n["name"]: i for i, n in enumerate(nodes)}
    scattered, updated, gathered = (
        named[name] for name in ("gradients: data parallel, reduce_scatter", "optimizer",
                                 "parameters: data parallel, all_gather")
    )  # fmt: skip
    assert scattered < updated < gathered
    groups = json.loads((tmp_path / "made" / "here" / "comm_groups.json").read_text())
    used = {n["pg_name"] for n in nodes if n["type"] == COLLECTIVE}
    assert {name: groups[name] for name in used} == groups
    assert sorted(groups.values()) == [[0, 1, 2, 3], list(range(0, 32, 4))]


def test_other_kinds_of_parallelism_have_their_collectives(tmp_path: Path):
    (nodes,) = saved(tmp_path, predict("mixtral-8x7b", Layout(dp=8, ep=8)))
    # each token goes to two experts and comes back, and so do gradients
    layers, row_bytes, rows = 32, 4096 * 2, 8192 * 2
    assert sizes(nodes, "all-to-all") == {ALL_TO_ALL: layers * rows * row_bytes * 4}
    (nodes,) = saved(tmp_path, predict("mixtral-8x7b", Layout(dp=2, data_parallel_sharding="none")))
    reduced = predict("mixtral-8x7b", Layout()).model.parameters * 4
    assert sizes(nodes, "data parallel") == {ALL_REDUCE: pytest.approx(reduced, abs=8)}
    (nodes,) = saved(tmp_path, predict(TINY, Layout(cp=2)))
    keys = 2 * 2048 * 2 * 4 * 64 * 8
    assert sizes(nodes, "context parallel") == {ALL_GATHER: keys * 2 // 2, REDUCE_SCATTER: keys}


def test_a_zero_bubble_step_sends_as_much(tmp_path: Path):
    """Gradients of weights gather what the backward does else."""
    layout = Layout(tp=4, pp=2, num_micro_batches=4)
    both = [
        saved(tmp_path, predict(TINY, each))
        for each in (layout, replace(layout, schedule="zero-bubble"))
    ]
    one, other = ([sizes(nodes, "tensor parallel") for nodes in stages] for stages in both)
    assert one == other


def test_a_trace_is_as_large_whatever_the_replicas(tmp_path: Path):
    layouts = [Layout(tp=8, pp=16, dp=dp, virtual_stages=4) for dp in (16, 1024)]
    counts = [sum(map(len, saved(tmp_path, predict("llama3-405b", each)))) for each in layouts]
    assert counts[0] == counts[1]


def test_too_many_nodes_and_ranks_are_refused(tmp_path: Path):
    many = predict(TINY, Layout(pp=8, num_micro_batches=2**15))
    with pytest.raises(InputError, match="num_micro_batches must be such that there are at most "):
        many.save_chakra(tmp_path)
    wide = predict(TINY, Layout(pp=8, dp=2**20), Fabric())
    with pytest.raises(InputError, match="dp must be such that there are at most 4194304 ranks"):
        wide.save_chakra(tmp_path)
    assert not list(tmp_path.iterdir())
