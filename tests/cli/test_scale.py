"""`counterpoint scale`: a column for each mode, published steps, JSON."""

import json
from pathlib import Path

import pytest
from commands import invoke, refused


def test_modes_stand_beside_each_other():
    text = invoke(
        "scale", "llama3-8b", "--gpus", "64", "--tp", "8", "--overlap", "ideal,none"
    ).stdout
    head = next(line for line in text.splitlines() if line.startswith("seconds of a step"))
    assert head.split()[-2:] == ["none", "ideal"]
    assert "speedup over none" in text and "stands on:" in text


def test_check_shows_every_step_and_paper():
    text = invoke("scale", "--check").stdout
    assert len([line for line in text.splitlines() if " mean error " in line]) == 8
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


def test_a_picture_has_a_bar_of_each_mode(tmp_path: Path):
    path = tmp_path / "step.svg"
    step = ("llama3-8b", "--gpus", "64", "--pp", "4", "--schedule", "zero-bubble")
    text = invoke("scale", *step, "--picture", str(path)).stdout
    assert text.endswith(f"The picture: {path}\n") and "zero-bubble" in text.splitlines()[0]
    drawn = path.read_text()
    assert all(f">{word}</text>" in drawn for word in ("none", "ours", "ideal", "stage 3"))
    assert "weight gradients" in drawn and "overlap ours" in drawn


def test_what_is_refused_names_options_as_they_are_typed():
    layout = ["llama3-8b", "--gpus", "64", "--pp", "4", "--virtual-stages", "2"]
    refused("scale", [*layout, "--num-micro-batches", "6"], "--num-micro-batches must be a mult")
    refused("scale", [*layout, "--schedule", "zero-bubble"], "--virtual-stages must be 1 with")
    refused("scale", [*layout, "--num-batches", "6"], "did you mean '--num-micro-batches'?")
    refused("scale", ["llama3-8b", "--picture", "x.gif"], "--picture must be a file name that ends")
    refused("scale", ["--check", "--picture", "x.png"], "--picture must be left out with --check")


def test_traces_of_each_mode_have_a_folder(tmp_path: Path):
    invoke("scale", "llama3-8b", "--gpus", "16", "--pp", "2", "--overlap", "none,ours", "--chakra",
           str(tmp_path / "made"))  # fmt: skip
    written = {str(path.relative_to(tmp_path / "made")) for path in tmp_path.rglob("*.*")}
    names = ("step.0.et", "step.8.et", "comm_groups.json")
    assert written == {f"{mode}/{name}" for mode in ("none", "ours") for name in names}


def test_a_dlrm_says_what_bounds_fusing_and_draws_its_map(tmp_path: Path):
    picture = tmp_path / "map.svg"
    args = ("scale", "dlrm-paper", "--gpus", "128", "--machine", "h100-1", "--nic", "200G")
    text = invoke(*args, "--map", str(picture)).stdout
    assert "512 samples a GPU" in text.splitlines()[0]
    assert "fusing saves" in text and "min(embedding" in text and "ASSUMED" in text
    assert f"map: {picture}" in text and picture.stat().st_size > 1000
    assert "band" in "".join(line[:5] for line in text.splitlines())
    assert "the band is the widest" in " ".join(text.split())


def test_check_has_mlperf_s_steps_apart():
    text = invoke("scale", "--check").stdout
    apart = text[text.index("not among these 29") :]
    assert apart.count("MLPerf dlrm-dcnv2") == 2 and apart.count("assumed") == 2


def test_memory_is_said_first():
    lines = invoke("scale", "llama3-405b", "--gpus", "8", "--tp", "8").stdout.splitlines()
    assert lines[1].startswith("DOES NOT FIT") and lines[2].startswith("  instead: ")
    (found, *_) = json.loads(invoke("scale", "llama3-8b", "--gpus", "8", "--json").stdout)
    assert not found["memory"]["fits"] and found["memory"]["changes"]
    assert sum(found["memory"]["parts"].values()) == pytest.approx(found["memory"]["bytes"])


def test_what_no_column_has_is_said():
    step = ("scale", "llama3-8b", "--gpus", "8", "--overlap", "none")
    assert "cp.overlap is not priced" in invoke(*step, "--sharding", "fsdp").stdout
    assert "cp.overlap is not priced" not in invoke(*step).stdout


def test_serving():
    for command in (("scale", "llama3-70b", "--tp", "4"),
                    ("advise", "--model", "llama3-70b", "--gpus", "4")):  # fmt: skip
        text = invoke(*command, "--serve", "--sequences", "8").stdout
        lines = text.splitlines()
        assert lines[0].startswith("serving llama3-70b on 4 GPUs (h100-8): 8 sequences of 2048")
        assert lines[1].startswith("memory fits") and lines[2].startswith("room for ")
        assert lines[3].startswith("To gain, predicted: ") and "compile_options" in lines[3]
        assert "to the first token" in text and "a token of each sequence" in text
    assert lines[0].endswith("rates derived from the datasheet: not measured")
    alone = invoke("scale", "llama3-8b", "--serve", "--machine", "h200-2").stdout
    assert alone.splitlines()[0].endswith("rates as measured")
    assert "Nothing to gain: communication is 0% of a prompt's time" in alone
    found = json.loads(invoke("scale", "llama3-8b", "--tp", "2", "--serve", "--json").stdout)
    assert [each["overlap"] for each in found] == ["none", "ours", "ideal"]
    assert found[0]["token_s"] == pytest.approx(sum(found[0]["token"].values()))
    refused("scale", ["llama3-8b", "--serve", "--picture", "x.png"],
            "--picture must be left out with --serve")  # fmt: skip
    refused("scale", ["llama3-8b", "--serve", "--gpus", "8"], "--gpus must be left out with")
    large = invoke("scale", "llama3-405b", "--tp", "8", "--serve").stdout
    assert "It does not fit" in large and "To gain" not in large
    refused("advise", ["t.json", "--serve"], "--serve must be given with --model")
    refused("advise", ["--model", "llama3-8b", "--serve", "--html", "x.html"],
            "--html must be left out with --serve")  # fmt: skip


def test_what_if_lists_mechanisms_and_what_is_not_ours_last():
    step = ("scale", "deepseek-v3", "--gpus", "64", "--ep", "64", "--what-if")
    lines = invoke(*step).stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("mechanism, each alone"))
    assert (
        lines[head + 2].startswith("tokens once to a rank") and "exchange_routes" in lines[head + 2]
    )
    last = next(line for line in lines if line.startswith("GPU-initiated exchange"))
    assert "not in this library: would save " in last and "more than all of these" in last
    assert lines.index(last) > next(i for i, line in enumerate(lines) if "tp is 1" in line)
    found = json.loads(invoke(*step, "--json").stdout)
    saved = [each["saves_s"] for each in found["mechanisms"] if each["in_library"]]
    assert saved == sorted(saved, reverse=True) and saved[0] > 0
    assert [each["in_library"] for each in found["mechanisms"]] == [True] * len(saved) + [False]
    assert found["step"]["overlap"] == "none" and found["together_s"] < found["step"]["seconds"]


def test_what_if_of_a_dlrm_has_other_sizes():
    step = ("scale", "dlrm-paper", "--gpus", "128", "--machine", "h100-1", "--what-if")
    text = invoke(*step).stdout
    assert "nothing of this library saves any of it" in text and "4x the batch" in text
    assert "GPU-initiated: not in this library" in text and "DeepEP" in text
