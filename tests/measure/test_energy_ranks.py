"""Energy of ranks that draw differently, and of a counter that does not move."""

from types import SimpleNamespace

import pytest
import torch
from counterpoint.measure.energy import Energy
from rank_bodies import world
from rankpool import RankPool

from counterpoint.measure import energy

STEP_S = 0.1


def measured(rank: int, ranks: int, watts: list[float], call_s: float, said_s: float) -> Energy:
    """Each rank's GPU draws `watts`; its counter steps ten times a second of a stub clock."""
    clock = SimpleNamespace(now_s=0.0, calls=0)

    def call() -> None:
        clock.now_s += call_s
        clock.calls += 1

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: (
            # the tiny shift: steps are at whole numbers of calls, as floating point has them
            round(int(clock.now_s / STEP_S + 1e-6) * STEP_S * watts[rank] * 1e3)
        ),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500 + 100 * rank,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "import_module", lambda name: library)
        patch.setattr(energy.time, "perf_counter", lambda: clock.now_s)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        patch.setattr(torch.cuda, "Event", lambda: event)
        uuid = SimpleNamespace(uuid=f"GPU-{rank}")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: uuid)
        return energy.energy_of(call, said_s, group=world(), device=torch.device("cpu"))


def test_the_mean_over_ranks(pool: RankPool):
    """Calls of 1 ms and ten a burst: steps are seen when they come."""
    found = pool.run(measured, 2, [500.0, 300.0], 1e-3, 1e-3)
    assert found[0] == found[1]
    assert found[0].joules == pytest.approx(0.4)
    assert found[0].watts == pytest.approx(400)
    assert found[0].sm_clock_mhz == 1550
    assert found[0].seconds == pytest.approx(1e-3)


def test_a_call_that_takes_longer_than_said(pool: RankPool):
    (found,) = pool.run(measured, 1, [700.0], 0.05, 0.01)
    assert (found.joules, found.seconds) == (pytest.approx(35), pytest.approx(0.05))


def test_a_counter_that_steps_too_seldom_is_an_error_on_all_ranks(pool: RankPool):
    """The call is twenty times faster than said: the counter moves once at most."""
    with pytest.raises(AssertionError) as caught:
        pool.run(measured, 2, [700.0, 500.0], 1e-4, 2e-3)
    text = "CounterpointError: energy: a GPU's counter did not move twice in 0.4 s"
    assert str(caught.value).count(text) == 2
