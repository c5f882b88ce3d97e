"""The library's collectives, as steps of a plan take them: NCCL's on GPUs.

On CPU ranks they are ours, by the notice board: gloo ends the process of a rank whose peer sends
another size, and a rank that waits in it can neither be told nor end.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.group.notice_board import Awaited, NoticeBoard
from counterpoint.group.workspace import Workspace


class Library(Protocol):
    """Collectives of one group, in stream order; tensors have no gaps."""

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        """All ranks' `source`, one under the other, into `target`."""
        ...

    def reduce_scatter(self, target: Tensor, source: Tensor, *, average: bool = False) -> None:
        """This rank's part of the sum of all ranks' `source` into `target`."""
        ...

    def all_reduce(self, tensor: Tensor, *, average: bool = False) -> None:
        """The sum over all ranks, in place."""
        ...

    def all_to_all(
        self, target: Tensor, source: Tensor,
        gets: Sequence[int] | None = None, gives: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Rows of `source` to each rank in order, and what they have for this one into `target`.

        Args:
            gets, gives: rows from and to each rank; None: equally many.
        """
        ...

    def begin_all_to_all(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], object]:
        """Begin to send sources[r] to rank r, and to get what it has for this one in targets[r].

        What is returned has the then current stream wait for it.
        """
        ...

    def gather_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        """As `all_gather`, of shards of unequal rows: that of rank r begins at row starts[r]."""
        ...

    def scatter_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        """As `reduce_scatter`, of shards of unequal rows."""
        ...


def library_of(
    workspace: Workspace, awaited: Awaited, group: dist.ProcessGroup | None = None
) -> Library:
    """The collectives of a workspace's ranks, for tensors on its device.

    Args:
        awaited: for errors of CPU ranks.
        group: another one of the same ranks, which has its own settings.
    """
    if workspace.device.type == "cpu":
        return _OnCpu(workspace.board, awaited)
    return _OnGpu(group or workspace.group)


def _method(*names: str) -> Any:
    for name in names:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            return method
    raise UnsupportedError(f"torch: its process groups have none of {', '.join(names)}")


def _blocking(options: Any) -> Any:
    """Options of a collective that the current stream waits for."""
    options.asyncOp = False
    return options


def _averaging(options: Any) -> Any:
    options.reduceOp = dist.ReduceOp.AVG
    return _blocking(options)


# torch.distributed's functions check and log each call, which takes the host as long as the call
# itself; what a plan calls has been checked. These methods of a group are not public, and their
# names differ between versions of torch: a feature test holds them
_GATHER = _method("all_gather_single", "_allgather_base")
_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_GATHER_OPTIONS = _blocking(distributed_c10d.AllgatherOptions())  # pyright: ignore  (not in its stub)
_SCATTER_OPTIONS = _blocking(distributed_c10d.ReduceScatterOptions())  # pyright: ignore  (sums by default)
_AVERAGE_OPTIONS = _averaging(distributed_c10d.ReduceScatterOptions())  # pyright: ignore


class _OnGpu:
    """NCCL's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._of = weakref.ref(group)  # the group ends when torch destroys it

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._of()
        assert group is not None, "its workspace has been forgotten by then"
        return group

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        work = _GATHER(self._of(), target, source, _GATHER_OPTIONS)
        if work is not None:
            work.wait()

    def reduce_scatter(self, target: Tensor, source: Tensor, *, average: bool = False) -> None:
        options = _AVERAGE_OPTIONS if average else _SCATTER_OPTIONS
        work = _SCATTER(self._of(), target, source, options)
        if work is not None:
            work.wait()

    def all_reduce(self, tensor: Tensor, *, average: bool = False) -> None:
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self._group)

    def all_to_all(
        self, target: Tensor, source: Tensor,
        gets: Sequence[int] | None = None, gives: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        lists = [None if rows is None else list(rows) for rows in (gets, gives)]
        dist.all_to_all_single(target, source, *lists, group=self._group)

    def begin_all_to_all(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], object]:
        work: Any = dist.all_to_all([*targets], [*sources], group=self._group, async_op=True)
        return work.wait

    def gather_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        group, me = self._group, self._group.rank()
        target[starts[me] : starts[me + 1]].copy_(source)
        for r, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                dist.broadcast(target[start:end], dist.get_global_rank(group, r), group=group)

    def scatter_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        group, me = self._group, self._group.rank()
        for r, (start, end) in enumerate(pairwise(starts)):
            block = source[start:end].clone()  # the library sums in place
            if block.numel():
                dist.reduce(block, dist.get_global_rank(group, r), group=group)
            if r == me:
                target.copy_(block)


