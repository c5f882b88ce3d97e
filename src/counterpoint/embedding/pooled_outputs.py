"""Memory for outputs that peers write to: what is computed elsewhere is at its place when it comes.

Each call takes the next of some turns. A rank that writes to a turn has heard, in the call before,
from the rank whose memory it is; so what is in that turn must have been read by then. A call that a
CUDA graph records has an output of its own, which all replays write to: each of them first waits
until all ranks have come to it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from counterpoint.errors import InputError
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.agreement import agree, captures
from counterpoint.ops.check import DTYPES, check_counts, check_device, check_group
from counterpoint.ranges import whole

ALIGN_BYTES = 256
MAX_TURNS, MAX_MEMORY = 1024, 2**40


class PooledOutputs:
    """Outputs of `embedding_bag_all_to_all` without a copy, made once by all ranks of a group.

    What a call with `out=` returns is a view of this memory. It holds until `turns` - 1 more such
    calls have begun: read it, in stream order, before that. A backward that comes before the next
    call, as in training, is in time; one that has saved it and comes too late is refused.

    A call that is captured in a CUDA graph takes one of `captured` outputs, and no other call ever
    gets that one. What a replay leaves there holds until the next replay of this graph. All ranks
    capture, and replay, or none does.

    `torch.compile` leaves such a call out of its graphs, and with `fullgraph=True` refuses it. What
    an operator returns in a compiled graph is the graph's own: once it has been read, a compiler
    may put another result into its memory, which peers would overwrite; and nobody would see that a
    backward comes too late.

    Args:
        columns: of the output, of all tables of all ranks.
        dtype: of the tables.
        batch: bags of each rank; or of all of them, if each has as many.
        group: whose ranks; None: the default group.
        device: this rank's; None: its current GPU, or the CPU where there is none.
        turns: outputs that are in use in turn.
        captured: outputs beside them, one for each call that a CUDA graph records.

    Raises:
        InputError: an argument is wrong, or ranks ask for other sizes.
        PeerTimeoutError: a rank did not come.

    Example:
        >>> out = counterpoint.PooledOutputs(26 * 128, torch.bfloat16, 65536)  # doctest: +SKIP
        >>> y = counterpoint.embedding_bag_all_to_all(  # doctest: +SKIP
        ...     tables, indices, offsets, out=out
        ... )
    """

    def __init__(
        self, columns: int, dtype: torch.dtype, batch: int | Sequence[int], *,
        group: dist.ProcessGroup | None = None, device: torch.device | str | None = None,
        turns: int = 2, captured: int = 0,
    ) -> None:  # fmt: skip
        self.group = check_group("PooledOutputs", group)
        ranks = self.group.size()
        columns = whole("PooledOutputs", "columns", columns, 1)
        turns = whole("PooledOutputs", "turns", turns, 2, MAX_TURNS)
        captured = whole("PooledOutputs", "captured", captured, 0, MAX_TURNS)
        if isinstance(batch, int):
            batch = [whole("PooledOutputs", "batch", batch)]
            if batch[0] % ranks:
                want = f"a multiple of {ranks} ranks, or a count for each"
                raise InputError("PooledOutputs", "batch", want=want, got=batch[0])
            batch = [batch[0] // ranks] * ranks
        batch = check_counts("PooledOutputs", "batch", batch, f"{ranks} counts >= 0", ranks)
        if dtype not in DTYPES:
            raise InputError("PooledOutputs", "dtype", want="bf16, fp16 or fp32", got=dtype)
        rows = max(1, *batch)
        turn_bytes = -(-rows * columns * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        if turn_bytes * (turns + captured) > MAX_MEMORY:
            want = f"so that {turns + captured} outputs have at most {MAX_MEMORY} bytes"
            raise InputError("PooledOutputs", "batch", want=want, got=f"{turn_bytes} bytes each")
        check_device("PooledOutputs", device)
        if device is None:
            gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InputError("PooledOutputs", "device", want="cpu or cuda", got=self.device)
        self.columns, self.dtype, self.batch, self.turns = columns, dtype, tuple(batch), turns
        self.captured = captured
        # what a call is checked for
        self.facts = id(self.group), self.device, columns, dtype, self.batch, captured > 0
        workspace = workspace_of(self.group, self.device)
        here = {"op": "PooledOutputs", "columns": str(columns), "dtype": str(dtype)}
        here |= {"batch": str(self.batch), "turns": str(turns), "captured": str(captured)}
        agree("PooledOutputs", here, workspace)
        self.turn_bytes = turn_bytes
        self._turn = 0
        self._recorded = 0  # calls, by graphs
        own = self.batch[workspace.rank]
        size = own * columns * dtype.itemsize
        starts = [turn * self.turn_bytes for turn in range(turns + captured)]
        # calls in any mode write to it, and some of them have gradients
        with torch.inference_mode(False):
            self.memory = workspace.allocate(self.turn_bytes * len(starts), "PooledOutputs")
            self.bases = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64).to(self.device)
            memory = self.memory.local()
            # .data: autograd counts what is written to one turn apart from the others
            turn_memory = [memory[s : s + size].view(dtype).data for s in starts]
            self._views = [turn.view(own, columns) for turn in turn_memory]

    def take(self) -> int:
        """The number of the next output: those in turn come first, then those of graphs.

        Raises:
            InputError: a graph is being captured, and others have all outputs that there are for
                graphs.
        """
        if captures(self.device):
            if self._recorded == self.captured:
                want, fix = "one for each call that a CUDA graph records", "make larger ones"
                raise InputError("PooledOutputs", "captured", want=want, got=self.captured, fix=fix)
            self._recorded += 1
            return self.turns + self._recorded - 1
        turn, self._turn = self._turn, (self._turn + 1) % self.turns
        # peers may write to the next one as soon as this call has begun: what autograd has saved
        # of it is refused in a backward from now on
        increment_version(self._views[self._turn])
        return turn

    def view(self, turn: int) -> Tensor:
        """This rank's output of that turn, [own bags, columns]: a new tensor of the same memory."""
        return self._views[turn].detach()
