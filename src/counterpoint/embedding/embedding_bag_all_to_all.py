"""Embedding bags of table-wise shards, and the all-to-all that gives each rank its bags' rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]

from counterpoint.embedding.autograd import (
    ANCHOR,
    TRAINED,
    Arguments,
    Backward,
    Eager,
    backward,
    save,
)
from counterpoint.embedding.call import PLAIN, ready_for
from counterpoint.embedding.check import check_bags, check_limits
from counterpoint.embedding.exchange import problem_from
from counterpoint.embedding.facts import Asked
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.embedding.pooled_outputs import PooledOutputs
from counterpoint.embedding.updates import Update
from counterpoint.errors import InputError
from counterpoint.group.ranks import group_of
from counterpoint.ops.agreement import left, num_dispatch_modes
from counterpoint.ops.check import check_group, is_fake
from counterpoint.ops.plans import plan_key
from counterpoint.ops.register import register
from counterpoint.ops.samples import Sample
from counterpoint.ops.watched import transformed
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem


def embedding_bag_all_to_all(
    tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, *,
    group: dist.ProcessGroup | None = None, mode: str = "sum",
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    batch: Sequence[int] | None = None, dims: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | None = None, sparse: bool = False, out: PooledOutputs | None = None,
    plan: str | Path | Plan = "auto",
) -> Tensor:  # fmt: skip
    """Pool the bags of own tables for all ranks, and get the own bags of all tables.

    In place of a `torch.nn.EmbeddingBag` for each table, all-to-all and concat. On GPUs sums are in
    fp32, without weights to the same bits by all plans. The columns are those of rank 0's tables,
    then rank 1's, as of torchrec's pooled KeyedTensor. Captures in a CUDA graph after an eager call
    with the same tables and as many bags. Differentiable in tables and weights, once, in the same
    order of sums each time. Where gradients are enabled the output asks for one on all ranks, so
    that all take part in the backward, also with frozen tables: `torch.no_grad` if there is none.
    Its exchange runs beside sorting, and by slices of tables beside sums where `choose` says so.

    Indices that a table does not have are undefined on GPUs; COUNTERPOINT_CHECK=1 has all values
    checked at each call, as on CPU ranks always.

    Args:
        tables: bf16, fp16 or fp32, each [rows, D], those of this rank. It may have none: then it
            passes `dims`, `dtype` and `batch`, and all ranks `dims`.
        indices: int32 or int64 [n], of the first table's bags, then the second's.
        offsets: int32 or int64 [tables * bags], where each bag of the global batch begins, for one
            table after another; bags in the order of the ranks that own them.
        group: whose ranks take part; None: the default group.
        mode: "sum" or "mean"; an empty bag is zero.
        per_sample_weights: dtype of the tables or fp32 [n], with "sum": each row times its weight.
        include_last_offset: offsets have one more, the end of the last bag.
        batch: bags of each rank; None: all have as many.
        dims: columns of each rank's tables, on all ranks or on none. None: ranks tell each other at
            each call, which waits for all of them; given, they meet at the first call of such
            tables and bags only. Where torch compiles it is given.
        dtype: of the tables, where there are none.
        sparse: gradients of tables are sparse, each row once; the backward waits for their number.
        out: where peers write to; else one more copy.
        plan: "fused": one kernel, which stores rows where they belong in their owner's output;
            "fused_after_barrier": what calls with `out` take in its place in CUDA graphs;
            "serial": a lookup, the library's all-to-all and a concat; "islands", of ranks on
            several: chunks for another island are exchanged while the next is pooled; "auto": the
            faster one as predicted at the first call with such dims, batch, dtype, mode and kind of
            `out`, from all ranks' number of indices there, which all later calls take too; a Plan,
            of any number of indices; or a JSON file of one. On all ranks alike.

    Returns:
        dtype of the tables, [own bags, D of all tables of all ranks]: new, or memory of `out`.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched. On all ranks, where
            they meet.
        PeerTimeoutError: a rank did not come to an earlier call; the group is unusable.

    Example:
        >>> y = counterpoint.embedding_bag_all_to_all(tables, indices, offsets)  # doctest: +SKIP
    """
    weights, last = per_sample_weights, include_last_offset
    given = tables, indices, offsets, weights, mode, last, batch, dims, dtype, out, plan
    return called(given, sparse, group)


def called(
    given: tuple[Any, ...], sparse: bool, group: dist.ProcessGroup | None,
    update: Update | None = None,
) -> Tensor:  # fmt: skip
    """Run a call: as an operator of torch's where something has to see it, else without.

    Args:
        given: the fields of `Asked`.
        update: what the backward does to the tables; None: it returns their gradients.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        group = check_group(OP, group)
    if sparse is not True and sparse is not False:
        raise InputError(OP, "sparse", want="True or False", got=repr(sparse))
    tables, indices, offsets, weights, _, last, _, _, _, out, _ = given
    if torch.compiler.is_compiling():
        if out is not None:
            return _pooled_outputs_take_turns(given, sparse, group, update)
        asked = Asked._make(given)
        return _operator(asked, described(asked, sparse, group), group, update)
    if transformed() or (num_dispatch_modes() and is_fake(indices)):
        asked = Asked._make(given)
        return _operator(asked, described(asked, sparse, group), group, update)
    if type(indices) is Tensor and indices.is_cuda and (
        indices.device.index != torch.cuda.current_device()
    ):  # fmt: skip
        with torch.cuda.device(indices.device):
            return called(given, sparse, group, update)
    try:
        asks = torch.is_grad_enabled()
        ready, placed = ready_for(given, group, asks=asks)
        if out is None and (num_dispatch_modes() or not (
            PLAIN.issuperset(map(type, tables))
            and PLAIN.issuperset((type(indices), type(offsets), type(weights)))
        )):  # fmt: skip
            flat = ready.mean, last, sparse, ready.flat, [*ready.problem.rows], ready.dtype
            return _operator(Asked._make(given), (*flat, ready.workspace.rank), group, update)
        if not asks:
            return ready(tables, indices, offsets, weights, last, placed, out)
        # of all ranks or of none, whatever they train: the backward has an all-to-all too
        how = Backward(sparse, update)
        return Eager.apply(ready, placed, given, how, weights, ANCHOR, *filter(TRAINED, tables))  # pyright: ignore[reportReturnType]
    except BaseException as error:
        left(OP, error, group, indices)
        raise


