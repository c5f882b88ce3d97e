"""Time several implementations fairly: one randomised rotation at settled clocks.

The same all-gather and matmul took 1.58 ms called singly and 1.81 ms a call in graphs of eight,
which leave the chip less time to cool (4xH200, bf16, 8192,7168,8192, 2026-11): arms that are not
interleaved in one run mislead. Every round runs every arm once, in a random order that
is the same on all ranks; before each, a backlog and a device-side barrier, so that neither host
time nor late ranks count. A round's time is that of the slowest rank. A round whose SM clock is far
from that of the others is dropped. CPU ranks go by the host's clock.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.gpu.capture import no_collector
from counterpoint.group.symmetric import allocate

Arm = Callable[[], object]
Around = Callable[[str], AbstractContextManager[object]]
BACKLOG_CYCLES = 600_000  # about 0.3 ms: the host enqueues an arm meanwhile
CLOCK_OFF = 0.10  # from the median, beyond which a round does not count


@dataclass(frozen=True)
class Times:
    """Seconds of one arm: of the slowest rank, one for each round that counts.

    Args:
        rounds_s: equally many for all arms of a rotation; those of one round stand together.
        skew_s: median over rounds of slowest minus fastest rank.
        clock_mhz: median SM clock of the slowest rank's GPU; 0 where it cannot be read.
    """

    rounds_s: tuple[float, ...]
    skew_s: float
    clock_mhz: float = 0.0

    @property
    def median_s(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds_s)

    def ratio_of(self, other: "Times") -> tuple[float, float, float]:
        """Median over rounds of other / self of one round, and its 95 % interval.

        Both were timed in one rotation: what differs between rounds then differs for both. The
        interval is that of order statistics.
        """
        pairs = zip(other.rounds_s, self.rounds_s, strict=True)
        ratios = sorted(theirs / mine for theirs, mine in pairs)
        spread = 0.98 * len(ratios) ** 0.5
        low, high = int(len(ratios) / 2 - spread), int(len(ratios) / 2 + spread)
        return statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]

    def quantile_s(self, q: int) -> float:
        """The q-th of ten quantiles."""
        return statistics.quantiles(self.rounds_s, n=10)[q - 1]


def backlog(cycles: int) -> None:
    """Keep the current stream busy for `cycles` GPU cycles: torch's own test kernel, private."""
    torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateUsage]


def soak(seconds: float, device: torch.device) -> None:
    """Keep the GPU at a large GEMM, so that clocks and power have settled."""
    a = torch.randn(8192, 8192, device=device).bfloat16()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def rotate(
    arms: Mapping[str, Arm],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int,
    soak_s: float,
    backlog_cycles: int = BACKLOG_CYCLES,
    around: Around = nullcontext,
) -> dict[str, Times]:
    """Time `arms` in one randomised rotation; all ranks of `group` call this with equal names.

    Args:
        rounds: how often each arm runs, after a warm-up round that does not count.
        soak_s: seconds of load before the first round.
        backlog_cycles: GPU cycles that the stream is busy before the barrier; an arm whose host
            time is longer shows it.
        around: makes a context for an arm's name, entered before it is its turn and left after
            it has ended: what the arm needs to be so, and others must not see.

    Raises:
        InputError: no rounds, or no arms.
    """
    if rounds < 1 or not arms:
        raise InputError("rotate", "rounds", want=">= 1, with one arm or more", got=rounds)
    on_gpu = device.type == "cuda"
    meeting = allocate(1 << 16, group, device) if on_gpu else None
    order, shuffle, index = list(arms), random.Random(0), list(arms).index
    times = torch.zeros(len(order), rounds, dtype=torch.float64)
    clocks = torch.zeros(rounds, dtype=torch.float64)
    for name, arm in arms.items():
        with around(name):
            arm()
            if on_gpu:
                torch.cuda.synchronize(device)
    if on_gpu:
        soak(soak_s, device)
    for i in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            with around(name):
                if on_gpu:
                    seconds = _time_once(arms[name], meeting, group, backlog_cycles)
                else:
                    seconds = _time_on_host(arms[name], group)
            times[index(name), i] = seconds
        clocks[i] = sm_clock_mhz(device)
    slowest, fastest, clocks = times.to(device), times.to(device, copy=True), clocks.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(fastest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(clocks, op=dist.ReduceOp.MIN, group=group)
    kept = settled(clocks.tolist())
    clock = statistics.median(clocks.tolist())
    skew = (slowest - fastest)[:, kept].median(dim=1).values
    return {
        name: Times(tuple(slowest[i, kept].tolist()), float(skew[i]), clock)
        for i, name in enumerate(arms)
    }


def settled(clocks_mhz: Sequence[float]) -> list[int]:
    """The rounds whose clock is near the median; all where clocks are not known, or are all over.

    Args:
        clocks_mhz: the SM clock of each round, equal on all ranks; 0 where it cannot be read.
    """
    every = list(range(len(clocks_mhz)))
    usual = statistics.median(clocks_mhz)
    kept = [i for i in every if abs(clocks_mhz[i] - usual) <= CLOCK_OFF * usual]
    return every if min(clocks_mhz) == 0 or len(kept) < max(2, len(every) / 2) else kept


def sm_clock_mhz(device: torch.device) -> int:
    """SM clock of a GPU now, by NVML; 0 on CPUs and where nvidia-ml-py is not installed."""
    if device.type != "cuda":
        return 0
    try:
        return torch.cuda.clock_rate(device)
    except (ModuleNotFoundError, RuntimeError):
        return 0


def _time_once(arm: Arm, meeting: object, group: dist.ProcessGroup, backlog_cycles: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier(group)
    torch.cuda.synchronize()
    backlog(backlog_cycles)
    meeting.handle.barrier(channel=0)  # type: ignore[attr-defined]
    start.record()
    arm()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def _time_on_host(arm: Arm, group: dist.ProcessGroup) -> float:
    dist.barrier(group)
    start_s = time.perf_counter()
    arm()
    return time.perf_counter() - start_s


def host_s(arm: Arm, *, group: dist.ProcessGroup, calls: int = 30) -> float:
    """Seconds of host time of one call, submitted while the GPU is busy: the slowest rank's."""
    arm()
    torch.cuda.synchronize()
    dist.barrier(group)
    backlog(100_000_000)  # the queue must not drain, nor a call wait for the GPU
    start_s = time.perf_counter()
    for _ in range(calls):
        arm()
    taken = torch.tensor(
        (time.perf_counter() - start_s) / calls, dtype=torch.float32, device="cuda"
    )
    torch.cuda.synchronize()
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return taken.item()


def captured(
    call: Callable[[int], object], calls: int, pool: Any = None
) -> tuple[Arm, torch.cuda.CUDAGraph]:
    """`calls` calls, numbered, in one CUDA graph; the arm replays it.

    Args:
        call: what is captured, after it has run once.
        calls: how many.
        pool: of `torch.cuda.graph_pool_handle()`: memory shared with other graphs, whose results
            are then lost when another one replays; None for memory of its own.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph, pool=pool):
        for i in range(calls):
            call(i)
    return graph.replay, graph


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in fp64; NaN where `got` has one."""
    return ((got.double() - want).norm() / want.norm()).item()
