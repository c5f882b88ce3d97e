"""A call of embedding bags: looked up by what is seen of it, or checked, agreed on and compiled.

Checks of many tables take the host longer than the GPU takes some calls. What they have let pass
is remembered by what is seen of tensors, none of it which object one is: a table that was resized,
converted, moved or replaced looks other. How many indices there are changes from call to call, and
is looked at each time.
"""

import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from counterpoint.choose.taken import Taken
from counterpoint.embedding.facts import Asked, agreed
from counterpoint.embedding.launch_lookups import OP, Bags, Chunks
from counterpoint.embedding.layout import MAX_INDICES, VECTOR_BYTES
from counterpoint.embedding.plan_embedding_bag_all_to_all import after_barrier
from counterpoint.embedding.pooled_outputs import PooledOutputs
from counterpoint.group.notice_board import digest_of
from counterpoint.group.workspace import Workspace, workspace_of, workspaces
from counterpoint.ops import batch_invariant
from counterpoint.ops.call import compiled
from counterpoint.ops.plans import KEYS, noted
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.run.execute import Code

MAX_KNOWN = 1024  # calls that are remembered
SHAPE, DTYPE = attrgetter("shape"), attrgetter("dtype")
PLAIN = {Tensor, Parameter, type(None)}


class Ready:
    """Calls whose facts have been checked, compiled.

    Args:
        workspace: of the group on the device.
        problem: what is computed.
        mean: of bags, not their sums.
        digests: of what is equal on all ranks, where no gradient is asked for, and where one is.
    """

    code: Code | None = None
    taken: Taken  # of code: what its calls are counted by
    opened: Code | None = None  # for an output that replays of a graph share

    def __init__(
        self, workspace: Workspace, problem: Problem, digests: Sequence[int], *, mean: bool
    ) -> None:
        self.workspace, self.problem, self.mean = workspace, problem, mean
        self.digests, self.board = digests, workspace.board
        self.shape = problem.rows[workspace.rank], problem.n
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        # as the dispatcher takes them: of each rank how many tables, and their columns
        self.flat = [n for each in problem.tables for n in (len(each), *each)]

    def __call__(
        self, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None,
        last: bool, placed: dict[object, Chunks], out: PooledOutputs | None = None,
        asks: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run on the current stream.

        Args:
            tables, indices, offsets, weights, last, placed: see `Bags`.
            out: whose next turn is the result; None: a new tensor.
            asks: whether all ranks take part in a backward.

        Raises:
            InputError: a graph is captured, and `out` has no output left for one.
            PeerTimeoutError: a peer did not answer; the group is unusable.
            InputError: likewise, as one has called something else.
        """
        board = self.board
        try:
            board.note(self.digests[asks])
            into, code = None, self.code
            if out is None:
                y = indices.new_empty(self.shape, dtype=self.dtype)
            else:
                turn = out.take()
                y, into = out.view(turn), (out.bases, out.turn_bytes // VECTOR_BYTES, turn)
                code = code if turn < out.turns else self.opened
            if code is not None:
                bags: Any = Bags(tables, indices, offsets, weights, last, self.mean, placed, into)
                self.taken.calls += 1
                code.run({"bags": bags, "y": y})
            board.calling = 0
        except BaseException as error:
            board.end(error)
            raise
        return y

    def compile(self, plan: Plan, asked: Asked, placed: dict[object, Chunks]) -> None:
        """Compile for tensors like these; collective."""
        out, into = asked.out, None
        if out is not None:
            into = out.bases, out.turn_bytes // VECTOR_BYTES, 0
        given = asked.tables, asked.indices, asked.offsets, asked.weights
        bags: Any = Bags(*given, asked.last, self.mean, placed, into)
        # memory that calls in any mode may write to
        with torch.inference_mode(False):
            y = asked.indices.new_empty(self.shape, dtype=self.dtype)
            like = {"bags": bags, "y": y}
            self.code = self.opened = compiled(plan, str(asked.plan), self.workspace, like)
            if out is None or not out.captured:
                return
            own = self.code.program.plan
            if own.family == "fused":
                self.opened = compiled(after_barrier(own.problem), own.spec, self.workspace, like)


class Known(NamedTuple):
    """What a call is ready with, and what kernels know of its tables."""

    ready: Ready
    placed: dict[object, Chunks]


def ready_for(given: tuple[Any, ...], group: dist.ProcessGroup, *, asks: bool) -> Known:
    """What a call runs with; collective where its facts are new.

    Args:
        given: the fields of `Asked`.
        asks: whether all ranks take part in a backward.

    Raises:
        InputError: an argument is wrong, or ranks differ; nothing was launched.
        PeerTimeoutError: a rank did not come.
    """
    tables, indices, offsets, weights, mode, last, batch, dims, dtype, out, plan = given
    key = None
    try:
        if (
            indices.dim() == 1 and indices.is_contiguous() and indices.numel() <= MAX_INDICES
            and (weights is None or (weights.shape == indices.shape and weights.is_contiguous()))
            and PLAIN.issuperset(map(type, tables)) and type(tables) in (list, tuple)
            and "COUNTERPOINT_CHECK" not in os.environ
            and (isinstance(plan, str | Path) or KEYS.get(id(plan), (KEYS,))[0] is plan)
        ):  # fmt: skip
            # of every table: in C, not in a loop. An address says on which device it is
            key = (
                OP, batch_invariant.depth > 0, *map(SHAPE, tables), *map(Tensor.stride, tables),
                *map(DTYPE, tables), *map(Tensor.data_ptr, tables), indices.dtype,
                offsets.shape, offsets.stride(), offsets.dtype, offsets.device,
                weights is None or (weights.dtype, weights.device), mode, last,
                batch and tuple(batch), dims and tuple(map(tuple, dims)), dtype,
                out and out.facts, plan if isinstance(plan, str | Path) else KEYS[id(plan)][1],
            )  # fmt: skip
            # as `workspace_if_any`, without its call
            workspace = workspaces.get((group.group_name, indices.device))
            if workspace is not None and workspace.group_id == id(group):
                found: Known | None = workspace.known.get(key)
                if found is not None:
                    return found
    except (AttributeError, RuntimeError, TypeError, ValueError):  # refused below, if it is wrong
        key = None
    return _first(Asked._make(given), group, key, asks)


def _first(
    asked: Asked, group: dist.ProcessGroup, key: tuple[Any, ...] | None, asks: bool
) -> Known:
    """Check, agree with all ranks, choose and compile; and remember it by `key`."""
    device = asked.device
    workspace = workspace_of(group, device)
    workspace.check()
    problem, taken = agreed(asked, workspace, asks)
    plan = taken.plan
    placed: dict[object, Chunks] = {}
    facts = (OP, plan.problem, plan.spec, asked.mode, bool(asked.out and asked.out.captured))
    ready: Ready | None = workspace.code.get(facts)
    if ready is None:
        # what is made while a graph is captured is empty until its first replay
        workspace.refuse_growth("none: this is the first call of such bags")
        said = {"op": OP, "plan": plan.spec, "mode": asked.mode, "dtype": problem.dtype}
        said |= {"batch": str(problem.rows), "dims": str(problem.tables)}
        digests: list[int] = []
        for asks in (False, True):
            facts_of_call = said | {"requires_grad": str(asks)}
            digests.append(digest_of(facts_of_call))
            workspace.board.facts[digests[-1]] = facts_of_call
        ready = Ready(workspace, problem, digests, mean=asked.mode == "mean")
        if not problem.empty:
            ready.compile(plan, asked, placed)
            assert ready.code is not None
            ready.taken = noted(taken, ready.code, workspace)
        workspace.remember(facts, ready)
    # others than those meet, or are compared, at each call
    if key is not None and asked.dims is not None and device.type == "cuda" and asked.frozen():
        if len(workspace.known) >= MAX_KNOWN:
            workspace.known.clear()
        workspace.known[key] = Known(ready, placed)
    return Known(ready, placed)
