"""What kernels that talk to their peers share in one group: memory, epoch, the word of a fault.

Symmetric memory for all of them, of all sizes. Each call writes to the half that its epoch's parity
names, so calls need no barrier between them; the kernel itself moves the epoch on, in device
memory, so a replayed graph counts like an eager call.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.group.symmetric import SymmetricMemory
from counterpoint.group.workspace import Workspace
from counterpoint.plan.steps import OWN_PROTOCOL, Plan
from counterpoint.problem import ITEM_BYTES
from counterpoint.run.lanes_cuda import lanes_of

GRANULE_BYTES = 1 << 20


class Shared:
    """Symmetric memory of one use; grows, and what it was stays.

    Args:
        workspace: of the group on this device.
        empty: it holds low-latency words, which are EMPTY when the memory is new.

    Attributes:
        bases: [ranks] int64, where each rank's begins.
    """

    def __init__(self, workspace: Workspace, *, empty: bool = False) -> None:
        self.workspace, self.empty = workspace, empty
        self.memory: SymmetricMemory | None = None
        self.bases: Tensor = torch.zeros(0, dtype=torch.int64, device=workspace.device)
        self._kept: list[Any] = []

    @property
    def half_bytes(self) -> int:
        """Where the half of odd epochs begins: a property of the memory, not of a call's size."""
        return self.memory.num_bytes // 2 if self.memory else 0

    def reserve(self, num_bytes: int) -> None:
        """Have halves of `num_bytes` on each rank; collective and synchronous where it has to grow.

        Raises:
            InputError: memory has to grow while a graph is being captured.
        """
        if num_bytes <= self.half_bytes:
            return
        device = self.workspace.device
        has = f"halves of {self.half_bytes} bytes, the kernel needs {num_bytes}"
        self.workspace.refuse_growth(has)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # graphs that were captured write to what they know, as long as the workspace lives: what is
        # kept for them is less than what there is then, if it at least doubles
        self._kept += [self.memory, self.bases]
        num_bytes = max(num_bytes, 2 * self.half_bytes)
        wanted = 2 * -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
        self.memory = self.workspace.allocate(wanted)
        self.bases = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64).to(device)
        if self.empty:
            self.memory.local().view(torch.float32).fill_(-0.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.workspace.gather(None)  # no peer writes before it is empty


class FusedMemory:
    """What the fused kernels of one workspace share.

    Args:
        workspace: of the group on this device.

    Attributes:
        words, turns, flags: memory of each of those spaces of buffers, never for another: see
            plan/steps.py.
        state: [6] int32, see `end_of_call`.
        fault: [1] int64 of the host, where a wait that has given up says so.
        over: [1] int64 of the host, where counts that were too large say so: see experts/routes/kernel_rows.py.
        launches: of kernels that several plans share.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.words = Shared(workspace, empty=True)
        self.turns, self.flags = Shared(workspace), Shared(workspace)
        self.launches: dict[Hashable, Any] = {}
        self._all = (self.words, self.turns, self.flags)
        if workspace.device.type == "cuda":  # the watchdog of the workspace looks at it
            lanes = lanes_of(workspace)
            self.fault, self.state = lanes.fault, lanes.words_and_stop(4)
            self.over = torch.zeros(1, dtype=torch.int64).pin_memory()
            workspace.board.alarms.append((self.over.numpy(), self.dropped))
        else:
            self.fault, self.over = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
            self.state = torch.zeros(6, dtype=torch.int32)

    def reserve(self, plan: Plan) -> None:
        """Have what the kernels of a plan need. Collective and synchronous where it has to grow.

        Raises:
            InputError: memory has to grow while a graph is being captured.
        """
        for space in OWN_PROTOCOL:
            shared: Shared = getattr(self, space)
            held = [b for b in plan.buffers if b.space == space == "turns"]
            # the second half of such a buffer begins at a whole row
            row = max((b.shape[1] * ITEM_BYTES[b.dtype] for b in held), default=0)
            shared.reserve(plan.num_bytes(space) // 2 + row)

    def dropped(self) -> InputError | None:
        """What a kernel of experts has found in its counts, or in the rows to sum."""
        word = int(self.over[0])
        if not word:
            return None
        if (word & 0xFF) == 3:
            got = "another at an earlier call; the group is unusable"
            return InputError("matmul_all_to_all", "sum_of", want="of rows that come back", got=got)
        op = ("all_to_all_matmul", "matmul_all_to_all")[(word & 0xFF) - 1]
        ranks = [r for r in range(self.workspace.group.size()) if word >> 32 + r % 32 & 1]
        want = f"as many as counts says for ranks {ranks}, as the rows of x"
        missing = word >> 8 & 0xFFFFFF
        got = f"{missing} fewer at an earlier call, which has dropped rows; the group is unusable"
        return InputError(op, "max_rows", want=want, got=got)

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank now."""
        return sum(shared.memory.num_bytes for shared in self._all if shared.memory)


def fused_memory(workspace: Workspace) -> FusedMemory:
    """The memory of this workspace's fused kernels; made at its first call, by all ranks.

    Raises:
        InputError: a graph is being captured, and it is not there yet.
    """
    if workspace.fused is None:
        workspace.refuse_growth("none: this is the group's first call")
        workspace.open_pads()  # by them a late rank is looked at
        workspace.fused = FusedMemory(workspace)
    return workspace.fused
