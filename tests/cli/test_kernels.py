"""`counterpoint doctor --kernels`: the table, and what is said where there are no kernels."""

import json

import pytest
from processes import python
from rich.console import Console
from typer.testing import CliRunner

from counterpoint.cli import kernels, main
from counterpoint.gpu import step_footprints
from counterpoint.gpu.footprint import Footprint
from counterpoint.gpu.step_footprints import SHAPE, fitting_shape

GEMM = Footprint(
    kind="kernel", name="nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
    grid=(132, 1, 1), block=(384, 1, 1), cluster=(2, 1, 1), registers_per_thread=168,
    static_shared_bytes=1024, dynamic_shared_bytes=213188, priority=-1,
)  # fmt: skip
STEP = [
    ("matmul", GEMM),
    ("copy", Footprint(kind="memcpy", total_bytes=64 * 2**20)),
    ("all-gather", Footprint(kind="event_record")),
]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 whose step is STEP."""
    for variable in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    cuda = kernels.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "set_device", lambda _: None)
    monkeypatch.setattr(cuda, "get_device_name", lambda _: "NVIDIA H200")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(kernels, "_free_bytes", lambda _: 140 * 2**30)
    monkeypatch.setattr(step_footprints, "step_footprints", lambda *_: STEP)
    monkeypatch.setattr(kernels, "Console", lambda: Console(width=200))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["doctor", "--kernels", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("one_gpu")
def test_table():
    lines = [line.rstrip() for line in run("--shape", "8192,7168,8192").splitlines()]
    assert lines[0] == "kernels of a step  M 8192 N 7168 K 8192  NVIDIA H200"
    cells = [line.split() for line in lines]
    tile = ["128x256", "13.58"]  # 64 x 28 tiles on 132 SMs
    shared = ["1.0", "+", "208.2"]
    grid = ["132x1x1", "384", "168"]
    assert ["matmul", GEMM.name, "kernel", *grid, *shared, "2x1x1", "-1", *tile] in cells
    assert ["copy", "64.00", "MiB", "memcpy"] in cells
    assert ["all-gather", "event_record"] in cells
    assert lines[-1] == kernels.WITH_NCCL


@pytest.mark.usefixtures("one_gpu")
def test_json():
    facts = json.loads(run("--json"))
    assert (facts["gpu"], facts["ranks"], facts["shape"]) == ("NVIDIA H200", 1, list(SHAPE))
    matmul, copy, _ = facts["kernels"]
    assert matmul["step"] == "matmul"
    assert matmul["name"] == matmul["short_name"] == GEMM.name
    assert (matmul["threads"], matmul["registers_per_thread"]) == (384, 168)
    assert matmul["tile"] == [128, 256]
    assert matmul["waves"] == pytest.approx(64 * 28 / 132)
    assert copy["total_bytes"] == 64 * 2**20
    assert copy["tile"] is copy["waves"] is None


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("shape", "tiles"), [("300,100,64", 2), ("100,300,64", 2), ("1,1,64", 1), ("257,1,1", 2)]
)
def test_waves_of_the_way_that_needs_fewer_tiles(shape: str, tiles: int):
    facts = json.loads(run("--json", "--shape", shape))
    assert facts["kernels"][0]["waves"] == pytest.approx(tiles / 132)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_without_a_gpu(cuda: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels.torch.version, "cuda", cuda)
    result = CliRunner().invoke(main.app, ["doctor", "--kernels", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    why = "no NVIDIA GPU found; install its driver" if cuda else "torch is a CPU build; install"
    assert f"GPU of this machine must be an NVIDIA one, got none; {why}" in result.stderr


def test_doctor_runs_without_triton():
    """It says that Triton is missing, so it must not need it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from counterpoint.cli.doctor import doctor; sys.exit(doctor(as_json=False))"
    )
    python("-c", code)


def test_default_shape_is_cut_by_rows_to_what_is_free():
    assert fitting_shape(140 * 2**30) == SHAPE
    assert fitting_shape(2**30) == SHAPE
    half_a_gib = fitting_shape(2**29)
    assert 1 < half_a_gib[0] < SHAPE[0] and half_a_gib[1:] == SHAPE[1:]
    assert fitting_shape(0) == (1, *SHAPE[1:])
