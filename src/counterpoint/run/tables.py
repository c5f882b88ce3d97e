"""Constants of kernels in device memory: addresses that signals go to, and numbers of slots.

A table lives as long as a program that has it. Its room is found again where there is none left
for another table: the GPU is idle then, so nothing reads what programs that are gone have had.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.gpu import driver
from counterpoint.group.workspace import Workspace

TABLE_WORDS = 1 << 16  # of a pool


class Tables:
    """Tables of int64 words of one workspace; equal ones are one.

    Args:
        workspace: of the group on this device.
        upload: a stream (a handle) that words are copied on.
    """

    def __init__(self, workspace: Workspace, upload: int) -> None:
        self.workspace, self._upload = workspace, upload
        self._tables: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()
        self._pools: list[Tensor] = []
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Device memory of all pools."""
        return sum(pool.nbytes for pool in self._pools)

    def of(self, words: Sequence[int]) -> Tensor:
        """`words` in device memory, for as long as what is returned is held on to.

        May be called in a capture, while there is room.

        Raises:
            InputError: a graph is being captured, and there is no room.
            UnsupportedError: they are more than a pool has.
        """
        key = tuple(words)
        table = self._tables.get(key)
        if table is None:
            host = torch.tensor(key or (0,), dtype=torch.int64)
            if self._used + len(host) > TABLE_WORDS:
                self._make_room(len(host))
            table = self._tables[key] = self._pools[-1][self._used : self._used + len(host)]
            driver.upload(host, table.data_ptr(), self._upload)
            self._used += -(-len(table) // 2) * 2  # 16-byte steps: one variant of each kernel
        return table

    def _make_room(self, words: int) -> None:
        """A new pool; those of which no table is left are freed."""
        self.workspace.refuse_growth(f"{self.num_bytes} bytes of tables, all in use")
        if words > TABLE_WORDS:
            raise UnsupportedError(f"workspace: a table of {words} words exceeds {TABLE_WORDS}")
        device = self.workspace.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        held = {table.untyped_storage().data_ptr() for table in self._tables.values()}
        self._pools = [pool for pool in self._pools if pool.data_ptr() in held]
        self._pools.append(torch.zeros(TABLE_WORDS, dtype=torch.int64, device=device))
        self._used = 0  # words of the last pool
        if device.type == "cuda":  # the zeros are there, whatever stream comes next
            torch.cuda.synchronize(device)
