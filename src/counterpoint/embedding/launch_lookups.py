"""How steps of kernel "embedding_bag_all_to_all" run: a lookup of own tables, alone or to peers.

A kernel has a launch for each setting of its step and for each alignment and dtype that a rank's
tensors have. All that a call may take is compiled at the first one like it, before ranks meet.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.embedding.gradients import bounds_of, pooled_on_cpu
from counterpoint.embedding.kernel_lookups import (
    WORDS,
    copy_out_kernel,
    embedding_all_to_all_kernel,
    lookup_kernel,
)
from counterpoint.embedding.layout import DTYPES, VECTOR_BYTES, block_of, vector_of
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Action, Operands, refuse_capture
from counterpoint.plan.boxes import hull
from counterpoint.plan.steps import Step
from counterpoint.run.compute import side_by_side
from counterpoint.run.fused import FusedMemory, fused_memory
from counterpoint.run.launch import Grid, Launch, Site, register

MAX_KNOWN = 64  # sets of tables whose chunks are kept by where they lie; and launches
COPY_BLOCK = 4096
COPY_WARPS = 8
LOOKUP = ("indices_ptr", "weights_ptr", "offsets_ptr", "chunks_ptr", "num_indices", "num_offsets",
          "out_ptr")  # fmt: skip
FUSED = (*LOOKUP[:-1], "outs_ptr", "half", "turn")
Own = tuple[Tensor] | tuple[Tensor, int, int]


class Chunks(NamedTuple):
    """Tables as a kernel takes them: see embedding/kernel_lookups.py."""

    words: Tensor
    vec_in: int


class Bags(NamedTuple):
    """The operand "bags" of a call.

    Args:
        tables: own ones, each [rows, columns] with the elements of a row side by side.
        indices, offsets, weights: 1-D, without gaps.
        last: offsets have one more, the end of the last bag.
        mean: of a bag, not its sum.
        placed: what kernels know of tables that lie where these do, by kernel.
        into: addresses of each rank's outputs, where a turn begins behind another in VECTOR_BYTES,
            and the turn; None: in the memory of the group.
    """

    tables: Sequence[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    last: bool
    mean: bool
    placed: dict[object, Chunks]
    into: tuple[Tensor, int, int] | None


class Setting(NamedTuple):
    """A way to launch a kernel: any sums in the same order, and without weights gives one result.

    Args:
        below: of a mean number of indices in a bag, for which it is taken.
        tile_bytes: of the rows that a program loads at a time, of one index of each bag.
        unroll: indices of a bag at a time.
        num_warps: of a program.
    """

    below: float
    tile_bytes: int
    unroll: int
    num_warps: int


def settings_of(step: Step) -> tuple[Setting, ...]:
    """Those of a step of a plan: "under_15" is "4096x2x4"; the last of them is for all others."""
    found: list[Setting] = []
    for name, value in step.args:
        if name != "kernel":
            below = float(name.removeprefix("under_")) if name != "else" else float("inf")
            found.append(Setting(below, *map(int, str(value).split("x"))))
    return tuple(found)


class Pooling:
    """What a lookup and the fused kernel have in common: chunks of tables, launches by variant.

    Args:
        site: of the step.
        kernel: Triton's.
        given: names of what each call passes.
        fixed: the kernel's own arguments that do not change.
        spans: of bags that are tasks of their own: how many each has.
        own: what the kernel writes to, as its last arguments, if no call says it; None: y.
        copy: of own rows to y, behind the kernel.
    """

    def __init__(
        self, site: Site, kernel: Any, given: Sequence[str], fixed: dict[str, Any],
        spans: Sequence[int], own: Own | None, copy: Launch | None = None,
    ) -> None:  # fmt: skip
        p, self.workspace = site.places.plan.problem, site.places.workspace
        dtype = getattr(torch, p.dtype)
        rank, spins = self.workspace.rank, site.bound.step.spins
        # in an output a row has the columns of all ranks
        first = p.column_starts[rank] if spins or own is None else 0
        firsts = list(accumulate(p.tables[rank], initial=first))
        columns = p.n if spins or own is None else firsts[-1]
        # beside an exchange a program ends soon, and leaves its SM to that
        self.each = not spins and p.islands > 1
        self.dims, self.firsts, self.num_bags = p.tables[rank], firsts, p.m
        self.item_bytes, self.settings = dtype.itemsize, settings_of(site.bound.step)
        self.block_d = block_of(self.dims)
        self.vec_out = vector_of((columns, *self.dims, *firsts[:-1]), self.item_bytes)
        chunks = sum(-(-d // self.block_d) for d in self.dims)
        self.fixed = fixed | {
            "one_ptr": torch.ones(1, device=self.workspace.device), "num_bags": p.m,
            "num_chunks": chunks, "stride": columns // self.vec_out, "DTYPE": DTYPES[dtype],
            "BLOCK_D": self.block_d, "EVEN_D": all(d % self.block_d == 0 for d in self.dims),
            "VEC_OUT": self.vec_out,
        }  # fmt: skip
        self._kernel, self._given, self._tasks = kernel, given, (len(spans), max(spans), chunks)
        self._launches: dict[tuple[Any, ...], list[tuple[float, Launch]]] = {}
        self._own, self._copy, self._spins = own, copy, spins
        self._known: dict[tuple[Any, ...], Chunks] = {}
        self._on_gpu = self.workspace.device.type == "cuda"

    def chunks(self, bags: Bags) -> Chunks:
        """The tables' chunks in device memory; a copy to it when none has been where they lie.

        Raises:
            InputError: they have to be copied while a graph is captured.
        """
        key = (*map(Tensor.data_ptr, bags.tables), *map(Tensor.stride, bags.tables))
        found = self._known.get(key)
        if found is None:
            if self._on_gpu:
                refuse_capture("tables that lie where none did in an earlier call")
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = self._cut(bags)
        bags.placed[self] = found
        return found

    def _cut(self, bags: Bags) -> Chunks:
        placed = [t.data_ptr() // self.item_bytes for t in bags.tables]
        strides = [t.stride(0) for t in bags.tables]
        vec_in = vector_of((*placed, *strides, *self.dims), self.item_bytes)
        words: list[int] = []
        for table, (place, stride, dim, first) in enumerate(
            zip(placed, strides, self.dims, self.firsts, strict=False)
        ):
            for start in range(0, dim, self.block_d):
                width = min(self.block_d, dim - start)
                column = (first + start) // self.vec_out
                words += ((place + start) * self.item_bytes, stride // vec_in, width // vec_in,
                          width // self.vec_out, column, table)  # fmt: skip
        # an empty tensor has no address
        host = torch.tensor(words or [0] * WORDS.value, dtype=torch.int64)
        return Chunks(host.to(self.workspace.device), vec_in)

    def __call__(self, operands: Operands) -> None:
        """Launch on the current stream, as many indices in a bag on average want it."""
        bags: Bags = operands["bags"]  # type: ignore[assignment]
        target = (self._spins and bags.into) or self._own or (operands["y"],)
        indices, offsets, weights = bags.indices, bags.offsets, bags.weights
        chunks = bags.placed.get(self) or self.chunks(bags)
        variant = (indices.dtype, offsets.dtype, weights is not None and weights.dtype, bags.mean,
                   chunks.vec_in)  # fmt: skip
        launches = self._launches.get(variant) or self.compile(operands)
        count = indices.numel()
        mean = count / (self.num_bags * len(self.dims) or 1)
        # of a few, in order: the first that is for so many
        which = 0
        while mean >= launches[which][0]:
            which += 1
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            self.workspace.keep(self, chunks.words)
        given = (indices, indices if weights is None else weights, offsets, chunks.words, count,
                 offsets.numel(), *target)  # fmt: skip
        if self._copy is None:
            launches[which][1](*given)
        else:
            Launch.in_a_row(((launches[which][1], given), (self._copy, (operands["y"],))))

    def compile(self, operands: Operands) -> list[tuple[float, Launch]]:
        """All settings for tensors like these; launches nothing.

        Raises:
            InputError: a graph is captured.
        """
        self.workspace.refuse_growth("none: this is the first call of such bags and indices")
        bags: Bags = operands["bags"]  # type: ignore[assignment]
        target = (self._spins and bags.into) or self._own or (operands["y"],)
        chunks = bags.placed.get(self) or self.chunks(bags)
        weights = bags.weights
        given = (bags.indices, bags.indices if weights is None else weights, bags.offsets,
                 chunks.words, bags.indices.numel(), bags.offsets.numel(), *target)  # fmt: skip
        owners, most, num_chunks = self._tasks
        found: list[tuple[float, Launch]] = []
        for setting in self.settings:
            rows = max(1, setting.tile_bytes // self.item_bytes // self.block_d)
            blocks = -(-most // rows)
            fixed = self.fixed | {
                "MEAN": bags.mean, "WEIGHTED": weights is not None, "BAGS": rows, "blocks": blocks,
                "VEC_IN": chunks.vec_in, "UNROLL": setting.unroll,
            }  # fmt: skip
            # why nothing is reserved: see embedding/kernel_lookups.py
            grid = Grid(owners * blocks * num_chunks, reserve=False, each=self.each)
            launch = Launch(self._kernel, self._given, fixed, grid, self.workspace.device, OP,
                            {"num_warps": setting.num_warps})  # fmt: skip
            found.append((setting.below, launch.compile(*given)))
        variant = (bags.indices.dtype, bags.offsets.dtype, weights is not None and weights.dtype,
                   bags.mean, chunks.vec_in)  # fmt: skip
        self._launches[variant] = found
        return found


def lookup(site: Site) -> Pooling:
    """A step without peers: bags of own tables side by side."""
    parts, places = site.bound.parts, site.places
    (target,) = hull([part.write for part in parts])
    own = places.fixed(target)
    start = 0 if own is None else target.r0
    spans = [(bags.r0, bags.r1 - bags.r0, write.r0 - start) for (bags,), write, _ in parts]
    words = torch.tensor(spans, dtype=torch.int32).to(places.workspace.device)
    fixed = {"spans_ptr": words, "spans": len(spans)}
    counts = [count for _, count, _ in spans]
    return Pooling(site, lookup_kernel, LOOKUP, fixed, counts, None if own is None else (own,))


def fused(site: Site) -> Pooling:
    """A step that stores rows to their owners, and copies own ones to y."""
    p, workspace = site.places.plan.problem, site.places.workspace
    memory, rank = fused_memory(workspace), workspace.rank
    # where peers write to is kept as it is now: it may grow later, and then on all ranks
    own = memory.turns.bases, memory.turns.half_bytes // VECTOR_BYTES, -1
    copy: Launch | None = None
    if p.rows[rank] and not p.out:
        count, dtype = p.rows[rank] * p.n, getattr(torch, p.dtype)
        fixed = {"outs_ptr": own[0], "state_ptr": memory.state, "count": count, "half": own[1],
                 "rank": rank, "BLOCK": COPY_BLOCK}  # fmt: skip
        grid = Grid(-(-count // COPY_BLOCK), reserve=False, each=True)
        copy = Launch(copy_out_kernel, ("target_ptr",), fixed, grid, workspace.device, OP,
                      {"num_warps": COPY_WARPS}).compile(dtype)  # fmt: skip
    return Pooling(
        site, embedding_all_to_all_kernel, FUSED, _fixed(site, memory), p.rows, own, copy
    )


def _fixed(site: Site, memory: FusedMemory) -> dict[str, Any]:
    p, workspace = site.places.plan.problem, site.places.workspace
    starts = torch.tensor(p.row_starts, dtype=torch.int32, device=workspace.device)
    return {
        "starts_ptr": starts, "flags_ptr": memory.flags.bases, "state_ptr": memory.state,
        "fault_ptr": memory.fault, "half_flags": memory.flags.half_bytes // 4,
        "rank": workspace.rank, "tag": site.tag, "timeout_ns": int(workspace.timeout_s * 1e9),
        "WORLD": p.ranks, "LANES": 1 << (p.ranks - 1).bit_length(),
    }  # fmt: skip


def prepare(site: Site) -> Action:
    """The launch of a step of either kind, compiled if it is known for what.

    Into outputs of peers, plan "fused" shares one with that behind a barrier: a capture of the
    second finds what eager calls of the first have compiled.
    """
    problem, spins = site.places.plan.problem, site.bound.step.spins
    pooling: Pooling
    if spins and problem.out:
        known, key = fused_memory(site.places.workspace).launches, (problem, site.bound.step.args)
        if len(known) >= MAX_KNOWN:
            known.clear()
        pooling = known.get(key) or known.setdefault(key, fused(site))
    else:
        pooling = (fused if spins else lookup)(site)
    if site.like:
        pooling.compile(site.like)
    return pooling


def reference(site: Site) -> Action:
    """What the kernels compute, by torch and gloo."""
    p, workspace, spins = site.places.plan.problem, site.places.workspace, site.bound.step.spins
    calls = library_of(workspace, Awaited(OP, "take part in the exchange of rows", "exchange"))
    exchange = side_by_side(p, workspace.rank, calls)
    found = () if spins else site.bound.parts
    parts = [((bags.r0, bags.r1), site.places.of(write)) for (bags,), write, _ in found]
    dtype = getattr(torch, p.dtype)

    def run(operands: Operands) -> None:
        bags: Bags = operands["bags"]  # type: ignore[assignment]
        bounds = bounds_of(bags.offsets, bags.indices.numel(), last=bags.last)

        def pooled(some: range) -> Tensor:
            return pooled_on_cpu(bags.tables, bags.indices, bounds, bags.weights, p.m, some,
                                 mean=bags.mean, dtype=dtype)  # fmt: skip

        for some, place in parts:
            place(operands).copy_(pooled(range(*some)))
        if spins:
            exchange(pooled(range(p.m)), operands["y"])

    return run


register(OP, prepare, reference)
