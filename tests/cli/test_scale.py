"""`counterpoint scale`: a column for each mode, published steps, JSON."""

import json
from pathlib import Path

import pytest
from commands import invoke


def test_modes_stand_beside_each_other():
    text = invoke(
        "scale", "llama3-8b", "--gpus", "64", "--tp", "8", "--overlap", "ideal,none"
    ).stdout
    head = next(line for line in text.splitlines() if line.startswith("seconds of a step"))
    assert head.split()[-2:] == ["none", "ideal"]
    assert "speedup over none" in text and "stands on:" in text


def test_check_shows_every_step_and_paper():
    text = invoke("scale", "--check").stdout
    assert len([line for line in text.splitlines() if " mean error " in line]) == 5
    assert text.count("MCore-H100 ") >= 9 and "no constant fitted" in text


def test_json_has_si_units():
    (found,) = json.loads(
        invoke(
            "scale", "deepseek-v3", "--gpus", "8", "--ep", "8", "--overlap", "ours", "--json"
        ).stdout
    )
    assert found["overlap"] == "ours" and found["layout"]["dp"] == 8
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert found["items"] == 8 * 4096 and found["unit"] == "tokens"


def test_a_dlrm_says_what_bounds_fusing_and_draws_its_map(tmp_path: Path):
    picture = tmp_path / "map.svg"
    args = ("scale", "dlrm-paper", "--gpus", "128", "--machine", "h100-1", "--nic", "200G")
    text = invoke(*args, "--map", str(picture)).stdout
    assert "512 samples a GPU" in text.splitlines()[0]
    assert "fusing saves" in text and "min(embedding" in text and "ASSUMED" in text
    assert f"map: {picture}" in text and picture.stat().st_size > 1000
    assert "band" not in "".join(line[:5] for line in text.splitlines())


def test_check_has_mlperf_s_steps_apart():
    text = invoke("scale", "--check").stdout
    apart = text[text.index("not among these 29") :]
    assert apart.count("MLPerf dlrm-dcnv2") == 2 and apart.count("assumed") == 2
