"""What ranks agree on of embedding bags: columns, bags and types of each, once for many calls."""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops import agreement
from counterpoint.ops.embedding_call import AUTO
from counterpoint.ops.embedding_check import OP, check_bags, check_limits, fix_of_last
from counterpoint.ops.embedding_seen import facts_seen
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import Layout
from counterpoint.runtime.workspace import Workspace, refuse_capture


def layout_of(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str,
    last: bool, batch: Sequence[int] | None, dims: Sequence[Sequence[int]] | None,
    dtype: torch.dtype | None, out: PooledOutputs | None, workspace: Workspace, plan: str = AUTO,
) -> Layout:  # fmt: skip
    """What each rank has and gets; ranks meet at the first call with these dims and counts.

    All of them must come to it or none: so it is known by what is equal on all ranks, and asked
    for at each call where the caller does not know the columns of the others' tables. Likewise on
    CPU ranks. While a graph is captured, when ranks cannot meet, it is what the last eager call of
    as many bags has found: if own columns are its, on all ranks, that is right.

    Raises:
        InputError: an argument is wrong, on all ranks alike where they meet; or the ranks disagree.
        PeerTimeoutError: a rank did not come.
    """
    seen = facts_seen(tables, indices, offsets, weights, mode, last, batch, dims, dtype, out, plan)
    layout: Layout | None = workspace.code.get(seen) if seen else None
    if layout is not None and not agreement.checking():
        return layout
    layout = _layout_of(
        tables, indices, offsets, weights, mode, last, batch, dims, dtype, out, workspace, plan
    )
    # others than those meet, or are compared, at each call
    if seen is not None and dims is not None and workspace.device.type == "cuda":
        workspace.remember(seen, layout)
    return layout


def _layout_of(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None, mode: str,
    last: bool, batch: Sequence[int] | None, dims: Sequence[Sequence[int]] | None,
    dtype: torch.dtype | None, out: PooledOutputs | None, workspace: Workspace, plan: str,
) -> Layout:  # fmt: skip
    known: _Known | None = None
    refused: InputError | None = None
    try:
        check_bags(tables, indices, offsets, weights, mode, last, plan)
    except InputError as error:
        refused = error
    try:
        known = _known_by(tables, offsets, mode, last, batch, dims, dtype, out, plan, workspace)
        _check_own(tables, known, dtype, out, workspace)
    except InputError as error:
        refused = refused or error
    except (AttributeError, IndexError, RuntimeError, TypeError):
        if refused is None:  # else it is of what has been refused already
            raise
    found: Layout | None = workspace.agreed.get(known) if known else None
    asked = workspace.device.type == "cpu" or agreement.checking()
    # a call of which nothing can be said is taken for the first one only where there was none
    new = found is None if known else not any(isinstance(k, _Known) for k in workspace.agreed)
    if not (asked or new or (known.dims if known else dims) is None):
        if refused is not None:
            raise refused  # peers do not meet
        assert found is not None
        return found
    if workspace.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if refused is not None:
            raise refused
        if found is None or found.dims[workspace.rank] != tuple(t.shape[1] for t in tables):
            refuse_capture("none: this is the first call of such tables and bags")
        assert found is not None
        return found
    here = {"op": OP}
    if known is not None and refused is None:
        here |= {"mode": mode, "plan": plan, "bags": str(sum(known.batch)),
                 "batch": str(known.batch), "dtype": str(known.dtype), "out": str(out is not None),
                 "outputs": str(known.outputs), "dims": str(known.dims),
                 "own": str(tuple(t.shape[1] for t in tables))}  # fmt: skip
    found = _agreed(agreement.meet(OP, (here, refused), workspace))
    _check_outputs(out, found)
    workspace.agreed[known] = found
    return found


class _Known(NamedTuple):
    """What a layout is known by: facts of a call that are equal on all ranks."""

    op: str
    dims: tuple[tuple[int, ...], ...] | None
    batch: tuple[int, ...]
    dtype: torch.dtype
    mode: str
    outputs: tuple[Any, ...] | None
    plan: str


