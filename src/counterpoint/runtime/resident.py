"""How many blocks of a kernel that waits for peers may be launched: all must be resident."""

from typing import Any

import torch

from counterpoint.errors import UnsupportedError
from counterpoint.runtime.device_limits import limits_here
from counterpoint.runtime.footprint import triton_footprint
from counterpoint.runtime.occupancy import occupancy

RESERVED_SMS = 32  # left to collectives of other groups, should they be there


def resident_blocks(compiled: Any, device: torch.device, name: str) -> int:
    """Blocks of a compiled Triton kernel that are on the GPU at once, beside the reserve.

    Raises:
        UnsupportedError: not one fits, or the GPU has no more SMs than are reserved.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count - RESERVED_SMS
    blocks = occupancy(triton_footprint(compiled), limits_here(device)).blocks * sms
    if blocks < 1:
        raise UnsupportedError(f"{name}: no block fits beside {RESERVED_SMS} reserved SMs")
    return blocks
