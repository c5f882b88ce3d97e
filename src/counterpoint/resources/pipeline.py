"""A step as its user writes it: what is computed, what is communicated, on which tensors.

Computation runs in the order written, collectives run in the order written, and the two run side by
side except where a stage touches what another one writes: that follows from the tensors, so that a
pipeline is legal however its kernels share the GPU.
"""

import hashlib
import math
import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.gpu.zero_cta import ZeroCta
from counterpoint.group.symmetric import SymmetricMemory, allocate
from counterpoint.group.workspace import Workspace, forget
from counterpoint.plan.steps import Plan
from counterpoint.resources.rewrites import Touch, plan_of
from counterpoint.resources.stages import (
    Collective,
    CollectiveOp,
    Compute,
    Reduction,
    Stage,
    check_collective,
    span,
)


class Pipeline:
    """Stages in the order of a step; every rank of the group builds the same one.

    Args:
        group: of its collectives.
        device: of its tensors; None: this process's current GPU, or the CPU without one.

    Example:
        Each product is all-reduced while the next one is computed:

            loop = Pipeline(group)
            for out in products:
                loop.compute(lambda out=out: torch.mm(a, b, out=out), reads=[a, b], writes=[out])
                loop.all_reduce(out)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str | None = None) -> None:
        if device is None:
            here = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if here else "cpu"
        self.group = group
        device = torch.device(device)
        # as tensors name theirs: a GPU with its index, the CPU without
        if device.type == "cuda":
            self.device = torch.empty(0, device=device).device
        else:
            self.device = torch.device(device.type)
        self._agreed = 0  # stages that the ranks have compared
        self.symmetric: list[SymmetricMemory] = []
        self.zero_cta: ZeroCta | None = None
        self.kept: dict[object, Any] = {}  # what controls have set up
        self._workspace: Workspace | None = None
        self._stages: list[Stage] = []

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order written."""
        return tuple(self._stages)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """In the order written."""
        return tuple(s for s in self._stages if isinstance(s, Collective))

    def empty(
        self, *shape: int, dtype: torch.dtype, memory: Literal["peers", "library"] = "peers"
    ) -> Tensor:
        """A tensor of zeros that is open to peers. All ranks call this, with equal shapes.

        Args:
            shape: of the tensor.
            dtype: of its elements.
            memory: "peers": peers write to it, what our copy engines need as a collective's target;
                "library": registered with NCCL, for its zero-CTA collectives.

        Raises:
            InputError: sizes differ between ranks or are none, or `memory` is another word.
            UnsupportedError: the GPUs do not reach each other; NCCL cannot, and why.
            torch.OutOfMemoryError: a rank is out of memory.
        """
        if memory not in ("peers", "library"):
            want = "'peers' or 'library'"
            raise InputError("Pipeline.empty", "memory", want=want, got=repr(memory))
        if not all(type(n) is int for n in shape):  # how many is compared by all ranks
            raise InputError("Pipeline.empty", "shape", want="whole numbers", got=shape)
        if memory == "library":
            if self.zero_cta is None:
                self.zero_cta = ZeroCta(self.group, self.device)
            return self.zero_cta.empty(*shape, dtype=dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        opened = allocate(num_bytes, self.group, self.device)
        self.symmetric.append(opened)
        return opened.local().view(dtype).view(shape)

    def compute(
        self,
        call: Callable[[], object],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        kernels: Sequence[Any] = (),
        name: str = "",
    ) -> None:
        """Add a stage that computes.

        Args:
            call: launches kernels on the current stream, and does not synchronise. What it
                allocates in a graph, the memory pool of the capture holds.
            reads: tensors that it reads.
            writes: tensors that it writes.
            kernels: Triton's compiled kernels of it, for shaping in eager mode.
            name: of the stage; "": compute and its place.

        Raises:
            InputError: a tensor is on another device, or nothing is written.
        """
        name = name or f"compute {len(self._stages)}"
        if not callable(call):
            fix = "pass lambda: torch.mm(a, b, out=c)"
            got = type(call).__name__
            raise InputError("Pipeline.compute", "call", want="callable", got=got, fix=fix)
        for given, some in (("reads", reads), ("writes", writes)):
            if not isinstance(some, list | tuple) or not all(isinstance(t, Tensor) for t in some):
                want, got = "a list of tensors", type(some).__name__
                raise InputError("Pipeline.compute", given, want=want, got=got)
        if not writes:
            fix = "what depends on the stage follows from it"
            raise InputError(
                "Pipeline.compute", "writes", want="one tensor or more", got=0, fix=fix
            )
        for tensor in (*reads, *writes):
            self._check_device("compute", name, tensor)
        self._stages.append(Compute(name, call, tuple(reads), tuple(writes), tuple(kernels)))

    def all_reduce(self, tensor: Tensor, *, reduction: Reduction = "sum", name: str = "") -> None:
        """Add an all-reduce of `tensor`, in place; see `collective`."""
        self.collective("all_reduce", tensor, tensor, reduction=reduction, name=name)

    def all_gather(self, target: Tensor, source: Tensor, *, name: str = "") -> None:
        """Add an all-gather of the ranks' `source`, one after the other, into `target`."""
        self.collective("all_gather", target, source, name=name)

    def reduce_scatter(
        self, target: Tensor, source: Tensor, *, reduction: Reduction = "sum", name: str = ""
    ) -> None:
        """Add a reduction of `source` of which each rank keeps its own n-th, `target`."""
        self.collective("reduce_scatter", target, source, reduction=reduction, name=name)

    def all_to_all(self, target: Tensor, source: Tensor, *, name: str = "") -> None:
        """Add an exchange: the r-th part of `source` goes to rank r, into the part of this rank."""
        self.collective("all_to_all", target, source, name=name)

    def collective(
        self,
        op: CollectiveOp,
        target: Tensor,
        source: Tensor,
        *,
        reduction: Reduction = "sum",
        name: str = "",
    ) -> None:
        """Add a collective of the group.

        Args:
            op: which.
            target: what it writes, contiguous.
            source: what it reads, contiguous, of the same dtype.
            reduction: of all_reduce and reduce_scatter.
            name: of the stage; "": the op and its place.

        Raises:
            InputError: sizes do not fit the op and the group, or tensors do not.
        """
        name = name or f"{op} {len(self._stages)}"
        for tensor in (target, source):
            self._check_device(op, name, tensor)
        stage = Collective(name, op, target, source, reduction)
        check_collective(stage, dist.get_world_size(self.group))
        self._stages.append(stage)

    def plan(self) -> Plan:
        """The stages as opaque steps that simply overlap.

        What touches the same memory is in order: read after write, write after read and write after
        write, by where tensors lie.
        """
        stages = [
            Touch(
                stage.name, stage.op if isinstance(stage, Collective) else "",
                [*map(span, stage.reads)], [*map(span, stage.writes)],
            )
            for stage in self._stages
        ]  # fmt: skip
        return plan_of(stages, dist.get_world_size(self.group))

    @property
    def workspace(self) -> Workspace:
        """Pads and lanes of its own: a stage may call operators of this library meanwhile."""
        if self._workspace is None:
            self._workspace = Workspace(self.group, self.device)
            # it and its lanes hold each other: left to the collector, they could go in a capture
            weakref.finalize(self, forget, self._workspace)
        return self._workspace

    def check(self, op: str) -> None:
        """Refuse a pipeline that has nothing to share a GPU for.

        Raises:
            InputError: it has no collective, or no compute.
        """
        kinds = {type(stage) for stage in self._stages}
        if kinds != {Compute, Collective}:
            missing = [
                name
                for kind, name in ((Compute, "compute stages"), (Collective, "collectives"))
                if kind not in kinds
            ]
            want = "of compute stages and collectives"
            raise InputError(op, "pipeline", want=want, got=f"one without {' or '.join(missing)}")

    def agree(self, op: str, more: object = None) -> None:
        """Compare the pipelines of all ranks, once for these stages. All ranks call this.

        Args:
            op: for the message.
            more: arguments that must be equal too; with some, they are compared at each call.

        Raises:
            InputError: ranks have different ones; names the first that differs from rank 0.
        """
        if more is None and self._agreed == len(self._stages):
            return
        said = self.workspace.gather((self.signature(), repr(more)))
        for rank, (signature, arguments) in enumerate(said):
            if arguments != said[0][1]:
                got = f"{arguments} on rank {rank}, {said[0][1]} on rank 0"
                raise InputError(op, "arguments", want="equal on all ranks", got=got)
            if signature != said[0][0]:
                lines = zip_longest(
                    signature.splitlines(), said[0][0].splitlines(), fillvalue="nothing"
                )
                here, there = next((a, b) for a, b in lines if a != b)
                got = f"{here!r} on rank {rank}, {there!r} on rank 0"
                raise InputError(op, "pipeline", want="equal on all ranks", got=got)
        self._agreed = len(self._stages)

    def signature(self) -> str:
        """What ranks must agree on and what a result is remembered by: stages, sizes, order."""
        parts = [f"{dist.get_world_size(self.group)} ranks"]
        for stage, step in zip(self._stages, self.plan().steps, strict=True):
            kind = stage.op if isinstance(stage, Collective) else "compute"
            reads, writes = (
                " ".join(map(self._describe, some)) for some in (stage.reads, stage.writes)
            )
            more = f" {stage.reduction}" if isinstance(stage, Collective) else ""
            parts.append(
                f"{stage.name}: {kind}{more} {reads} -> {writes}"
                + "".join(f" after {name}" for name in step.after)
            )
        return "\n".join(parts)

    def _describe(self, tensor: Tensor) -> str:
        """Shape, strides if they are not dense, dtype, and whether peers can write to it."""
        strides = "" if tensor.is_contiguous() else f" by {tensor.stride()}"
        opened = " opened" if self.memory_of(tensor) else ""
        return f"{tuple(tensor.shape)}{strides} {tensor.dtype}{opened}"

    def memory_of(self, tensor: Tensor) -> SymmetricMemory | None:
        """The memory open to peers that a tensor lies in, if any."""
        start, stop = span(tensor)
        for memory in self.symmetric:
            first = memory.local().data_ptr()
            if first <= start and stop <= first + memory.num_bytes:
                return memory
        return None

    def key(self) -> str:
        """The signature in 16 letters."""
        return hashlib.sha256(self.signature().encode()).hexdigest()[:16]

    def _check_device(self, op: str, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            want = f"on {self.device}"
            raise InputError(f"Pipeline.{op}", f"tensors of {name!r}", want=want, got=tensor.device)
