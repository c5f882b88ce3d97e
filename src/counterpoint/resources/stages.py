"""The stages of a pipeline: a call that computes, or a collective; and where their tensors lie."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.resources.rewrites import Span, overlap

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Reduction = Literal["sum", "avg"]


@dataclass(frozen=True, eq=False)
class Compute:
    """A call that launches kernels on the current stream.

    Args:
        name: of the stage.
        call: takes no argument; what it returns is dropped.
        reads: tensors that it reads.
        writes: tensors that it writes.
        kernels: Triton's compiled kernels that it launches, as `kernel[grid](...)` returns them:
            needed to shape them in eager mode, and not in a graph.
    """

    name: str
    call: Callable[[], object]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    kernels: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of the pipeline's group, of contiguous tensors.

    Args:
        name: of the stage.
        op: which.
        target: what it writes. all_gather: n times `source`; reduce_scatter: an n-th of it;
            all_reduce: the same tensor.
        source: what it reads.
        reduction: of all_reduce and reduce_scatter.
    """

    name: str
    op: CollectiveOp
    target: Tensor
    source: Tensor
    reduction: Reduction = "sum"

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """What it reads."""
        return (self.source,)

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """What it writes."""
        return (self.target,)


Stage = Compute | Collective


def check_collective(stage: Collective, ranks: int) -> None:
    """Refuse a collective whose tensors do not fit its op and the number of ranks.

    Raises:
        InputError: names the tensor, what it must be, and what it is.
    """
    op, name, target, source = stage.op, stage.name, stage.target, stage.source
    reduction = stage.reduction
    for tensor in (target, source):
        if not tensor.is_contiguous():
            got = f"strides {tensor.stride()} in {name!r}"
            raise InputError(f"Pipeline.{op}", "tensors", want="contiguous", got=got)
    if target.dtype != source.dtype:
        got = f"{target.dtype} and {source.dtype} in {name!r}"
        raise InputError(f"Pipeline.{op}", "tensors", want="of one dtype", got=got)
    if reduction not in ("sum", "avg"):
        raise InputError(f"Pipeline.{op}", "reduction", want="'sum' or 'avg'", got=reduction)
    wants = {
        "all_reduce": (source.numel(), 1),
        "all_gather": (source.numel() * ranks, 1),
        "reduce_scatter": (source.numel() // ranks, ranks),
        "all_to_all": (source.numel(), ranks),
    }
    if op not in wants:
        want = f"one of {', '.join(wants)}"
        raise InputError("Pipeline.collective", "op", want=want, got=repr(op))
    numel, divisor = wants[op]
    if source.numel() == 0 or source.numel() % divisor:
        want = f"of a number of elements that {ranks} ranks divide"
        raise InputError(f"Pipeline.{op}", "source", want=want, got=source.numel())
    if target.numel() != numel:
        want = f"of {numel} elements"
        raise InputError(f"Pipeline.{op}", "target", want=want, got=target.numel())
    if op == "all_reduce":
        if span(target) != span(source):
            got = "another tensor"
            raise InputError(f"Pipeline.{op}", "target", want="source, in place", got=got)
    elif overlap(span(target), span(source)):
        raise InputError(f"Pipeline.{op}", "target", want="apart from source", got="in it")


def span(tensor: Tensor) -> Span:
    """From the first to the last byte of a tensor, gaps between its rows included."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
