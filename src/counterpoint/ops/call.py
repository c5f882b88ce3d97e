"""From the tensors of a call to a program that is ready to run.

All that can be wrong with a call is checked before its first launch, from facts that are equal on
all ranks, once for each new set of facts. What has been checked is remembered: a repeated eager
call looks itself up, allocates its results and runs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _device as device

from counterpoint.attention.steps import made_whole
from counterpoint.choose.taken import Taken
from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.gpu import nvtx
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import Action, Operands, Workspace, workspace_of, workspaces
from counterpoint.ops import batch_invariant, watched
from counterpoint.ops.agreement import Input, agree, checking, words_of
from counterpoint.ops.check import check_group
from counterpoint.ops.plans import KEYS, in_force, noted, of_islands, plan_of
from counterpoint.ops.register import with_gradient
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.run import activated
from counterpoint.run.execute import Code, compile_plan
from counterpoint.run.scaled import FP8

Shape = tuple[int, ...]
Tensors = Sequence[Tensor | None]  # of a call, in the order of its operator's inputs
Words = tuple[dict[str, str], CounterpointError | None]


class Given(NamedTuple):
    """What the values of an operand say of one call: no facts.

    Args:
        room: rows of results.
        refused: what is wrong with them.
    """

    room: int = 0
    refused: CounterpointError | None = None


NOTHING = Given()
# operators whose calls are remembered with a gradient, too
WITH_GRADIENT = ("all_gather_matmul", "all_gather_matmul_list", "matmul_reduce_scatter",
                 "matmul_all_reduce")  # fmt: skip


@dataclass(frozen=True)
class Output:
    """One result.

    Args:
        name: of its buffer.
        shape: -1 rows are as many as a call says, see `Ready`; such results are the last ones.
        transposed: whether it is stored so.
        spare: a fused step may leave it out; it has no columns then.
        dtype: None: that of the first tensor.
    """

    name: str
    shape: Shape
    transposed: bool = False
    spare: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Operator:
    """What an operator is to this file: its tensors, and how they make a problem and results.

    Args:
        op: of the problem.
        inputs: its tensors in order; those whose argument is None are left out of the plan.
        problem: from the tensors, rows (one count a rank, of dim 0) and the number of ranks.
        outputs: from the tensors, rows, the number of ranks and this rank.
        words: facts in words that ranks compare, where they are not the shapes; and what is wrong
            with values that the host can read. From the tensors, rows and this rank.
        ends: what remains to be done when the plan has run, on its operands; None: nothing.
        clears: rows of results that are none have to be zero.
        settings: facts that are not seen by its tensors, by name.
        compares: likewise, of what stands around what runs: ranks compare them, and the same code
            runs whatever they are.
        name: as users know it; "": op.

    Attributes:
        known: those that have been declared, by op; of several of one op the first.
    """

    known: ClassVar[dict[str, "Operator"]] = {}

    op: str
    inputs: tuple[Input, ...]
    problem: Callable[[Tensors, Sequence[int], int], Problem]
    outputs: Callable[[Tensors, Sequence[int], int, int], tuple[Output, ...]]
    words: Callable[[Tensors, Sequence[int], int], Words] | None = None
    ends: Callable[[Code | None], Action | None] | None = None
    clears: bool = False
    settings: tuple[tuple[str, bool | float | str], ...] = ()
    compares: tuple[tuple[str, int | str], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        self.known.setdefault(self.op, self)


class Runnable(Protocol):
    """A call whose facts have been checked."""

    def __call__(self, tensors: Tensors, room: int = 0) -> list[Tensor]:
        """Run on the current stream; the results are new tensors, of `room` rows if counted."""
        ...


class Compiled(NamedTuple):
    """What ranks have compiled of a call for the same facts.

    Args:
        code: None: there is nothing to compute.
        taken: what its calls are counted by.
        digests: of the facts, for each `Operator.compares` that there were.
    """

    code: Code | None
    taken: Taken
    digests: dict[object, int]


class Ready:
    """A call of a plan whose facts have been checked, compiled."""

    def __init__(
        self,
        workspace: Workspace,
        known: Compiled,
        operator: Operator,
        tensors: Tensors,
        outputs: tuple[Output, ...],
    ) -> None:
        self.workspace, self.board = workspace, workspace.board
        code = self.code = known.code
        self.taken = known.taken
        self.digest = known.digests[operator.compares]
        given = enumerate(zip(operator.inputs, tensors, strict=True))
        named = {buffer.name for buffer in code.program.plan.buffers} if code else set[str]()
        # positions of the tensors that are there, their buffers, and how they become operands; a
        # table on the host that no step reads is left out: a replay would look for its address
        self.inputs = [
            (i, x.name, _form(x, t)) for i, (x, t) in given
            if t is not None and (t.device == workspace.device or x.name in named)
        ]  # fmt: skip
        made = _made(code)
        fused = code is not None and any(s.kind == "fused" for s in code.program.plan.steps)
        self.outputs = [
            (out.name, (*out.shape[:-1], 0) if fused and out.spare else out.shape,
             out.transposed, out.dtype)
            for out in outputs
            if out.name not in made
        ]  # fmt: skip
        self.made = [out.name for out in outputs if out.name in made]
        self.counted = [out.name for out in outputs if out.shape[0] < 0]
        self.ends = operator.ends(code) if operator.ends else None
        self.clears = operator.clears
        self.activation = str(dict(operator.settings).get("activation", ""))

    def __call__(self, tensors: Tensors, room: int = 0) -> list[Tensor]:
        """Run on the current stream; the results are new tensors.

        Args:
            room: rows of results whose rows the counts of a call say.

        Raises:
            PeerTimeoutError: a peer did not answer; the group is unusable.
            InputError: a peer has called something else; likewise.
        """
        board = self.board
        try:
            board.note(self.digest)
            operands: dict[str, Tensor] = {}
            for i, name, form in self.inputs:
                tensor: Any = tensors[i]
                operands[name] = form(tensor) if form else tensor
            like: Any = tensors[self.inputs[0][0]]
            results: list[Tensor] = []
            for name, shape, transposed, dtype in self.outputs:
                if shape[0] < 0:  # a step may put another tensor in its place
                    operands[name] = like.new_empty(room, shape[1])
                    continue
                y: Tensor = like.new_empty(shape[::-1] if transposed else shape, dtype=dtype)
                y = y.t() if transposed else y
                operands[name] = y if len(shape) == 2 else y.flatten(0, -2)
                results.append(y)
            if self.code is not None:
                if self.clears:
                    operands["clear"] = like
                self.taken.calls += 1
                self.code.run(operands)
                if self.ends is not None:
                    self.ends(operands)
                results += [operands[name] for name in (*self.made, *self.counted)]
            else:
                self._without_code(operands, results)
            board.calling = 0
        except BaseException as error:
            board.end(error)
            raise
        return results

    @property
    def chains(self) -> bool:
        """Whether a call may be launched together with others: see `execute.Code`."""
        return self.code is not None and self.code.chains and self.ends is None

    def bound(self, tensors: Tensors, results: Operands) -> Operands:
        """The operands of a call whose results are there, by name."""
        found: Operands = {}
        for i, name, form in self.inputs:
            tensor: Any = tensors[i]
            found[name] = form(tensor) if form else tensor
        if self.clears:
            found["clear"] = found[self.inputs[0][1]]
        return found | results

    def _without_code(self, operands: dict[str, Tensor], results: list[Tensor]) -> None:
        """Fill results of a sum of nothing."""
        bias = operands.get("bias")
        results += [operands[name] for name in self.counted]
        for y in results:
            if y.numel():
                y.zero_() if bias is None else y.copy_(bias.expand_as(y))
                if bias is not None and self.activation:
                    activated.into(self.activation, y, None, y)


def _made(code: Code | None) -> set[str]:
    """Results that the library makes anew, and a step puts in their places; the last ones."""
    return made_whole(code.program) if code is not None else set()


def present(tensors: Tensors) -> tuple[Tensor, ...]:
    """Those that are not None."""
    return tuple(t for t in tensors if t is not None)


def key_of(
    op: str, tensors: Tensors, plan: object, rows: object, dim: object, counted: bool = False,
    whole: bool = False,
) -> tuple[object, ...] | None:  # fmt: skip
    """What a call that nothing watches is remembered by; None: it goes through the dispatcher.

    That is one under a compiler, a tracer, a mode or autocast, of tensors that are not just numbers
    in memory, or of which a gradient is asked for, but of `WITH_GRADIENT`.

    Args:
        counted: how many rows the first tensor has is nothing to remember.
        whole: of a layer, which sees to autocast and to gradients itself.
    """
    # a compiler first: it traces what follows
    if torch.compiler.is_compiling() or watched.keys_of_thread().raw_repr() not in watched.USUAL:
        return None
    if (not whole and watched.any_autocast()) or type(dim) is not int:
        return None
    default = device.CURRENT_DEVICE is not None  # a mode, too
    if watched.function_modes() > default or forward_ad._current_level >= 0:  # pyright: ignore
        return None
    grad = torch.is_grad_enabled()
    if not isinstance(plan, str | Path):  # a Plan: it is known from its second call on
        own = KEYS.get(id(plan))
        if own is None or own[0] is not plan:
            return None
        plan = own[1]
    key: list[object] = [(op, batch_invariant.depth > 0), plan, dim]
    first: Any = tensors[0]
    try:
        plain = watched.keys_of_plain(first.device.type)
        for t in tensors:
            if t is None:
                key.append(None)
                continue
            if type(t) is not Tensor and type(t) is not Parameter:
                return None
            if grad and t.requires_grad:
                if not whole and op not in WITH_GRADIENT:
                    return None
                key.append(grad)
            keys = watched.keys_of(t).raw_repr()
            if keys not in plain and keys not in watched.keys_of_plain(t.device.type):
                return None
            key += (t.shape, t.stride(), t.dtype, t.device)
        if counted:
            key[3] = first.shape[1:]
        # another GPU than the current one has to be made that first
        here = first.is_cuda and first.device.index == torch.cuda.current_device()
        if not (here or first.is_cpu):
            return None
    except (AttributeError, RuntimeError):  # no tensor, or one without strides: it is refused
        return None
    if rows is not None:
        if not isinstance(rows, list | tuple) or not all(type(n) is int for n in rows):  # pyright: ignore[reportUnknownVariableType]
            return None
        key += rows
    return tuple(key)


def repeated(
    op: str, tensors: tuple[Tensor, *tuple[Tensor | None, ...]], group: dist.ProcessGroup | None,
    plan: object, rows: object = None, dim: int = 0, room: int | None = None,
    settings: tuple[object, ...] = (),
) -> tuple[Any, tuple[object, ...] | None, dist.ProcessGroup]:  # fmt: skip
    """Run a call whose facts are known: its result, or else None and what to remember it by.

    Args:
        dim: of the first tensor and of the result, which is first in the plan.
        room: rows of the results, where counts say them and those of the first tensor.
        settings: facts that are not seen by the tensors.

    Returns:
        The result, or with `room` or `settings` the list of all; the key; and the group.

    Raises:
        InputError: there is no group, or this rank is not in it.
        PeerTimeoutError: a peer did not answer; the group is unusable.
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        group = check_group(op, group)
    key = key_of(op, tensors, plan, rows, dim, room is not None)
    if key is None:
        return None, None, group
    key += settings
    x, *rest = tensors
    # as `workspace_if_any`, without its call
    workspace = workspaces.get((group.group_name, x.device))
    if workspace is None or workspace.group_id != id(group) or "COUNTERPOINT_CHECK" in os.environ:
        return None, key, group
    ready: Runnable | None = workspace.known.get(key)
    if ready is None:
        return None, key, group
    if room is not None:
        return ready(tensors, room), key, group
    if settings:
        return ready(tensors), key, group
    if not dim:
        return ready(tensors)[0], key, group
    dim %= x.dim()
    return ready((x.movedim(dim, 0), *rest))[0].movedim(0, dim), key, group