class _OnCpu:
    """Ours: each rank shows what it has, and takes what it needs."""

    def __init__(self, board: NoticeBoard, awaited: Awaited) -> None:
        self._board, self._awaited = board, awaited

    def _shown(self, source: Tensor, *, even: bool = False) -> list[Tensor]:
        """All ranks' tensors, flat, in the dtype of `source`; `even`: they must be of one size."""
        mine = np.empty(0, np.uint8)
        if source.numel():
            mine = source.detach().contiguous().view(-1).view(torch.uint8).numpy()
        found = self._board.gather_bytes(mine, self._awaited)
        for r, each in enumerate(found if even else ()):
            if each.size != found[0].size:
                want = f"equal on all ranks, {found[0].size} as on rank 0"
                self._refuse("bytes", want, f"{each.size} on rank {r}")
        return [torch.from_numpy(each).view(source.dtype) if each.size else source.new_empty(0)
                for each in found]  # fmt: skip

    def _sum(self, parts: Sequence[Tensor], like: Tensor, *, average: bool = False) -> Tensor:
        """In fp32, in rank order, rounded once; the same bits on all ranks."""
        if not like.is_floating_point():
            return torch.stack(list(parts)).sum(0, dtype=like.dtype).view(like.shape)
        total = torch.zeros(like.numel(), dtype=torch.promote_types(like.dtype, torch.float32))
        for part in parts:
            total += part
        if average:
            total /= len(parts)
        return total.view(like.shape)

    def all_gather(self, target: Tensor, source: Tensor) -> None:
        target.copy_(_joined(self._shown(source, even=True)).view(target.shape))

    def reduce_scatter(self, target: Tensor, source: Tensor, *, average: bool = False) -> None:
        shape, me = (self._board.ranks, -1), self._board.rank
        parts = [each.view(shape)[me] for each in self._shown(source, even=True)]
        target.copy_(self._sum(parts, target, average=average))

    def all_reduce(self, tensor: Tensor, *, average: bool = False) -> None:
        tensor.copy_(self._sum(self._shown(tensor, even=True), tensor, average=average))

    def all_to_all(
        self, target: Tensor, source: Tensor,
        gets: Sequence[int] | None = None, gives: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        ranks, me = self._board.ranks, self._board.rank
        width = source[:1].numel() or target[:1].numel() or 1  # elements of a row
        gives = [len(source) // ranks] * ranks if gives is None else gives
        gets = [len(target) // ranks] * ranks if gets is None else gets
        tables = self._shown(torch.tensor(gives, dtype=torch.int64))
        taken: list[Tensor] = []
        for r, (table, shown) in enumerate(zip(tables, self._shown(source), strict=True)):
            starts = [0, *table.cumsum(0).tolist()]
            if int(table[me]) != gets[r]:
                want = f"{gets[r]} from rank {r} to rank {me}, as that one has them"
                self._refuse("rows", want, int(table[me]))
            taken.append(shown[starts[me] * width : starts[me + 1] * width])
        target.copy_(torch.cat(taken).view(target.shape))

    def begin_all_to_all(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Callable[[], object]:
        gets, gives = [t.numel() for t in targets], [s.numel() for s in sources]
        got = targets[0].new_empty(sum(gets))
        self.all_to_all(got, torch.cat([s.flatten() for s in sources]), gets, gives)
        for target, part in zip(targets, got.split(gets), strict=True):
            target.copy_(part.view(target.shape))
        return lambda: None

    def _refuse(self, arg: str, want: str, got: object) -> None:
        fix = "the group is unusable, restart its ranks"
        raise self._board.fail(InputError(self._awaited.op, arg, want=want, got=got, fix=fix))

    def gather_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        target.copy_(_joined(self._shown(source)).view(target.shape))

    def scatter_rows(self, target: Tensor, source: Tensor, starts: Sequence[int]) -> None:
        me = self._board.rank
        parts = [
            each.view(source.shape)[starts[me] : starts[me + 1]].flatten()
            for each in self._shown(source)
        ]
        target.copy_(self._sum(parts, target))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors one behind the other, as bytes: autocast would look at their dtype."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
