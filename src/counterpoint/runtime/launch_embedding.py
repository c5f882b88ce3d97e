"""How embedding bags and their all-to-all are launched as one kernel: chunks, grid, memory."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.kernels.embedding_all_to_all import (
    WORDS,
    copy_out_kernel,
    embedding_all_to_all_kernel,
    lookup_kernel,
)
from counterpoint.runtime.device_limits import limits_here
from counterpoint.runtime.embedding_layout import (
    DTYPES,
    VECTOR_BYTES,
    Facts,
    Layout,
    Way,
    block_of,
    vector_of,
)
from counterpoint.runtime.footprint import triton_footprint
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.lanes_cuda import raw_stream
from counterpoint.runtime.launch_fused import padded_rows
from counterpoint.runtime.occupancy import occupancy
from counterpoint.runtime.workspace import refuse_capture

MAX_KNOWN = 64  # sets of tables whose chunks are remembered
COPY_BLOCK = 4096
COPY_WARPS = 8


class Chunks(NamedTuple):
    """Tables as the kernel takes them: see kernels/embedding_all_to_all.py."""

    words: Tensor
    number: int
    vec_in: int


class Launched(NamedTuple):
    """A compiled kernel, and what it takes of a GPU."""

    run: Callable[..., None]
    programs: int
    registers: int  # of a thread
    spills: int


class Pooling:
    """What a lookup and the fused kernel have in common: chunks of tables, constants, launches.

    Args:
        facts: what the kernel is compiled for.
        firsts: the first column of the output of each own table.
        columns: of the output.
        dims: of own tables.
        way: how.
        device: it runs on.
        like: another way of the same, which knows the same tables.
    """

    def __init__(
        self, facts: Facts, firsts: Sequence[int], columns: int, dims: Sequence[int], way: Way,
        device: torch.device, like: "Pooling | None" = None,
    ) -> None:  # fmt: skip
        self.facts, self.way, self.device = facts, way, device
        self.item_bytes = facts.layout.dtype.itemsize
        self.dims, self.firsts, self.columns = tuple(dims), tuple(firsts), columns
        self.block_d = block_of(dims)
        self.bags = max(1, way.tile_bytes // self.item_bytes // self.block_d)
        self.even = all(d % self.block_d == 0 for d in dims)
        self.vec_out = vector_of((columns, *dims, *self.firsts), self.item_bytes)
        self.one = like.one if like else torch.ones(1, device=device)
        self._known: dict[tuple[Any, ...], Chunks] = like._known if like else {}
        self.launches: dict[int, Launched] = {}

    def chunks(self, tables: Sequence[Tensor]) -> Chunks:
        """The tables' chunks, in device memory; a copy to it when they lie where none has been.

        Raises:
            InputError: they have to be copied while a graph is captured.
        """
        key = (*map(Tensor.data_ptr, tables), *map(Tensor.stride, tables))
        found = self._known.get(key)
        if found is None:
            if self.device.type == "cuda":
                refuse_capture("tables that lie where none did in an earlier call")
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            placed = [(t.data_ptr(), t.stride(0)) for t in tables]
            found = self._known[key] = self._chunks(placed)
        return found

    def _chunks(self, key: Sequence[tuple[int, int]]) -> Chunks:
        placed = [address // self.item_bytes for address, _ in key]
        strides = [stride for _, stride in key]
        vec_in = vector_of((*placed, *strides, *self.dims), self.item_bytes)
        words: list[int] = []
        for table, ((address, stride), dim, first) in enumerate(
            zip(key, self.dims, self.firsts, strict=True)
        ):
            for start in range(0, dim, self.block_d):
                width = min(self.block_d, dim - start)
                column = (first + start) // self.vec_out
                words += (address + start * self.item_bytes, stride // vec_in, width // vec_in,
                          width // self.vec_out, column, table)  # fmt: skip
        num_words: int = WORDS.value
        # an empty tensor has no address
        host = torch.tensor(words or [0] * num_words, dtype=torch.int64)
        return Chunks(host.to(self.device), len(words) // num_words, vec_in)

    def inputs(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, chunks: Chunks
    ) -> tuple[Any, ...]:
        """The first arguments of a kernel."""
        return indices, indices if weights is None else weights, offsets, self.one, chunks.words

    def counts(self, indices: Tensor, offsets: Tensor, chunks: Chunks) -> tuple[int, ...]:
        """Its first numbers."""
        sizes = self.facts.layout.num_bags, indices.numel(), offsets.numel(), chunks.number
        return *sizes, self.columns // self.vec_out

    def constants(self, vec_in: int) -> tuple[Any, ...]:
        """Its last arguments."""
        return (DTYPES[self.facts.layout.dtype], self.facts.mean, self.facts.weights is not None,
                self.bags, self.block_d, self.even, vec_in, self.vec_out,
                self.way.unroll)  # fmt: skip

    def launch(self, kernel: Any, arguments: tuple[Any, ...], tasks: int, vec_in: int) -> None:
        """Launch on the current stream, compiled at the first call with this alignment.

        Args:
            kernel: of `arguments`, whose types never change.
            tasks: that programs share: never more programs than those, nor than fit the GPU.
            vec_in: part of the constants.
        """
        if self.device.type != "cuda":
            kernel[(max(tasks, 1),)](*arguments, num_warps=self.way.num_warps)
            return
        found = self.launches.get(vec_in) or self.compiled(kernel, arguments, tasks, vec_in)
        found.run(*arguments, stream=raw_stream(self.device.index))

    def compiled(
        self, kernel: Any, arguments: tuple[Any, ...], tasks: int, vec_in: int
    ) -> Launched:
        """The kernel for tables of this alignment, compiled and loaded; arguments of `launch`."""
        compiled = kernel.warmup(*arguments, grid=(1,), num_warps=self.way.num_warps)
        footprint = triton_footprint(compiled)
        blocks = occupancy(footprint, limits_here(self.device)).blocks
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        programs = max(1, min(tasks, blocks * sms))
        found = self.launches[vec_in] = Launched(
            compiled[(programs, 1, 1)], programs, footprint.registers_per_thread, compiled.n_spills
        )
        return found


class Lookup(Pooling):
    """Bags of own tables, side by side in one tensor: no peer takes part.

    Args:
        facts: as for `Pooling`; the layout's batch is that of all ranks.
        rank: whose tables.
        way, device, like: as for `Pooling`.
    """

    def __init__(
        self, facts: Facts, rank: int, device: torch.device, way: Way | None = None,
        like: "Lookup | None" = None,
    ) -> None:  # fmt: skip
        dims = facts.layout.dims[rank]
        firsts = list(accumulate(dims, initial=0))
        super().__init__(facts, firsts[:-1], firsts[-1], dims, way or Way(), device, like)

    def __call__(
        self, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Into `out` [bags of all ranks, columns of own tables]: what an all-to-all would send."""
        chunks = self.chunks(tables)
        tasks = -(-self.facts.layout.num_bags // self.bags) * chunks.number
        if not tasks:
            return
        arguments = (
            *self.inputs(indices, offsets, weights, chunks), out,
            *self.counts(indices, offsets, chunks), *self.constants(chunks.vec_in),
        )  # fmt: skip
        self.launch(lookup_kernel, arguments, tasks, chunks.vec_in)


class Place(NamedTuple):
    """Where outputs and flags of one layout lie, equal on all ranks as long as it lives."""

    outputs: Tensor
    half_bytes: int
    flags: Tensor
    half_flags: int


def place_of(memory: FusedMemory, layout: Layout, *, own_outputs: bool = False) -> Place:
    """Have the memory that a layout needs, of two outputs unless peers write elsewhere.

    Collective, and synchronous where it has to grow. What grows later is another memory: so this
    is kept, and asked for by all ranks at the same time.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """
    if not own_outputs:
        memory.turns.reserve(max(layout.half_bytes, 1))  # without bags it has an address too
    memory.flags.reserve(4 * len(layout.batch))
    tiles, flags = memory.turns, memory.flags
    return Place(tiles.bases, tiles.half_bytes, flags.bases, flags.half_bytes // 4)


class Sender(Pooling):
    """The fused kernel of one layout; all ranks call theirs in one order.

    Args:
        facts: as for `Pooling`.
        memory: of the group.
        place: in it.
        tag: that a fault word names it by.
        way: how; may differ between ranks.
        like: as for `Pooling`.
    """

    def __init__(
        self, facts: Facts, memory: FusedMemory, place: Place, tag: int, way: Way | None = None,
        like: "Sender | None" = None,
    ) -> None:  # fmt: skip
        workspace, layout = memory.workspace, facts.layout
        rank, ranks, device = workspace.rank, workspace.group.size(), workspace.device
        firsts = layout.first_columns(rank)[:-1]
        super().__init__(
            facts, firsts, layout.columns, layout.dims[rank], way or Way(), device, like
        )
        self.outputs = place.outputs, place.half_bytes, -1
        self._starts = torch.tensor(layout.starts, dtype=torch.int32, device=device)
        self._memory = place.flags, memory.state, memory.fault
        self._half_flags = place.half_flags
        self._last = tag, int(workspace.timeout_s * 1e9)
        self._world = ranks, padded_rows(ranks)
        self._copy: Any = None
        self._state, self._rank = memory.state, rank
        self._blocks = -(-max(layout.batch) // self.bags)

    def __call__(
        self, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None,
        outputs: tuple[Tensor, int, int] | None = None,
    ) -> None:  # fmt: skip
        """Pool and send; when the kernel has ended all rows for this rank are there.

        Args:
            tables: own ones, each [rows, columns] with elements of a row without gaps.
            indices, offsets, weights: 1-D, without gaps.
            outputs: addresses of each rank's memory, bytes between its turns, and the turn;
                None: the memory of the group, the half of the epoch.
        """
        launch = self.launch_of(tables, indices, offsets, weights, outputs)
        self.launch(embedding_all_to_all_kernel, *launch)

    def launch_of(
        self, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None,
        outputs: tuple[Tensor, int, int] | None,
    ) -> tuple[tuple[Any, ...], int, int]:  # fmt: skip
        """What `launch` takes besides the kernel; arguments as for a call."""
        chunks = self.chunks(tables)
        bases, half_bytes, turn = outputs or self.outputs
        arguments = (
            *self.inputs(indices, offsets, weights, chunks), self._starts, bases, *self._memory,
            *self.counts(indices, offsets, chunks), self._blocks, half_bytes // VECTOR_BYTES,
            self._half_flags, turn, self._rank, *self._last, *self._world,
            *self.constants(chunks.vec_in),
        )  # fmt: skip
        return arguments, self._world[0] * self._blocks * chunks.number, chunks.vec_in

    def prepare(
        self, tables: Sequence[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None,
        outputs: tuple[Tensor, int, int] | None = None, y: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compile what a call launches, and the copy to `y`; launches nothing."""
        if self.device.type != "cuda":
            return
        launch = self.launch_of(tables, indices, offsets, weights, outputs)
        self.compiled(embedding_all_to_all_kernel, *launch)
        if y is not None and y.numel():
            self._compiled_copy(y)

    def copy_out(self, y: Tensor) -> None:
        """What the last call has left in the memory of the group, into `y`, contiguous."""
        if not y.numel():
            return
        arguments, programs = self._copy_of(y)
        if self.device.type != "cuda":
            kernel: Any = copy_out_kernel
            kernel[(programs,)](*arguments, num_warps=COPY_WARPS)
            return
        run = self._copy or self._compiled_copy(y)
        run(*arguments, stream=raw_stream(self.device.index))

    def _copy_of(self, y: Tensor) -> tuple[tuple[Any, ...], int]:
        bases, half_bytes, _ = self.outputs
        half = half_bytes // VECTOR_BYTES
        arguments = y, bases, self._state, y.numel(), half, self._rank, COPY_BLOCK
        return arguments, -(-y.numel() // COPY_BLOCK)

    def _compiled_copy(self, y: Tensor) -> Any:
        arguments, programs = self._copy_of(y)
        compiled = copy_out_kernel.warmup(*arguments, grid=(1,), num_warps=COPY_WARPS)
        self._copy = compiled[(programs, 1, 1)]
        return self._copy
