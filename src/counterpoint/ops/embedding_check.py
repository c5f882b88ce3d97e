"""Arguments of embedding bags: refused before a launch, and agreed on once by all ranks."""

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import agreement
from counterpoint.ops.check import DTYPES
from counterpoint.runtime.embedding_layout import MAX_COUNT, MAX_RANKS, Layout
from counterpoint.runtime.workspace import Workspace, refuse_capture

OP = "embedding_bag_all_to_all"
INDEX = (torch.int32, torch.int64)


class Agreed(NamedTuple):
    """What all ranks know after they have met: the layout, and whether one wants gradients."""

    layout: Layout
    differentiated: bool


def check_bags(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str,
    last: bool,
) -> None:  # fmt: skip
    """Refuse what is wrong on its own, whatever other ranks pass.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    if not isinstance(tables, list | tuple) or not all(isinstance(t, Tensor) for t in tables):
        raise InputError(OP, "tables", want="a list of Tensors", got=type(tables).__name__)
    if mode not in ("sum", "mean"):
        raise InputError(OP, "mode", want="'sum' or 'mean'", got=repr(mode))
    given = [("indices", indices), ("offsets", offsets)]
    given += [("per_sample_weights", weights)] if weights is not None else []
    for name, tensor in given:
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not tensor.is_contiguous():
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(OP, name, want="a 1-D Tensor without gaps", got=got)
        if tensor.device != indices.device or tensor.device.type not in ("cpu", "cuda"):
            want = f"on {indices.device} as indices, cpu or cuda"
            raise InputError(OP, name, want=want, got=tensor.device)
        if tensor.numel() > MAX_COUNT:
            raise InputError(OP, name, want=f"of at most {MAX_COUNT} elements", got=tensor.numel())
    for name, tensor in given[:2]:
        if tensor.dtype not in INDEX:
            raise InputError(OP, name, want="int32 or int64", got=tensor.dtype)
    for i, table in enumerate(tables):
        name = f"tables[{i}]"
        if table.dim() != 2 or not table.shape[1] or table.stride(1) != 1:
            want = "[rows, D] with elements of a row side by side"
            raise InputError(OP, name, want=want, got=f"{tuple(table.shape)}, {table.stride()}")
        if table.dtype not in DTYPES or table.dtype != tables[0].dtype:
            want = "bf16, fp16 or fp32, and alike"
            raise InputError(OP, name, want=want, got=table.dtype)
        if table.device != indices.device:
            raise InputError(OP, name, want=f"on {indices.device} as indices", got=table.device)
    if weights is not None:
        if mode != "sum":
            raise InputError(OP, "per_sample_weights", want="None unless mode is 'sum'", got=mode)
        dtypes = (torch.float32, tables[0].dtype) if tables else DTYPES
        if weights.shape != indices.shape or weights.dtype not in dtypes:
            want = f"{dtypes[-1]} or fp32, {tuple(indices.shape)} as indices"
            got = f"{weights.dtype} {tuple(weights.shape)}"
            raise InputError(OP, "per_sample_weights", want=want, got=got)
    bags = offsets.numel() - last
    if bags < 0 or (bags % len(tables) if tables else bags):
        want = f"a bag for each of {len(tables)} tables and each of the global batch"
        want += ", and the last" if last else ""
        raise InputError(OP, "offsets", want=want, got=f"{offsets.numel()} of them")


def layout_of(
    tables: Sequence[Tensor], offsets: Tensor, mode: str, last: bool, batch: Sequence[int] | None,
    dims: Sequence[Sequence[int]] | None, dtype: torch.dtype | None, workspace: Workspace, *,
    differentiated: bool, out: bool,
) -> Agreed:  # fmt: skip
    """What each rank has and gets; collective at the first call with these tables and counts.

    Ranks must all come to it: so it is known by what is equal on all of them, or else by where own
    tables lie. On CPU ranks it is asked for at each call.

    Raises:
        InputError: the ranks disagree, or the counts do not fit one another; on all ranks alike.
        PeerTimeoutError: a rank did not come.
    """
    own = tuple(t.shape[1] for t in tables)
    all_dims = None if dims is None else tuple(map(tuple, dims))
    counts = _counts(batch)
    if not tables and (all_dims is None or counts is None or dtype is None):
        fix = "pass dims=, dtype= and batch="
        raise InputError(OP, "tables", want="some, or described", got="none", fix=fix)
    if all_dims is not None and (
        len(all_dims) != workspace.group.size() or all_dims[workspace.rank] != own
    ):
        want = f"of the tables of each of {workspace.group.size()} ranks, {own} on this one"
        raise InputError(OP, "dims", want=want, got=all_dims)
    if tables and dtype not in (None, tables[0].dtype):
        raise InputError(OP, "dtype", want=f"{tables[0].dtype} as tables", got=dtype)
    bags = (offsets.numel() - last) // len(tables) if tables else sum(counts or ())
    dtype = tables[0].dtype if tables else dtype
    places = tuple(t.data_ptr() for t in tables) if all_dims is None else all_dims
    grad = torch.is_grad_enabled()
    key = (OP, "layout", own, places, bags, counts, dtype, mode, grad, differentiated, out)
    found: Agreed | None = workspace.code.get(key)
    on_cpu = workspace.device.type == "cpu"
    if found is None or on_cpu or agreement.checking():
        if not on_cpu:
            refuse_capture("none: this is the first call of such tables and bags")
        here = {"op": OP, "mode": mode, "batch": str(counts), "bags": str(bags),
                "dtype": str(dtype), "out": str(out), "dims": str(own),
                "grad": str(differentiated)}  # fmt: skip
        found = _agreed(agreement.meet(OP, here, workspace))
        if all_dims not in (None, found.layout.dims):
            raise InputError(OP, "dims", want=f"{found.layout.dims} as tables", got=all_dims)
        workspace.remember(key, found)
    return found


def _counts(batch: Sequence[int] | None) -> tuple[int, ...] | None:
    if batch is None:
        return None
    try:
        counts = tuple(index(n) for n in batch)
    except TypeError:  # no sequence, or not of whole numbers
        counts = ()
    if not counts or min(counts) < 0:
        raise InputError(OP, "batch", want="a count >= 0 for each rank", got=batch)
    return counts


def _agreed(everyone: list[dict[str, str]]) -> Agreed:
    """From what all ranks say: they raise alike."""
    ranks = len(everyone)
    if ranks > MAX_RANKS:
        raise InputError(OP, "group", want=f"of at most {MAX_RANKS} ranks", got=ranks)
    if all(said.get("dims") == "()" for said in everyone):
        raise InputError(OP, "tables", want="some on one rank at least", got="none on all")
    for name in ("op", "mode", "batch", "bags", "dtype", "out"):
        want = everyone[0].get(name, "another call")
        for rank, said in enumerate(everyone):
            got = said.get(name, "another call")
            # who has no tables must say how many bags there are: others need not
            if got != want and not (name == "batch" and "None" in (got, want)):
                what = {"bags": "offsets", "dtype": "tables", "out": "out is given"}.get(name, name)
                want += " bags" * (name == "bags")
                want = f"equal on all ranks, {want} as on rank 0"
                raise InputError(OP, what, want=want, got=f"{got} on rank {rank}")
    bags = int(everyone[0]["bags"])
    said_batches = [said["batch"] for said in everyone if said["batch"] != "None"]
    if not said_batches:
        if bags % ranks:
            fix = "pass batch= with the bags of each rank"
            raise InputError(
                OP, "offsets", want=f"{ranks} equal parts", got=f"{bags} bags", fix=fix
            )
        batch = (bags // ranks,) * ranks
    else:
        batch = _numbers(said_batches[0])
        if len(batch) != ranks or sum(batch) != bags:
            want = f"a count for each of {ranks} ranks, {bags} in all"
            raise InputError(OP, "batch", want=want, got=batch)
    dims = tuple(_numbers(said["dims"]) for said in everyone)
    if bags * max(map(len, dims)) >= MAX_COUNT:
        raise InputError(OP, "offsets", want=f"fewer than {MAX_COUNT} bags of all tables", got=bags)
    dtype = getattr(torch, everyone[0]["dtype"].removeprefix("torch."))
    return Agreed(Layout(dims, batch, dtype), any(said["grad"] == "True" for said in everyone))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.strip("()").split(",") if n.strip())


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
