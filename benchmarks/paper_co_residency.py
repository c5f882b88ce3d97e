"""Whether blocks of a collective are resident beside blocks of a matmul, by SM id and clock.

    counterpoint bench co_residency --paper --out folder            # 2 GPUs or more

The matmul has tiles of 64x64x32 and a persistent grid: a case says how many of its blocks an SM
has. The collective is an all-gather by plain stores to the peers, in 32 blocks of 128 threads with
30 registers each. Every block of both writes down its SM, and when it started and ended. As many
blocks of the matmul as fit an SM leave no registers for a block of the collective; 6 of them do.

Rows have the time of both kernels together and of each alone. `matmul_s` and `collective_s` are by
the stamps: from the start of a kernel's first block to the end of its last one. By
`collective_after_s`, of each rank, the first block of the collective started so much later than
that of the matmul.

Source: arXiv 2606.09200, whose claim this is of; the kernels are ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.declare import Arms, Bench, Benchmark, Call, Case
from benchmarks.rows import Row
from benchmarks.stamps import (
    WORDS,
    stamped_gather_kernel,
    stamped_matmul_kernel,
    stays,
    together,
)
from counterpoint.device import PeerKernel
from counterpoint.gpu.delay import Delay
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.gpu.occupancy import occupancy
from counterpoint.group.symmetric import allocate
from counterpoint.measure.timing import backlog, relative_error

ALL = 0  # blocks per SM: as many as fit
PER_SM = (ALL, 6, 4, 2)
M, N, K = 8192, 8192, 4096
NUMEL = 128 << 20  # of a rank
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
LAUNCH: dict[str, Any] = {**TILE, "num_warps": 4, "num_stages": 3}
COMM_BLOCKS, COMM_STEP = 32, 2048  # elements that a block stores in a step
LATER_S = 10e-6  # the second kernel: the first one has its SMs by then
AHEAD_CYCLES = 5_000_000  # of the GPU: by then the host has launched both kernels
DTYPE = torch.bfloat16
LAUNCHED: Any = stamped_matmul_kernel
BASELINE, ORDERS = "one after the other", ("matmul first", "collective first")


def cases(_: int) -> list[Case]:
    """From an SM that is full of the matmul's blocks to one that has room."""
    return [case_of(per_sm) for per_sm in PER_SM]


def case_of(per_sm: int, m: int = M, n: int = N, k: int = K, numel: int = NUMEL) -> Case:
    """So many blocks of the matmul on each SM."""
    return Case(f"{per_sm or 'all'} blocks per SM", {
        "blocks_asked": per_sm, "m": m, "n": n, "k": k, "numel": numel})  # fmt: skip


class Matmul:
    """The matmul, its result and its stamps."""

    def __init__(self, case: Case, bench: Bench) -> None:
        m, n, k = case["m"], case["n"], case["k"]
        self.x, self.w = (bench.normal(m, k, dtype=DTYPE),
                          bench.normal(k, n, scale=k**-0.5, dtype=DTYPE))  # fmt: skip
        self.out = bench.empty(m, n, dtype=DTYPE)
        self.blocks_per_sm, sms = case["blocks_asked"] or 1, 1
        self.stamps = torch.zeros(1, WORDS, dtype=torch.int64, device=bench.device)
        if bench.on_gpu:
            compiled = LAUNCHED.warmup(*self._given(), grid=(1,), **LAUNCH)
            fit = occupancy(triton_footprint(compiled), limits_here(bench.device)).blocks
            self.blocks_per_sm = min(case["blocks_asked"] or fit, fit)
            sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
        self.stamps = self.stamps.new_zeros(self.blocks_per_sm * sms, WORDS)

    def _given(self) -> tuple[object, ...]:
        (m, k), n = self.x.shape, self.w.shape[1]
        return self.x, self.w, self.out, self.stamps, m, n, k

    def __call__(self) -> None:
        """Launch it on the current stream."""
        LAUNCHED[(len(self.stamps),)](*self._given(), **LAUNCH)


class Gather:
    """The all-gather, its result and its stamps; all ranks make it."""

    def __init__(self, case: Case, bench: Bench) -> None:
        numel, ranks = case["numel"], bench.ranks
        self.source = bench.normal(numel, dtype=DTYPE)
        self.memory = allocate(ranks * numel * DTYPE.itemsize, bench.group, bench.device)
        own = self.memory.local()[: ranks * numel * DTYPE.itemsize]
        self.out = own.view(DTYPE).view(ranks, numel)
        self.stamps = torch.zeros(COMM_BLOCKS, WORDS, dtype=torch.int64, device=bench.device)
        self.kernel = PeerKernel(stamped_gather_kernel, device=bench.device, group=bench.group,
                                 num_flags=ranks * COMM_BLOCKS)  # fmt: skip
        outs = torch.tensor(self.memory.buffer_ptrs, dtype=torch.int64).to(bench.device)
        self.given: dict[str, Any] = {
            "source_ptr": self.source, "outs_ptr": outs, "stamps_ptr": self.stamps,
            "numel": numel, "BLOCK": COMM_STEP,
        }  # fmt: skip

    def __call__(self) -> None:
        """Launch it on the current stream."""
        self.kernel(COMM_BLOCKS, **self.given)


