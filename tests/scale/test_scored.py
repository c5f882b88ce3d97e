"""Published steps that were predicted once, before anybody had looked: each has its source.

Nothing here predicts: their scores are kept in benchmarks/results.
"""

import json
from collections import Counter
from dataclasses import fields, replace
from importlib.resources import files
from typing import Any

import pytest

from counterpoint.machine import Machine
from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric, Network

FOLDER = files("counterpoint.scale")
SETS = {file: json.loads((FOLDER / file).read_text())
        for file in ("scored_steps.json", "scored_second.json")}  # fmt: skip
STEPS = {row["name"]: row for each in SETS.values() for row in each["steps"]}
SEEN = json.loads((FOLDER / "published_steps.json").read_text())
TEXTS = ("source", "machine", "reported", "seconds_from", "assumed")


def model_of(row: dict[str, Any]) -> Model:
    sizes = dict(row["model"])
    renamed = {"gated": sizes.pop("gated_mlp"), "sequence": sizes.pop("seq_len")}
    return Model(name=row["name"], source=row["source"], **renamed, **sizes)


def layout_of(row: dict[str, Any]) -> Layout:
    return Layout(asynchronous=row["asynchronous"], **row["layout"])


def machine_of(row: dict[str, Any]) -> Machine:
    """A preset, with what another GPU of its kind has otherwise."""
    found = preset(row["node"]["preset"])
    parts = {part: replace(getattr(found, part), **row["node"].get(part, {}))
             for part in ("device", "link")}  # fmt: skip
    return replace(found, **parts)


@pytest.mark.parametrize("file", SETS)
def test_there_are_enough_of_each_kind_and_from_many_papers(file: str):
    steps = SETS[file]["steps"]
    kinds, papers = (Counter(row[key] for row in steps) for key in ("kind", "paper"))
    assert len({row["name"] for row in steps}) == len(steps) >= 25
    assert set(kinds) == {"fsdp", "experts", "pipeline"} and min(kinds.values()) >= 5
    assert len(papers) >= 6 and max(papers.values()) <= 6
    assert set(papers) | {"all"} == set(SETS[file]["rules"])


def test_none_is_of_a_paper_that_predictions_were_compared_with():
    assert len(STEPS) == sum(len(each["steps"]) for each in SETS.values())
    first, second = ({row["paper"] for row in each["steps"]} for each in SETS.values())
    papers = {row["name"].split()[0] for row in SEEN}
    assert not papers & (first | second) and not first & second
    assert not {row["source"] for row in SEEN} & {row["source"] for row in STEPS.values()}


@pytest.mark.parametrize("name", STEPS)
def test_each_step_builds_and_has_its_source(name: str):
    row = STEPS[name]
    model, layout, machine = model_of(row), layout_of(row), machine_of(row)
    layout.fits(model)
    Network(machine, Fabric(**row["fabric"])).covers(layout.num_gpus)
    assert name.split()[0] == row["paper"] and all(row[text] for text in TEXTS)
    assert "github" in row["source"] or "arXiv" in row["source"]
    assert set(row["layout"]) < {each.name for each in fields(Layout)}
    assert layout.num_gpus <= machine.num_devices or row["fabric"]["source"]
    experts, pipeline = row["kind"] == "experts", row["kind"] == "pipeline"
    assert experts == bool(model.experts)
    assert not pipeline or (layout.tp > 1 and layout.pp > 1)


@pytest.mark.parametrize("name", STEPS)
def test_seconds_follow_from_what_was_reported(name: str):
    """Of a rate, tokens of the step over it; and no GPU computes faster than its peak."""
    row = STEPS[name]
    model, layout, machine = model_of(row), layout_of(row), machine_of(row)
    tokens = layout.micro_batch * layout.micro_batches * layout.dp * layout.length(model)
    seconds, gpus = row["reported_step_s"], layout.num_gpus
    if row["seconds_from"] != "reported":
        of_step, rate = row["seconds_from"].split(" / ")
        each = float(rate.split(" x ")[1].split()[0])
        assert int(of_step.split()[0]) == tokens
        assert seconds == pytest.approx(tokens / (gpus * each), rel=1e-3)
    idle = (model.layers - model.num_dense) * (model.experts - model.top_k)
    used = model.multiplied - idle * model.mlp_parameters(model.expert_ffn)
    share = 6 * used * tokens / seconds / gpus / machine.device.bf16_flop_per_s
    assert 0.05 < share < 0.75


@pytest.mark.parametrize("file", SETS)
def test_what_was_left_out_says_where_and_why(file: str):
    left = SETS[file]["looked_at"]
    assert len({row["source"] for row in left}) == len(left) >= 20
    assert all(row["left_out"] for row in left)
