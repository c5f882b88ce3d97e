"""What all operators share: their checks, the choice of a plan, and running it.

Everything is checked before the first launch, from facts that are equal on all ranks.
"""

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from math import prod
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.choose.rule import choose_spec
from counterpoint.errors import InputError, PeerTimeoutError, UnsupportedError
from counterpoint.machine import Machine
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset_of
from counterpoint.problem import Op, Problem
from counterpoint.runtime.execute import compile_plan
from counterpoint.runtime.ranks import gather_object, group_of
from counterpoint.runtime.workspace import Workspace, workspace_of

LIBRARY = torch.library.Library("counterpoint", "FRAGMENT")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAN_KEY = "plan:"

_plans: dict[str, Plan] = {}  # users' own plans by digest: an operator takes strings only
_keys: dict[int, tuple[Plan, str]] = {}


def check_tensors(op: str, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Refuse operands that do not fit one another.

    Raises:
        InputError: names the argument, what it must be, and what it is.
        UnsupportedError: a gradient is asked for.
    """
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputError(op, name, want="a Tensor", got=type(tensor).__name__)
        if tensor is not None and tensor.layout != torch.strided:
            raise InputError(op, name, want="a dense tensor", got=tensor.layout)
    if x.dtype not in DTYPES:
        raise InputError(op, "x", want="bf16, fp16 or fp32", got=x.dtype)
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(op, "x", want="on cpu or cuda", got=x.device)
    if x.dim() < 2:
        raise InputError(op, "x", want="[rows, ..., K] of 2 or more dims", got=f"{x.dim()}-D")
    if w.dim() != 2:
        raise InputError(op, "w", want="[K, N] of 2 dims", got=f"{w.dim()}-D")
    if w.shape[0] != x.shape[-1]:
        fix = "pass w.t() of a torch.nn.Linear weight"
        shape = tuple(w.shape)
        raise InputError(op, "w", want=f"[K={x.shape[-1]}, N]", got=f"{shape}", fix=fix)
    if bias is not None and tuple(bias.shape) != (w.shape[1],):
        raise InputError(op, "bias", want=f"[N={w.shape[1]}]", got=f"{tuple(bias.shape)}")
    for name, tensor in (("w", w), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise InputError(op, name, want=f"{x.dtype} as x", got=tensor.dtype)
        if tensor.device != x.device:
            raise InputError(op, name, want=f"on {x.device} as x", got=tensor.device)
    grad = any(t is not None and t.requires_grad for t in (x, w, bias))
    if grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{op}: has no backward yet; call it under torch.no_grad() or on detached tensors"
        )


def check_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to use, the default one for None.

    Raises:
        InputError: there is no group, or this rank is not in it.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        fix = "start ranks with torchrun and call torch.distributed.init_process_group"
        raise InputError(op, "group", want="an initialised process group", got=group, fix=fix)
    # a rank outside of a new group gets a placeholder in its place
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(op, "group", want="a ProcessGroup that has this rank", got=group)
    return group


def check_rows(op: str, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """`rows=` as a list; empty means equal shards.

    Raises:
        InputError: not one count >= 0 for each rank.
    """
    if rows is None:
        return []
    try:
        counts = [index(n) for n in rows]
    except TypeError:  # no sequence, or not of whole numbers
        counts = []
    if len(counts) != ranks or min(counts) < 0:
        raise InputError(op, "rows", want=f"{ranks} counts >= 0", got=rows)
    return counts


def plan_key(op: str, plan: str | Plan) -> str:
    """A plan as an operator's string argument; a user's own Plan is proved first.

    Raises:
        InputError: neither a string nor a Plan.
        PlanError: the plan is wrong.
    """
    if isinstance(plan, str):
        return plan
    if not isinstance(plan, Plan):
        raise InputError(op, "plan", want="a family's name or a Plan", got=type(plan).__name__)
    # by identity first: the hash of a plan walks all of it
    known, key = _keys.get(id(plan), (None, ""))
    if known is not plan:
        key = PLAN_KEY + hashlib.sha256(to_json(plan).encode()).hexdigest()[:32]
        if key not in _plans:
            validate(plan)
            _plans[key] = plan
        _keys[id(plan)] = plan, key
    return key


def run(
    op: Op, x: Tensor, w: Tensor, bias: Tensor | None, plan: str, rows: list[int], group_name: str
) -> Tensor:
    """Run `op` on the current stream; x and the result are [rows, ..., columns].

    Raises:
        InputError: the plan is not for these sizes, the ranks disagree, or a graph is captured
            before a warm call.
        PeerTimeoutError: a peer did not answer; the group is unusable.
    """
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return run(op, x, w, bias, plan, rows, group_name)
    group = group_of(group_name)
    workspace = workspace_of(group, x.device)
    workspace.check()
    key = (op, x.shape, w.shape, x.dtype, bias is None, plan, tuple(rows))
    found = workspace.code.get(key)
    # ranks that disagree would wait for one another, or compute something else: compared at the
    # first call with these facts, and at each call where that is asked for
    if found is None or os.environ.get("COUNTERPOINT_CHECK") == "1":
        _compare(op, key, workspace)
    if found is None:
        problem = _problem(op, x, w, bias, rows, group.size())
        code = None if not problem.m * problem.n * problem.k else compile_plan(
            _plan(problem, plan, x.device), workspace)  # fmt: skip
        found = (problem, code)
        workspace.remember(key, found)
    problem, code = found

    if op == "all_gather_matmul":
        mine = sum(rows) if rows else x.shape[0] * group.size()
    else:
        mine = rows[workspace.rank] if rows else x.shape[0] // group.size()
    y = x.new_empty(mine, *x.shape[1:-1], problem.n)
    if code is None:
        y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    else:
        operands = {"x": _flat(x), "w": _columns(w), "y": _flat(y)}
        if bias is not None:
            operands["bias"] = bias.contiguous().view(1, -1)
        code.run(operands)
    return y


def _problem(
    op: Op, x: Tensor, w: Tensor, bias: Tensor | None, rows: list[int], ranks: int
) -> Problem:
    inner = prod(x.shape[1:-1])
    m = x.shape[0] * inner
    if op == "all_gather_matmul":
        m = sum(rows) * inner if rows else m * ranks
    dtype = str(x.dtype).removeprefix("torch.")
    counts = tuple(n * inner for n in rows)
    return Problem(op, m, w.shape[1], w.shape[0], ranks, dtype, counts, bias is not None)  # type: ignore[arg-type]


def _plan(problem: Problem, plan: str, device: torch.device) -> Plan:
    if plan.startswith(PLAN_KEY):
        own = _plans.get(plan)
        if own is None:
            fix = "pass the Plan itself to the function"
            raise InputError(problem.op, "plan", want="a known plan", got=plan, fix=fix)
        if own.problem != problem:
            raise InputError(problem.op, "plan", want=f"for {problem}", got=f"for {own.problem}")
        return own
    machine = _machine(device, problem.ranks)
    return build(problem, choose_spec(problem, machine) if plan == "auto" else plan, machine)


@cache
def _machine(device: torch.device, ranks: int) -> Machine | None:
    """The preset of this GPU, by its name; None where there is none."""
    if device.type != "cuda":
        return None
    return preset_of(torch.cuda.get_device_name(device), min(ranks, 8))


def _compare(op: str, key: tuple[object, ...], workspace: Workspace) -> None:
    """Refuse a call whose facts differ between ranks, naming the first that differs.

    Not while a graph is captured: ranks cannot talk then.
    """
    if workspace.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    names = ("op", "x.shape", "w.shape", "x.dtype", "bias is None", "plan", "rows")
    # a gathered x may have a shape of its own on each rank, as rows= says
    facts = [str(tuple(fact) if isinstance(fact, torch.Size) else fact) for fact in key]
    if op == "all_gather_matmul" and key[-1]:
        facts[1] = str(tuple(key[1])[1:])  # type: ignore[arg-type]
    try:
        everyone = gather_object(facts, workspace.group)
    except RuntimeError as error:
        gone = workspace.gone()
        who = ", ".join(f"rank {r} ({state})" for r, state in gone) or "a rank"
        workspace.fault = PeerTimeoutError(
            f"{op}: {who} did not come to compare its arguments ({error}); the group is unusable, "
            "restart its ranks",
            rank=gone[0][0] if gone else None,
            step="compare",
        )
        raise workspace.fault from error
    for i, name in enumerate(names):
        for rank, theirs in enumerate(everyone):
            if theirs[i] != everyone[0][i]:
                want = f"equal on all ranks, {everyone[0][i]} as on rank 0"
                got = f"{theirs[i]} on rank {rank}"
                fix = "pass rows= where shards differ" if name == "x.shape" else ""
                # the op of rank 0: all ranks say the same
                raise InputError(everyone[0][0], name, want=want, got=got, fix=fix)


def _flat(x: Tensor) -> Tensor:
    return (x if x.is_contiguous() else x.contiguous()).view(-1, x.shape[-1])


def _columns(w: Tensor) -> Tensor:
    """w as the matmul library takes it: one of its two dims without gaps."""
    rows, cols = w.stride()
    plain = (cols == 1 and rows >= w.shape[1]) or (rows == 1 and cols >= w.shape[0])
    return w if plain else w.contiguous()
