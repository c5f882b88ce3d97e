"""Steps that read the operand "counts": all-to-alls, copies and matmuls of the rows that it says.

They are laid out on the host, so the table is there. How rows lie: rows_of_experts.py.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts.routes.launch import rows_into
from counterpoint.experts.rows import DISPATCH, Rows, expert_of, rows_in
from counterpoint.experts.rows import boxes as counted_boxes
from counterpoint.experts.steps_routed import boxes as routed_boxes
from counterpoint.gpu.device_limits import refused_on
from counterpoint.group.library import Library
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box
from counterpoint.plan.steps import COUNTS
from counterpoint.schedules.peers import Chunk

# public since torch 2.10
_GROUPED: Callable[..., Tensor] | None = getattr(
    F, "grouped_mm", getattr(torch, "_grouped_mm", None)
)
Action = Callable[[Operands], object]


def all_to_all(bound: BoundStep, places: Places, calls: Library) -> Action:
    """The library's all-to-all of rows, and the pass that puts them in order by expert."""
    source, target = bound.step.reads[0].buffer, bound.step.writes[0].buffer
    dispatches = places.plan.problem.op == DISPATCH
    rank = places.rank

    def run(operands: Operands) -> None:
        table = operands[COUNTS].cpu()  # no copy where the host has it
        mine = table.view(len(table), len(table), -1)[:, rank]  # [sources, local experts]
        owned = table[rank].view(len(table), -1).sum(1).tolist()  # my rows, by the rank they go to
        sources = mine.sum(1).tolist()
        x, y = _rows_of(source, operands, places), _rows_of(target, operands, places)
        if dispatches:
            x, y = x[: sum(owned)], y[: sum(sources)]
            in_order = 1 in mine.shape or not len(y)
            come = y if in_order else torch.empty_like(y)
            calls.all_to_all(come, x.contiguous(), sources, owned)
            if not in_order:
                torch.index_select(come, 0, _order(mine, come), out=y)
            return
        x = x[: sum(sources)]
        if not (1 in mine.shape or not len(x)):
            x = x.index_select(0, _order(mine.t(), x))
        calls.all_to_all(y[: sum(owned)], x, owned, sources)

    return run


def boxes(bound: BoundStep, places: Places) -> Callable[[Operands], list[tuple[Box, Box]]]:
    """What a copy step copies in a call, and where it goes; none empty."""
    return (routed_boxes if bound.step.routed else counted_boxes)(bound, places)


def copies(bound: BoundStep, places: Places) -> Action:
    """A copy step on CPU ranks."""
    found = boxes(bound, places)

    def memory(box: Box, operands: Operands) -> Tensor:
        own, rows, cols = operands.get(box.buffer), slice(box.r0, box.r1), slice(box.c0, box.c1)
        place = places.fixed(box) if own is None else own[rows, cols]
        assert place is not None, "an operand that a call lacks"
        return place

    def run(operands: Operands) -> None:
        for source, target in found(operands):
            memory(target, operands).copy_(memory(source, operands))

    return run


def matmuls(bounds: Sequence[BoundStep], places: Places) -> Action:
    """y[rows of e] = x[rows of e] w[e] (+ the same rows of the operand "add").

    Or a chunk of the rows of each rank for e, those of some ranks, or some columns of w and y.
    """
    p, rank = places.plan.problem, places.rank
    (x_region, w_region, *_), (y_region,) = bounds[0].step.reads, bounds[0].step.writes
    source, target = x_region.buffer, y_region.buffer
    first, chunk = expert_of(y_region, p)
    shards = [places.plan.resolve(shard, rank) for shard in y_region.shards]
    sources = range(min(shards), max(shards) + 1) if shards else range(p.ranks)
    some = len(sources) < p.ranks
    cols = slice(*(w_region.cols if isinstance(w_region.cols, tuple) else (0, p.n)))
    last, every = first + len(bounds), len(bounds) == p.experts

    def run(operands: Operands) -> None:
        starts = rows_in(operands[COUNTS])
        edges = starts.by_expert[rank][:: p.ranks]  # of each local expert
        x, y = (_rows_of(name, operands, places) for name in (source, target))
        total, w = edges[-1], operands["w"][:, :, cols]
        here = slice(edges[first], edges[last])
        one_launch = (last - first > 1 or every) and not some
        if chunk[1] == 1 and one_launch and here.start < here.stop and _grouped_takes(x, w):
            assert _GROUPED is not None
            ends = _on_device(
                torch.tensor(edges[first + 1 : last + 1], dtype=torch.int64) - here.start, x
            )
            if every and (len(y) == total or places.plan.buffer(target).space == "scratch"):
                # it makes a result of its own, which takes the place of the one that is there
                del y
                operands.pop(target, None)
                operands[target] = y = _GROUPED(x[here], w, offs=ends)
            else:
                y[here] = _GROUPED(x[here], w[first:last], offs=ends)
        else:
            for e in range(first, last):
                for rows in _of_expert(starts, (rank, e, p.ranks), sources, chunk):
                    if rows.start < rows.stop:
                        torch.mm(x[rows], w[e], out=y[rows])
                    if some and "add" in operands:
                        y[rows] += operands["add"][rows, cols]
        if "add" in operands and not some:
            y[here] += operands["add"][here, cols]
        if "clear" in operands and target == "y" and last == p.experts:
            y[total:].zero_()

    return run


