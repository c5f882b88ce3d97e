"""Experts in one kernel on a GPU: both operators, compiled and with their memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.ops.experts import Exchange, rows_by_rank
from counterpoint.plan.expert_tiles import tile_of
from counterpoint.runtime.fused import fused_memory, in_turn
from counterpoint.runtime.fused_call import aligned
from counterpoint.runtime.lanes_cuda import lanes_of
from counterpoint.runtime.launch_experts import (
    AllToAllMatmul,
    MatmulAllToAll,
    sending_of,
)
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import Workspace

ANY = 2**31 - 1  # rows of x, where they are known to suffice


class Fused:
    """One operator in one kernel: the host reads no counts that it has not been given.

    Args:
        workspace: of the group.
        given: the first such call.
    """

    def __init__(self, workspace: Workspace, given: Exchange) -> None:
        self.workspace = workspace
        self.memory, self.lanes = fused_memory(workspace), lanes_of(workspace)
        ranks = tuple(range(workspace.group.size()))
        self.tag = self.lanes.register(given.op, "fused", (("rows of all ranks", ranks),))
        self._calls: dict[tuple[object, ...], Any] = {}

    def __call__(self, given: Exchange, add: Tensor | None, clear: bool) -> tuple[Tensor, Tensor]:
        """(the result, the rows that were multiplied where they are kept); as `Serial`."""
        y = given.x.new_empty(given.rows, given.w.shape[2])
        if not given.out:
            self._run(given, y, add=None if add is None else _in_line(add), clear=clear)
            return y, given.x
        rows = y.new_empty(0, given.w.shape[1])
        if given.keep:
            rows = y.new_empty(given.rows, given.w.shape[1])
        self._run(given, y, rows if given.keep else None, clear=clear)
        return y, rows

    def summed(
        self, given: Exchange, index: Tensor, weights: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """(the weighted sums of rows that came back, and those rows where they are kept)."""
        n = given.w.shape[2]
        out = given.x.new_empty(index.shape[0], n)
        y = given.x.new_empty(given.rows, n) if keep else None
        sums = (_in_line(index), _in_line(weights), out)
        self._run(given, y, sums=sums if index.shape[1] else None)
        if not index.shape[1]:
            out.zero_()
        return out, given.x.new_empty(0, n) if y is None else y

    def _run(self, given: Exchange, *results: Tensor | None, **more: Any) -> None:
        self.workspace.check()
        capturing = torch.cuda.is_current_stream_capturing()
        if given.host and capturing:
            fix = "they change from call to call"
            want = "on the GPU while a graph is captured"
            raise InputError(given.op, "counts", want=want, got="on the host", fix=fix)
        # a pinned table may be filled anew before an asynchronous copy has read it
        later = not given.counts.is_cuda and not given.counts.is_pinned()
        counts = _in_line(given.counts.to(given.x.device, non_blocking=later))
        x, w = _in_line(given.x), given.w if aligned(given.w) else given.w.clone()
        has = ANY if given.host else x.shape[0]  # the host has compared its own
        if not x.shape[0]:
            x = x.new_zeros(1, x.shape[1])  # TMA takes no tensor without rows
        arguments = (x, w, counts, has, *results)
        limit, rows = self._limit(given), self._rows(given)
        sums = more.get("sums")
        key = (limit, rows, sums and _kinds(sums), w.stride(), counts.dtype)
        call: Any = self._calls.get(key)
        if call is None:
            call = self._compiled(given, limit, rows, capturing, (x, w, counts, has), sums)
            self._calls[key] = call
        if capturing:
            self.workspace.keep(call)
        else:
            self.lanes.follow()
            in_turn(x.device)
        call(*arguments, **more)

    def _compiled(
        self, given: Exchange, limit: int, rows: int, capturing: bool, facts: Sequence[Any],
        sums: tuple[Tensor, ...] | None,
    ) -> AllToAllMatmul | MatmulAllToAll:  # fmt: skip
        """A call whose kernels are there, on all ranks: who still compiles is late for all.

        All kernels that a rank by itself may come to need: with rows kept or added, and without;
        what clears as well.
        """
        with torch.inference_mode(False):
            call: Any = self._make(given, limit, rows)
            k, n = (given.x.new_empty(1, size) for size in given.w.shape[1:])
        problem = ""
        call.only_compile = True
        try:
            if given.out:
                call(*facts, n, k, clear=True)
            else:
                call(*facts, n, sums=sums)
                call(*facts, n, add=n)
        except (CounterpointError, OSError, RuntimeError) as error:
            problem = f"rank {self.workspace.rank}: {error}"
        call.only_compile = False
        everyone = [problem] if capturing else gather_object(problem, self.workspace.group)
        if any(everyone):
            raise UnsupportedError(f"{given.op}: {'; '.join(filter(None, everyone))}")
        return call

    def _limit(self, given: Exchange) -> int:
        """Rows that a rank can take: equal on all ranks."""
        if not given.host:
            return given.rows
        return _bucket(int(rows_by_rank(given.counts, given.out).max()))

    def _rows(self, given: Exchange) -> int:
        """Rows that a rank multiplies, about."""
        if given.host:
            return _bucket(int(rows_by_rank(given.counts, out=True).max()))
        return given.rows if given.out else given.x.shape[0]

    def _make(self, given: Exchange, limit: int, rows: int) -> AllToAllMatmul | MatmulAllToAll:
        local, k, n = given.w.shape
        ranks = self.workspace.group.size()
        tile = tile_of(rows, k, n, local, back=not given.out)
        sizes = (self.memory, self.tag, local * ranks, limit, k, n, given.w.dtype, tile)
        if given.out:
            return AllToAllMatmul(*sizes, sending_of(rows, local, ranks))
        return MatmulAllToAll(*sizes)


def _bucket(rows: int) -> int:
    """Somewhat more: tables change from call to call, but memory and kernels seldom."""
    step = max(256, 1 << max(rows.bit_length() - 3, 0))
    return -(-rows // step) * step


def _kinds(given: tuple[Tensor, ...]) -> object:
    """What of `sums` kernels are compiled for."""
    return tuple((each.dtype, each.shape[-1]) for each in given)


def _in_line(tensor: Tensor) -> Tensor:
    """Without gaps, at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if aligned(tensor) else tensor.clone()
