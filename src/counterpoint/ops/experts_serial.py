"""Experts by the libraries: one all-to-all, one grouped matmul, rows put in order between them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.ops import call
from counterpoint.ops.experts import Exchange, refusal
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Workspace

# public since torch 2.10
_GROUPED: Callable[..., Tensor] | None = getattr(
    F, "grouped_mm", getattr(torch, "_grouped_mm", None)
)

call.LIBRARY.define(
    "experts_weight_gradient(Tensor x, Tensor dy, Tensor counts, bool transposed, "
    "str group_name, int group_size) -> Tensor"
)


class Serial:
    """Both operators by the libraries; on CPU ranks also what the fused kernels compute.

    A device-known table is copied to the host, and the host waits for it.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(self, given: Exchange, add: Tensor | None, clear: bool) -> tuple[Tensor, Tensor]:
        """See `Ready`; of the rows that were multiplied those that the table has, and no more."""
        self.workspace.check()
        table = self._table(given)
        ranks, rank = len(table), self.workspace.rank
        mine = table.view(ranks, ranks, -1)[:, rank]  # [sources, local experts]
        owned = table[rank].view(ranks, -1).sum(1).tolist()  # my rows, by the rank they go to
        experts, sources = mine.sum(0), mine.sum(1).tolist()
        if given.out:
            arrived = self._all_to_all(given.x[: sum(owned)], sources, owned)
            rows = _turned(arrived, mine)
            y = products(rows, given.w, experts)
            return grown(y, given.rows, clear), rows
        rows = given.x[: sum(sources)]
        y = products(rows, given.w, experts)
        if add is not None:
            y += add[: len(rows)]
        y = self._all_to_all(_turned(y, mine.t()), owned, sources)
        return grown(y, given.rows, clear), rows

    def summed(
        self, given: Exchange, index: Tensor, weights: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """(the weighted sums of rows that came back, and those rows where they are kept)."""
        y, _ = self(given, None, False)
        return sum_of_rows(y, index, weights), y if keep else y.new_empty(0, y.shape[1])

    def _table(self, given: Exchange) -> Tensor:
        capturing = given.x.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            fix = "pass counts on the GPU and plan='fused'"
            got = "serial while a graph is captured, which lays rows out on the host"
            raise InputError(given.op, "plan", want="fused", got=got, fix=fix)
        if given.host:
            return given.counts
        table = given.counts.cpu()
        refused = refusal(given, table, self.workspace.rank)
        if refused is not None:
            raise refused
        return table

    def _all_to_all(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        target = rows.new_empty(sum(received), rows.shape[1])
        group = self.workspace.group
        dist.all_to_all_single(target, rows.contiguous(), received, sent, group=group)
        return target


def sum_of_rows(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over j of weights[t, j] y[index[t, j]], in fp32 and in order, rounded once."""
    total = torch.zeros(index.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(index.shape[1]):
        total += weights[:, j, None].float() * y.index_select(0, index[:, j])
    return total.to(y.dtype)


def _turned(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rows that lie in blocks [a, b], a by a, laid out b by b; `blocks` has their sizes."""
    if 1 in blocks.shape or not rows.numel():
        return rows
    sizes = blocks.t().flatten()
    ends = blocks.flatten().cumsum(0).view(blocks.shape).t().flatten()
    # a block's rows keep their order: one shift for each
    shift = _on_device(torch.stack((ends - sizes.cumsum(0), sizes)), rows)
    order = torch.arange(len(rows), device=rows.device)
    order += torch.repeat_interleave(shift[0], shift[1], output_size=len(rows))
    return rows.index_select(0, order)


def _on_device(few: Tensor, like: Tensor) -> Tensor:
    """A few numbers beside `like`; the driver takes them at once, and the host does not wait."""
    return few.to(like.device, non_blocking=True)


def grown(y: Tensor, rows: int, clear: bool = False) -> Tensor:
    """The same rows, and room after them where `rows` are more."""
    if len(y) == rows:
        return y
    grown = y.new_empty(rows, y.shape[1])
    grown[: len(y)] = y
    if clear:
        grown[len(y) :].zero_()
    return grown


def products(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    """x[rows of e] w[e], accumulated in fp32: [rows, N].

    Args:
        x: [rows, K], sorted by expert.
        w: [experts, K, N].
        experts: rows of each, on the CPU.
    """
    if not x.numel() or not w.numel():
        return x.new_zeros(x.shape[0], w.shape[2])
    if grouped(x, w.shape[1], w.shape[2]) and _lies_on_words(w):
        assert _GROUPED is not None
        ends = _on_device(experts.cumsum(0, dtype=torch.int32), x)
        return _GROUPED(x.contiguous(), w, offs=ends)
    y, start = x.new_empty(x.shape[0], w.shape[2]), 0
    for e, rows in enumerate(experts.tolist()):
        if rows:
            torch.mm(x[start : start + rows], w[e], out=y[start : start + rows])
        start += rows
    return y


def grouped(x: Tensor, k: int, n: int) -> bool:
    """Whether the library has one kernel for all experts: bf16 on Hopper and later, of 16 bytes."""
    if _GROUPED is None or not x.is_cuda or x.dtype != torch.bfloat16 or (k | n) % 8:
        return False
    return k * n > 0 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _lies_on_words(w: Tensor) -> bool:
    """Whether each row or column, as it is stored, starts at a multiple of 16 bytes."""
    strides = [s for s in w.stride() if s != 1]
    return not w.data_ptr() % 16 and all(s % 8 == 0 for s in strides)


def _run_weight_gradient(
    x: Tensor, dy: Tensor, counts: Tensor, transposed: bool, group_name: str, group_size: int
) -> Tensor:
    """dw[e] = x[rows of e]^T dy[rows of e], [E_local, K, N], zero where there are none."""
    if transposed:
        dw = _run_weight_gradient(dy, x, counts, False, group_name, group_size)
        return dw.transpose(1, 2)
    rank = dist.get_rank(group_of(group_name))
    experts = counts.view(group_size, group_size, -1)[:, rank].sum(0)
    k, n = x.shape[1], dy.shape[1]
    if grouped(x, k, n) and len(x) and len(dy):
        assert _GROUPED is not None
        # neither table nor ends are read by the host; where counts are beyond what there is, a
        # kernel has dropped the rest, and says so
        ends = experts.cumsum(0, dtype=torch.int32).clamp_max(min(len(x), len(dy)))
        ends = _on_device(ends, x)
        dw = _GROUPED(x.contiguous().t(), dy.contiguous(), offs=ends)
        # pytorch issue 172439: on Blackwell an expert without rows gets another's numbers
        if torch.cuda.get_device_capability(x.device) != (9, 0):
            dw.masked_fill_((_on_device(experts, x) == 0)[:, None, None], 0)
        return dw
    dw, start = x.new_zeros(len(experts), k, n), 0
    if not len(x) or not len(dy):
        return dw
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        want, got = "bf16 on Hopper or later where a graph is captured", str(x.dtype)
        raise InputError("gradient of experts", "w", want=want, got=got)
    for e, rows in enumerate(experts.tolist()):
        if rows and dw.numel():
            torch.mm(x[start : start + rows].t(), dy[start : start + rows], out=dw[e])
        start += rows
    return dw


def _fake_weight_gradient(
    x: Tensor, dy: Tensor, counts: Tensor, transposed: bool, group_name: str, group_size: int
) -> Tensor:
    experts, k, n = counts.shape[1] // group_size, x.shape[1], dy.shape[1]
    if transposed:
        return x.new_empty(experts, n, k).transpose(1, 2)
    return x.new_empty(experts, k, n)


def weight_gradient(
    x: Tensor, dy: Tensor, counts: Tensor, w: Tensor, group_name: str, group_size: int
) -> Tensor:
    """dw [E_local, K, N], stored as w is, of rows by expert on both sides."""
    op: Any = torch.ops.counterpoint.experts_weight_gradient
    transposed = w.stride(1) == 1 and w.shape[1] > 1
    return op(x, dy, counts, transposed, group_name, group_size)


def refuse_double(ctx: object, *grads: object) -> tuple[None, ...]:
    """The gradient of a gradient.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "counterpoint: double backward (a gradient of a gradient) is not supported; "
        "call backward without create_graph=True, or take torch's own operators there"
    )


call.LIBRARY.impl("experts_weight_gradient", _run_weight_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    "counterpoint::experts_weight_gradient", _fake_weight_gradient, lib=call.LIBRARY
)
torch.library.register_autograd(
    "counterpoint::experts_weight_gradient", refuse_double, lib=call.LIBRARY
)
