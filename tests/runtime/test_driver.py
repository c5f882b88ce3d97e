"""What is said where cuda-bindings is missing, or CUDA refuses a call."""

import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest

from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.runtime import driver
from counterpoint.runtime.driver import Copy


@pytest.fixture
def forgotten() -> Iterator[None]:
    """As if nothing had been imported, before and after."""
    yield driver.bindings.cache_clear() or driver.driver_bindings.cache_clear()
    driver.bindings.cache_clear()
    driver.driver_bindings.cache_clear()


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
