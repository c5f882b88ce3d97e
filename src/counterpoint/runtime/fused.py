"""What kernels that talk to their peers share in one group: memory, epoch, the word of a fault.

Symmetric memory for all of them, of all sizes. Each call writes to the half that its epoch's parity
names, so calls need no barrier between them; the kernel itself moves the epoch on, in device
memory, so a replayed graph counts like an eager call.
"""

from typing import Any

import torch
from torch import Tensor

from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.symmetric import SymmetricMemory
from counterpoint.runtime.workspace import Workspace

GRANULE_BYTES = 1 << 20


class Shared:
    """Symmetric memory of one use, zero when it is new; grows, and what it was stays.

    Args:
        workspace: of the group on this device.

    Attributes:
        bases: [ranks] int64, where each rank's begins.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.memory: SymmetricMemory | None = None
        self.bases: Tensor = torch.zeros(0, dtype=torch.int64, device=workspace.device)
        self._kept: list[Any] = []

    @property
    def half_bytes(self) -> int:
        """Where the half of odd epochs begins: a property of the memory, not of a call's size."""
        return self.memory.num_bytes // 2 if self.memory else 0

    def reserve(self, num_bytes: int) -> None:
        """Have `num_bytes` on each rank; collective and synchronous where it has to grow.

        Raises:
            InputError: memory has to grow while a graph is being captured.
        """
        has = self.memory.num_bytes if self.memory else 0
        if num_bytes <= has:
            return
        self.workspace.refuse_growth(f"{has} bytes, the kernel needs {num_bytes}")
        if self.workspace.device.type == "cuda":
            torch.cuda.synchronize(self.workspace.device)
        # graphs that were captured write to what they know, as long as the workspace lives
        self._kept += [self.memory, self.bases]
        wanted = -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
        self.memory = self.workspace.allocate(wanted)
        addresses = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64)
        self.bases = addresses.to(self.workspace.device)


class FusedMemory:
    """What the fused kernels of one workspace share.

    Args:
        workspace: of the group on this device.

    Attributes:
        words, tiles, flags: memory for each kind of cell, never for another.
        state: [3] int32: epoch, programs of a running kernel that have ended, and whether a wait
            of this rank has given up.
        fault: [1] int64 of the host, where a wait that has given up says so.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.words, self.tiles, self.flags = (Shared(workspace) for _ in range(3))
        self.state = torch.zeros(3, dtype=torch.int32, device=workspace.device)
        if workspace.device.type == "cuda":  # the watchdog of the workspace looks at it
            self.fault = lanes_of(workspace).fault
        else:
            self.fault = torch.zeros(1, dtype=torch.int64)


_last: dict[torch.device, torch.cuda.Stream] = {}


def in_turn(device: torch.device) -> None:
    """Let the current stream wait for the last fused kernel, where that was on another one.

    Two grids that wait for peers may not fit a GPU together. Ranks launch them in one order, as
    they do collectives.
    """
    stream = torch.cuda.current_stream(device)
    last = _last.get(device)
    if last is not None and last != stream:
        stream.wait_stream(last)
    _last[device] = stream
