"""What an SM of a GPU of this machine holds, and whether kernels of ours run on it."""

from functools import cache
from typing import Any

import torch

from counterpoint.errors import UnsupportedError
from counterpoint.gpu.limits import LIMITS, SmLimits, limits_of
from counterpoint.group.workspace import Workspace
from counterpoint.machine import DeviceSpec, kernels_refused
from counterpoint.presets import preset_of


def limits_here(device: torch.device) -> SmLimits:
    """Limits of the SMs of this GPU.

    Raises:
        UnsupportedError: nobody has written down those of its architecture.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    capability = capability_of(device)
    arch = capability if torch.version.hip else f"sm_{capability.replace('.', '')}"
    if arch in LIMITS:
        return LIMITS[arch]
    known: DeviceSpec | None = getattr(preset_of(properties.name, 1), "device", None)
    if known is None:
        raise UnsupportedError(f"shape: no limits are known of {arch}; known: {', '.join(LIMITS)}")
    return limits_of(known)


def capability_of(device: torch.device) -> str:
    """The compute capability of a GPU, "9.0"; on AMD its architecture."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"{properties.major}.{properties.minor}"


@cache
def refused_on(device: torch.device) -> str:
    """Why kernels of ours do not run on a GPU; "" if they do."""
    return kernels_refused(capability_of(device))


def refused_in(workspace: Workspace) -> str:
    """Why kernels of ours do not run on the GPU of a rank, and of which; "" if they run on all.

    Collective at its first call. While a graph is captured a rank knows of its own GPU alone.
    """
    device = workspace.device
    if device.type != "cuda":
        return ""
    if workspace.kernels_refused is None:
        if torch.cuda.is_current_stream_capturing():
            return refused_on(device)
        each = enumerate(workspace.gather(refused_on(device)))
        workspace.kernels_refused = next((f"{why} of rank {r}" for r, why in each if why), "")
    return workspace.kernels_refused
