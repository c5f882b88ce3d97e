"""`counterpoint plan`: what it prints, writes and refuses, on a machine without a GPU."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from plan_cases import AR, ATTENTION, BAGS, EXPERTS, NORM, OPS, make_problem
from processes import python

import counterpoint as cp
from counterpoint.choose.known import Place, save_machine
from counterpoint.machine_of import machine_of
from counterpoint.model.estimate import predicted_s
from counterpoint.presets import preset

GATHER = ("all_gather_matmul", "--shape", "8192,7168,8192")
SMALL = ("all_gather_matmul", "--shape", "8190,64,64", "--ranks", "3")


run = partial(invoke, "plan")


def rows_of(text: str) -> dict[str, list[str]]:
    """Plan -> the other cells, of the table in `text`; a cell may hold single spaces."""
    lines = text.split("─\n")[1].splitlines()
    rows = [line.rpartition(" simulated ") for line in lines if " simulated " in line]
    found: dict[str, list[str]] = {}
    for head, _, verdict in rows:
        *words, us, ratio = head.split()
        found[" ".join(words)] = [us, ratio, verdict.strip()]
    return found


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize(
    ("machine", "ranks"),
    [("h200-8", 0), ("a100-8", 4), ("b200-4", 0), ("mi300x-8", 0), ("mi300x-8", 3), ("a40-2", 2)],
)
def test_it_says_what_choose_says(op: str, machine: str, ranks: int):
    shape = "8190,7168,8192" if ranks == 3 else "8192,7168,8192"
    text = run(op, "--shape", shape, "--machine", machine, "--ranks", str(ranks)).stdout
    where = cp.preset(machine)
    m, n, k = map(int, shape.split(","))
    problem = cp.Problem(op, m, n, k, ranks or where.num_devices)  # type: ignore[arg-type]
    choice = cp.choose(problem, machine)
    words = " ".join(text.split())
    assert f"problem {problem}, in a CUDA graph machine {machine}: " in words
    assert f"by model {choice.spec}: {choice.seconds * 1e6:.0f} us, speedup " in words
    assert f"alone matmuls {choice.compute_s * 1e6:.0f} us, communication" in words
    assert all(f"\n{c.spec} " in text for c in choice.table)
    rows = rows_of(text)
    assert list(rows) == [c.spec for c in choice.table if c.basis == "simulated"]
    assert rows[choice.spec][2] == "chosen"
    serial = next(c for c in choice.table if c.spec == "serial")
    assert rows["serial"][:2] == [f"{serial.seconds * 1e6:.1f}", "1.00"]


@pytest.mark.drawn(10)
@pytest.mark.parametrize("by", ["model", "rule"])
@pytest.mark.parametrize("op", OPS)
def test_every_operator_is_planned_for(op: str, by: str):
    experts = ("--experts", "4") if op in EXPERTS else ()
    shape, problem = "512,64,128", make_problem(op, 512, 64, 128, 2)
    if op == NORM:
        shape = "512,64"
    if op in ATTENTION:
        shape, problem = "512,128,64", make_problem(op, 512, 128, 64, 2)
    if op == BAGS:
        shape = "8,64,5,512"
        problem = cp.Problem(op, 512, ranks=2, tables=((64,) * 8,) * 2, indices=(8 * 512 * 5,) * 2)
    given = (op, "--shape", shape, "--machine", "b200-2", "--by", by, *experts)
    facts = json.loads(run(*given, "--json").stdout, parse_constant=strict)
    choice = cp.choose(problem, "b200-2", by=by)  # type: ignore[arg-type]
    assert (facts["plan"], facts["seconds"]) == (choice.spec, choice.seconds)
    assert facts["workspace_bytes"] == choice.plan.workspace_bytes
    assert "chosen" in run(*given).stdout


def test_an_all_reduce_shows_its_kernel():
    given = (AR, "--shape", "33,8192,3584", "--machine", "h200-4")
    text = run(*given, "--plan", "fused two_shot 64x64x4", "--show").stdout
    rows = rows_of(text)
    spec = "fused two_shot 64x64x4 warps=4"
    assert set(rows) == {"serial", spec} and rows[spec][2] == "asked for"
    problem = cp.Problem(AR, 33, 8192, 3584, 4)
    assert str(cp.build(problem, "fused two_shot 64x64x4")) in text
    assert "stages=4 num_warps=4" in text and "buffer slots" in text
    assert "by model fused: " in " ".join(run(*given).stdout.split())


@pytest.mark.parametrize("op", EXPERTS)
def test_experts_are_problems_too(op: str):
    sizes = ("--shape", "8192,4096,7168", "--experts", "32", "--machine", "h200-4")
    text = run(op, *sizes, "--plan", "grouped 8/8/16", "--show").stdout
    want = f"problem {op} M8192 N4096 K7168 experts 32 bfloat16 on 4 ranks"
    assert want in " ".join(text.split())
    assert {"serial", "grouped 8/8/16 ring"} == set(rows_of(text))
    assert "push_2" in text and "matmul_31" in text
    assert "chosen" in run(op, *sizes).stdout and "chosen" in run(op, *sizes, "--by", "rule").stdout


def test_embedding_bags_are_problems_too():
    given = (BAGS, "--shape", "8,128,5,65536", "--machine", "h200-4")
    for own in (False, True):
        more = ("--into",) if own else ()
        facts = json.loads(run(*given, *more, "--json").stdout, parse_constant=strict)
        problem = cp.Problem(BAGS, 65536, ranks=4, tables=((128,) * 8,) * 4,
                             indices=(8 * 65536 * 5,) * 4, out=own)  # fmt: skip
        choice = cp.choose(problem, "h200-4")
        assert facts["plan"] == choice.spec and facts["serial_s"] == choice.serial_s
    text = run(*given, "--plan", "serial", "--show").stdout
    assert "lookup " in text and "pooled own cols -> y" in text
    assert "experts must be 0" in run(*given, "--experts", "8", code=2).stderr
    assert "TABLES,D,POOLING,BATCH of numbers" in run(BAGS, "--shape", "8,8,8", code=2).stderr


@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
def test_operands_in_fp8(scales: str):
    facts = json.loads(run(*GATHER, "--fp8", scales, "--json").stdout, parse_constant=strict)
    problem = cp.Problem("all_gather_matmul", 8192, 7168, 8192, 8, scales=scales)  # type: ignore[arg-type]
    choice = cp.choose(problem, "h200-8")
    assert (facts["plan"], facts["seconds"]) == (choice.spec, choice.seconds)
    assert facts["compute_s"] < cp.choose(replace(problem, scales="", x_dtype="")).compute_s
    words = " ".join(run(*GATHER, "--fp8", scales).stdout.split())
    assert f"float8_e4m3fn with {scales} scales to bfloat16 on 8 ranks" in words


def test_a_norm_and_what_it_has():
    given = (NORM, "--shape", "64,8192", "--machine", "h200-4")
    text = run(*given, "--norm", "layer", "--residual", "--bias", "--fp8", "row").stdout
    words = " ".join(text.split())
    assert f"problem {NORM} M64 N8192 layer +residual, fp8 by rows bfloat16 +bias on 4" in words
    assert "alone norm " in words and "matmuls" not in words
    problem = cp.Problem(NORM, 64, 8192, ranks=4, norm="layer", residual=True, bias=True,
                         quantized="rows")  # fmt: skip
    choice = cp.choose(problem, "h200-4")
    assert f"by model {choice.spec}: {choice.seconds * 1e6:.0f} us" in words
    assert "norm alone" in choice.explain() and "matmuls" not in choice.explain()
    said = run(*given, "--fp8", "block", code=2).stderr
    assert "--fp8 must be row or tensor, of a result, got block" in said
    assert "bias must be False: a norm by RMS adds none" in run(*given, "--bias", code=2).stderr


@pytest.mark.parametrize("op", EXPERTS)
def test_experts_by_routes_and_islands(op: str):
    given = (op, "--shape", "32768,4096,7168", "--experts", "8", "--top-k", "8")
    words = " ".join(run(*given).stdout.split())
    assert "experts 8 routed top 8 bfloat16 on 8 ranks" in words
    far = (*given, "--islands", "2")
    assert "a machine with a nic" in run(*far, code=2).stderr
    facts = json.loads(run(*far, "--nic", "50", "--json").stdout, parse_constant=strict)
    problem = cp.Problem(op, 32768, 4096, 7168, 16, experts=8, counts="routed", top_k=8, islands=2)
    nic = cp.LinkSpec(name="NIC", bytes_per_s=50e9)
    choice = cp.choose(problem, replace(machine_of("test", "h200-8"), nic=nic))
    assert (facts["plan"], facts["seconds"]) == (choice.spec, choice.seconds)
    assert "--top-k must be 0" in run(*GATHER, "--top-k", "2", code=2).stderr


@pytest.mark.parametrize("by", ["model", "rule"])
def test_a_batch_invariant_plan_is_one_among_such(by: str):
    """Serial beside it is so, too; and it costs what our own matmul costs."""
    words = " ".join(run(*GATHER, "--plan", "auto invariant", "--by", by).stdout.split())
    assert "batch-invariant bfloat16 on 8 ranks" in words
    problem = cp.Problem("all_gather_matmul", 8192, 7168, 8192, 8, invariant=True)
    choice = cp.choose(problem, "h200-8", by=by)  # type: ignore[arg-type]
    assert f"by {by} {choice.spec}: {choice.seconds * 1e6:.0f} us" in words
    text = run(*GATHER, "--plan", "shard_p2p ring invariant").stdout
    assert set(rows_of(text)) == {"serial", "shard_p2p ring"}
    assert "batch-invariant bfloat16" in " ".join(text.split())
    serial = predicted_s(cp.build(problem, "serial"), machine_of("test", "h200-8"))
    assert rows_of(text)["serial"][0] == f"{serial * 1e6:.1f}"
    plain = cp.choose(replace(problem, invariant=False), "h200-8")
    assert 1 < cp.choose(problem, "h200-8").compute_s / plain.compute_s < 1.05


def test_it_fits_80_columns():
    result = run(*GATHER, columns=80)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


def test_a_machine_that_was_measured(tmp_path: Path):
    where = cp.preset("h100-2")
    measured = cp.Machine(
        name="mine", device=where.device, link=where.link, num_devices=2, measured=where.costs,
        source="measured on 2x NVIDIA H100",
    )  # fmt: skip
    path = save_machine(measured, Place(gpu="NVIDIA H100", ranks=2), tmp_path)
    text = " ".join(run(*GATHER, "--machine", str(path)).stdout.split())
    assert "on 2 ranks" in text
    assert "machine mine: measured on 2x NVIDIA H100 rates measured; a plan has to gain 3%" in text
    guessed = " ".join(run(*GATHER, "--machine", "b200-2").stdout.split())
    assert "rates derived from the datasheet; a plan has to gain 15%" in guessed


def test_a_plan_that_is_asked_for_stands_beside_serial():
    text = run(*GATHER, "--machine", "mi300x-8", "--plan", "shard_p2p xor", "--show").stdout
    rows = rows_of(text)
    assert list(rows) == ["serial", "shard_p2p xor"], "the fastest first"
    machine = cp.preset("mi300x-8")
    problem = cp.Problem("all_gather_matmul", 8192, 7168, 8192, 8)
    plan = cp.build(problem, "shard_p2p xor")
    us = predicted_s(plan, machine) * 1e6
    assert rows["shard_p2p xor"] == [f"{us:.1f}", rows["shard_p2p xor"][1], "asked for"]
    assert "asked for shard_p2p xor: " in " ".join(text.split())
    assert "slower than serial, 128 MiB of workspace" in text
    assert str(plan) in text
    assert "closed form" not in text


def test_rule_and_eager():
    by_rule = run(*GATHER, "--by", "rule").stdout
    assert "the rule takes shard_p2p ring for communication of" in by_rule
    assert "a plan has to gain" not in by_rule
    eager = json.loads(run(*SMALL, "--eager", "--json").stdout)
    graph = json.loads(run(*SMALL, "--json").stdout)
    assert eager["eager"] and not graph["eager"]
    assert eager["serial_s"] > graph["serial_s"]


def strict(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@pytest.mark.parametrize("plan", ["auto", "graded"])
def test_json(plan: str):
    facts = json.loads(run(*GATHER, "--plan", plan, "--json").stdout, parse_constant=strict)
    assert facts["machine"]["name"] == "h200-8"
    assert facts["problem"]["ranks"] == 8
    assert facts["by"] == ("model" if plan == "auto" else "asked for")
    table = {row["spec"]: row for row in facts["table"]}
    assert table[facts["plan"]]["seconds"] == facts["seconds"]
    assert table["serial"]["seconds"] == facts["serial_s"]
    assert facts["longer_s"] == max(facts["compute_s"], facts["comm_s"])
    assert all(row["seconds"] > 0 for row in table.values())


def test_json_of_what_is_refused_has_no_time(tmp_path: Path):
    here = preset("h200-8")
    old = replace(here, device=replace(here.device, capability="7.5"))
    (tmp_path / "old.json").write_text(old.to_json())
    file = str(tmp_path / "old.json")
    facts = json.loads(run(*GATHER, "--machine", file, "--json").stdout, parse_constant=strict)
    table = {row["spec"]: row for row in facts["table"]}
    assert table["serial"]["seconds"] and table["shard_p2p ring"]["seconds"] is None


SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_pictures(suffix: str, tmp_path: Path):
    path = tmp_path / f"the plan{suffix}"
    assert f"predicted timeline of serial and this plan: {path}" in run(
        *SMALL, "--plan", "graded", "--out", str(path)
    ).stdout.replace("\n", " ")
    assert path.read_bytes().startswith(SIGNATURES[suffix])


def test_trace_has_serial_beside_the_plan(tmp_path: Path):
    path = tmp_path / "plan.json"
    facts = json.loads(run(*SMALL, "--plan", "graded 1/2", "--json", "--out", str(path)).stdout)
    assert facts["picture"] == str(path)
    trace = json.loads(path.read_text())
    assert trace["otherData"]["first: source"].startswith("serial, predicted for h200-8")
    assert trace["otherData"]["second: source"].startswith("graded 1/2 ring, predicted")
    ends = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            half = event["pid"] % 2
            ends[half] = max(ends.get(half, 0.0), (event["ts"] + event["dur"]) * 1e-6)
    assert ends == pytest.approx({0: facts["serial_s"], 1: facts["seconds"]}, rel=1e-3)


def test_serial_is_drawn_alone(tmp_path: Path):
    path = tmp_path / "serial.json"
    text = run(*SMALL, "--plan", "serial", "--out", str(path)).stdout.replace("\n", " ")
    assert f"predicted timeline of serial: {path}" in text
    assert list(rows_of(run(*SMALL, "--plan", "serial").stdout)) == ["serial"]
    assert json.loads(path.read_text())["otherData"]["source"].startswith("predicted for h200-8")


def test_it_needs_no_torch_and_is_cheap():
    # 84,000 calls of Python functions are a tenth of a second on a quiet machine
    code = (
        "import sys\n"
        "import counterpoint.cli.plan\n"
        "from counterpoint.cli.main import app\n"
        "calls = []\n"
        "sys.setprofile(lambda _, event, *__: calls.append(event))\n"
        f"app(['plan', *{GATHER}], standalone_mode=False)\n"
        "sys.setprofile(None)\n"
        "assert calls.count('call') < 200_000\n"
        "assert not {'torch', 'triton', 'cuda', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    python("-c", code, PATH="")
