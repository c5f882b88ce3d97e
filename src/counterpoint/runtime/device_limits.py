"""What an SM of a GPU of this machine holds."""

from typing import Any

import torch

from counterpoint.errors import UnsupportedError
from counterpoint.machine import DeviceSpec
from counterpoint.presets import preset_of
from counterpoint.runtime.limits import LIMITS, SmLimits, limits_of


def limits_here(device: torch.device) -> SmLimits:
    """Limits of the SMs of this GPU.

    Raises:
        UnsupportedError: nobody has written down those of its architecture.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = str(properties.gcnArchName).partition(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    if arch in LIMITS:
        return LIMITS[arch]
    known: DeviceSpec | None = getattr(preset_of(properties.name, 1), "device", None)
    if known is None:
        raise UnsupportedError(f"shape: no limits are known of {arch}; known: {', '.join(LIMITS)}")
    return limits_of(known)
