"""Energy from the steps of a counter that moves ten times a second."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.measure import energy


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


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """As on one GPU: nothing to wait for, nobody to agree with."""
    made = Nvml(500.0)
    monkeypatch.setattr(energy, "import_module", lambda name: made)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: made.now_s)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="abc"))
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    return made


@pytest.mark.parametrize("call_s", [0.002, 0.02, 0.13])
def test_joules_of_a_call(one_rank: Nvml, call_s: float):
    def call() -> None:
        one_rank.now_s += call_s

    group: Any = None
    found = energy.energy_of(call, call_s, group=group, device=torch.device("cpu"), window_s=2.0)
    assert one_rank.asked == ["GPU-abc"]
    assert found.seconds == pytest.approx(call_s)
    assert found.sm_clock_mhz == 1700
    # a step of the counter is seen up to a burst late
    assert found.joules == pytest.approx(500 * call_s, rel=0.1)
    assert found.watts == pytest.approx(500, rel=0.1)


def test_a_counter_that_stands_still_is_an_error(one_rank: Nvml):
    group: Any = None
    one_rank.watts = 0.0
    with pytest.raises(CounterpointError, match=r"counter did not move twice in 0\.4 s"):
        energy.energy_of(lambda: None, 0.01, group=group, device=torch.device("cpu"))


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