@_disable_dynamo  # torch.compiler.disable would import torch._dynamo with this module
def _pooled_outputs_take_turns(*given: Any) -> Tensor:
    """A call between graphs: none may return the same memory each other time."""
    return called(*given)


def _operator(
    asked: Asked, flat: tuple[Any, ...], group: dist.ProcessGroup, update: Update | None
) -> Tensor:
    """By torch's dispatcher; `flat` is what the operator needs beside tensors, plan and group."""
    anchor = ANCHOR if torch.is_grad_enabled() else None
    kind, rates, sums = ("", None, ()) if update is None else update[:3]
    return torch.ops.counterpoint.embedding_bag_all_to_all(
        list(asked.tables), asked.indices, asked.offsets, asked.weights, anchor, *flat,
        plan_key(OP, asked.plan), group.group_name, kind, rates, list(sums),
    )  # fmt: skip


TRACED = "compiling, or under transforms of torch.func"


def described(asked: Asked, sparse: bool, group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What the operator needs beside tensors, without asking other ranks: in a compiled graph.

    Raises:
        InputError: an argument is wrong, or it cannot be known from the arguments alone.
    """
    check_bags(*asked[:6])
    if asked.dims is None:
        raise InputError(OP, "dims", want=f"given while {TRACED}", got=None)
    tables, batch, ranks = asked.tables, asked.batch, group.size()
    if batch is None:
        bags = (asked.offsets.numel() - asked.last) // max(len(tables), 1)
        if not tables or bags % ranks:
            raise InputError(OP, "batch", want=f"given while {TRACED}", got=f"{bags} bags")
        batch = [bags // ranks] * ranks
    if not tables and asked.dtype is None:
        raise InputError(OP, "dtype", want="given where there are no tables", got=None)
    check_limits(asked.dims, batch)
    flat = [n for each in asked.dims for n in (len(each), *each)]
    kind = tables[0].dtype if tables else asked.dtype
    return asked.mode == "mean", asked.last, sparse, flat, list(batch), kind, dist.get_rank(group)


def _run(*given: Any) -> Tensor:
    g = Arguments(*given)
    p, bags = problem_from(g.dims, g.batch, g.dtype), (g.tables, g.indices, g.offsets, g.weights)
    mode = "mean" if g.mean else "sum"
    asked = (*bags, mode, g.last, p.rows, p.tables, g.dtype, None, g.plan)
    asks = g.anchor is not None
    ready, placed = ready_for(asked, group_of(g.group_name), asks=asks)
    return ready(*bags, g.last, placed, asks=asks)


def _fake(*given: Any) -> Tensor:
    g = Arguments(*given)
    columns = problem_from(g.dims, g.batch, g.dtype).n
    return g.indices.new_empty(g.batch[g.rank], columns, dtype=g.dtype)


register(OP, _run, _fake, backward, save)


SAMPLE_TABLE_BYTES = 2 << 30  # of a rank's tables: no cache holds what is read of them


def sample(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """Calls on random tables and indices; bags are of one size."""
    p, own, rank = problem, problem.tables[group.rank()], group.rank()
    count = p.indices[rank] if p.indices else 0
    room = SAMPLE_TABLE_BYTES if device.type == "cuda" else 1 << 20
    rows = max(1, min(1 << 20, room // (sum(own) * p.item_bytes or 1)))
    dtype = getattr(torch, p.dtype)
    tables = [torch.empty(rows, d, dtype=dtype, device=device).uniform_(-1, 1) for d in own]
    indices = torch.randint(0, rows, (count,), device=device)
    bags = p.m * len(own)
    offsets = torch.arange(bags + bool(own), device=device) * count // max(bags, 1)

    def call_of(spec: str) -> Callable[[int], object]:
        @torch.no_grad()
        def call(_: int) -> object:
            return embedding_bag_all_to_all(
                tables, indices, offsets, group=group, include_last_offset=bool(own), batch=p.rows,
                dims=p.tables, dtype=dtype, plan=spec,
            )  # fmt: skip

        call(0)
        return call

    return Sample(1, call_of)
