"""What ranks agree on of embedding bags: columns, bags, dtype and plan, once for many calls."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.choose.taken import Taken
from counterpoint.embedding.check import check_bags, check_limits, fix_of_last, problem_with
from counterpoint.embedding.exchange import decide_slices
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.embedding.pooled_outputs import PooledOutputs
from counterpoint.errors import CounterpointError, InputError
from counterpoint.gpu import nvtx
from counterpoint.group.workspace import Workspace, refuse_capture
from counterpoint.ops import agreement
from counterpoint.ops.plans import of_islands, plan_key, plan_of
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem


class Asked(NamedTuple):
    """The arguments of a call, as `embedding_bag_all_to_all` takes them."""

    tables: Sequence[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    mode: str
    last: bool
    batch: Sequence[int] | None
    dims: Sequence[Sequence[int]] | None
    dtype: torch.dtype | None
    out: PooledOutputs | None
    plan: str | Path | Plan

    @property
    def device(self) -> torch.device:
        """Where ranks talk about the call.

        Raises:
            InputError: there is none.
        """
        if not isinstance(self.indices, Tensor) or self.indices.device.type not in ("cpu", "cuda"):
            check_bags(*self[:6])
        return self.indices.device

    def frozen(self) -> bool:
        """Whether batch and dims are numbers; a tensor among them may change unseen."""
        batch: Sequence[object] = self.batch or ()
        dims: Sequence[Sequence[object]] = self.dims or ()
        return {int}.issuperset(map(type, chain(batch, *dims)))


class _Known(NamedTuple):
    """What a call is known by: facts of it that are equal on all ranks."""

    op: str
    dims: tuple[tuple[int, ...], ...] | None
    batch: tuple[int, ...]
    dtype: torch.dtype
    mode: str
    outputs: tuple[Any, ...] | None
    plan: str


class _Agreed(NamedTuple):
    """What ranks have found together."""

    problem: Problem
    plan: Taken


def agreed(asked: Asked, workspace: Workspace, asks: bool) -> tuple[Problem, Taken]:
    """What is computed and how; ranks meet at the first call with these dims, counts and plan.

    All of them must come to it or none: so it is known by what is equal on all ranks, and asked
    for at each call where the caller does not know the columns of the others' tables. Likewise on
    CPU ranks, where gloo ends the process of a rank whose peer sends another size. While a graph is
    captured, when ranks cannot meet, it is what the last eager call of as many bags has found: if
    own columns are its, on all ranks, that is right.

    What is chosen at the first of such calls, by all ranks' numbers of indices, later ones take
    too, whatever they pool: a rank that decided anew by its own would decide alone.

    Args:
        asks: whether all ranks take part in a backward.

    Raises:
        InputError: an argument is wrong, on all ranks alike where they meet; or the ranks disagree.
        PeerTimeoutError: a rank did not come.
    """
    known: _Known | None = None
    refused: CounterpointError | None = nvtx.refusal(OP)
    try:
        check_bags(*asked[:6])
    except InputError as error:
        refused = refused or error
    try:
        known = _known_by(asked, workspace)
        _check_own(asked, known, workspace)
    except InputError as error:
        refused = refused or error
    except (AttributeError, IndexError, RuntimeError, TypeError):
        if refused is None:  # else it is of what has been refused already
            raise
    found: _Agreed | None = workspace.agreed.get(known) if known else None
    values = workspace.device.type == "cpu" or agreement.checking()
    # a call of which nothing can be said is taken for the first one only where there was none
    new = found is None if known else not any(isinstance(k, _Known) for k in workspace.agreed)
    if not (values or new or (known.dims if known else asked.dims) is None):
        if refused is not None:
            workspace.board.refuse(refused)
            raise refused  # peers do not meet
        assert found is not None
        return found
    if workspace.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if refused is not None:
            raise refused
        if found is None or found.problem.tables[workspace.rank] != _columns(asked):
            refuse_capture("none: this is the first call of such tables and bags")
        assert found is not None
        return found
    here = (
        _said(asked, known, values, asks) if known is not None and refused is None else {"op": OP}
    )
    everyone = agreement.meet(OP, (here, refused), workspace, here)
    problem = of_islands(_told(everyone), workspace)
    assert known is not None
    _check_outputs(asked.out, problem)
    found = workspace.agreed[known] = _Agreed(problem, _chosen(problem, known, workspace))
    decide_slices(problem, workspace)
    return found


def _chosen(problem: Problem, known: _Known, workspace: Workspace) -> Taken:
    """The plan of the first call of such a problem."""
    key = (OP, replace(problem, indices=()), known.mode, known.plan)
    if key not in workspace.agreed:
        workspace.agreed[key] = plan_of(problem, known.plan, workspace, ())
    return workspace.agreed[key]


def _columns(asked: Asked) -> tuple[int, ...]:
    return tuple(t.shape[1] for t in asked.tables)


def _known_by(asked: Asked, workspace: Workspace) -> _Known:
    tables, out, ranks = asked.tables, asked.out, workspace.group.size()
    counts = _counts(asked.batch)
    try:
        dims = None if asked.dims is None else tuple(tuple(map(index, d)) for d in asked.dims)
    except TypeError:
        want = "columns of each rank's tables"
        raise InputError(OP, "dims", want=want, got=asked.dims) from None
    if not tables and (dims is None or counts is None or asked.dtype is None):
        needed = (("dims=", dims), ("dtype=", asked.dtype), ("batch=", counts))
        fix = f"pass {' and '.join(name for name, value in needed if value is None)}"
        fix += ", and dims= on all ranks" if dims is None else ""
        raise InputError(OP, "tables", want="some, or described", got="none", fix=fix)
    if ranks == 1 and dims is None:
        dims = (_columns(asked),)
    if out is not None and not isinstance(out, PooledOutputs):
        fix = "make one of them, counterpoint.PooledOutputs(...), for all calls"
        raise InputError(OP, "out", want="PooledOutputs", got=type(out).__name__, fix=fix)
    counts = _bags_of(asked, counts, ranks)
    kind = tables[0].dtype if tables else asked.dtype
    assert kind is not None
    outputs = None if out is None else (out.columns, out.dtype, out.batch, out.captured > 0)
    return _Known(OP, dims, counts, kind, str(asked.mode), outputs, plan_key(OP, asked.plan))


def _bags_of(asked: Asked, counts: tuple[int, ...] | None, ranks: int) -> tuple[int, ...]:
    """Bags of each rank: as many as offsets say."""
    tables, offsets, last = asked.tables, asked.offsets, asked.last
    bags = (offsets.numel() - last) // len(tables) if tables else sum(counts or ())
    if counts is None:
        if bags % ranks:
            fix = "pass batch= with the bags of each rank, on all ranks"
            if hint := fix_of_last(offsets, last, len(tables) * ranks):
                fix += f"; or {hint}"
            want = f"{ranks} equal parts"
            raise InputError(OP, "offsets", want=want, got=f"{bags} bags", fix=fix)
        counts = (bags // ranks,) * ranks
    if len(counts) != ranks or sum(counts) != bags:
        want = f"a count for each of {ranks} ranks, {bags} in all"
        fix = ""
        if len(counts) == ranks and offsets.numel() - (not last) == sum(counts) * len(tables):
            fix = fix_of_last(offsets, last, len(tables))
        raise InputError(OP, "batch", want=want, got=counts, fix=fix)
    return counts


def _check_own(asked: Asked, known: _Known, workspace: Workspace) -> None:
    """Refuse what one rank alone may have wrong, though it knows the call."""
    own, ranks, out = _columns(asked), workspace.group.size(), asked.out
    if known.dims is not None and (len(known.dims) != ranks or known.dims[workspace.rank] != own):
        want = f"of the tables of each of {ranks} ranks, {own} on rank {workspace.rank}"
        raise InputError(OP, "dims", want=want, got=known.dims)
    if asked.dtype not in (None, known.dtype):
        raise InputError(OP, "dtype", want=f"{known.dtype} as tables", got=asked.dtype)
    if out is not None and (out.group is not workspace.group or out.device != workspace.device):
        want = f"of this group, on {workspace.device}"
        raise InputError(OP, "out", want=want, got=f"of another, on {out.device}")


def _check_outputs(out: PooledOutputs | None, problem: Problem) -> None:
    """Refuse outputs of other sizes; ranks have compared theirs, so on all of them."""
    if out is None:
        return
    want = problem.n, getattr(torch, problem.dtype), problem.rows
    got = out.columns, out.dtype, out.batch
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


def _said(asked: Asked, known: _Known, values: bool, asks: bool) -> dict[str, str]:
    """What this rank says of a call, and of its values where they are looked at."""
    here = {
        "op": OP, "mode": asked.mode, "plan": known.plan, "bags": str(sum(known.batch)),
        "batch": str(known.batch), "dtype": str(known.dtype), "out": str(asked.out is not None),
        "outputs": str(known.outputs), "dims": str(known.dims), "own": str(_columns(asked)),
        "indices": str(asked.indices.numel()), "requires_grad": str(asks),
    }  # fmt: skip
    if values:
        here["values"] = problem_with(asked.tables, asked.indices, asked.offsets, last=asked.last)
    return here


def _told(everyone: Sequence[tuple[dict[str, str], CounterpointError | None]]) -> Problem:
    """From what all ranks say: they raise alike."""
    words = [said for said, _ in everyone]
    _compare(words, ("op",))
    for _, refused in everyone:
        if refused is not None:
            raise refused
    _compare(words, ("mode", "plan", "bags", "batch", "dtype", "out", "outputs", "dims",
                     "requires_grad"))  # fmt: skip
    if all(said["own"] == "()" for said in words):
        raise InputError(OP, "tables", want="some on one rank at least", got="none on all")
    for rank, said in enumerate(words):
        if said.get("values"):
            what, want, got = said["values"].split("|")
            raise InputError(OP, what, want=want, got=f"{got} on rank {rank}")
    dims, batch = tuple(_numbers(said["own"]) for said in words), _numbers(words[0]["batch"])
    check_limits(dims, batch)
    return Problem(
        OP, sum(batch), ranks=len(dims), dtype=words[0]["dtype"],  # type: ignore[arg-type]
        rows=batch, tables=dims, indices=tuple(int(said["indices"]) for said in words),
        out=words[0]["out"] == "True",
    )  # fmt: skip


def _compare(words: Sequence[dict[str, str]], names: Sequence[str]) -> None:
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
