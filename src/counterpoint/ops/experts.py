"""What both operators of experts share: the table of counts, its checks, the facts of a call.

E experts in all, E_local = E / ranks of them on each rank: expert e is on rank e // E_local.
`counts[s, e]` is how many rows rank s sends to expert e; every rank has the whole table. Rows lie
by owner or by expert: see runtime/counted.py.

A table on the CPU is host-known: it sizes what is returned. One on a GPU is device-known: what is
returned has `max_rows` rows, the rows beyond the table's sum are not written, and rows of x beyond
it are not read. Where no one kernel takes it the host reads it at each call, and waits. Tables
change with every step of a layer, so nothing is kept by their values: plans are for as many rows as
there may be, in steps.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from operator import attrgetter, index
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops import call
from counterpoint.ops.agreement import Input
from counterpoint.ops.backward import dtype_of
from counterpoint.ops.call import Operator, Output, Words
from counterpoint.ops.check import DTYPES
from counterpoint.ops.fused_experts import COMBINE, DISPATCH, copy_own, sum_of_rows
from counterpoint.ops.plans import family_of
from counterpoint.ops.samples import Sample, num_sets
from counterpoint.plan.bind import Box
from counterpoint.plan.families import families
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Counts, Problem
from counterpoint.problem import dtype_of as problem_dtype
from counterpoint.runtime.compute import Action
from counterpoint.runtime.counted import refusal, rows_by_rank
from counterpoint.runtime.execute import Code
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Operands, Places

Table = Tensor | Sequence[Sequence[int]]
Tensors = Sequence[Tensor | None]
# whether the host may read a table at each call
host_known: Callable[[Tensor], bool] = attrgetter("is_cpu")
KINDS: tuple[Counts, ...] = ("equal", "host", "device")


class Facts(NamedTuple):
    """What all ranks must have alike of a table and of sizes; the `rows` of a call.

    Args:
        kind: which of KINDS.
        m: of the Problem.
        has, room: rows of x and of the result, where the table is device-known.
    """

    kind: int
    m: int
    has: int = 0
    room: int = 0


class Seen(NamedTuple):
    """What is seen of a call at once.

    Args:
        facts: of all ranks.
        counts: the table, on the host if that has read it.
        room: rows of the result on this rank.
        good: the values of the table fit the rows of x and of the result, as far as they are known.
    """

    facts: Facts
    counts: Tensor
    room: int
    good: bool


def check_operands(op: str, x: Tensor, w: Tensor) -> None:
    """Refuse operands that do not fit one another.

    Raises:
        InputError: names the argument, what it must be, and what it is.
    """
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor):
            raise InputError(op, name, want="a Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided:
            raise InputError(op, name, want="a dense tensor", got=tensor.layout)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(op, "x", want="on cpu or cuda", got=x.device)
    if x.dim() != 2:
        raise InputError(op, "x", want="[rows, K] of 2 dims", got=f"{x.dim()}-D")
    if w.dim() != 3:
        raise InputError(op, "w", want="[E_local, K, N] of 3 dims", got=f"{w.dim()}-D")
    if w.shape[1] != x.shape[1]:
        fix = "pass w.transpose(1, 2) of weights that are stored as [E_local, N, K]"
        want = f"[E_local, K={x.shape[1]}, N]"
        raise InputError(op, "w", want=want, got=tuple(w.shape), fix=fix)
    if w.dtype != x.dtype:
        raise InputError(op, "w", want=f"{x.dtype} as x", got=w.dtype)
    if w.device != x.device:
        raise InputError(op, "w", want=f"on {x.device} as x", got=w.device)
    if not any(w.stride(dim) == 1 or w.shape[dim] <= 1 for dim in (1, 2)):
        fix = "pass w.contiguous()"
        want = "with a unit stride in K or N"
        raise InputError(op, "w", want=want, got=f"strides {w.stride()}", fix=fix)


def check_plan(op: str, plan: str) -> None:
    """Refuse what names no plan of experts; a spec is read when the experts are known.

    Raises:
        InputError: there is no such family.
    """
    names = ("auto", *families(DISPATCH))
    if not isinstance(plan, str) or plan.split()[:1] not in [[name] for name in names]:
        raise InputError(op, "plan", want=f"one of {', '.join(names)}", got=repr(plan))


def table_of(op: str, counts: Table, x: Tensor, w: Tensor, ranks: int) -> Tensor:
    """The table as a tensor. Its values are not looked at.

    Raises:
        InputError: no whole numbers, another shape than [ranks, E], or on another device.
    """
    experts = ranks * w.shape[0]
    want = f"int32 or int64 [{ranks}, {experts}], rows of each rank for each expert"
    if not isinstance(counts, Tensor):
        try:
            table = [[index(n) for n in row] for row in counts]
        except TypeError:  # no sequences, or not of whole numbers
            raise InputError(op, "counts", want=want, got=repr(counts)) from None
        if len(table) != ranks or any(len(row) != experts for row in table):
            got = f"{len(table)} rows of {sorted({len(row) for row in table})}"
            raise InputError(op, "counts", want=want, got=got)
        counts = torch.tensor(table, dtype=torch.int64, device="cpu")
    if counts.dtype not in (torch.int32, torch.int64) or counts.shape != (ranks, experts):
        fix = f"w has {w.shape[0]} experts on each of {ranks} ranks"
        got = f"{counts.dtype} {list(counts.shape)}"
        raise InputError(op, "counts", want=want, got=got, fix=fix)
    if counts.device not in (torch.device("cpu"), x.device):
        raise InputError(op, "counts", want=f"on cpu or on {x.device} as x", got=counts.device)
    return counts


def room_of(
    op: str, counts: Tensor, max_rows: int | None, group: dist.ProcessGroup
) -> tuple[int, bool]:
    """Rows of the result on this rank, and whether the table is host-known.

    Raises:
        InputError: `max_rows` is missing, not a count, or, where the table is host-known, less
            than what a rank gets.
    """
    host = host_known(counts)
    if max_rows is None and not host:
        fix = "rows that a rank may get at most; its memory is that large"
        raise InputError(op, "max_rows", want="given with counts on a GPU", got=None, fix=fix)
    if max_rows is not None:
        try:
            max_rows = index(max_rows)
        except TypeError:
            raise InputError(op, "max_rows", want="a count", got=repr(max_rows)) from None
        if max_rows < 0:
            raise InputError(op, "max_rows", want=">= 0", got=max_rows)
        if not host:
            return max_rows, host
    totals = rows_by_rank(counts, op == DISPATCH).tolist()
    if max_rows is not None and max(totals) > max_rows:
        who = totals.index(max(totals))
        want = f">= {max(totals)}, what rank {who} gets"
        raise InputError(op, "max_rows", want=want, got=max_rows)
    return totals[group.rank()], host


def seen(
    op: str, x: Tensor, w: Tensor, counts: Table, max_rows: int | None, plan: object,
    rank: int, ranks: int, host: bool | None = None,
) -> Seen | None:  # fmt: skip
    """The facts of a call, from its table where the host reads that.

    Args:
        max_rows: rows of the result; None: as the table says.
        host: whether the table is host-known; None: nothing has been checked yet.

    Returns:
        The facts; None, if nothing had been checked and this is no plain call.

    Raises:
        InputError: a graph is being captured, and the host would have to read the table.
    """
    if host is None:
        if torch.compiler.is_compiling() or not (
            isinstance(counts, Tensor) and isinstance(x, Tensor) and isinstance(w, Tensor)
        ):
            return None
        host = host_known(counts)
        good = w.dim() == 3 and x.dim() == 2 and counts.shape == (ranks, ranks * w.shape[0])
        good = good and not counts.is_floating_point()
        if not good or (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)):
            return None
        if host:
            good = max_rows is None
        elif type(max_rows) is int and max_rows >= 0 and isinstance(plan, str):
            good = one_kernel(op, plan, x.dtype, w.shape[2], w.shape[1], w.shape[0], ranks)
        else:
            good = False
        if not good:
            return None
    assert isinstance(counts, Tensor)
    rows, experts, room = x.shape[0], counts.shape[1], max_rows
    if not host:
        assert room is not None
        if one_kernel(op, str(plan), x.dtype, w.shape[2], w.shape[1], w.shape[0], ranks):
            facts = Facts(2, _most(max(rows, room), experts), rows, room)
            return Seen(facts, counts, room, True)
        counts = _on_host(op, counts)
    if not experts:
        return Seen(Facts(0, 0), counts, room or 0, rows == 0)
    low, high = map(int, counts.aminmax())
    pairs = counts.reshape(ranks, ranks, -1).sum(2)  # rows from each rank to each rank
    sent, come = pairs.sum(1).tolist(), pairs.sum(0).tolist()
    has, gets = (sent, come) if op == DISPATCH else (come, sent)
    same = host and low == high and low >= 0
    facts = Facts(0, low * experts) if same else Facts(1, _most(max(*sent, *come), experts))
    room = max(gets[rank], 0) if room is None else room
    fits = (rows, room) == (has[rank], gets[rank])
    fits = fits or (not host and rows >= has[rank] and room >= gets[rank])
    return Seen(facts, counts, room, low >= 0 and fits)


@cache
def one_kernel(
    op: str, plan: str, dtype: torch.dtype, n: int, k: int, experts: int, ranks: int
) -> bool:
    """Whether a call of a device-known table leaves it there; else the host waits for it."""
    if plan != "auto":
        return family_of(plan) == "fused"
    name = problem_dtype(op, dtype)
    problem = Problem(op, 0, n, k, ranks, name, experts=experts, counts="device")
    return ranks > 1 and operation_of(op).without_serial(problem)[0] == "fused"


def _on_host(op: str, counts: Tensor) -> Tensor:
    """A device-known table, read by the host, which waits for it.

    Raises:
        InputError: a graph is being captured.
    """
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        fix = "pass counts on the GPU and plan='fused'"
        got = "serial while a graph is captured, which lays rows out on the host"
        raise InputError(op, "plan", want="fused", got=got, fix=fix)
    return counts.cpu()


def sample_by(
    run: Callable[..., Tensor], problem: Problem, group: dist.ProcessGroup, device: torch.device
) -> Sample:
    """Calls of half a layer on random rows, as many for each expert; weights take turns."""
    p, dtype = problem, getattr(torch, problem.dtype)
    counts = torch.full((p.ranks, p.ranks * p.experts), p.m // (p.ranks * p.experts))
    x = torch.randn(p.m, p.k, device=device).to(dtype)
    shape = (p.experts, p.n, p.k)  # as a layer stores them
    count = num_sets(prod(shape) * p.item_bytes, device)
    weights = [torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(count)]

    def call_of(spec: str) -> Callable[[int], object]:
        @torch.no_grad()
        def one(i: int) -> object:
            return run(x, weights[i % count], counts=counts, group=group, plan=spec)

        one(0)
        return one

    return Sample(count, call_of, captures=p.counts == "equal")


@lru_cache(maxsize=4096)
def _most(rows: int, experts: int) -> int:
    """Somewhat more, equal for all experts: tables change from call to call, but plans seldom."""
    step = max(256, 1 << max(rows.bit_length() - 3, 0))
    rows = max(-(-rows // step), 1) * step
    return -(-rows // max(experts, 1)) * experts


def _problem(op: str, tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    facts, (x, w) = Facts(*rows), tensors[:2]
    assert x is not None
    assert w is not None
    experts, k, n = w.shape
    kind = KINDS[facts.kind]
    return Problem(op, facts.m, n, k, ranks, dtype_of(x), experts=experts, counts=kind)


def _outputs(
    op: str, keep: bool, tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    w, last = tensors[1], tensors[-1]
    assert w is not None
    k, n = w.shape[1:]
    y = Output("y", (-1, n))
    if op == DISPATCH:
        return (y, Output("rows", (-1, k))) if keep else (y,)
    if last is None:
        return (y,)
    return Output("sums", (last.shape[0], n)), Output("y", (-1, n), spare=not keep)


def _words(op: str, tensors: Tensors, rows: Sequence[int], rank: int) -> Words:
    """The facts in words. A device-known table is read by the host here, and at no other time."""
    x, w, counts = tensors[:3]
    assert x is not None
    assert w is not None
    assert counts is not None
    facts = Facts(*rows)
    host = KINDS[facts.kind] != "device"
    here = {
        "w.shape": str(tuple(w.shape)), "x.dtype": str(x.dtype),
        "counts' place": "the host" if host else "the device",
    }  # fmt: skip
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return here, None
    table = counts.cpu()
    here |= {f"counts[{source}]": str(row) for source, row in enumerate(table.tolist())}
    if host:
        return here, None
    here |= {"max_rows": str(facts.room), "rows of x": str(facts.has)}
    return here, refusal(op, table, x, facts.room, rank, host=False)


def _ends(keep: bool, code: Code | None) -> Action | None:
    """What plans leave that are not one kernel: sums of rows, and rows that are kept."""
    plan = code.program.plan if code else None
    if code is None or plan is None or any(step.kind == "fused" for step in plan.steps):
        return None
    if plan.problem.op == COMBINE:
        return _sum
    if not keep or any(buffer.name == "rows" for buffer in plan.buffers):
        return None
    if not any(buffer.name == "received" for buffer in plan.buffers):  # of one rank
        return copy_own
    p, workspace = plan.problem, code.workspace
    rows = Places(workspace, plan).fixed(Box(workspace.rank, "received", 0, 0, p.m, 0, p.k))
    assert rows is not None, "symmetric"
    return lambda o: o["rows"].copy_(rows)  # the next call writes over them


def _sum(operands: Operands) -> None:
    if "sums" in operands:
        sums = sum_of_rows(operands["y"], operands["index"], operands["weights"])
        operands["sums"].copy_(sums)


@cache
def operator_of(op: str, keep: bool = False, clears: bool = False) -> Operator:
    """How call.py sees a call.

    Args:
        keep: of a dispatch, the rows that come; of sums, the rows that are summed.
        clears: the rows beyond those of the table are zero.
    """
    inputs = (
        Input("x", "rows", fact="columns"), Input("w", "given"), Input("counts", "plain", fact=""),
    )  # fmt: skip
    if op == COMBINE:
        aside = (("add", "rows"), ("index", "plain"), ("weights", "plain"))
        inputs += tuple(Input(name, form, fact="") for name, form in aside)  # type: ignore[arg-type]
    return Operator(
        op, inputs,
        partial(_problem, op), partial(_outputs, op, keep), partial(_words, op),
        partial(_ends, keep),
        clears,
    )  # fmt: skip


def run(
    operator: Operator, tensors: tuple[Tensor | None, ...], plan: str, group_name: str, rows: int,
    host: bool, refused: InputError | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a call as torch's dispatcher has it.

    Args:
        rows: of the result.
        host: the table is host-known.
        refused: what this rank has found wrong already.

    Raises:
        InputError, UnsupportedError, PeerTimeoutError: as the operators.
    """
    op, (x, w, counts, *rest) = operator.op, tensors
    assert x is not None
    assert w is not None
    assert counts is not None
    group = group_of(group_name)
    rank = group.rank()
    found = seen(op, x, w, counts, rows, plan, rank, group.size(), host)
    assert found is not None, "checked"
    facts, counts, room, good = found
    if not good and refused is None:
        refused = refusal(op, counts, x, room, rank, host=host)
    given = call.Given(room, refused)
    return call.run(operator, (x, w, counts, *rest), plan, facts, group_name, given)
