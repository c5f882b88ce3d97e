"""What a benchmark declares, and what the runner gives it to do so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from benchmarks.rows import Row
from counterpoint.errors import CounterpointError
from counterpoint.measure.timing import captured, rotate

Call = Callable[[int], Any]  # by its number: operands take turns
L2_ROTATIONS = 4  # operands in rotation cover this many times the L2
# by their newer names where torch has these
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ROUNDING = 1e-2  # a result in bf16 that is further off is wrong


class WrongResultError(CounterpointError):
    """Arms computed something else than fp64 says, on all ranks alike.

    Args:
        text: which, and by how much.
        rows: of the case: those of the other arms, and why these have none.
    """

    def __init__(self, text: str, rows: list[Row]) -> None:
        super().__init__(text)
        self.rows = rows


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Args:
        name: what `--cases` is compared with.
        facts: sizes; every row of the case has them.
    """

    name: str
    facts: Mapping[str, Any]

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]


@dataclass
class Arms:
    """What a case compares.

    Args:
        calls: by name; a text says why an arm cannot be had here.
        check: how far off what an arm has returned is, on this rank: one error for each result.
        baseline: the arm that the others are held against; none may be off by twice as much.
        parts: arms that are a part of the work, and have no result to check.
        against: arms that are held against another one than the baseline: by which. That one may be
            off by `limit`, as the baseline.
        peers: arms that are left out of graphs if they cannot be captured: those of others, those
            whose host may have to wait, and those that were never captured before.
        waits: arms whose host waits for the GPU in each call, or lays it out: no graph has them.
        floor: an error that rounding alone explains.
        limit: an error of the baseline above which nothing is timed.
        outputs: tensors that are full of NaN before each check.
        nan_bytes: of memory that is allocated next and is full of NaN before each check.
        sets: operands in rotation.
        pool: memory that the CUDA graphs of all arms share; None: each has its own.
        about: facts of an arm, beside those of the case.
        facts: more facts of the case.
        close: gives back what was opened, once all has been timed.
    """

    calls: Mapping[str, Call | str]
    check: Callable[[str, Any], Sequence[float]]
    baseline: str = "serial"
    parts: Sequence[str] = ()
    against: Mapping[str, str] = field(default_factory=dict[str, str])
    peers: Sequence[str] = ()
    waits: Sequence[str] = ()
    floor: float = 0.0
    limit: float = ROUNDING
    outputs: Sequence[Tensor] = ()
    nan_bytes: int = 1 << 28
    sets: int = 1
    pool: Any = None
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Section:
    """A marked part of a page.

    Args: page: from the root of the checkout. marker: text stands between `<!-- marker:start -->`
    and `<!-- marker:end -->`. write: number of GPUs -> rows, from the most GPUs down, to the text;
    "" leaves what is there."""

    page: str
    marker: str
    write: Callable[[Mapping[int, list[Row]]], str]


@dataclass(frozen=True)
class Benchmark:
    """A comparison, as it is declared.

    Args:
        name: of the command line, of the file of rows, and their `table`.
        cases: by the number of ranks; where it is `cut`, by that of GPUs that a model is cut over.
        cut: cases are what one of so many GPUs holds of a model.
        arms: of a case; all ranks call it.
        rows: in place of arms, where what is measured is no comparison of arms: rows of a case.
        short: whether a case is one of the few of the short form.
        ranks: GPUs that it takes; 0: all that there are, `least` or more.
        least: see `ranks`.
        apart: begins the names of cases that run only where `--cases` asks for them by it.
        unit: "ms" or "us", of what is printed.
        moved: bytes that a rank gets from its peers, by case and ranks.
        calls: of one CUDA graph, at least; 0: nothing is captured.
        rounds: of the rotation.
        eager: arms that are also timed as single calls: behind a backlog, and with the host's time.
        every_eager: all arms are, behind a backlog; those of `eager` with the host's time too.
        host: measure the host's time of a call too.
        backlog_cycles: of the GPU before a single call: the host is so much ahead.
        soak_s: load before the first round.
        own: the cases of sizes that the command line names.
        sections: what pages say of the rows.
        pictures: draws rows into a folder.
    """

    name: str
    cases: Callable[[int], Sequence[Case]]
    arms: Callable[[Case, "Bench"], Arms] | None = None
    rows: Callable[[Case, "Bench"], list[Row]] | None = None
    short: Callable[[Case], bool] = lambda _: True
    cut: bool = False
    ranks: int = 0
    least: int = 2
    apart: str = ""
    unit: str = "us"
    moved: Callable[[Case, int], int] = lambda _, __: 0
    calls: int = 8
    rounds: int = 9
    eager: Sequence[str] = ()
    every_eager: bool = False
    host: bool = True
    backlog_cycles: int = 5_000_000
    soak_s: float = 0.3
    own: Callable[[tuple[int, ...], int], Sequence[Case]] | None = None
    sections: Sequence[Section] = ()
    pictures: Callable[[Mapping[int, list[Row]], Any], None] | None = None


