"""Arguments of embedding bags: what a rank can refuse by itself, before a launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.embedding.layout import MAX_COUNT, MAX_INDICES, MAX_RANKS, block_of
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.errors import InputError
from counterpoint.ops.check import DTYPES, check_dense

INDEX = (torch.int32, torch.int64)


def check_bags(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str,
    last: bool,
) -> None:  # fmt: skip
    """Refuse what is wrong on its own, whatever other ranks pass.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    if not isinstance(tables, list | tuple) or not all(isinstance(t, Tensor) for t in tables):
        got = type(tables).__name__
        if isinstance(tables, list | tuple):
            got += f" of {', '.join(sorted({type(t).__name__ for t in tables}))}"
        raise InputError(OP, "tables", want="a list of Tensors", got=got)
    if not isinstance(last, bool):
        want = "True or False"
        raise InputError(OP, "include_last_offset", want=want, got=repr(last))
    if not isinstance(mode, str) or mode not in ("sum", "mean"):
        raise InputError(OP, "mode", want="'sum' or 'mean'", got=repr(mode))
    given = [("indices", indices), ("offsets", offsets)]
    given += [("per_sample_weights", weights)] if weights is not None else []
    for name, tensor in given:
        check_dense(OP, **{name: tensor})
        if tensor.dim() != 1 or not tensor.is_contiguous():
            got = tuple(tensor.shape)
            raise InputError(OP, name, want="a 1-D Tensor without gaps", got=got)
        if tensor.device != indices.device or tensor.device.type not in ("cpu", "cuda"):
            want = f"on {indices.device} as indices, cpu or cuda"
            raise InputError(OP, name, want=want, got=tensor.device)
        most = MAX_COUNT if name == "offsets" else MAX_INDICES
        if tensor.numel() > most:
            raise InputError(OP, name, want=f"of at most {most} elements", got=tensor.numel())
    for name, tensor in given[:2]:
        if tensor.dtype not in INDEX:
            raise InputError(OP, name, want="int32 or int64", got=tensor.dtype)
    if not tables and indices.numel():
        raise InputError(OP, "indices", want="none without tables", got=f"{indices.numel()}")
    _check_tables(tables, indices)
    if weights is not None:
        if mode != "sum":
            raise InputError(OP, "per_sample_weights", want="None unless mode is 'sum'", got=mode)
        dtypes = [*dict.fromkeys((tables[0].dtype, torch.float32))] if tables else DTYPES
        if weights.shape != indices.shape or weights.dtype not in dtypes:
            want = f"{' or '.join(map(str, dtypes))}, {tuple(indices.shape)} as indices"
            got = f"{weights.dtype} {tuple(weights.shape)}"
            raise InputError(OP, "per_sample_weights", want=want, got=got)
    bags = offsets.numel() - last
    if bags < 0 or (bags % len(tables) if tables else bags):
        want = f"a bag for each of {len(tables)} tables and each of the global batch"
        want += ", and the last" if last else ""
        fix = fix_of_last(offsets, last, len(tables))
        raise InputError(OP, "offsets", want=want, got=f"{offsets.numel()} of them", fix=fix)


def _check_tables(tables: Sequence[Tensor], indices: Tensor) -> None:
    """Raise InputError where a table is none, or unlike the others."""
    for i, table in enumerate(tables):
        name = f"tables[{i}]"
        check_dense(OP, **{name: table})
        if table.dim() != 2 or not table.shape[1] or table.stride(1) != 1:
            want = "[rows, D] with elements of a row side by side"
            raise InputError(OP, name, want=want, got=f"{tuple(table.shape)}, {table.stride()}")
        if table.dtype not in DTYPES or table.dtype != tables[0].dtype:
            want = "bf16, fp16 or fp32, and alike"
            raise InputError(OP, name, want=want, got=table.dtype)
        if table.device != indices.device:
            raise InputError(OP, name, want=f"on {indices.device} as indices", got=table.device)


def fix_of_last(offsets: Tensor, last: bool, parts: int) -> str:
    """What to do about one offset more or less than so many equal parts, or ''."""
    if not parts or (offsets.numel() - (not last)) % parts:
        return ""
    if last:
        return "pass include_last_offset=False if each of them is where a bag begins"
    return "pass include_last_offset=True if the last of them is where the last bag ends"


def check_limits(dims: Sequence[Sequence[int]], batch: Sequence[int]) -> None:
    """Refuse what the kernel cannot count.

    Raises:
        InputError: too many ranks, or bags of all tables of one of them.
    """
    ranks = len(dims)
    if ranks > MAX_RANKS:
        raise InputError(OP, "group", want=f"of at most {MAX_RANKS} ranks", got=ranks)
    # tasks are counted as if all ranks had as many bags as the one that has most
    bags = max(sum(batch), ranks * max(batch))
    pieces = max(sum(-(-d // block_of(own)) for d in own) for own in dims)
    if bags * pieces >= MAX_COUNT:
        want = f"fewer than {MAX_COUNT} bags of all tables"
        raise InputError(OP, "offsets", want=want, got=bags)


def problem_with(tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, *, last: bool) -> str:
    """What is wrong with the values, "argument|want|got", or ''. Waits for the GPU."""
    if not tables:
        return ""
    bounds = offsets.long()
    ends = bounds if last else torch.cat([bounds, bounds.new_tensor([indices.numel()])])
    if int(ends[0]) or int(ends[-1]) != indices.numel() or bool((ends[1:] < ends[:-1]).any()):
        return f"offsets|0 at first, rising to {indices.numel()} indices|others"
    bags = (ends.numel() - 1) // len(tables)
    edges = ends[::bags].tolist() if bags else [0] * (len(tables) + 1)
    for i, table in enumerate(tables):
        some = indices[edges[i] : edges[i + 1]]
        if some.numel() and not 0 <= int(some.min()) <= int(some.max()) < len(table):
            low, high = int(some.min()), int(some.max())
            return f"indices of tables[{i}]|0 to {len(table) - 1}|{low} to {high}"
    return ""
