"""Energy and clock of a GPU while it runs one thing over and over, by NVML.

The counter moves ten times a second: energy is read between two of its steps, and what ran between
them is counted. The GPU is never without work meanwhile.
"""

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.declare import Bench
from counterpoint.errors import CounterpointError, UnsupportedError

WINDOW_S = 0.4
STEP_S = 0.1  # of the counter
BURST_S = 0.02  # of calls between two looks at it


def nvml() -> Any:
    """NVIDIA's management library.

    Raises:
        UnsupportedError: nvidia-ml-py is not installed, or there is no driver.
    """
    try:
        library: Any = import_module("pynvml")
    except ImportError as error:
        fix = "pip install nvidia-ml-py"
        raise UnsupportedError(f"energy: needs nvidia-ml-py ({error}); {fix}") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise UnsupportedError(f"energy: NVML does not start: {error}") from error
    return library


def energy_of(call: Callable[[], object], seconds_of_call: float, bench: Bench) -> dict[str, float]:
    """Run `call` back to back and read what it takes, the mean over the ranks; all ranks call this.

    Args:
        call: enqueues work on the current stream.
        seconds_of_call: about, equal on all ranks: it sets how many calls there are.
        bench: this rank.

    Returns:
        Joules and seconds of a call, watts and SM clock.

    Raises:
        UnsupportedError: NVML is not there.
        CounterpointError: a GPU's counter moved less than twice.
    """
    library = nvml()
    uuid = str(torch.cuda.get_device_properties(bench.device).uuid)
    handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU") else f"GPU-{uuid}")
    burst = max(1, round(BURST_S / seconds_of_call))
    num_bursts = max(4, round((1.5 * WINDOW_S + STEP_S) / seconds_of_call / burst))

    def enqueue() -> torch.cuda.Event:
        for _ in range(burst):
            call()
        event = torch.cuda.Event()
        event.record()
        return event

    bench.meet()
    steps: list[tuple[float, int, int]] = []  # time, calls that have ended, millijoules
    clocks: list[int] = []
    last = library.nvmlDeviceGetTotalEnergyConsumption(handle)
    start_s = time.perf_counter()
    running = enqueue()
    for i in range(1, num_bursts + 1):
        following = enqueue()  # the GPU has work while the counter is read
        running.synchronize()
        running = following
        now = library.nvmlDeviceGetTotalEnergyConsumption(handle)
        at_s = time.perf_counter()
        if now != last and at_s - start_s > WINDOW_S / 2:  # clocks have settled
            steps.append((at_s, i * burst, now))
            clocks.append(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
        last = now
    running.synchronize()
    mine = torch.full((4,), torch.nan, dtype=torch.float64, device=bench.device)
    if len(steps) >= 2:
        (t0, c0, e0), (t1, c1, e1) = steps[0], steps[-1]
        joules, seconds = (e1 - e0) * 1e-3, t1 - t0
        mine = mine.new_tensor(
            [joules / (c1 - c0), joules / seconds, sum(clocks) / len(clocks), seconds / (c1 - c0)]
        )
    mean = (bench.summed(mine) / bench.ranks).tolist()
    if any(value != value for value in mean):
        raise CounterpointError(f"energy: a counter did not move twice in {WINDOW_S:g} s")
    names = ("energy_j", "power_w", "arm_sm_clock_mhz", "back_to_back_s")
    return dict(zip(names, mean, strict=True))
