"""`counterpoint scale`: a column for each mode, published steps, JSON."""

import json

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