def ran(
    operator: Operator, tensors: Tensors, plan: str, rows: Sequence[int],
    group: dist.ProcessGroup, key: tuple[object, ...] | None = None, given: Given = NOTHING,
    shown: tuple[str, tuple[Any, ...]] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a call that has passed its checks.

    Args:
        key: what an eager call like it is found by from now on; None: by nothing.
        shown: name and arguments for torch, of `WITH_GRADIENT`.

    Raises:
        InputError, UnsupportedError, PeerTimeoutError: see `prepare`.
    """
    known = _known(operator, tensors, plan, rows, group)
    if known.ready is not None and given.refused is None and key is None and not checking():
        return known.ready(tensors, given.room)
    with known.workspace.board.whole():
        ready = _prepared(operator, tensors, plan, rows, known, given.refused)
        run = with_gradient(ready, *shown) if shown else ready
        if key is not None:
            known.workspace.know(key, run)
        return run(tensors, given.room)


def known_call(
    operator: Operator, tensors: Tensors, plan: str, rows: Sequence[int], group: dist.ProcessGroup
) -> Ready | None:
    """A call like one that has been prepared; no rank meets another for it."""
    return _known(operator, tensors, in_force(plan), rows, group).ready


class _Found(NamedTuple):
    """What is known of a call before it is prepared.

    Args:
        facts: what all ranks must have alike.
        layout: those, and how this rank's tensors lie.
    """

    workspace: Workspace
    facts: tuple[object, ...]
    layout: tuple[object, ...]
    ready: Ready | None


def _known(
    operator: Operator, tensors: Tensors, plan: str, rows: Sequence[int], group: dist.ProcessGroup
) -> _Found:
    first = next(t for t in tensors if t is not None)
    workspace = workspace_of(group, first.device)
    workspace.check()
    facts = (operator.op, operator.settings, plan, tuple(rows), _sizes(operator, tensors))
    layout = (operator, facts, tuple(t if t is None else (t.shape, t.stride()) for t in tensors))
    return _Found(workspace, facts, layout, workspace.known.get(layout))


def prepare(
    operator: Operator,
    tensors: Tensors,
    plan: str,
    rows: Sequence[int],
    group: dist.ProcessGroup,
    refused: CounterpointError | None = None,
) -> Ready:
    """Check, choose and compile; collective at the first call with these facts.

    Facts are what all ranks must have alike: operator, sizes, dtype, plan, rows. They alone decide
    whether ranks meet. How a rank's own tensors lie only decides how they become operands.

    Args:
        refused: what this rank alone has found wrong; where ranks meet, all of them hear of it.

    Raises:
        InputError: the plan is not for these sizes, the ranks disagree, or a graph is captured
            before a warm call.
        UnsupportedError: the plan that was asked for does not run on the GPU of a rank.
        PeerTimeoutError: a peer did not answer; the group is unusable.
    """
    known = _known(operator, tensors, plan, rows, group)
    if known.ready is not None and refused is None and not checking():
        return known.ready
    return _prepared(operator, tensors, plan, rows, known, refused)


def _prepared(
    operator: Operator, tensors: Tensors, plan: str, rows: Sequence[int], found: _Found,
    refused: CounterpointError | None,
) -> Ready:  # fmt: skip
    """See `prepare`, of a call that is new, or that ranks compare again."""
    workspace, facts, layout, _ = found
    known: Compiled | None = workspace.code.get(facts)
    # ranks that disagree would wait for one another, or compute something else: compared in words
    # at the first call with these facts, and at each call where that is asked for; else by digests
    if known is None:
        refused = refused or nvtx.refusal(operator.name or operator.op)
    digest = known.digests.get(operator.compares) if known else None
    if digest is None or checking():
        digest = _compare(operator, tensors, plan, rows, workspace, refused)
    elif refused is not None:
        workspace.board.refuse(refused)
        raise refused
    ranks, rank = workspace.board.ranks, workspace.rank
    if known is None:
        problem = of_islands(operator.problem(tensors, rows, ranks), workspace)
        taken = plan_of(problem, plan, workspace, tensors)
        code: Code | None = None
        if not problem.empty:
            # memory and views of it that calls in any mode may write to
            with torch.inference_mode(False), torch.enable_grad():
                given = zip(operator.inputs, tensors, strict=True)
                like = {x.name: formed(t) if (formed := _form(x, t)) else t
                        for x, t in given if t is not None}  # fmt: skip
                code = compiled(taken.plan, plan, workspace, like)
            taken = noted(taken, code, workspace)
        known = Compiled(code, taken, {})
        workspace.remember(facts, known)
    known.digests[operator.compares] = digest
    outputs = operator.outputs(tensors, rows, ranks, rank)
    ready = Ready(workspace, known, operator, tensors, outputs)
    workspace.know(layout, ready)
    return ready


def _sizes(operator: Operator, tensors: Tensors) -> tuple[object, ...]:
    """Shapes and dtypes, as far as they are facts."""
    return tuple(
        None if t is None
        else (t.shape if given.fact == "shape" else t.shape[1:], t.dtype)
        for given, t in zip(operator.inputs, tensors, strict=True)
        if given.fact
    )  # fmt: skip


def _compare(
    operator: Operator, tensors: Tensors, plan: str, rows: Sequence[int],
    workspace: Workspace, refused: CounterpointError | None,
) -> int:  # fmt: skip
    """Refuse a call whose facts differ between ranks, or that one of them refuses; their digest."""
    if operator.words is None:
        here, wrong = words_of(operator.inputs, tensors, plan, rows), None
        here |= {name: str(value) for name, value in operator.settings}
    else:
        here, wrong = operator.words(tensors, rows, workspace.rank)
        here = {"plan": plan} | here
    around = {name: str(value) for name, value in operator.compares}
    op = operator.name or operator.op
    here = {"op": op} | around | here
    return agree(op, here, workspace, refused or wrong)


def compiled(plan: Plan, asked: str, workspace: Workspace, like: Operands | None = None) -> Code:
    """The plan compiled on all ranks; of "auto", serial on all of them where one rank cannot.

    Args:
        like: operands of the first call, for kernels that are compiled for what lies how.

    Raises:
        UnsupportedError: the plan was asked for, and does not run on the GPU of a rank.
    """
    try:
        return nvtx.ranged(compile_plan(plan, workspace, like=like))
    except UnsupportedError:
        # of a plan that waits in a kernel all ranks are here then, see CudaCode; in a capture each
        # would be by itself
        waits = any(step.spins for step in plan.steps)
        if asked.split()[0] != "auto" or not waits or torch.cuda.is_current_stream_capturing():
            raise
    return nvtx.ranged(compile_plan(build(plan.problem, "serial"), workspace, like=like))


def run(
    operator: Operator,
    tensors: Tensors,
    plan: str,
    rows: Sequence[int],
    group_name: str,
    given: Given = NOTHING,
) -> list[Tensor]:
    """Prepare and run: what torch's dispatcher calls.

    Raises:
        InputError: see `prepare`.
        PeerTimeoutError: a peer did not answer; the group is unusable.
    """
    return ran(operator, tensors, in_force(plan), rows, group_of(group_name), None, given)


def _form(given: Input, tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """How the tensor becomes the 2-D operand of the plan; None: it is one already."""
    if given.form == "given":
        if _in_order(tensor) or tensor.dim() < 2 or _in_order(tensor.mT):
            return None
        by_column = not tensor.is_contiguous() and tensor.mT.is_contiguous()
        if by_column:
            return lambda t: _without_gaps(t.mT).mT
        return _without_gaps if tensor.is_contiguous() else None
    if given.form == "plain":
        return None if _in_order(tensor) else _without_gaps
    # a layout is known once: what lies in order is not looked at again
    ordered = Tensor.contiguous if _in_order(tensor) else _without_gaps
    if given.form == "row":
        return lambda t: ordered(t).view(1, -1)
    if given.form == "heads":
        return lambda t: ordered(t).flatten(1)
    if tensor.dim() == 1:  # the one scale of a tensor
        return lambda t: ordered(t).view(1, 1)
    if given.form == "rows":
        if not _in_order(tensor):
            return lambda t: _without_gaps(t).flatten(0, -2)
        return None if tensor.dim() == 2 else lambda t: t.flatten(0, -2)
    if tensor.dtype in FP8:
        return None if _in_order(tensor.t()) else lambda t: _without_gaps(t.t()).t()
    # as the matmul library takes it: one of the two dims without gaps
    row_stride, col_stride = tensor.stride()
    plain = (col_stride == 1 and row_stride >= tensor.shape[1]) or (
        row_stride == 1 and col_stride >= tensor.shape[0]
    )
    return None if plain else _without_gaps


def _in_order(t: Tensor) -> bool:
    """Whether strides are those of new memory, also of dims of one element, where any are legal."""
    return t.stride() == _strides(t.shape)


def _without_gaps(t: Tensor) -> Tensor:
    """The numbers in order: a tensor of which `_in_order` holds."""
    t = t.contiguous()
    return t if _in_order(t) else t.as_strided(t.shape, _strides(t.shape))


def _strides(shape: Sequence[int]) -> Shape:
    """Of new memory."""
    found = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        found[dim - 1] = found[dim] * max(shape[dim], 1)
    return tuple(found)
