"""Serving, predicted: parts, memory, what is refused, and models that were measured."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import served
from benchmarks.rows import RESULTS
from counterpoint.errors import InputError
from counterpoint.machine_of import shipped
from counterpoint.presets import preset
from counterpoint.scale.models import MODELS
from counterpoint.scale.serving import COMMUNICATION, Serving, serve


def bytes_of_weights(found: Serving) -> float:
    return 2 * found.model.parameters / found.tp


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3"])
def test_ours_is_between_none_and_ideal(model: str):
    none, ours, ideal = (
        serve(model, "h200-8", tp=8, sequences=4, overlap=mode)
        for mode in ("none", "ours", "ideal")
    )
    for what in ("first", "token"):
        times = [getattr(each, f"{what}_s") for each in (none, ours, ideal)]
        assert times[0] >= times[1] >= times[2] > 0
        parts = [getattr(each, what) for each in (none, ours, ideal)]
        assert times == pytest.approx([sum(each.values()) for each in parts])
        assert parts[0][COMMUNICATION] > parts[2][COMMUNICATION] >= 0
    assert none.memory == ours.memory


def test_a_token_takes_what_its_weights_take_to_read():
    found = serve("llama3-8b", "h200-8")
    machine = preset("h200-8")
    least_s = bytes_of_weights(found) / machine.device.hbm_bytes_per_s
    assert least_s < found.token_s < 1.6 * least_s
    # 2 x parameters x tokens products, and no matmul is faster than the peak
    assert found.first_s > 2 * 7.5e9 * 2048 / machine.device.bf16_flop_per_s
    many = serve("llama3-8b", "h200-8", sequences=32)
    read_s = 31 * 2048 * 2 * 1024 * 2 * 32 / machine.device.hbm_bytes_per_s
    assert many.token["attention"] - found.token["attention"] == pytest.approx(read_s, rel=0.3)


def test_experts_that_nobody_goes_to_are_not_read():
    one, many = (serve("mixtral-8x7b", "h200-8", tp=2, sequences=n) for n in (1, 64))
    # two of eight for one token, all of them for 64
    assert 3 < many.token["experts"] / one.token["experts"] < 4.5


def test_memory_and_how_many_sequences_there_is_room_for():
    found = serve("llama3-70b", "h100-8", tp=4, sequences=8, length=4096)
    assert found.memory.fits and found.memory.parts["weights"] == bytes_of_weights(found)
    # 80 layers, 2 of 8 heads a rank, 128 wide, keys and values, bf16
    kept = 8 * 4096 * 80 * 2 * 128 * 2 * 2
    assert found.memory.parts["keys and values"] == kept
    most = found.most_sequences
    assert serve("llama3-70b", "h100-8", tp=4, sequences=most, length=4096).memory.fits
    above = serve("llama3-70b", "h100-8", tp=4, sequences=most + 1, length=4096).memory
    assert not above.fits and above.changes == (f"{most} sequences at a time", "tp 8")
    none = serve("llama3-405b", "h100-8", tp=8).memory
    assert none.changes == ("quantized weights, or GPUs with more memory",)
    # latent attention keeps the same on every rank
    one, eight = (serve("deepseek-v3", "h100-8", tp=tp).memory.parts for tp in (1, 8))
    assert one["keys and values"] == eight["keys and values"] == 2048 * 61 * (512 + 64) * 2


def test_memory_of_windows_and_of_what_is_not_cut():
    windowed = replace(MODELS["llama3-8b"], window=4096, windowed=32)
    found = serve(windowed, "h200-8", sequences=64, length=32768)
    whole = serve("llama3-8b", "h200-8", sequences=64, length=32768)
    assert whole.memory.parts["keys and values"] == 8 * found.memory.parts["keys and values"]
    assert found.memory.fits and found.most_sequences >= 64
    # latent attention's first matmul is on every rank
    model = MODELS["deepseek-v3"]
    cut = serve("deepseek-v3", "h200-8", tp=8).memory.parts["weights"] - model.parameters / 4
    assert cut == pytest.approx(2 * 61 * 7168 * (1536 + 512 + 64) * 7 / 8)
    # heads of keys and values that two ranks share
    shared = serve("qwen3-235b", "h200-8", tp=8).memory.parts["weights"]
    assert shared - MODELS["qwen3-235b"].parameters / 4 == 2 * 94 * 4096 * 2 * 128 / 2


@pytest.mark.parametrize(("model", "given"), [
    ("deepseek-v3", {"tp": 4, "sequences": 128, "length": 32768}),
    ("qwen3-235b", {"tp": 4, "sequences": 256, "length": 8192}),
    ("llama3-70b", {"tp": 2, "sequences": 32000, "length": 1}),
    ("llama3-70b", {"tp": 1, "sequences": 1, "length": 2048}),
])  # fmt: skip
def test_what_to_serve_with_instead_fits(model: str, given: dict[str, Any]):
    found = serve(model, "h200-8", **given)
    assert found.memory.changes or found.memory.fits
    for line in found.memory.changes:
        words = line.split()
        if words[0] == "tp":
            given = given | {"tp": int(words[1])}
        elif words[1] == "sequences":
            given = given | {"sequences": int(words[0])}
        else:
            continue
        assert serve(model, "h200-8", **given).memory.fits, line


def test_attention_as_transformers_calls_it_repeats_what_it_reads():
    for heads, more in ((32, 1), (8, 4)):
        model = replace(MODELS["llama3-8b"], kv_heads=heads)
        paged, sdpa = (serve(model, "h200-8", sequences=32, attention=how)
                       for how in ("paged", "sdpa"))  # fmt: skip
        kernels_s = 5e-5 * model.layers
        moved_s = sdpa.token["attention"] - paged.token["attention"]
        assert moved_s > (1.5 * more if more > 1 else 1) * paged.token["attention"] - kernels_s
        assert 2 < sdpa.first["attention"] / paged.first["attention"] < 4


@pytest.mark.parametrize(("given", "said"), [
    ({"model": "llama3-8c"}, "model must be one of"),
    ({"model": "dlrm-dcnv2"}, "serve: model must be a transformer, got dlrm-dcnv2"),
    ({"tp": 16}, "serve: tp must be a whole number from 1 to 8, got 16"),
    ({"tp": 3}, "Layout: tp must be a divisor of the 32 heads of llama3-8b, got 3"),
    ({"sequences": 0}, "serve: sequences must be a whole number from 1"),
    ({"length": 2.0}, "serve: length must be a whole number from 1"),
    ({"overlap": "most"}, "serve: overlap must be one of none, ours, ideal, got most"),
    ({"attention": "flash"}, "serve: attention must be one of paged, sdpa, got flash"),
    ({"machine": "h100-9"}, "preset: name must be one of"),
])  # fmt: skip
def test_what_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(InputError) as error:
        serve(**{"model": "llama3-8b", **given})
    assert said in str(error.value)


def test_measured_models_are_near():
    """Of unmodified models of transformers, by torch.compile, on as many GPUs as were lent."""
    off = dict[str, float]()
    for path in sorted(RESULTS.glob("served-*.jsonl")):
        for row in map(json.loads, Path(path).read_text().splitlines()):
            if row["arm"] != served.PLAIN or "median_s" not in row:
                continue
            machine = shipped(row["gpu"], max(row["ranks"], 2))
            found = serve(served.MODELS[row["model"]], machine, tp=row["ranks"],
                          sequences=row["sequences"], length=row["length"],
                          attention="sdpa")  # fmt: skip
            seconds = found.first_s if row["step"] == served.PREFILL else found.token_s
            off[f"{row['ranks']}, {row['case']}"] = abs(seconds / row["median_s"] - 1)
    assert len(off) >= 10 and median(off.values()) < 0.15, off
