"""Energy and clock of a GPU while it runs one thing over and over, by NVML.

The counter moves ten times a second: energy is read between two of its steps, and what ran between
them is counted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import UnsupportedError

WINDOW_S = 0.3


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
    """
    library: Any = nvml()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU") else f"GPU-{uuid}")
    burst = max(1, round(0.01 / seconds_of_call))  # calls between two looks at the counter

    def run(num: int) -> None:
        for _ in range(num):
            call()
        torch.cuda.synchronize(device)

    dist.barrier(group)
    run(max(1, round(window_s / 2 / seconds_of_call)))
    num_bursts = max(3, round((window_s + 0.25) / seconds_of_call / burst))
    steps: list[tuple[float, int, int]] = []  # time, calls so far, millijoules
    last, calls, clocks = library.nvmlDeviceGetTotalEnergyConsumption(handle), 0, list[int]()
    start_s = time.perf_counter()
    for _ in range(num_bursts):
        run(burst)
        calls += burst
        now = library.nvmlDeviceGetTotalEnergyConsumption(handle)
        if now != last:
            steps.append((time.perf_counter(), calls, now))
            clocks.append(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
            last = now
    spent_s = (time.perf_counter() - start_s) / calls
    mine = [0.0, 0.0, float(sum(clocks)) / max(len(clocks), 1), spent_s]
    if len(steps) >= 2:
        (t0, c0, e0), (t1, c1, e1) = steps[0], steps[-1]
        mine[0], mine[1] = (e1 - e0) * 1e-3 / (c1 - c0), (e1 - e0) * 1e-3 / (t1 - t0)
    total = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return Energy(*(total / dist.get_world_size(group)).tolist())
