"""Shapes of kernels, on a stub of CUDA's driver and of Triton's compiled kernels."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.resources import shape as shape_module
from counterpoint.resources.footprint import Footprint
from counterpoint.resources.limits import LIMITS
from counterpoint.resources.occupancy import Kernel, feasible, occupancy
from counterpoint.resources.shape import Nodes, Shape, refusal, triton_launches
from counterpoint.runtime import graph_nodes

H200 = LIMITS["sm_90"]
NCCL = Kernel(544, 96, 21568, 82240)


def kernel(**changes: Any) -> Footprint:
    values: dict[str, Any] = {
        "kind": "kernel", "name": "gemm", "grid": (64, 1, 1), "block": (128, 1, 1),
        "cluster": (1, 1, 1), "registers_per_thread": 64, "dynamic_shared_bytes": 16384,
    }  # fmt: skip
    return Footprint(**(values | changes))


class Driver:
    """Kernel nodes, each of a function of its own, with what the driver would keep of them."""

    def __init__(self, *kernels: Footprint) -> None:
        self.kernels = dict(enumerate(kernels, 1))
        self.bytes = {n: k.dynamic_shared_bytes for n, k in self.kernels.items()}
        self.executable: dict[int, int] = {}
        self.carve_outs = dict.fromkeys(self.kernels, 0)
        self.limits = {100 + n: 48 << 10 for n in self.kernels}
        self.clones: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shape_module, "node_footprint", self.kernels.__getitem__)
        for name in ("nodes", "function_of", "allow_dynamic_bytes", "set_dynamic_bytes",
                     "set_carve_out", "clone_of", "destroy", "copy_attributes", "set_priority",
                     "kernel_of", "prefer_carve_out"):  # fmt: skip
            monkeypatch.setattr(graph_nodes, name, getattr(self, name))

    def nodes(self, graph: int) -> list[int]:
        return list(self.kernels)

    def function_of(self, node: int) -> int:
        return 100 + node

    def allow_dynamic_bytes(self, function: int, num_bytes: int) -> int:
        before, self.limits[function] = self.limits[function], num_bytes
        return before

    def prefer_carve_out(self, function: int, percent: int) -> int:
        before, self.carve_outs[function] = self.carve_outs.get(function, -1), percent
        return before

    def set_dynamic_bytes(self, node: int, num_bytes: int, executable: int = 0) -> None:
        assert num_bytes <= self.limits[100 + node], "the driver refuses more than the limit"
        (self.executable if executable else self.bytes)[node] = num_bytes

    def set_carve_out(self, node: int, percent: int) -> None:
        self.carve_outs[node] = percent

    def clone_of(self, graph: int) -> int:
        self.clones.append(999)
        return 999

    def destroy(self, graph: int) -> None:
        self.clones.remove(graph)

    def copy_attributes(self, node: int, clone: int) -> None:
        assert clone in self.clones
        self.carve_outs[node] = 0

    def kernel_of(self, node: int) -> Footprint:
        return self.kernels[node]

    def set_priority(self, node: int, priority: int) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"blocks_per_sm": 2, "carve_out": True}, "arguments must be one at a time"),
        ({"blocks_per_sm": 0}, "blocks_per_sm must be >= 1, got 0"),
        ({"dynamic_bytes": -1}, "dynamic_bytes must be >= 1, got -1"),
    ],
)
def test_a_shape_is_one_thing(given: dict[str, Any], text: str):
    with pytest.raises(InputError, match=text):
        Shape(**given)


def test_shapes_of_random_kernels_have_the_occupancy_they_name():
    draw = random.Random(0)
    for _ in range(200):
        found = kernel(
            block=(32 * draw.randint(1, 16), 1, 1), registers_per_thread=draw.randint(16, 128),
            static_shared_bytes=draw.choice((0, 1024)),
            dynamic_shared_bytes=draw.choice((0, 1000, 40000)),
        )  # fmt: skip
        able = feasible(found, H200)
        for wanted in range(min(able), 40):
            num_bytes = Shape(blocks_per_sm=wanted).bytes_of(found, H200)
            shaped = kernel(
                block=found.block, registers_per_thread=found.registers_per_thread,
                static_shared_bytes=found.static_shared_bytes, dynamic_shared_bytes=num_bytes,
            )  # fmt: skip
            assert occupancy(shaped, H200).blocks == max(k for k in able if k <= wanted)
        assert Shape().bytes_of(found, H200) == found.dynamic_shared_bytes


def test_a_pad_beyond_the_limit_is_refused():
    most = H200.shared_bytes_per_block
    assert Shape(dynamic_bytes=most).bytes_of(kernel(), H200) == most
    for wrong in (most + 1, 16383):
        with pytest.raises(InputError, match=f"got {wrong}"):
            Shape(dynamic_bytes=wrong).bytes_of(kernel(), H200)
    small = LIMITS["gfx942"]  # one block of 64 KiB is all that there is
    wide = kernel(block=(1024, 1, 1), registers_per_thread=32, dynamic_shared_bytes=0)
    assert 1 in feasible(wide, small)


def test_room_beside_a_block_of_nccl():
    slim = kernel(registers_per_thread=32)
    num_bytes = Shape(beside=NCCL).bytes_of(slim, H200)
    assert 114 << 10 < num_bytes + 1024 <= round(125.6 * 1024)
    with pytest.raises(InputError, match=r"beside must be a kernel that fits beside gemm .* sm_80"):
        Shape(beside=NCCL).bytes_of(slim, LIMITS["sm_80"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "memcpy"}, "a memcpy has no blocks"),
        ({"name": "ncclDevKernel_AllReduce"}, "it waits for peers"),
        ({"name": "signal_kernel"}, "it waits for peers"),
        ({"cooperative": True}, "it is a cooperative launch"),
        ({"cluster": (2, 1, 1)}, "it is launched in clusters"),
        ({"dynamic_shared_bytes": 213188, "block": (384, 1, 1)}, "one block per SM is resident"),
        ({}, ""),
    ],
)
def test_what_cannot_be_shaped(changes: dict[str, Any], why: str):
    found = refusal(kernel(**changes), H200)
    assert found.startswith(why) and bool(found) == bool(why)


def test_nodes_are_shaped_and_brought_back(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(kernel(), kernel(name="ncclKernel"), kernel(registers_per_thread=128))
    driver.install(monkeypatch)
    before = dict(driver.limits)
    nodes = Nodes(7, H200)
    assert set(nodes.kernels) == {1, 3} and set(nodes.refused) == {"ncclKernel"}
    assert nodes.feasible() == (8, 7, 6, 5, 4, 3, 2, 1)
    with pytest.raises(RuntimeError, match="on purpose"):  # noqa: SIM117
        with nodes:
            assert driver.limits[101] == driver.limits[103] == H200.shared_bytes_per_block
            nodes.set(Shape(blocks_per_sm=6))
            assert driver.bytes[1] > 16384 and driver.bytes[3] == 16384  # 4 blocks of itself
            assert not driver.executable
            nodes.set(Shape(blocks_per_sm=2), executable=5)
            assert set(driver.executable) == {1, 3}
            nodes.set(Shape(carve_out=True))
            assert (driver.carve_outs[1], driver.carve_outs[2]) == (100, 0)
            assert driver.bytes[1] == 16384
            with pytest.raises(InputError, match="executable must be 0 with a carve-out"):
                nodes.set(Shape(carve_out=True), executable=5)
            nodes.set(Shape(blocks_per_sm=1))
            assert driver.carve_outs[1] == 0
            raise RuntimeError("on purpose")
    assert driver.bytes == {1: 16384, 2: 16384, 3: 16384}
    assert driver.limits == before and not driver.clones


def test_a_shape_that_one_kernel_cannot_have_changes_none(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(kernel(), kernel(dynamic_shared_bytes=100_000))
    driver.install(monkeypatch)
    with Nodes(7, H200) as nodes:
        with pytest.raises(InputError, match="got 50000"):
            nodes.set(Shape(dynamic_bytes=50_000))
        assert driver.bytes == {1: 16384, 2: 100_000}


def test_nothing_to_shape_says_why(monkeypatch: pytest.MonkeyPatch):
    Driver(kernel(cluster=(2, 1, 1))).install(monkeypatch)
    with pytest.raises(UnsupportedError, match="nothing can be shaped; gemm: it is launched in cl"):
        Nodes(7, H200).check()


def compiled(**changes: Any) -> Any:
    metadata = {"name": "gemm", "num_warps": 4, "num_ctas": 1, "shared": 16384}
    metadata |= {k: v for k, v in changes.items() if k in metadata}
    packed = changes.get("packed", tuple(metadata[k] for k in ("num_warps", "num_ctas", "shared")))
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), n_regs=64, function=101,
                           packed_metadata=packed)  # fmt: skip


def test_triton_launches_are_brought_back(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(kernel())
    driver.install(monkeypatch)
    made = compiled()
    with pytest.raises(RuntimeError, match="on purpose"):  # noqa: SIM117
        with triton_launches([made], Shape(blocks_per_sm=2), H200) as found:
            assert made.packed_metadata == (4, 1, found["gemm"])
            assert driver.limits[101] == H200.shared_bytes_per_block
            shaped = kernel(dynamic_shared_bytes=found["gemm"])
            assert occupancy(shaped, H200).blocks == 2
            raise RuntimeError("on purpose")
    assert made.packed_metadata == (4, 1, 16384) and driver.limits[101] == 48 << 10
    with triton_launches([made], Shape(carve_out=True), H200):
        assert driver.carve_outs[101] == 100 and made.packed_metadata == (4, 1, 16384)
    assert driver.carve_outs[101] == -1


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (object(), InputError, "kernels must be compiled Triton kernels, .* got object"),
        (compiled(packed=(4, 1, 16384, 0)), UnsupportedError, r"this Triton launches by \(4, 1"),
        (compiled(num_ctas=2), UnsupportedError, "gemm cannot be shaped: it is launched in clus"),
        (compiled(name="signal_kernel"), UnsupportedError, "signal_kernel cannot be shaped: it wa"),
    ],
)
def test_launches_that_cannot_be_shaped(
    given: Any, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
):
    driver = Driver(kernel())
    driver.install(monkeypatch)
    with pytest.raises(error, match=text):  # noqa: SIM117
        with triton_launches([given], Shape(blocks_per_sm=2), H200):
            pass
    assert driver.limits[101] == 48 << 10
