"""Measure what the model needs of a machine: matmuls, copies, collectives, contention, the host.

Shapes are none of those that are published, so that a prediction of these is one. Everything is
timed as `measure.timing` times arms: graphs in one rotation at settled clocks, the slowest rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu.driver import Copy, copy_async
from counterpoint.group.islands import group_of_island
from counterpoint.group.symmetric import allocate
from counterpoint.group.workspace import Places, workspace_of
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.characterize_cpu import characterize_cpu
from counterpoint.measure.exchanges import Row, exchanges
from counterpoint.measure.timing import captured, host_s, rotate
from counterpoint.model.calibrate import fit
from counterpoint.model.calibrate_cpu import nic_of
from counterpoint.ops.auto import matmul_tile
from counterpoint.plan.bind import Arrival, bind
from counterpoint.plan.families import build
from counterpoint.presets import preset_of
from counterpoint.problem import Problem
from counterpoint.run import compute, launch_collective, launch_cuda
from counterpoint.run.fused import fused_memory
from counterpoint.schedules.direct import wants_ranks
from counterpoint.tensor_parallel.all_gather_matmul import all_gather_matmul

MIB = 1 << 20
MATMULS = ((4096, 4096), (2048, 8192), (6144, 5120), (10240, 8192))  # (n, k)
ROWS = (256, 512, 1024, 2048, 4096, 8192)
COPIES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
DIRECT = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
DIRECT_OF = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}
DIRECT_COLUMNS = 1024
COLLECTIVES = (MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
CONTENTION = ((8192, 6144, 5120), (2048, 6144, 5120))  # (rows, n, k)
SETTLING_ROUNDS = 40
CALLS = 8
L2_ROTATIONS = 4

Call = Callable[[int], object]


def characterize(
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Machine, list[Row]]:
    """Measure this machine with all ranks of `group`; all of them call this.

    Returns:
        The machine with measured costs, and the rows they were fitted to; equal on all ranks.

    Raises:
        InputError: fewer than two ranks.
        UnsupportedError: no preset describes this GPU.
    """
    if device.type == "cpu":
        return characterize_cpu(group=group, rounds=rounds, progress=progress)
    if (ranks := group.size()) < 2:
        raise InputError("characterize", "group", want="2 ranks or more", got=ranks)
    name, workspace = torch.cuda.get_device_name(device), workspace_of(group, device)
    base = preset_of(name, min(workspace.islands.size, 8))
    if base is None:
        raise UnsupportedError(f"characterize: no preset describes {name!r}; see presets.py")
    progress("exchanges")
    rows, costs = exchanges(workspace, rounds), None
    if workspace.islands.size > 1:
        mine = group_of_island(workspace.group, workspace.islands.mine)
        bench = Bench(mine, device, rounds)
        questions = (
            bench.matmuls, bench.copies, bench.collectives, bench.direct, bench.memory,
            bench.signals, bench.contention, bench.host,
        )  # fmt: skip
        for question in questions:
            progress(question.__name__)
            rows += question()
        costs = fit(rows, base)
    facts = {"table": "characterize", "ranks": ranks} | record.environment()
    source = f"measured on {ranks}x {name}, torch {torch.__version__}, {facts['date']}"
    machine = replace(base, measured=costs, nic=nic_of(rows), source=source)
    # islands measure side by side, and may find other numbers
    told, rows = workspace.gather((machine.to_json(), rows))[0]
    return Machine.from_json(told), [row | facts for row in rows]


class Bench:
    """The questions to the ranks of one island, each a method that returns rows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rounds: int) -> None:
        self.group, self.device, self.rounds = group, device, rounds
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.memory_of_peers: Any = allocate(max(COPIES) * self.ranks, group, device)
        self.pads: Any = allocate(1 << 16, group, device)
        self.source = torch.empty(max(COPIES), dtype=torch.uint8, device=device).random_()
        self.word = torch.zeros(1, dtype=torch.int32, device=device)
        self.side = torch.cuda.Stream(device, priority=-1)

    def timed(
        self,
        calls: dict[str, Call],
        per_graph: int = CALLS,
        *,
        rounds: int = 0,
        soak_s: float = 0.3,
    ) -> dict[str, float]:
        """Seconds of one call of each."""
        pairs = {name: captured(call, per_graph) for name, call in calls.items()}
        arms = {name: arm for name, (arm, _) in pairs.items()}
        times = rotate(arms, group=self.group, device=self.device, rounds=rounds or self.rounds,
                       soak_s=soak_s)  # fmt: skip
        return {name: t.median_s / per_graph for name, t in times.items()}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def multiply(self, rows: int, n: int, k: int) -> Call:
        count = max(1, ceil(L2_ROTATIONS * self.l2_bytes / (2 * n * k)))
        weights = [self.normal(n, k).t() for _ in range(min(count, CALLS))]
        x, y = self.normal(rows, k), self.normal(rows, n)
        return lambda i: torch.mm(x, weights[i % len(weights)], out=y)

    def push(self, num_bytes: int) -> Call:
        """To each peer once, in ring order, a signal behind each."""

        def run(_: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for d in range(1, self.ranks):
                peer = (self.rank + d) % self.ranks
                target = self.memory_of_peers.buffer_ptrs[peer] + self.rank * num_bytes
                source = self.source.data_ptr()
                copy_async(Copy(target, num_bytes, source, num_bytes, num_bytes, 1), stream)
                word = self.pads.buffer_ptrs[peer] + 4 * self.rank
                copy_async(Copy(word, 4, self.word.data_ptr(), 4, 4, 1), stream)

        return run

    def matmuls(self) -> list[Row]:
        rows: list[Row] = []
        for m in ROWS:
            # each length in a rotation of its own, long enough that clocks settle by it, and not
            # by a soak: short matmuls run at higher clocks
            calls = {f"{n} {k}": self.multiply(m, n, k) for n, k in MATMULS}
            for name, seconds in self.timed(calls, rounds=SETTLING_ROUNDS, soak_s=0.0).items():
                n, k = map(int, name.split())
                tile = matmul_tile(m, n, k, torch.bfloat16, self.device, True)
                rows.append({"question": "matmul", "rows": m, "n": n, "k": k,
                             "tile": tile, "seconds": seconds})  # fmt: skip
        return rows

    def copies(self) -> list[Row]:
        times = self.timed({str(size): self.push(size) for size in COPIES}, 4)
        peers = self.ranks - 1
        return [
            {"question": "copy", "num_bytes": int(size), "seconds": seconds / peers}
            for size, seconds in times.items()
        ]

    def collectives(self) -> list[Row]:
        calls: dict[str, Call] = {}
        for size in COLLECTIVES:
            whole, part = self.normal(size // 2), self.normal(size // 2 // self.ranks)
            calls[f"{size} all_gather"] = partial(self.all_gather, whole, part)
            calls[f"{size} reduce_scatter"] = partial(self.reduce_scatter, whole, part)
        return self._received("collective", calls)

    def all_gather(self, whole: Tensor, part: Tensor, _: int) -> None:
        compute.all_gather(whole, part, group=self.group)

    def reduce_scatter(self, whole: Tensor, part: Tensor, _: int) -> None:
        compute.reduce_scatter(part, whole, group=self.group)

    def direct(self) -> list[Row]:
        """Collectives of our own, where there are such for this number of ranks."""
        if wants_ranks(self.ranks):
            return []
        calls: dict[str, Call] = {}
        # the largest first: memory that grows would move what is compiled
        for (op, kind), size in product(DIRECT_OF.items(), DIRECT[::-1]):
            calls[f"{size} {kind}"] = self.direct_step(op, size)
        dist.barrier(self.group)  # all have compiled before one waits
        return self._received("direct", calls)

    def _received(self, question: str, calls: dict[str, Call]) -> list[Row]:
        """Times of collectives by size and kind, and the bytes that a rank receives."""
        rows: list[Row] = []
        for name, seconds in self.timed(calls, 4).items():
            size, kind = name.split()
            received = int(int(size) * ((self.ranks - 1) / self.ranks))
            rows.append({"question": question, "num_bytes": received, "kind": kind,
                         "seconds": seconds})  # fmt: skip
        return rows

    def direct_step(self, op: str, num_bytes: int) -> Call:
        """The collective of the plan "direct" of an operator, by itself."""
        rows = num_bytes // 2 // DIRECT_COLUMNS
        problem = Problem(op, rows, DIRECT_COLUMNS, DIRECT_COLUMNS, self.ranks)
        plan, workspace = build(problem, "direct"), workspace_of(self.group, self.device)
        workspace.reserve(plan)
        fused_memory(workspace).reserve(plan)
        (bound,) = (b for b in bind(plan, self.rank).steps if b.step.spins)
        run = launch_collective.action(bound, Places(workspace, plan), 0)
        part = self.normal(rows // self.ranks, DIRECT_COLUMNS)
        return lambda _: run({"x": part, "y": part})

    def memory(self) -> list[Row]:
        calls: dict[str, Call] = {}
        for rows in (1024, 4096):
            a, b = self.normal(rows, 8192), self.normal(rows, 8192)
            calls[str(2 * a.numel() * 2)] = lambda _, a=a, b=b: a.copy_(b)
        return [
            {"question": "memory", "num_bytes": int(size), "seconds": seconds}
            for size, seconds in self.timed(calls).items()
        ]

    def signals(self) -> list[Row]:
        # a workspace has what a plan's signals are made of
        self._warm("shard_p2p")
        lanes = workspace_of(self.group, self.device).lanes
        peers = [rank for rank in range(self.ranks) if rank != self.rank]
        posts = [Arrival(1 + self.rank, peer) for peer in peers]
        waits = [Arrival(1 + peer, peer) for peer in peers]
        opening = launch_cuda.signal(lanes, posts, waits, 0, opens=True)
        alone = launch_cuda.signal(lanes, (), (), 0, opens=False)

        def launch(run: Callable[[int], None]) -> Call:
            return lambda _: run(torch.cuda.current_stream().cuda_stream)

        times = self.timed({"barrier": launch(opening), "kernel": launch(alone)})
        return [{"question": name, "seconds": seconds} for name, seconds in times.items()]

    def contention(self) -> list[Row]:
        rows: list[Row] = []
        size = 16 * MIB
        for m, n, k in CONTENTION:
            multiply, push = self.multiply(m, n, k), self.push(size)
            # as many in a row as below: copies of ranks that are out of step meet on a link
            parts = self.timed({"matmul": multiply, "copy": push}, 16)
            # how many of each, so that the other one is done a little earlier
            counts = {"matmul": beside_counts(parts["matmul"], parts["copy"]),
                      "copy": beside_counts(parts["copy"], parts["matmul"])[::-1]}  # fmt: skip
            calls: dict[str, Call] = {}
            for which, (matmuls, pushes) in counts.items():
                calls[f"{which} beside"] = self.both(multiply, matmuls, push, pushes)
                calls[f"{which} alone"] = self.both(multiply, matmuls * (which == "matmul"), push,
                                                    pushes * (which == "copy"))  # fmt: skip
                calls[f"{which} other"] = self.both(multiply, matmuls * (which == "copy"), push,
                                                    pushes * (which == "matmul"))  # fmt: skip
            times = self.timed(calls, 1)
            rows += [
                {"question": "beside", "which": which, "rows": m, "n": n, "k": k,
                 "seconds": times[f"{which} beside"], "alone_s": times[f"{which} alone"],
                 "other_s": times[f"{which} other"]}
                for which in counts
            ]  # fmt: skip
        return rows

    def both(self, multiply: Call, matmuls: int, push: Call, pushes: int) -> Call:
        def run(_: int) -> None:
            main = torch.cuda.current_stream()
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for i in range(pushes):
                    push(i)
            for i in range(matmuls):
                multiply(i)
            main.wait_stream(self.side)

        return run

    def host(self) -> list[Row]:
        rows: list[Row] = []
        for spec in ("shard_p2p", "shard_p2p chunks=4"):
            call, num_steps = self._warm(spec)
            replays = workspace_of(self.group, self.device).lanes.replays
            replays.off = True  # steps are counted here, not the launch of a graph of them
            replays.clear()
            rows.append({"question": "host", "num_steps": num_steps,
                         "seconds": host_s(call, group=self.group)})  # fmt: skip
            replays.off = False
        return rows

    def _warm(self, spec: str) -> tuple[Callable[[], object], int]:
        """A small call that has run once, and the number of its steps."""
        m, n, k = 64, 512, 1024
        x, w = self.normal(m, k), self.normal(k, n)

        def call() -> Tensor:
            return all_gather_matmul(x, w, group=self.group, plan=spec)

        call()
        torch.cuda.synchronize(self.device)
        problem = Problem("all_gather_matmul", m * self.ranks, n, k, self.ranks)
        return call, len(build(problem, spec).steps)


def beside_counts(own_s: float, other_s: float, total_s: float = 2e-3) -> tuple[int, int]:
    """How many of one thing take about `total_s`, and of the other 85 % of that time."""
    own = max(2, ceil(total_s / own_s))
    return own, max(1, int(0.85 * own * own_s / other_s))
