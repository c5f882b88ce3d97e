"""What both operators of experts share: the table of counts, its checks, the facts of a call.

E experts in all, E_local = E / ranks of them on each rank: expert e is on rank e // E_local.
`counts[s, e]` is how many rows rank s sends to expert e; every rank has the whole table. Rows lie
by owner or by expert: see experts/rows.py.

A table on the CPU is host-known: it sizes what is returned. One on a GPU is device-known: what is
returned has `max_rows` rows, the rows beyond the table's sum are not written, and rows of x beyond
it are not read. Where no one kernel takes it the host reads it at each call, and waits. Tables
change with every step of a layer, so nothing is kept by their values: plans are for as many rows as
there may be, in steps.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts import check as experts_check
from counterpoint.experts.check import Table
from counterpoint.experts.fused.launch import COMBINE, DISPATCH, copy_own, finish
from counterpoint.experts.steps_counted import refusal
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import Action, Operands, Places
from counterpoint.ops import call
from counterpoint.ops.agreement import Input
from counterpoint.ops.call import Operator, Output, Tensors, Words, present
from counterpoint.ops.plans import family_of
from counterpoint.ops.samples import Sample, num_sets
from counterpoint.plan.bind import Box
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Counts, Problem
from counterpoint.problem import dtype_of as problem_dtype
from counterpoint.run.execute import Code
from counterpoint.tensor_parallel.backward import dtype_of

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


def seen(
    op: str, x: Tensor, w: Tensor, counts: Table, max_rows: int | None, plan: object,
    group: dist.ProcessGroup, host: bool | None = None,
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
    rank, ranks = group.rank(), group.size()
    if host is None:
        if torch.compiler.is_compiling() or not (
            isinstance(counts, Tensor) and isinstance(x, Tensor) and isinstance(w, Tensor)
        ):
            return None
        host = experts_check.host_known_at_once(counts)
        if x.is_nested or w.is_nested or counts.is_nested:
            return None
        good = w.dim() == 3 and x.dim() == 2 and counts.shape == (ranks, ranks * w.shape[0])
        good = good and counts.dtype in (torch.int32, torch.int64)
        good = good and counts.layout == torch.strided
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
            facts = Facts(2, most(max(rows, room), experts), rows, room)
            return Seen(facts, counts, room, True)
        counts = _on_host(op, counts)
    if not experts:
        return Seen(Facts(0, 0), counts, room or 0, rows == 0)
    low, high = map(int, counts.aminmax())
    pairs = counts.reshape(ranks, ranks, -1).sum(2)  # rows from each rank to each rank
    sent, come = pairs.sum(1).tolist(), pairs.sum(0).tolist()
    has, gets = (sent, come) if op == DISPATCH else (come, sent)
    same = host and low == high and low >= 0
    facts = Facts(0, low * experts) if same else Facts(1, most(max(*sent, *come), experts))
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


@lru_cache(maxsize=4096)
def most(rows: int, experts: int) -> int:
    """Somewhat more, equal for all experts: tables change from call to call, but plans seldom."""
    step = max(256, 1 << max(rows.bit_length() - 3, 0))
    rows = max(-(-rows // step), 1) * step
    return -(-rows // max(experts, 1)) * experts


def _problem(op: str, tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    facts, (x, w, *_) = Facts(*rows), present(tensors)
    experts, k, n = w.shape
    kind = KINDS[facts.kind]
    return Problem(op, facts.m, n, k, ranks, dtype_of(x), experts=experts, counts=kind)


def _outputs(
    op: str, keep: bool, tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    (_, w, *_), last = present(tensors), tensors[-1]
    k, n = w.shape[1:]
    y = Output("y", (-1, n))
    if op == DISPATCH:
        return (y, Output("rows", (-1, k))) if keep else (y,)
    if last is None:
        return (y,)
    return Output("sums", (last.shape[0], n)), Output("y", (-1, n), spare=not keep)


def _words(op: str, tensors: Tensors, rows: Sequence[int], rank: int) -> Words:
    """The facts in words. A device-known table is read by the host here, and at no other time."""
    x, w, counts, *_ = present(tensors)
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
        return partial(finish, code.workspace.rank)
    if not keep or any(buffer.name == "rows" for buffer in plan.buffers):
        return None
    if not any(buffer.name == "received" for buffer in plan.buffers):  # of one rank
        return copy_own
    p, workspace = plan.problem, code.workspace
    rows = Places(workspace, plan).fixed(Box(workspace.rank, "received", 0, 0, p.m, 0, p.k))
    assert rows is not None, "symmetric"

    def copied(operands: Operands) -> None:  # the next call writes over them
        kept = operands["rows"][: len(rows)]
        kept.copy_(rows[: len(kept)])

    return copied


@cache
def operator_of(op: str, keep: bool = False, clears: bool = False, asks: str = "") -> Operator:
    """How call.py sees a call.

    Args:
        keep: of a dispatch, the rows that come; of sums, the rows that are summed.
        clears: the rows beyond those of the table are zero.
        asks: operands whose gradients ranks make together, if they are asked for; see `asked_of`.
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
        compares=(("requires_grad", asks or "nothing"),),
    )  # fmt: skip


def run(
    operator: Operator, tensors: tuple[Tensor, Tensor, Tensor, *tuple[Tensor | None, ...]],
    plan: str, group_name: str, rows: int, host: bool, refused: InputError | None = None,
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
    group = group_of(group_name)
    found = seen(op, x, w, counts, rows, plan, group, host)
    assert found is not None, "checked"
    facts, counts, room, good = found
    if not good and refused is None:
        refused = refusal(op, counts, x, room, group.rank(), host=host)
    given = call.Given(room, refused)
    return call.run(operator, (x, w, counts, *rest), plan, facts, group_name, given)


def sample(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """Calls on random rows, equally many for each expert: see samples.py.

    Counts that differ from call to call are in no graph, as serial lays rows out on the host.
    """
    p, dtype = problem, getattr(torch, problem.dtype)
    facts = Facts(KINDS.index(p.counts), p.m)
    counts = torch.full((p.ranks, p.ranks * p.experts), p.m // (p.ranks * p.experts))
    x = torch.randn(p.m, p.k, device=device).to(dtype)
    ws = [
        torch.randn(p.experts, p.n, p.k, device=device).to(dtype).transpose(1, 2)
        for _ in range(num_sets(p.experts * p.n * p.k * p.item_bytes, device))
    ]
    operator = operator_of(p.op)
    aside = [None] * (len(operator.inputs) - 3)

    def call_of(spec: str) -> Callable[[int], object]:
        def one(i: int) -> object:
            tensors = (x, ws[i % len(ws)], counts, *aside)
            return call.prepare(operator, tensors, spec, facts, group)(tensors, p.m)

        one(0)
        return one

    return Sample(len(ws), call_of, captures=p.counts == "equal")