class Bench:
    """A rank, and what all benchmarks need of it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        short: bool = False,
        rounds: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.group, self.device, self.short, self.say = group, device, short, say
        self.rounds = rounds
        self.rank, self.ranks = group.rank(), group.size()
        self.on_gpu = device.type == "cuda"
        self.seeded(0)

    def seeded(self, seed: int) -> None:
        """Draw from here on what is the same in each run and different on each rank."""
        self.draw = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)

    def normal(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Random normal numbers."""
        drawn = torch.randn(shape, device=self.device, generator=self.draw)
        return drawn.mul_(scale).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Room for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def sets(self, num_bytes: int, most: int = 1 << 20) -> int:
        """How many operands of so many bytes take turns, so that none is in the L2 already."""
        if not self.on_gpu:
            return 1
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(most, max(1, ceil(L2_ROTATIONS * l2_bytes / num_bytes)))

    def sample(self, rows: int, count: int = 64) -> Tensor:
        """Numbers of rows to check, equal on all ranks."""
        chosen = torch.Generator().manual_seed(7)
        return torch.randint(0, rows, (count,), generator=chosen).to(self.device)

    def whole(self, shard: Tensor) -> Tensor:
        """The rows of all ranks, by the library."""
        full = shard.new_empty(self.ranks * shard.shape[0], *shard.shape[1:])
        all_gather(full, shard.contiguous(), group=self.group)
        return full

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def reduce_scatter(self, target: Tensor, source: Tensor) -> None:
        """The library's, or what gloo has in its place."""
        if self.on_gpu:
            reduce_scatter(target, source, group=self.group)
        else:
            target.copy_(self.summed(source.clone()).chunk(self.ranks)[self.rank])

    def opened(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
        """Memory that peers can write to, by torch, and its handle; on GPUs."""
        own = symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        return own, symmetric_memory.rendezvous(own, self.group.group_name)

    def pushes(self, source: Tensor) -> Call | str:
        """A copy of `source` to each peer, in ring order, by copy engines; on GPUs."""
        if not self.on_gpu:
            return "copy engines need GPUs"
        flat = source.view(-1)
        own, handle = self.opened(flat.numel() * self.ranks, flat.dtype)
        every = [handle.get_buffer(r, (self.ranks, flat.numel()), flat.dtype)[self.rank]
                 for r in range(self.ranks)]  # fmt: skip

        def push(_: int, kept: Tensor = own) -> None:  # peers' memory is open as long as own is
            for d in range(1, self.ranks):
                every[(self.rank + d) % self.ranks].copy_(flat)

        return push

    def most(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all ranks; what is no number is above all."""
        found = [v if v == v else torch.inf for v in values]
        worst = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        return worst.tolist()

    def gathered(self, value: Any) -> list[Any]:
        """An object of each rank."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    def meet(self) -> None:
        """All ranks are here, and their GPUs are done."""
        for _ in range(2):
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            dist.barrier(self.group)

    def quick_s(self, calls: Mapping[str, Call], per_graph: int) -> dict[str, float]:
        """Seconds of a call of each, roughly: to find how many are needed."""
        arms = {name: captured(call, per_graph)[0] for name, call in calls.items()}
        times = rotate(arms, group=self.group, device=self.device, rounds=3, soak_s=0.1)
        return {name: t.median_s / per_graph for name, t in times.items()}
