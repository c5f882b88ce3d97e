"""What a call of embedding bags has been checked for: a repeated one is not checked again.

Checks of many tables take the host longer than the GPU takes some calls. What they have let pass
is remembered by facts alone, none of them which object a tensor is: a table that was resized,
converted, moved or replaced has others. How many indices there are changes from call to call, and
is looked at each time.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import MAX_INDICES

SHAPE, DTYPE, DEVICE = map(attrgetter, ("shape", "dtype", "device"))


def facts_seen(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str,
    last: bool, batch: Sequence[int] | None, dims: Sequence[Sequence[int]] | None,
    dtype: torch.dtype | None, out: PooledOutputs | None, plan: str,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that a call is checked for; None of one that is to be checked, or refused, as a new one.

    Strides are among it, addresses are not: no check looks at where a table lies.
    """
    try:
        if not isinstance(tables, list | tuple) or indices.numel() > MAX_INDICES:
            return None
        if indices.dim() != 1 or not indices.is_contiguous():
            return None
        of_weights = None
        if weights is not None:
            if weights.shape != indices.shape or not weights.is_contiguous():
                return None
            of_weights = weights.dtype, weights.device
        # of every table: in C, not in a loop
        of_tables = (*map(SHAPE, tables), *map(Tensor.stride, tables), *map(DTYPE, tables),
                     *map(DEVICE, tables))  # fmt: skip
        of_offsets = offsets.shape, offsets.stride(), offsets.dtype, offsets.device
        of_out = None
        if out is not None:
            of_out = type(out), id(out.group), out.device, out.columns, out.dtype, out.batch
        facts = (
            "checked", of_tables, indices.dtype, indices.device, of_offsets, of_weights, mode, last,
            _frozen(batch), _frozen(dims), dtype, of_out, plan,
        )  # fmt: skip
        hash(facts)
    except (AttributeError, TypeError):
        return None
    return facts


def _frozen(numbers: Any) -> Any:
    """Lists, which callers may change, as tuples.

    Raises:
        TypeError: something else is among them, such as a tensor, whose values may change too.
    """
    if isinstance(numbers, list | tuple):
        return tuple(map(_frozen, numbers))
    if numbers is None or isinstance(numbers, int):
        return numbers
    raise TypeError
