"""What is known of a machine, in files: read back as written, ignored where it is damaged."""

import json
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.choose import known
from counterpoint.choose.known import (
    CONTROLS,
    MACHINE,
    PLANS,
    Place,
    cache_folder,
    file_of,
    load,
    load_controls,
    problem_key,
    released,
    save_controls,
    save_machine,
    save_tuned,
)
from counterpoint.errors import CounterpointWarning
from counterpoint.machine import Machine
from counterpoint.machine_of import SHIPPED, machine_of, shipped, slug
from counterpoint.presets import preset
from counterpoint.problem import Problem

GPU, RANKS = "NVIDIA H200", 4
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "nccl": "2.28.9", "driver": "580.65",
            "counterpoint": "0.1.0", "cpu": "Xeon"}  # fmt: skip
PLACE = Place(gpu=GPU, ranks=RANKS, versions=VERSIONS, environment={"NCCL_ALGO": "Ring"})
PROBLEM = Problem("all_gather_matmul", 8192, 7168, 8192, RANKS)
SPEC = "graded 1/3 ring"


def measured(kernel_s: float = 2e-6) -> Machine:
    base = preset(f"h200-{RANKS}")
    return replace(base, measured=replace(base.costs, kernel_s=kernel_s), source="measured here")


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.machine_of.SHIPPED", tmp_path / "shipped")


def read(folder: Path, place: Place = PLACE) -> known.Knowledge:
    return load(place, folder)


def test_a_machine_and_its_plans_are_read_back(tmp_path: Path):
    path = save_machine(measured(), PLACE, tmp_path)
    assert path == tmp_path / "nvidia-h200-4.json"
    entry = {"spec": SPEC, "seconds": 1e-3, "serial_s": 1.2e-3}
    assert save_tuned(PROBLEM, entry, PLACE, tmp_path) == tmp_path / "tuned-nvidia-h200-4.json"
    other = replace(PROBLEM, n=1280)
    save_tuned(other, {"spec": "serial"}, PLACE, tmp_path)
    # measured once more: the newer one stays
    save_tuned(other, {"spec": "shard_p2p xor"}, PLACE, tmp_path)

    found = read(tmp_path)
    assert found.machine == measured()
    assert found.tuned == {
        problem_key(PROBLEM): SPEC,
        problem_key(other): "shard_p2p xor",
    }
    kept = json.loads((tmp_path / "tuned-nvidia-h200-4.json").read_text())
    assert kept["plans"][problem_key(PROBLEM)] == entry


