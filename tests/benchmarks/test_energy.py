"""Energy from the steps of a counter that moves ten times a second."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import energy
from counterpoint.errors import CounterpointError, UnsupportedError


class Nvml:
    """A GPU of `watts` whose counter moves every 0.1 s of a clock that calls advance."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1

    def __init__(self, watts: float) -> None:
        self.watts, self.now_s = watts, 0.0
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return round(int(self.now_s * 10) / 10 * self.watts * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1700


class Event:
    """Of what has been enqueued: nothing waits."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Alone:
    """As one rank: nobody to wait for or to agree with."""

    device, ranks = torch.device("cpu"), 1

    def meet(self) -> None:
        pass

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml(500.0)
    monkeypatch.setattr(energy, "import_module", lambda name: made)
    monkeypatch.setattr(energy, "WINDOW_S", 2.0)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: made.now_s)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="abc"))
    return made


@pytest.mark.parametrize("call_s", [0.002, 0.02, 0.13])
def test_joules_of_a_call(counter: Nvml, call_s: float):
    def call() -> None:
        counter.now_s += call_s

    alone: Any = Alone()
    found = energy.energy_of(call, call_s, alone)
    assert counter.asked == ["GPU-abc"]
    assert found["back_to_back_s"] == pytest.approx(call_s)
    assert found["arm_sm_clock_mhz"] == 1700
    # a step of the counter is seen up to a burst late
    assert found["energy_j"] == pytest.approx(500 * call_s, rel=0.1)
    assert found["power_w"] == pytest.approx(500, rel=0.1)


def test_a_counter_that_stands_still_is_an_error(counter: Nvml):
    alone: Any = Alone()
    counter.watts = 0.0
    with pytest.raises(CounterpointError, match=r"counter did not move twice in 2 s"):
        energy.energy_of(lambda: None, 0.01, alone)


def test_without_nvml_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(energy, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"needs nvidia-ml-py \(No .*\); pip install nvidia"):
        energy.nvml()


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch):
    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(energy, "import_module", lambda name: Broken(0.0))
    with pytest.raises(UnsupportedError, match="NVML does not start: Driver Not Loaded"):
        energy.nvml()