def _of_expert(
    rows: Rows, of: tuple[int, int, int], sources: range, chunk: Chunk
) -> list[slice]:  # fmt: skip
    """The rows of an expert, or a chunk of those that each rank has for it.

    Args:
        of: this rank, the expert, and how many ranks there are.
        sources: neighbouring ranks.
    """
    rank, e, ranks = of
    if chunk[1] == 1:
        edges = rows.by_expert[rank][e * ranks :]
        return [slice(edges[sources.start], edges[sources.stop])]
    return [slice(*rows.of(rank, e * ranks + source, False, chunk)) for source in sources]


def _rows_of(name: str, operands: Operands, places: Places) -> Tensor:
    """A whole buffer: of the operands, or else what this rank has of the workspace."""
    if name in operands:
        return operands[name]
    buffer = places.plan.buffer(name)
    whole = places.fixed(Box(places.rank, name, 0, 0, buffer.shape[0], 0, buffer.shape[1]))
    assert whole is not None, "an operand that a call lacks"
    return whole


def refusal(
    op: str, table: Tensor, x: Tensor, room: int, rank: int, *, host: bool
) -> InputError | None:
    """What is wrong with the values of a table, or with rows that do not fit it.

    Args:
        room: rows of the result.
        host: the table is known to the host.
    """
    low = int(table.min()) if table.numel() else 0
    if low < 0:
        return InputError(op, "counts", want=">= 0", got=low)
    dispatches = op == DISPATCH
    has, gets = (int(rows_by_rank(table, out)[rank]) for out in (not dispatches, dispatches))
    where, rows = f"on rank {rank}", x.shape[0]
    what = f"counts[{rank}]" if dispatches else f"what counts has for experts of rank {rank}"
    if rows != has if host else rows < has:
        more = "" if host else " or more"
        want = f"[{has}, K]{more} {where}, the sum of {what}"
        return InputError(op, "x", want=want, got=tuple(x.shape))
    if gets > room:
        return InputError(op, "max_rows", want=f">= {gets} {where}, as counts says", got=room)
    return None


def rows_by_rank(counts: Tensor, dispatches: bool) -> Tensor:
    """What each rank gets: its experts' rows, else its own rows back."""
    if not dispatches:
        return counts.sum(1)
    return counts.view(counts.shape[0], counts.shape[0], -1).sum((0, 2))


def _order(blocks: Tensor, rows: Tensor) -> Tensor:
    """The order of rows that lie in blocks [a, b], a by a, laid out b by b; `blocks` has sizes."""
    sizes = blocks.t().flatten()
    ends = blocks.flatten().cumsum(0).view(blocks.shape).t().flatten()
    # a block's rows keep their order: one shift for each
    shift = torch.stack((ends - sizes.cumsum(0), sizes)).to(rows.device, non_blocking=True)
    order = torch.arange(len(rows), device=rows.device)
    order += torch.repeat_interleave(shift[0], shift[1], output_size=len(rows))
    return order


def _on_device(ends: Tensor, like: Tensor) -> Tensor:
    """A few numbers beside `like`; the driver takes them at once, and the host does not wait."""
    return ends.to(torch.int32).to(like.device, non_blocking=True)


def grouped(x: Tensor, k: int, n: int) -> bool:
    """Whether the library has one kernel for all experts: bf16 on Hopper and later, of 16 bytes."""
    if _GROUPED is None or not x.is_cuda or x.dtype != torch.bfloat16 or (k | n) % 8:
        return False
    return k * n > 0 and _is_hopper_or_later(x.device)


@cache
def _is_after_hopper(device: torch.device) -> bool:
    """There an expert without rows gets another's numbers: pytorch issue 172439."""
    return torch.cuda.get_device_capability(device) != (9, 0)


@cache
def _is_hopper_or_later(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Here(NamedTuple):
    """The rows of the experts here, where no host reads them."""

    rows: Tensor  # int64 [E_local], of each
    ends: Tensor  # int32 [E_local], no more than there is room for


def rows_here(counts: Tensor, rank: int, ranks: int, room: int) -> Here:
    """Of counts [ranks, E]: where they are more than room, a kernel has dropped the rest."""
    if counts.is_cuda and not refused_on(counts.device):
        rows = counts.new_empty(counts.shape[1] // ranks)
        ends = rows.new_empty(rows.shape, dtype=torch.int32)
        rows_into(rows, ends, counts.long(), rank, room)
        return Here(rows, ends)
    rows = counts.view(ranks, ranks, -1)[:, rank].sum(0)
    return Here(rows, rows.cumsum(0, dtype=torch.int32).clamp_max(room))


def weight_gradient(x: Tensor, dy: Tensor, here: Here) -> Tensor | None:
    """dw[e] = x[rows of e]^T dy[rows of e] by the library's one kernel; None where it has none."""
    if not (grouped(x, x.shape[1], dy.shape[1]) and x.shape[0] and dy.shape[0]):
        return None
    assert _GROUPED is not None
    experts = here.rows
    ends = here.ends if here.ends.device == x.device else _on_device(here.ends, x)
    dw = _GROUPED(x.contiguous().t(), dy.contiguous(), offs=ends)
    if _is_after_hopper(x.device):
        none: Any = (experts == 0).to(x.device, non_blocking=True)
        dw.masked_fill_(none[:, None, None], 0)
    return dw


def _grouped_takes(x: Tensor, w: Tensor) -> bool:
    """Whether the library's one kernel takes these weights [experts, K, N] of rows x.

    Each row or column of them, as it is stored, starts at a multiple of 16 bytes.
    """
    strides = [s for s in w.stride() if s != 1]
    on_words = not w.data_ptr() % 16 and all(s % 8 == 0 for s in strides)
    return on_words and grouped(x, w.shape[1], w.shape[2])
