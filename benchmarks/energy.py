"""Energy and clock of a GPU while it runs one thing over and over, by NVML.

The counter moves ten times a second: energy is read between two of its steps, and what ran between
them is counted. The GPU is never without work meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, UnsupportedError

WINDOW_S = 0.4
STEP_S = 0.1  # of the counter
BURST_S = 0.02


@dataclass(frozen=True)
class Energy:
    """Of one call, as the mean over the ranks' GPUs.

    Args:
        joules: of one GPU for one call.
        watts: of one GPU.
        sm_clock_mhz: in the middle of the time.
        seconds: of one call, back to back.
    """

    joules: float
    watts: float
    sm_clock_mhz: float
    seconds: float


def nvml() -> ModuleType:
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


def energy_of(
    call: Callable[[], object],
    seconds_of_call: float,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    window_s: float = WINDOW_S,
) -> Energy:
    """Run `call` back to back for `window_s` or longer and read what it takes. All ranks call this.

    Args:
        call: enqueues work on the current stream.
        seconds_of_call: about, equal on all ranks: it sets how many calls there are.
        group: of the ranks.
        device: this rank's GPU.
        window_s: of the measurement; half as long before it does not count.

    Raises:
        UnsupportedError: NVML is not there.
        CounterpointError: a GPU's counter moved less than twice.
    """
    library: Any = nvml()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU") else f"GPU-{uuid}")
    burst = max(1, round(BURST_S / seconds_of_call))  # calls between two looks at the counter
    num_bursts = max(4, round((1.5 * window_s + STEP_S) / seconds_of_call / burst))

    def enqueue() -> torch.cuda.Event:
        for _ in range(burst):
            call()
        event = torch.cuda.Event()
        event.record()
        return event

    dist.barrier(group)
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
        if now != last:
            last = now
            if at_s - start_s > window_s / 2:  # clocks have settled
                steps.append((at_s, i * burst, now))
                clocks.append(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
    running.synchronize()
    mine = [float("nan")] * 4
    if len(steps) >= 2:
        (t0, c0, e0), (t1, c1, e1) = steps[0], steps[-1]
        mine = [(e1 - e0) * 1e-3 / (c1 - c0), (e1 - e0) * 1e-3 / (t1 - t0),
                sum(clocks) / len(clocks), (t1 - t0) / (c1 - c0)]  # fmt: skip
    total = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    if bool(total.isnan().any()):
        raise CounterpointError(f"energy: a GPU's counter did not move twice in {window_s:g} s")
    return Energy(*(total / dist.get_world_size(group)).tolist())
