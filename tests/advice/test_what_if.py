"""What mechanisms would bring: the largest first, why others do not, and what is not ours last."""

from typing import Any

import pytest

from counterpoint.advice.what_if import NOT_OURS, WhatIf, what_if
from counterpoint.presets import preset
from counterpoint.scale import Fabric, Layout
from counterpoint.scale.models import model_of


def priced(model: str, machine: str = "h100-8", nic: float = 50e9, **degrees: Any) -> WhatIf:
    known = model_of("what_if", model)
    return what_if(known, Layout(**degrees), Fabric(nic_bytes_per_s=nic), preset(machine))


def reasons(found: WhatIf) -> dict[str, str]:
    return {each.name: each.why for each in found.without}


def test_the_largest_is_first_and_all_together_save_at_least_as_much():
    found = priced("llama3-8b", tp=2, cp=2, dp=2, data_parallel_sharding="fsdp")
    none_s = found.step.seconds
    saved = [each.saves_s for each in found.ours]
    assert saved == sorted(saved, reverse=True) and len(saved) == 4
    assert found.together_s == pytest.approx(none_s - sum(saved), rel=0.01)
    for each in found.ours:
        assert each.speedup == pytest.approx(none_s / (none_s - each.saves_s)) and not each.why
        assert each.line.startswith("counterpoint.")
    assert any("cp.overlap predicts" in line for line in found.assumptions)


def test_experts_between_nodes():
    found = priced("deepseek-v3", dp=64, ep=64)
    assert [each.name for each in found.ours] == ["tokens once to a rank", "experts' all-to-alls"]
    assert found.puts.line == NOT_OURS and found.puts.saves_s > 0
    assert 0 < found.beyond_s < found.puts.saves_s
    assert any(line.startswith("assumed: put_s = ") for line in found.assumptions)


def test_what_does_not_apply_says_why():
    found = priced("llama3-70b", dp=64, data_parallel_sharding="fsdp")
    assert not found.ours and found.together_s == found.step.seconds and found.beyond_s == 0
    why = reasons(found)
    assert why["FSDP2 in place"].startswith("shards lie on 8 nodes")
    assert why["tensor-parallel matmuls"] == why["tensor parallel in fp8"] == "tp is 1"
    assert why["experts' all-to-alls"] == "the model has no experts"
    assert found.puts.why and not found.sizes and not found.assumptions
    assert "8.9" in reasons(priced("llama3-8b", "a100-8", tp=8))["tensor parallel in fp8"]
    assert "zero1" in reasons(priced("llama3-8b", dp=8))["FSDP2 in place"]
    on_many = reasons(priced("deepseek-v3", "h100-1", dp=128, ep=128))
    assert on_many["tokens once to a rank"].startswith("no plan is between so many islands")


def test_a_recommender_has_its_own():
    found = priced("dlrm-paper", "h100-1", 25e9, dp=16, micro_batch=4096)
    (ours,) = found.ours
    assert ours.name == "embeddings' all-to-all" and ours.saves_s / found.step.seconds > 0.08
    assert 0 < found.beyond_s < 0.01 * found.step.seconds
    assert found.sizes[0].ours == pytest.approx(ours.saves_s / found.step.seconds)
    assert "one node" in priced("dlrm-dcnv2", dp=8, micro_batch=512).puts.why