class Streams:
    """Where both kernels are launched; on CPU ranks they run one after the other.

    The collective has a stream of its own in every arm: on another one it would wait for all that
    was there when it was called last.
    """

    def __init__(self, matmul: Matmul, gather: Gather, bench: Bench) -> None:
        self.matmul, self.gather, self.on_gpu = matmul, gather, bench.on_gpu
        if self.on_gpu:
            self.side, self.delay = torch.cuda.Stream(bench.device), Delay(bench.device)

    def collective(self, later_s: float = 0.0, beside: Callable[[], None] = lambda: None) -> None:
        """The collective, and what is launched `beside` it meanwhile."""
        if not self.on_gpu:
            self.gather()
            beside()
            return
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            if later_s:
                self.delay(later_s)
            self.gather()
        beside()
        here.wait_stream(self.side)

    def matmul_later(self) -> None:
        """The matmul on the current stream, a little later."""
        if self.on_gpu:
            self.delay(LATER_S)
        self.matmul()

    def calls(self) -> dict[str, Callable[[], None]]:
        """Each alone, one after the other, and side by side in both orders."""

        def in_turn() -> None:
            self.matmul()
            self.collective()

        return {
            BASELINE: in_turn, "matmul": self.matmul, "collective": self.collective,
            "matmul first": lambda: self.collective(LATER_S, self.matmul),
            "collective first": lambda: self.collective(0.0, self.matmul_later),
        }  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """Both kernels in every order, and what the stamps say of each."""
    matmul, gather = Matmul(case, bench), Gather(case, bench)
    calls = Streams(matmul, gather, bench).calls()
    about = {name: seen(call, matmul, gather, bench) for name, call in calls.items()}

    def call_of(call: Callable[[], None]) -> Call:
        def run(_: int) -> tuple[Tensor, Tensor]:
            call()
            return matmul.out, gather.out

        return run

    rows = bench.sample(case["m"], 16)
    want = matmul.x[rows].double() @ matmul.w.double()
    whole = bench.whole(gather.source).view(bench.ranks, -1)
    return Arms(
        {name: call_of(call) for name, call in calls.items()},
        lambda _, got: [relative_error(got[0][rows], want), float(not got[1].equal(whole))],
        baseline=BASELINE, parts=("matmul", "collective"), outputs=[matmul.out, gather.out],
        about=about,
        facts={"blocks_per_sm": matmul.blocks_per_sm},
    )  # fmt: skip


def seen(call: Callable[[], None], matmul: Matmul, gather: Gather, bench: Bench) -> Row:
    """What the stamps of one call say: of pairs and shares the least of all ranks, of seconds the
    most."""
    call()  # compiled
    for kernel in (matmul, gather):
        kernel.stamps.zero_()
    bench.meet()
    if bench.on_gpu:
        backlog(AHEAD_CYCLES)
    call()
    bench.meet()
    found: Row = {}
    one, other = stays(matmul.stamps), stays(gather.stamps)
    for name, blocks in (("matmul_s", one), ("collective_s", other)):
        if blocks:
            long_ns = max(b.end_ns for b in blocks) - min(b.start_ns for b in blocks)
            (found[name],) = bench.most([1e-9 * long_ns])
    if one and other:
        pairs, beside, share = (-least for least in bench.most([-n for n in together(one, other)]))
        after_ns = min(b.start_ns for b in other) - min(b.start_ns for b in one)
        found |= {"comm_blocks": len(other), "pairs": int(pairs), "blocks_beside": int(beside),
                  "share_beside": share,
                  "collective_after_s": bench.gathered(1e-9 * after_ns)}  # fmt: skip
    return found


PAPER_CO_RESIDENCY = Benchmark(
    "paper_co_residency", cases, arms, calls=0, every_eager=True, host=False, rounds=15,
    backlog_cycles=AHEAD_CYCLES, short=lambda case: case["blocks_asked"] == 4,
    moved=lambda case, ranks: DTYPE.itemsize * case["numel"] * (ranks - 1),
)  # fmt: skip