def _known_by(
    tables: Sequence[Tensor], offsets: Tensor, mode: str, last: bool, batch: Sequence[int] | None,
    dims: Sequence[Sequence[int]] | None, dtype: torch.dtype | None, out: PooledOutputs | None,
    plan: str, workspace: Workspace,
) -> _Known:  # fmt: skip
    ranks = workspace.group.size()
    counts = _counts(batch)
    try:
        all_dims = None if dims is None else tuple(tuple(map(index, each)) for each in dims)
    except TypeError:
        raise InputError(OP, "dims", want="columns of each rank's tables", got=dims) from None
    if not tables and (all_dims is None or counts is None or dtype is None):
        needed = (("dims=", all_dims), ("dtype=", dtype), ("batch=", counts))
        fix = f"pass {' and '.join(name for name, value in needed if value is None)}"
        fix += ", and dims= on all ranks" if all_dims is None else ""
        raise InputError(OP, "tables", want="some, or described", got="none", fix=fix)
    if ranks == 1 and all_dims is None:
        all_dims = (tuple(t.shape[1] for t in tables),)
    if out is not None and not isinstance(out, PooledOutputs):
        fix = "make one of them, counterpoint.PooledOutputs(...), for all calls"
        raise InputError(OP, "out", want="PooledOutputs", got=type(out).__name__, fix=fix)
    bags = (offsets.numel() - last) // len(tables) if tables else sum(counts or ())
    if counts is None:
        if bags % ranks:
            fix = "pass batch= with the bags of each rank, on all ranks"
            if hint := fix_of_last(offsets, last, len(tables) * ranks):
                fix += f"; or {hint}"
            raise InputError(
                OP, "offsets", want=f"{ranks} equal parts", got=f"{bags} bags", fix=fix
            )
        counts = (bags // ranks,) * ranks
    if len(counts) != ranks or sum(counts) != bags:
        want = f"a count for each of {ranks} ranks, {bags} in all"
        fix = ""
        if len(counts) == ranks and offsets.numel() - (not last) == sum(counts) * len(tables):
            fix = fix_of_last(offsets, last, len(tables))
        raise InputError(OP, "batch", want=want, got=counts, fix=fix)
    kind = tables[0].dtype if tables else dtype
    assert kind is not None
    outputs = None if out is None else (out.columns, out.dtype, out.batch)
    return _Known(OP, all_dims, counts, kind, mode, outputs, plan)


def _check_own(
    tables: Sequence[Tensor], known: _Known, dtype: torch.dtype | None, out: PooledOutputs | None,
    workspace: Workspace,
) -> None:  # fmt: skip
    """Refuse what one rank alone may have wrong, though it knows the call."""
    own, ranks = tuple(t.shape[1] for t in tables), workspace.group.size()
    if known.dims is not None and (len(known.dims) != ranks or known.dims[workspace.rank] != own):
        want = f"of the tables of each of {ranks} ranks, {own} on rank {workspace.rank}"
        raise InputError(OP, "dims", want=want, got=known.dims)
    if dtype not in (None, known.dtype):
        raise InputError(OP, "dtype", want=f"{known.dtype} as tables", got=dtype)
    if out is not None and (out.group is not workspace.group or out.device != workspace.device):
        want = f"of this group, on {workspace.device}"
        raise InputError(OP, "out", want=want, got=f"of another, on {out.device}")


def _check_outputs(out: PooledOutputs | None, layout: Layout) -> None:
    """Refuse outputs of other sizes; ranks have compared theirs, so on all of them."""
    if out is None:
        return
    want, got = (layout.columns, layout.dtype, layout.batch), (out.columns, out.dtype, out.batch)
    if want != got:
        form = "{} columns of {} for batches {}".format
        raise InputError(OP, "out", want=form(*want), got=form(*got))


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


def _agreed(everyone: Sequence[tuple[dict[str, str], CounterpointError | None]]) -> Layout:
    """From what all ranks say: they raise alike."""
    words = [said for said, _ in everyone]
    _compared(words, ("op",))
    for _, refused in everyone:
        if refused is not None:
            raise refused
    _compared(words, ("mode", "plan", "bags", "batch", "dtype", "out", "outputs", "dims"))
    if all(said["own"] == "()" for said in words):
        raise InputError(OP, "tables", want="some on one rank at least", got="none on all")
    dims = tuple(_numbers(said["own"]) for said in words)
    batch = _numbers(words[0]["batch"])
    check_limits(dims, batch)
    return Layout(dims, batch, getattr(torch, words[0]["dtype"].removeprefix("torch.")))


def _compared(words: Sequence[dict[str, str]], names: Sequence[str]) -> None:
    called = {"bags": "offsets", "dtype": "tables", "out": "out is given", "outputs": "out"}
    for name in names:
        want = words[0].get(name, "another call")
        for rank, said in enumerate(words):
            got = said.get(name, "another call")
            if got != want:
                want += " bags" * (name == "bags")
                want = f"equal on all ranks, {want} as on rank 0"
                raise InputError(OP, called.get(name, name), want=want, got=f"{got} on rank {rank}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.strip("()").split(",") if n.strip())
