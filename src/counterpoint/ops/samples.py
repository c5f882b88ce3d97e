"""Calls of an operator on random tensors, by its problem alone: what is tuned and compared.

Tensors are those that the operator's declaration names. An operator's file whose tensors say
more than their sizes (indices, counts) has a `sample` of its own.
"""

from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.operators import FAMILIES
from counterpoint.ops.call import Operator, prepare
from counterpoint.plan.scaled import SCALE, operands_of
from counterpoint.problem import Problem

L2_ROTATIONS = 4  # of weights, between two uses of one
MAX_SETS = 8


class Sample(NamedTuple):
    """Random calls of one problem.

    Args:
        num_sets: of operands; weights take turns, so that none stays in a cache.
        call: of a plan, prepared and run once: the call on the operands of a number.
        captures: whether a graph may be captured of it.
    """

    num_sets: int
    call: Callable[[str], Callable[[int], object]]
    captures: bool = True


def sample_of(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> Sample:
    """Random calls for `problem` on this rank; all ranks of the group ask alike."""
    forward = problem.op.removesuffix("_backward").removesuffix("_wgrad")
    module: Any = import_module(f"counterpoint.{FAMILIES[forward]}.{forward}")
    if hasattr(module, "sample"):
        return module.sample(problem, group, device)
    return sample_by(operator_of(problem.op), problem, group, device)


def operator_of(op: str) -> Operator:
    """The declaration of a matmul operator, or of a gradient, which stands beside its forward's."""
    forward = op.removesuffix("_backward").removesuffix("_wgrad")
    import_module(f"counterpoint.{FAMILIES[forward]}.{forward}")
    return Operator.known[op]


def sample_by(
    operator: Operator, problem: Problem, group: dist.ProcessGroup, device: torch.device
) -> Sample:
    """By the operator's own tensors, rank by rank."""
    sets = _sets(operator, problem, group.rank(), device)
    rows = [] if problem.equal_rows else list(problem.rows)

    def call_of(spec: str) -> Callable[[int], object]:
        prepare(operator, sets[0], spec, rows, group)(sets[0])

        def call(i: int) -> object:
            tensors = sets[i % len(sets)]
            return prepare(operator, tensors, spec, rows, group)(tensors)

        return call

    return Sample(len(sets), call_of)


def operands(problem: Problem, rank: int, device: torch.device) -> list[Tensor | None]:
    """Random normal tensors of `rank`, in the order of the operator's inputs.

    Weights are the transposed views that a torch.nn.Linear gives.
    """
    buffers = {b.name: b for b in operands_of(problem)}
    found: list[Tensor | None] = []
    for given in operator_of(problem.op).inputs:
        buffer = buffers.get(given.name)
        if buffer is None:
            found.append(None)
            continue
        rows = problem.rows[rank] if buffer.split and buffer.holds == "own" else buffer.shape[0]
        shape, dtype = (rows, buffer.shape[1]), getattr(torch, buffer.dtype)
        is_weight = given.name == "w"
        tensor = torch.randn(shape[::-1] if is_weight else shape, device=device).to(dtype)
        tensor = tensor.t() if is_weight else tensor
        one = problem.scales == "tensor" and given.name.endswith(SCALE)
        if one and given.own:  # of all ranks, in a plan
            tensor.fill_(0.5)
        found.append(tensor.view(-1) if given.form == "row" or one else tensor)
    return found


def _sets(
    operator: Operator, problem: Problem, rank: int, device: torch.device
) -> list[list[Tensor | None]]:
    """One set of tensors for each call of a graph: weights take turns, other tensors do not."""
    first = operands(problem, rank, device)
    sets = [first]
    for _ in range(num_sets(problem.n * problem.k * problem.item_bytes, device) - 1):
        fresh = operands(problem, rank, device)
        weights = [given.name.startswith("w") for given in operator.inputs]
        sets.append([b if turn else a for a, b, turn in zip(first, fresh, weights, strict=True)])
    return sets


def num_sets(weight_bytes: int, device: torch.device) -> int:
    """Weights of so many bytes that go round before one is used again; 1 on CPU ranks."""
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MAX_SETS, ceil(L2_ROTATIONS * l2_bytes / max(weight_bytes, 1))))
