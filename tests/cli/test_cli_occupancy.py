"""`counterpoint occupancy`: what it prints and refuses, on a machine without a GPU."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, refused
from processes import python

import counterpoint as cp
from counterpoint.cli.occupancy import ASSUMED, DEVICES, FEWER, NOTES, TOO_LARGE
from counterpoint.gpu.limits import limits_of
from counterpoint.gpu.occupancy import (
    Kernel,
    dynamic_bytes_for,
    feasible,
)

GEMM = ("--threads", "128", "--registers", "64", "--shared", "16384")
LEAN = ("--threads", "128", "--registers", "32", "--shared", "16384")
NVJET = ("--threads", "384", "--registers", "168", "--shared", "213188")
DEFAULT = ["a40", "a100", "h100", "h200", "mi250x"]


run = partial(invoke, "occupancy")


def facts_of(*arguments: str) -> dict[str, dict[str, Any]]:
    """Machine -> its facts."""
    facts = json.loads(run(*arguments, "--json").stdout)
    return {found["machine"]: found for found in facts["machines"]}


def test_table():
    text = run(*GEMM, "--all").stdout
    assert text.startswith("occupancy, predicted by arithmetic, not measured")
    assert "of a block of 128 threads, 64 registers, 16384 bytes" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if row and row[0] in DEVICES] == DEFAULT
    nccl = ["0", "registers", "0", "registers"]
    assert ["h200", "8", "registers", "16384", *nccl, "-"] in rows
    assert ["1", "shared", "memory", "115713", *nccl, "113.0-124.6"] in rows
    assert ["registers"] in rows, "what else keeps them apart"
    assert ["a40", "5", "shared", "memory", "16384", "-", "-", "-"] in rows
    for note in (*NOTES, ASSUMED, f"a40: {TOO_LARGE}", f"mi250x: {TOO_LARGE}"):
        assert f"\n{note}\n" in text


@pytest.mark.parametrize("arguments", [GEMM, LEAN, NVJET, [*LEAN, "--machine", "all", "--all"]])
def test_it_fits_a_screen(arguments: list[str]):
    lines = run(*arguments, columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24 or "--all" in arguments
    assert "…" not in "".join(lines)


def test_what_is_left_out_without_all():
    lines = [line.rstrip() for line in run(*LEAN).stdout.splitlines()]
    every = [line.rstrip() for line in run(*LEAN, "--all").stdout.splitlines()]
    rows = [line for line in lines if line in every]
    assert len(rows) < len(every) and lines[-1] == FEWER
    h200 = next(found for found in json.loads(run(*LEAN, "--json").stdout)["machines"]
                if found["machine"] == "h200")  # fmt: skip
    roomy = [level["blocks"] for level in h200["feasible"][1:]
             if any(b and b["window"] for b in level["beside"].values())]  # fmt: skip
    shown = lines[next(i for i, line in enumerate(lines) if line.startswith("h200")) + 1]
    assert int(shown.split()[0]) == max(roomy)


@pytest.mark.parametrize("machine", DEVICES)
def test_json_is_what_the_functions_return(machine: str):
    (facts,) = facts_of(*GEMM, "--machine", machine).values()
    kernel, limits = Kernel(128, 64, 0, 16384), limits_of(DEVICES[machine])
    assert facts["device"] == DEVICES[machine].name
    found = [(level["blocks"], level["shared_bytes"]) for level in facts["feasible"]]
    assert found == [(k, dynamic_bytes_for(kernel, limits, k)) for k in feasible(kernel, limits)]


def test_json_has_the_window():
    facts = json.loads(run(*LEAN, "--machine", "a100,h200", "--json").stdout)
    assert facts["basis"] == "predicted by arithmetic, not measured"
    assert facts["kernel"]["dynamic_shared_bytes"] == 16384
    assert {name: block["threads"] for name, block in facts["beside"].items()} == {
        "ring": 544, "send/recv": 640,
    }  # fmt: skip
    a100, h200 = facts["machines"]
    window = {"low_bytes": 115713, "high_bytes": 127616, "other_limit": ""}
    for other in facts["beside"]:
        assert all(level["beside"][other]["window"] is None for level in a100["feasible"])
        *more, one = [level["beside"][other] for level in h200["feasible"]]
        assert all(level["window"] is None for level in more)
        assert one == {"blocks": 1, "bound_by": "registers", "window": window}


def test_another_block_of_communication():
    text = run(*LEAN, "--beside", "256,32,20480", "--machine", "mi250x").stdout
    assert "beside 256,32,20480" in text
    assert ASSUMED not in text
    (found,) = facts_of(*LEAN, "--beside", "256,32,20480", "--machine", "mi250x").values()
    own = found["feasible"][0]
    assert (own["blocks"], own["beside"]["256,32,20480"]["blocks"]) == (4, 2)


def test_a_kernel_that_fits_some_machines():
    text = run(*NVJET).stdout
    fix = "a40: occupancy: block must be of 0 to 101376 bytes of shared memory on A40 PCIe"
    assert fix in " ".join(text.split())
    facts = facts_of(*NVJET)
    assert {name for name in facts if facts[name]["feasible"]} == {"h100", "h200"}
    assert facts["h200"]["feasible"][0]["blocks"] == 1


def test_a_machine_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.json"
    path.write_text(replace(cp.preset("h100-8"), name="mine").to_json())
    mine, other = facts_of(*GEMM, "--machine", f"{path},h100").items()
    assert mine[0] == "mine" and mine[1]["feasible"] == other[1]["feasible"] != []


def test_all_machines():
    assert list(facts_of(*GEMM, "--machine", "all")) == list(DEVICES)
    assert list(facts_of(*GEMM)) == DEFAULT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GEMM, "--machine", "v100"],
         "--machine must be all, or of a100, a40, h100, h200, b200, gb200, mi250x, mi300x, or "),
        ([*GEMM, "--machine", "no.json"], "a file of a machine, got no.json: no such file"),
        ([*GEMM, "--machine", "h200-8"], "mi250x, mi300x, or files of a machine, got 'h200-8'"),
        ([*GEMM, "--beside", "rccl"], "--beside must be nccl, or threads (above 0), registers"),
        ([*GEMM, "--beside", "1,2"], "and shared bytes as T,R,S, got '1,2'"),
        ([*GEMM, "--beside", "0,2,3"], "and shared bytes as T,R,S, got '0,2,3'"),
        ([*NVJET, "--machine", "a40,a100"], "block must be of 0 to 101376 bytes of shared memory"),
        (["--threads", "1025", "--registers", "8", "--shared", "0"],
         "block.threads must be 1 to 1024, got 1025"),
        (["--threads", "1024", "--registers", "255", "--shared", "0"],
         "block.registers_per_thread must be 0 to 64 with 1024 threads on A40 PCIe, got 255"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(arguments: list[str], message: str):
    refused("occupancy", arguments, message)


def test_it_needs_no_torch():
    code = (
        "import sys\n"
        "from counterpoint.cli.main import app\n"
        f"app(['occupancy', *{GEMM}], standalone_mode=False)\n"
        "assert not {'torch', 'triton', 'cuda', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    python("-c", code, PATH="")
