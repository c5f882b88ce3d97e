"""What is said where cuda-bindings is missing, or CUDA refuses; what goes as one batch."""

import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.gpu import driver
from counterpoint.gpu.driver import Copy


@pytest.fixture
def forgotten() -> Iterator[None]:
    """As if nothing had been imported, before and after."""
    yield driver.bindings.cache_clear() or driver.driver_bindings.cache_clear()
    driver.bindings.cache_clear()
    driver.driver_bindings.cache_clear()
    driver.no_batches.cache_clear()


@pytest.mark.parametrize(
    ("part", "find", "user"),
    [
        ("runtime", driver.bindings, "copy engine"),
        ("driver", driver.driver_bindings, "graph nodes"),
    ],
)
@pytest.mark.usefixtures("forgotten")
def test_missing_bindings(
    part: str, find: Callable[[], ModuleType], user: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, f"cuda.bindings.{part}", None)
    wanted = rf"^{user}: needs cuda-bindings \(.*\); pip install cuda-bindings, of torch's CUDA"
    with pytest.raises(UnsupportedError, match=wanted):
        find()


class Status(IntEnum):
    """As the runtime's."""

    cudaErrorInvalidValue = 1


def test_a_refused_copy_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch):
    runtime = SimpleNamespace(
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToDevice=3),
        cudaMemcpyAsync=lambda *_: (Status.cudaErrorInvalidValue,),
    )
    monkeypatch.setattr(driver, "bindings", lambda: runtime)
    with pytest.raises(CounterpointError, match=r"^cudaMemcpyAsync failed: cudaErrorInvalidValue$"):
        driver.copy_async(Copy(0, 8, 8, 8, 8, 1), 0)


STREAM, CAPTURED = 64, 65
FLAT = [Copy(1000, 16, 2000, 16, 16, 1), Copy(3000, 32, 4000, 32, 32, 1)]
TALL = Copy(5000, 64, 6000, 128, 8, 4)


class Runtime(SimpleNamespace):
    """As cuda-bindings, on paper: notes what it is asked for, and refuses what it is told to."""

    def __init__(self, *, version: int = 13000, has_batches: bool = True, refuses: str = ""):
        kinds = SimpleNamespace(cudaMemcpyDeviceToDevice=3)
        super().__init__(cudaMemcpyKind=kinds, cudaError_t=Status)
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        found: dict[str, Callable[..., tuple[object, ...]]] = {
            "cudaMemcpyAsync": lambda *_: (),
            "cudaMemcpy2DAsync": lambda *_: (),
            "cudaDriverGetVersion": lambda: (version,),
            "cudaStreamIsCapturing": lambda stream: (int(stream == CAPTURED),),
        }
        for name, call in found.items():
            status = Status.cudaErrorInvalidValue if name == refuses else 0

            def noted(*a: object, name: str = name, call: object = call, status: int = status):
                self.calls.append((name, a))
                return (status, *call(*a))  # type: ignore[operator]

            setattr(self, name, noted)

        def batch(*arguments: object) -> int:
            self.calls.append(("cudaMemcpyBatchAsync", arguments))
            return int(refuses == "cudaMemcpyBatchAsync")

        if has_batches:
            self.cudaMemcpyBatchAsync = batch

    def copies(self) -> list[str]:
        return [name for name, _ in self.calls if "Memcpy" in name]


