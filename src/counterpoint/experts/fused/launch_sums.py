"""Sums of rows that are of one token: by a kernel on GPUs, else by torch; no atomics in either."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from counterpoint.experts.fused.kernel_sums import token_sum_kernel
from counterpoint.gpu.device_limits import refused_on

BLOCK_N = 2048  # columns at a time
NUM_WARPS = 4
PROGRAMS = 1 << 12


class Source(NamedTuple):
    """Rows that are summed, and which ones make a token.

    Args:
        rows: [R, N], without gaps.
        entries: int32 or int64 [tokens, top]; those beyond `rows` are none.
        first: what an entry says of rows[0].
        weights: fp32 [R], of rows; None: all 1.
    """

    rows: Tensor
    entries: Tensor
    first: int = 0
    weights: Tensor | None = None


def sum_rows(out: Tensor, source: Source, more: Source | None = None) -> None:
    """out[t] = the rows of token t, times their weights, in fp32 and in order, rounded once.

    Args:
        out: [tokens, N], without gaps.
        source: whose rows come first.
        more: whose follow; without weights.
    """
    if not out.numel():
        return
    if out.is_cuda and not refused_on(out.device):
        sum_by_kernel(out, source, more)
        return
    total = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
    total.zero_()
    for each in (source, more):
        if each is not None and len(each.rows):
            _add(total, each)
    if total is not out:
        out.copy_(total)


def _add(total: Tensor, source: Source) -> None:
    rows, entries, first, weights = source
    for column in entries.unbind(1):
        entry = column - first
        known = ((entry >= 0) & (entry < len(rows))).nonzero().flatten()
        entry = entry[known]
        each = rows.index_select(0, entry).float()
        if weights is not None:
            each *= weights.index_select(0, entry)[:, None]
        total.index_add_(0, known, each)  # no token twice in a column: no atomics meet


def sum_by_kernel(out: Tensor, source: Source, more: Source | None = None) -> None:
    """`sum_rows` by the kernel."""
    tokens, n = out.shape
    rows, entries, first, weights = source
    again: Sequence[Any] = (rows, entries, 0, 0)
    if more is not None:
        again = more.rows, more.entries, more.first, len(more.rows)
    top, added = entries.shape[1], 0 if more is None else more.entries.shape[1]
    kernel: Any = token_sum_kernel
    kernel[(min(PROGRAMS, tokens),)](
        rows, entries, first, len(rows), rows if weights is None else weights, *again,
        out, tokens, n, top, added, weights is not None,
        min(BLOCK_N, triton.next_power_of_2(n)), num_warps=NUM_WARPS,
    )  # fmt: skip