def test_a_key_is_of_the_problem_and_not_of_the_memory_limit():
    keys = [
        problem_key(p)
        for p in (
            PROBLEM,
            replace(PROBLEM, n=7169),
            replace(PROBLEM, bias=True),
            replace(PROBLEM, dtype="float16"),
            replace(PROBLEM, rows=(8192, 0, 0, 0)),
            replace(PROBLEM, splits=(7000, 168)),
            replace(PROBLEM, op="matmul_reduce_scatter"),
            replace(PROBLEM, ranks=2, rows=()),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert problem_key(replace(PROBLEM, scratch_bytes_limit=1)) == problem_key(PROBLEM)
    assert problem_key(replace(PROBLEM, rows=(2048,) * 4)) == problem_key(PROBLEM)


def test_file_names_are_plain():
    assert slug("NVIDIA H200", 4) == "nvidia-h200-4"
    assert slug("NVIDIA A100-SXM4-80GB", 8) == "nvidia-a100-sxm4-80gb-8"
    assert slug("../../etc: x\n", 2) == "etc-x-2"


def test_missing_files_are_no_news(tmp_path: Path, nothing_shipped: None):
    found = read(tmp_path / "not there")
    assert found.machine == preset("h200-4")
    assert found.tuned == {}
    assert read(tmp_path, replace(PLACE, gpu="Some GPU")).machine is None
    assert released(GPU, RANKS) == found.machine
    assert not (tmp_path / "not there").exists()


def test_the_package_alone_is_asked_where_no_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    save_machine(measured(), PLACE)
    assert load(PLACE).machine == measured()
    assert released(GPU, RANKS) != measured()


Content = dict[str, Any]


def without_measured(content: Content) -> object:
    return {**content, "machine": {**content["machine"], "measured": None}}


def with_cost(**costs: object) -> Callable[[Content], object]:
    def damage(content: Content) -> object:
        machine = content["machine"]
        return {**content, "machine": {**machine, "measured": {**machine["measured"], **costs}}}

    return damage


MACHINE_DAMAGE: dict[str, tuple[Callable[[Content], object], str]] = {
    "other gpu": (lambda c: {**c, "gpu": "NVIDIA H100"}, "is for gpu 'NVIDIA H100'"),
    "other ranks": (lambda c: {**c, "ranks": 8}, "is for ranks 8, this is 4"),
    "other format": (lambda c: {**c, "format": 0}, "is for format 0, this is 2"),
    "no format": (lambda c: {"machine": c["machine"]}, "is for format None"),
    "a list": (lambda c: [c], "is damaged: no JSON object"),
    "nothing": (lambda c: None, "is damaged: no JSON object"),
    "no machine": (lambda c: {k: v for k, v in c.items() if k != "machine"}, "is damaged"),
    "no such machine": (lambda c: {**c, "machine": "h200-4"}, "is damaged"),
    "empty machine": (lambda c: {**c, "machine": {}}, "is damaged"),
    "not measured": (without_measured, "has no measured costs"),
    "unit slip": (with_cost(copy_bytes_per_s=390), "is damaged: Costs: copy_bytes_per_s must be"),
    "microseconds": (with_cost(barrier_s=3.2), "is damaged: Costs: barrier_s must be a number"),
    "a text": (with_cost(kernel_s="__import__('os').abort()"), "is damaged"),
    "infinite": (with_cost(hbm_bytes_per_s=10**400), "is damaged"),
    "unknown constant": (with_cost(speed=1.0), "is damaged"),
    "enormous number": (
        lambda c: {**c, "machine": {**c["machine"], "device": {
            **c["machine"]["device"], "hbm_bytes": -(10**400)}}},
        "is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINE_DAMAGE)
def test_a_damaged_machine_is_ignored(
    tmp_path: Path, nothing_shipped: None, caplog: pytest.LogCaptureFixture, name: str
):
    caplog.set_level("INFO", "counterpoint")
    damage, why = MACHINE_DAMAGE[name]
    path = save_machine(measured(), PLACE, tmp_path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.warns(CounterpointWarning) as caught:
        found = read(tmp_path)
    assert found.machine == preset("h200-4") and found.tuned == {}
    (warning,) = caught
    assert str(warning.message).startswith(f"{path} {why}")
    assert str(warning.message).endswith("it is ignored, delete it or measure again")
    assert caplog.messages == [str(warning.message)]


TUNED_DAMAGE: dict[str, tuple[Callable[[Content], object], str]] = {
    "other gpu": (lambda c: {**c, "gpu": "NVIDIA H100"}, "is for gpu 'NVIDIA H100'"),
    "other ranks": (lambda c: {**c, "ranks": 8}, "is for ranks 8, this is 4"),
    "other format": (lambda c: {**c, "format": 2}, "is for format 2, this is 3"),
    "other torch": (
        lambda c: {**c, "versions": {**c["versions"], "torch": "2.12.0"}},
        "is for torch '2.12.0', this is '2.11",
    ),
    "no versions": (lambda c: {k: v for k, v in c.items() if k != "versions"}, "is for torch None"),
    "a text": (lambda c: "plans", "is damaged: no JSON object"),
    "plans are a list": (lambda c: {**c, "plans": [SPEC]}, "is damaged: its plans have no spec"),
    "an entry is a text": (lambda c: {**c, "plans": {"x": SPEC}}, "is damaged: its plans have no"),
    "no spec": (lambda c: {**c, "plans": {"x": {}}}, "is damaged: its plans have no spec"),
    "spec is a number": (lambda c: {**c, "plans": {"x": {"spec": 1}}}, "is damaged: its plans"),
    "spec is a list": (lambda c: {**c, "plans": {"x": {"spec": [SPEC]}}}, "is damaged: its plans"),
}


def test_files_that_are_read_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Not those that are written, nor those that are not there."""
    caplog.set_level("INFO", "counterpoint")
    read(tmp_path)
    machine = save_machine(measured(), PLACE, tmp_path)
    plans = save_tuned(PROBLEM, {"spec": SPEC, "seconds": 1e-3, "serial_s": 2e-3}, PLACE, tmp_path)
    save_tuned(replace(PROBLEM, n=64), {"spec": "serial", "seconds": 3}, PLACE, tmp_path)
    controls = save_controls("graph abc", {"spec": "overlap", "why": ""}, PLACE, tmp_path)
    assert caplog.messages == []
    found = read(tmp_path)
    load_controls("graph abc", PLACE, tmp_path)
    assert caplog.messages == [
        f"{plans}: tuned plans of 2 problems", f"{machine}: measured costs of {measured().name}",
        f"{controls}: tuned controls of a pipeline",
    ]  # fmt: skip
    # times that someone has written otherwise are none
    assert found.times == {problem_key(PROBLEM): known.Timed(1e-3, "serial", 2e-3)}
    assert known.Knowledge.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", TUNED_DAMAGE)
def test_damaged_plans_are_ignored(tmp_path: Path, name: str):
    damage, why = TUNED_DAMAGE[name]
    save_machine(measured(), PLACE, tmp_path)
    path = save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.warns(CounterpointWarning) as caught:
        found = read(tmp_path)
    # the machine is in a file of its own
    assert found.machine == measured() and found.tuned == {}
    (warning,) = caught
    assert str(warning.message).startswith(f"{path} {why}")
    # and what is tuned from now on is kept
    with pytest.warns(CounterpointWarning):
        save_tuned(PROBLEM, {"spec": "serial"}, PLACE, tmp_path)
    assert read(tmp_path).tuned == {problem_key(PROBLEM): "serial"}


BYTES = {
    "a folder": None,
    "empty": b"",
    "no JSON": b"import os; os.abort()",
    "no text": b"\xff\xfe\x00\x81",
    "too deep": b"[" * 100_000,
    "long number": b'{"format": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("file", ["nvidia-h200-4.json", "tuned-nvidia-h200-4.json"])
def test_a_file_of_something_else_is_ignored(
    tmp_path: Path, nothing_shipped: None, file: str, content: bytes | None
):
    path = tmp_path / file
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.warns(CounterpointWarning, match=f"{tmp_path / file} is damaged"):
        assert read(tmp_path) == known.Knowledge(preset("h200-4"), {})


def test_a_file_cut_off_anywhere_is_ignored(tmp_path: Path, nothing_shipped: None):
    save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path)
    path = save_machine(measured(), PLACE, tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.warns(CounterpointWarning, match=f"{path} is damaged"):
            found = read(tmp_path)
        assert found.machine == preset("h200-4")
        assert found.tuned == {problem_key(PROBLEM): SPEC}


def test_saving_leaves_nothing_else_behind(tmp_path: Path):
    where = tmp_path / "not" / "yet" / "there"
    machine, tuned = (
        save_machine(measured(), PLACE, where),
        save_tuned(PROBLEM, {"spec": SPEC}, PLACE, where),
    )
    before = tuned.read_bytes()
    with pytest.raises(TypeError):  # no JSON: the file stays as it was
        save_tuned(PROBLEM, {"spec": SPEC, "what": object()}, PLACE, where)
    assert tuned.read_bytes() == before
    assert sorted(where.iterdir()) == sorted([machine, tuned])


def test_saving_at_the_same_time_never_shows_half_a_file(tmp_path: Path):
    problems = [replace(PROBLEM, n=n) for n in range(1, 9)]
    save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path)

    def save(problem: Problem) -> None:
        for i in range(10):
            save_tuned(problem, {"spec": "x" * 100 * i}, PLACE, tmp_path)
            save_machine(measured(problem.n * 1e-6), PLACE, tmp_path)

    # a warning is an error here: whatever is read meanwhile is whole
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        saves = [pool.submit(save, problem) for problem in problems]
        while not all(each.done() for each in saves):
            found = read(tmp_path)
            assert found.tuned
        for each in saves:
            each.result()
        found = read(tmp_path)
    assert found.machine in [measured(p.n * 1e-6) for p in problems]
    assert set(found.tuned) == {problem_key(p) for p in (PROBLEM, *problems)}, "an update is lost"
    assert len(list(tmp_path.iterdir())) == 2


def test_controls_of_a_pipeline_are_read_back(tmp_path: Path):
    assert load_controls("graph abc", PLACE, tmp_path) is None
    entry = {"spec": "overlap priority", "why": "it is faster"}
    path = save_controls("graph abc", entry, PLACE, tmp_path)
    assert path == tmp_path / "controls-nvidia-h200-4.json"
    save_controls("eager abc", {"spec": "overlap", "why": ""}, PLACE, tmp_path)
    assert load_controls("graph abc", PLACE, tmp_path) == entry
    assert load_controls("graph other", PLACE, tmp_path) is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"controls": ["graph abc"]}))
    with pytest.warns(CounterpointWarning, match="its controls have no spec"):
        assert load_controls("graph abc", PLACE, tmp_path) is None


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COUNTERPOINT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "counterpoint"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "counterpoint"
    assert save_machine(measured(), PLACE).parent == tmp_path / "xdg" / "counterpoint"
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert save_tuned(PROBLEM, {"spec": SPEC}, PLACE).parent == tmp_path / "own"
    found = load(PLACE)
    assert found.machine != measured() and found.tuned
    # set to nothing is not set
    monkeypatch.setenv("COUNTERPOINT_CACHE", "")
    assert load(PLACE).machine == measured()


def test_what_came_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("counterpoint.machine_of.SHIPPED", tmp_path)
    assert shipped(GPU, 4) is None
    save_machine(measured(), PLACE, tmp_path)
    assert shipped(GPU, 4) == machine_of("test", "h200-4") == measured()
    # of eight GPUs of the kind four have been measured: what a part costs is taken from there
    eight = shipped(GPU, 8)
    assert eight is not None
    assert eight == replace(
        preset("h200-8"), measured=measured().costs, source="measured here, on 4 GPUs"
    )
    # but not the other way round
    assert shipped(GPU, 2) is None and shipped(GPU, 1) is None
    assert shipped("NVIDIA H100", 4) is None
    # nor are two GPUs like more: NCCL has other rates there
    save_machine(measured(), replace(PLACE, gpu="NVIDIA B200", ranks=2), tmp_path)
    assert shipped("NVIDIA B200", 2) == measured()
    assert shipped("NVIDIA B200", 4) is shipped("NVIDIA B200", 8) is None
    # what was measured here goes before
    save_machine(measured(3e-6), PLACE, tmp_path / "cache")
    assert read(tmp_path / "cache").machine == measured(3e-6)
    assert read(tmp_path / "empty").machine == measured()


def test_what_comes_with_this_release_is_readable():
    for path in SHIPPED.glob("*.json"):
        content = json.loads(path.read_text())
        machine = shipped(content["gpu"], content["ranks"])
        assert machine is not None and machine.measured
        assert path.name == f"{slug(content['gpu'], content['ranks'])}.json"
        assert machine.num_devices == content["ranks"]


def writes(folder: str, writer: int) -> None:
    for i in range(40):
        problem = replace(PROBLEM, n=1000 * writer + i)
        save_tuned(problem, {"spec": SPEC}, PLACE, Path(folder))


def test_nothing_that_six_processes_write_is_lost(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=writes, args=(str(tmp_path), n)) for n in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 6
    assert len(read(tmp_path).tuned) == 240


def test_a_folder_that_cannot_be_written_to_is_one_warning(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.warns(CounterpointWarning, match="cannot be written to"):
        save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path / "file")
    # a second one would be an error here
    save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path / "file")


OTHER_PLACES = {
    "gpu": replace(PLACE, gpu="NVIDIA H100"),
    "gpu of one slug": replace(PLACE, gpu="NVIDIA-H200"),
    "ranks": replace(PLACE, ranks=8),
    "islands": replace(PLACE, islands=2),
    "variable": replace(PLACE, environment={"NCCL_ALGO": "Tree"}),
    "one more": replace(PLACE, environment={**PLACE.environment, "NCCL_PROTO": "LL"}),
    "one less": replace(PLACE, environment={}),
    **{name: replace(PLACE, versions=VERSIONS | {name: "other"}) for name in VERSIONS},
    "version less": replace(PLACE, versions={"torch": VERSIONS["torch"]}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::counterpoint.errors.CounterpointWarning")
@pytest.mark.parametrize("changed", OTHER_PLACES)
def test_what_was_measured_is_of_its_place_alone(
    tmp_path: Path, nothing_shipped: None, changed: str
):
    """Also in the file of the other place, as where a cache folder is shared or copied."""
    other = OTHER_PLACES[changed]
    save_machine(measured(), PLACE, tmp_path)
    save_tuned(PROBLEM, {"spec": SPEC}, PLACE, tmp_path)
    save_controls("key", {"spec": "overlap"}, PLACE, tmp_path)
    for copied in (False, True):
        found = read(tmp_path, other)
        assert found.machine == released(other.gpu, other.ranks) and not found.tuned
        assert load_controls("key", other, tmp_path) is None
        if not copied:
            for kind in (MACHINE, PLANS, CONTROLS):
                mine, its = (file_of(kind, place, tmp_path)[0] for place in (PLACE, other))
                if mine != its:
                    mine.rename(its)
    assert {field.name for field in fields(Place)} == set(PLACE.facts()), "a fact is not compared"


def test_variables_that_change_what_is_measured(monkeypatch: pytest.MonkeyPatch):
    before = known.environment()
    for name in ("NCCL_DEBUG", "NCCL_HOSTID", "COUNTERPOINT_CACHE", "COUNTERPOINT_ISLAND",
                 "COUNTERPOINT_NVTX", "COUNTERPOINT_TIMEOUT_S",
                 "TORCH_NCCL_ASYNC_ERROR_HANDLING"):  # fmt: skip
        monkeypatch.setenv(name, "other")
    assert known.environment() == before
    changing = ("NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS", "COUNTERPOINT_REPLAY",
                "COUNTERPOINT_CHECK", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLASLT_WORKSPACE_SIZE",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVIDIA_TF32_OVERRIDE")  # fmt: skip
    for name in changing:
        monkeypatch.setenv(name, "other")
    assert known.environment() == before | dict.fromkeys(changing, "other")