@pytest.fixture
def install(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    def installed(**facts: object) -> Runtime:
        runtime = Runtime(**facts)  # type: ignore[arg-type]
        driver.no_batches.cache_clear()
        for name in ("bindings", "runtime"):
            monkeypatch.setattr(driver, name, lambda: runtime)
        return runtime

    return installed


@pytest.mark.parametrize(("major", "behind"), [(12, 1), (13, 0)])
def test_a_batch_is_one_call_with_one_attribute(
    major: int, behind: int, install: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
):
    """Of CUDA 12 the call also says which copy failed."""
    runtime = install()
    monkeypatch.setattr(driver, "cuda_major", lambda: major)
    driver.copy_batch_async(FLAT, STREAM)
    ((_, call),) = (each for each in runtime.calls if each[0] == "cudaMemcpyBatchAsync")
    *arrays, count, attribute, index, num_attributes = cast("Any", call)[:7]
    assert len(call) == 8 + behind
    stream = cast("Any", call[-1])
    assert [[*array] for array in arrays] == [[1000, 3000], [2000, 4000], [16, 32]]
    assert (count.value, num_attributes.value, stream.value) == (2, 1, STREAM)
    assert (attribute._obj.order, index._obj.value) == (1, 0)
    driver.copy_batch_async([], STREAM)
    assert runtime.copies() == ["cudaMemcpyBatchAsync"], "an empty batch is no call"


def test_a_batch_copies_from_elsewhere_next_time(install: Callable[..., Runtime]):
    runtime = install()
    batch = driver.Batch(FLAT)
    batch.submit(STREAM, [6000, 7000])
    assert [*cast("Any", runtime.calls[-1][1][1])] == [6000, 7000]
    batch.submit(CAPTURED, [8000, 9000])
    assert [arguments[1] for name, arguments in runtime.calls if name == "cudaMemcpyAsync"] == [
        8000, 9000,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("copies", "stream", "text"),
    [
        ([*FLAT, TALL], STREAM, "copies must be of one row each, got 4 rows; submit .* copy_async"),
        (FLAT, 0, "stream must be another than the legacy one, got 0; use a stream of torch"),
        (FLAT, 1, "stream must be another than the legacy one, got 1"),
        (FLAT, CAPTURED, "stream must be one that is not captured, got a capture; submit one by"),
    ],
)
def test_what_no_batch_can_be(
    copies: list[Copy], stream: int, text: str, install: Callable[..., Runtime]
):
    runtime = install()
    with pytest.raises(InputError, match=f"^copy_batch_async: {text}"):
        driver.copy_batch_async(copies, stream)
    assert runtime.copies() == []


LACKS = [
    ({"version": 12060}, "the driver is of CUDA 12.6; 12.8 or newer has cudaMemcpyBatchAsync"),
    (
        {"has_batches": False},
        r"torch's CUDA runtime has none \(.*\); that of CUDA 12.8 or newer has",
    ),
]


@pytest.mark.parametrize(("facts", "text"), LACKS)
def test_without_batches_copies_go_singly(
    facts: dict[str, object], text: str, install: Callable[..., Runtime]
):
    runtime = install(**facts)
    with pytest.raises(UnsupportedError, match=f"^copy_batch_async: {text}"):
        driver.copy_batch_async(FLAT, STREAM)
    driver.copies_async([*FLAT, TALL], STREAM, capturing=False)
    assert runtime.copies() == ["cudaMemcpyAsync", "cudaMemcpyAsync", "cudaMemcpy2DAsync"]


@pytest.mark.parametrize("call", ["cudaMemcpyBatchAsync", "cudaStreamIsCapturing"])
def test_every_status_of_a_batch_is_looked_at(call: str, install: Callable[..., Runtime]):
    install(refuses=call)
    with pytest.raises(CounterpointError, match=f"^{call} failed: cudaErrorInvalidValue$"):
        driver.copy_batch_async(FLAT, STREAM)


EMPTY = Copy(7000, 0, 8000, 0, 0, 1)


@pytest.mark.parametrize(
    ("copies", "stream", "capturing", "batched", "wanted"),
    [
        (FLAT, STREAM, False, 2, ["cudaMemcpyBatchAsync"]),
        ([TALL, *FLAT, EMPTY], STREAM, False, 2, ["cudaMemcpyBatchAsync", "cudaMemcpy2DAsync"]),
        (FLAT, CAPTURED, True, 0, ["cudaMemcpyAsync"] * 2),
        (FLAT, 0, False, 0, ["cudaMemcpyAsync"] * 2),
        (FLAT[:1], STREAM, False, 0, ["cudaMemcpyAsync"]),
    ],
    ids=["batch", "batch and strided", "capture", "legacy stream", "one"],
)
def test_what_goes_as_one_batch(
    copies: list[Copy], stream: int, capturing: bool, batched: int, wanted: list[str],
    install: Callable[..., Runtime],
):  # fmt: skip
    runtime = install()
    driver.copies_async(copies, stream, capturing=capturing)
    assert runtime.copies() == wanted
    for name, arguments in runtime.calls:
        if name == "cudaMemcpyBatchAsync":
            assert len(cast("Any", arguments[2])) == batched
