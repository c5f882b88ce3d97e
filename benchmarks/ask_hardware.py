"""Ask a multi-GPU machine what the choices between plans rest on; one JSON row per measurement.

    torchrun --standalone --nproc-per-node 4 benchmarks/ask_hardware.py --out FILE.jsonl

Standalone: torch, triton and cuda-bindings, nothing of this library. n = number of ranks.

A  copies to or from all n-1 peers: push or pull, ring or XOR order, eager, batched, as a graph
   chain, as a graph fork; and strided 2-D pushes
B  what a signal after a copy costs: 4-byte copy, stream write, one-warp kernel, one vector post
W  the stream-write arms of B, run last: a refused peer address may cost the context
C  barrier kernels: torch's against one warp that posts and polls all peers as one vector
D  how late a one-warp kernel starts beside cuBLAS, and what a wait between two GEMMs costs
E  all-gather -> GEMM by groups of shards: push with signals, and pull with barriers
F  GEMM -> reduce-scatter by push, groups from large to small, and the final sum

Times are medians over rounds of the slowest rank; start delays (D) are pooled over ranks. Every
result of E and F is checked before it is timed. A poll that outlasts its bound reports a fault
and returns, so nothing hangs. Multicast stays off; clocks are left alone.
"""

import argparse
import datetime
import faulthandler
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from cuda.bindings import driver as cu
from cuda.bindings import runtime as rt

KIB, MIB = 2**10, 2**20
BF16 = torch.bfloat16
WATCHDOG_S = 540
SECTION_BUDGET_S = {"A": 40, "B": 20, "C": 20, "D": 35, "E": 65, "F": 55, "W": 15}
ROUNDS = 9
CYCLES_PER_US = 1980  # of torch.cuda._sleep; a lower clock only makes the backlog longer

# the arena: one symmetric buffer; the pads first, then payload
PAYLOAD_BYTES_AT = 64 * KIB
RECEIVE_BYTES_AT = PAYLOAD_BYTES_AT + 64 * MIB  # section A: behind the region that peers read
STAGING_BYTES_AT = PAYLOAD_BYTES_AT + 128 * MIB  # section E: behind the gathered matrix
ARENA_BYTES = RECEIVE_BYTES_AT + 512 * MIB

# word offsets in the pad; each is the start of 32 words, one lane each
PUSH_BARRIER, PULL_BARRIER, DATA_FLAGS, SIGNAL_FLAGS, QUIET_FLAGS = 0, 64, 128, 192, 256
OWN_BARRIERS = 512  # section C: 64 words per variant

# indices of the epoch words (32 words apart) in ordinary device memory
PUSH_WORD, PULL_WORD, WAIT_WORD, SIGNAL_WORD, QUIET_WORD, OWN_BARRIER_WORDS = 0, 1, 2, 3, 4, 8
PIECES_PER_SHARD_MAX = 2  # lane of a data flag = source rank * this + piece

LANES = 32
SPIN_LIMIT = 1 << 24  # polls, about 10 s
DEADLINE_NS = 6_000_000_000
WAIT = {"POST": "store", "POLL": "acquire", "DEADLINE": "timer"}  # what E, F and D use

AG_SHAPES = ((8192, 1280, 8192), (8192, 7168, 8192), (2048, 7168, 8192))
RS_SHAPES = ((8192, 8192, 1024), (8192, 8192, 3584), (2048, 8192, 3584))
AG_GROUPS = {
    2: ("1/1", "2"),
    4: ("1/3", "1/1/2", "1/1/1/1", "2/2", "1/2/1", "4"),
    8: ("1/1/1/1/1/1/1/1", "1/1/2/4", "1/2/5", "1/1/3/3", "1/1/1/2/3", "2/2/4", "2/6"),
}
AG_HALF_GROUPS = {  # counted in half shards, own two first
    2: ("2/1/1",),
    4: ("2/1/1/2/2", "2/1/2/3", "2/1/5", "2/2/4", "2/3/3", "2/1/1/1/1/1/1"),
    8: (),
}
RS_GROUPS = {
    2: ("1/1", "2"),
    4: ("3/1", "2/1/1", "1/1/1/1", "2/2"),
    8: ("2/2/2/1/1", "4/2/1/1", "1/1/1/1/1/1/1/1", "2/2/2/2"),
}


# --- kernels: one warp each, except the sum ---------------------------------------------------


@triton.jit
def now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def post(pads, mask, slot, epoch, POST: tl.constexpr):
    """Write the epoch to word `slot` of each masked pad, released at system scope."""
    words = pads.to(tl.pointer_type(tl.int32)) + slot
    # the release that pairs with `peek` on the peer covers all that this block wrote before
    tl.debug_barrier()
    if POST == "xchg":
        tl.atomic_xchg(words, epoch, mask=mask, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %p;
            setp.ne.s32 %p, $3, 0;
            @%p st.release.sys.global.b32 [$1], $2;
            mov.b32 $0, $2;
            }""",
            "=r,l,r,r",
            [words, epoch, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def count_late(words, mask, epoch, POLL: tl.constexpr):
    """How many masked words are behind the epoch: one look at all of them."""
    if POLL == "atomic":
        seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys")
    elif POLL == "volatile":
        seen = tl.load(words, mask=mask, other=0, volatile=True)
    else:
        # unmasked: idle lanes read their own word of the pad, which is harmless
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return tl.sum((mask & (seen - epoch < 0)).to(tl.int32))


@triton.jit
def wait_all(words, mask, epoch, fault_address, limit, POLL: tl.constexpr, DEADLINE: tl.constexpr):
    """Poll until no masked word is behind the epoch; else write a fault and go on."""
    if DEADLINE == "timer":
        end_ns = now_ns() + limit
        late = count_late(words, mask, epoch, POLL)
        while (late > 0) & (now_ns() < end_ns):
            late = count_late(words, mask, epoch, POLL)
    else:
        spins = limit * 0
        late = count_late(words, mask, epoch, POLL)
        while (late > 0) & (spins < limit):
            late = count_late(words, mask, epoch, POLL)
            spins += 1
    if POLL == "volatile":
        # orders the plain polls before all later reads; pairs with the peer's release
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;",
            "=r,r",
            [late],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if late > 0:
        tl.store(fault_address.to(tl.pointer_type(tl.int32)), 1)


@triton.jit(do_not_specialize=["rank", "num_ranks", "fault_address", "limit"])
def barrier_kernel(
    word_ptr,  # [1] int32: epoch of the last call, advanced here so that a graph replays
    pads_ptr,  # [num_ranks] int64: address of this barrier's words on each rank
    own_pad_ptr,  # [LANES] int32
    rank,
    num_ranks,
    fault_address,
    limit,
    POST: tl.constexpr,
    POLL: tl.constexpr,
    DEADLINE: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    peer = (lane < num_ranks) & (lane != rank)
    epoch = tl.load(word_ptr) + 1
    pads = tl.load(pads_ptr + lane, mask=peer, other=0)
    post(pads, peer, rank, epoch, POST)
    wait_all(own_pad_ptr + lane, peer, epoch, fault_address, limit, POLL, DEADLINE)
    tl.store(word_ptr, epoch)


@triton.jit(do_not_specialize=["peer_bits", "slot"])
def post_kernel(
    word_ptr,  # [1] int32: the epoch to post
    pads_ptr,  # [num_ranks] int64
    peer_bits,  # bit r: post to rank r
    slot,
    POST: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    chosen = ((peer_bits >> lane) & 1) != 0
    pads = tl.load(pads_ptr + lane, mask=chosen, other=0)
    post(pads, chosen, slot, tl.load(word_ptr), POST)


@triton.jit(do_not_specialize=["lane_bits", "advance", "fault_address", "limit", "stamp_slot"])
def wait_kernel(
    word_ptr,  # [1] int32: epoch of the last call of this waiter
    own_pad_ptr,  # [LANES] int32
    lane_bits,  # bit i: wait for word i
    advance,  # 1 in the first wait of a call
    fault_address,
    limit,
    stamps_ptr,  # int64, ns
    stamp_slot,
    STAMP: tl.constexpr,
    POLL: tl.constexpr,
    DEADLINE: tl.constexpr,
    LANES: tl.constexpr,
):
    if STAMP:
        tl.store(stamps_ptr + stamp_slot, now_ns())
    lane = tl.arange(0, LANES)
    chosen = ((lane_bits >> lane) & 1) != 0
    epoch = tl.load(word_ptr) + advance
    wait_all(own_pad_ptr + lane, chosen, epoch, fault_address, limit, POLL, DEADLINE)
    tl.store(word_ptr, epoch)


@triton.jit(do_not_specialize=["slot"])
def stamp_kernel(
    stamps_ptr,  # int64, ns
    slot,
):
    tl.store(stamps_ptr + slot, now_ns())


@triton.jit(do_not_specialize=["slot", "length_ns"])
def spin_kernel(
    stamps_ptr,  # int64, ns: the end goes to `slot`
    slot,
    length_ns,
):
    now = now_ns()
    end_ns = now + length_ns
    while now < end_ns:
        now = now_ns()
    tl.store(stamps_ptr + slot, now)


@triton.jit
def sum_slots_kernel(
    slots_ptr,  # [SLOTS, numel]
    out_ptr,  # [numel], numel a multiple of BLOCK
    numel,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    # rank order: the same bits in every run
    for slot in tl.static_range(SLOTS):
        acc += tl.load(slots_ptr + slot * numel.to(tl.int64) + offs).to(tl.float32)
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty))


# --- the machine: rank, streams, arena --------------------------------------------------------


def checked(result: tuple) -> Any:
    """The value of a cuda-bindings call, or an error that names its code."""
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA call failed: {code!r}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Machine:
    """What every section needs; built once, the same on all ranks."""

    rank: int
    num_ranks: int
    device: torch.device
    main: torch.cuda.Stream
    side: torch.cuda.Stream  # high priority: copies
    low: torch.cuda.Stream  # default priority
    signals: torch.cuda.Stream  # high priority: posts that do not interrupt the copies
    branches: list[torch.cuda.Stream]
    arena: torch.Tensor  # [ARENA_BYTES] uint8, symmetric
    base: list[int]  # address of each rank's arena
    words: torch.Tensor  # [32, 32] int32: epoch words, one per row
    stamps: torch.Tensor  # [32] int64
    fault: torch.Tensor  # [1] int32, pinned host memory
    start: Any  # torch's symmetric-memory handle: the barrier before each start event
    generator: torch.Generator
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    def address(self, rank: int, byte_offset: int) -> int:
        """Address, on this GPU, of a byte of a rank's arena."""
        return self.base[rank] + byte_offset

    def local(self, byte_offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The own arena, from a byte on, as a tensor."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        return self.arena[byte_offset : byte_offset + count].view(dtype).view(shape)

    def pad(self, word: int) -> torch.Tensor:
        """The 32 words of the own pad from `word` on."""
        return self.local(4 * word, (LANES,), torch.int32)

    def pad_table(self, word: int) -> torch.Tensor:
        """Addresses of pad word `word` on every rank, as a device tensor."""
        if word not in self.tables:
            addresses = [self.address(r, 4 * word) for r in range(self.num_ranks)]
            self.tables[word] = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return self.tables[word]

    def word(self, index: int) -> torch.Tensor:
        """One epoch word, in a 128-byte line of its own."""
        return self.words[index, :1]

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal bf16, different on each rank."""
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=BF16)


M: Machine  # set once by `build_machine`
START_S = time.monotonic()


def refuse_multicast() -> None:
    """Multicast must be off before NCCL or symmetric memory start; both read this later."""
    for name, want in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        if os.environ.setdefault(name, want) != want:
            raise SystemExit(f"{name} must be {want}: this script never uses multicast")


def build_machine() -> Machine:
    """Join the ranks, allocate the arena, zero the pads."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # the bindings carry a runtime of their own
    checked(rt.cudaSetDevice(device.index))
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=90))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    arena = symm_mem.empty(ARENA_BYTES, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(arena, name)
    base = [
        arena.data_ptr()
        if r == rank
        else handle.get_buffer(r, (ARENA_BYTES,), torch.uint8).data_ptr()
        for r in range(num_ranks)
    ]
    start_buffer = symm_mem.empty(1024, dtype=torch.uint8, device=device)
    start = symm_mem.rendezvous(start_buffer, name)
    main = torch.cuda.Stream(device)
    torch.cuda.set_stream(main)
    machine = Machine(
        rank=rank,
        num_ranks=num_ranks,
        device=device,
        main=main,
        side=torch.cuda.Stream(device, priority=-1),
        low=torch.cuda.Stream(device, priority=0),
        signals=torch.cuda.Stream(device, priority=-1),
        branches=[torch.cuda.Stream(device, priority=-1) for _ in range(num_ranks - 1)],
        arena=arena,
        base=base,
        words=torch.zeros(32, 32, dtype=torch.int32, device=device),
        stamps=torch.zeros(32, dtype=torch.int64, device=device),
        fault=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        start=start,
        generator=torch.Generator(device).manual_seed(1000 + rank),
    )
    arena[:PAYLOAD_BYTES_AT].zero_()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return machine


def say(text: str) -> None:
    """Print on rank 0, with the time since the start."""
    if M.rank == 0:
        print(f"[{time.monotonic() - START_S:6.1f} s] {text}", flush=True)


# --- agreement, rows --------------------------------------------------------------------------


def agree(ok: bool) -> bool:
    """Whether all ranks say yes."""
    flag = torch.tensor([int(ok)], device=M.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def meet() -> None:
    """All work of all ranks is done."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


class Outcome(NamedTuple):
    """What `attempt` gives: the same `ok` on all ranks."""

    ok: bool
    value: Any
    error: str


def attempt(label: str, step: Callable[[], Any]) -> Outcome:
    """Run a step without collectives of its own; it counts only if it works on all ranks."""
    value, error = None, ""
    try:
        value = step()
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"[:300]
        print(f"rank {M.rank}: {label}: {error}", file=sys.stderr, flush=True)
    if agree(not error):
        return Outcome(True, value, "")
    return Outcome(False, None, error or "failed on another rank")


def reset_signals() -> None:
    """Start all epochs anew: a step that broke off on one rank leaves them unequal."""
    meet()
    M.arena[:PAYLOAD_BYTES_AT].zero_()
    M.words.zero_()
    M.fault[0] = 0
    meet()


def raise_on_fault() -> None:
    """Turn a poll that outlasted its bound into an error of the host."""
    torch.cuda.synchronize()
    if int(M.fault[0]):
        M.fault[0] = 0
        raise RuntimeError("a wait on a peer outlasted its bound")


class Report:
    """The JSON rows: written at once, and kept for the table at the end."""

    def __init__(self, path: Path) -> None:
        """Start the file on rank 0."""
        self.rows: list[dict] = []
        self.facts: dict[str, Any] = {}
        self.path = path
        if M.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            self.facts = environment_facts()

    def add(self, question: str, arm: str, params: dict, **values: Any) -> None:
        """One measurement, or the reason why there is none (`error`)."""
        if M.rank:
            return
        row = {"question": question, "arm": arm, "params": params, **values}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps({**row, **self.facts}) + "\n")

    def of(self, question: str, **params: Any) -> list[dict]:
        """Rows of a question without an error whose params match."""
        return [
            row
            for row in self.rows
            if row["question"] == question
            and "error" not in row
            and all(row["params"].get(key) == value for key, value in params.items())
        ]


R: Report  # set once by `main`


def environment_facts() -> dict[str, Any]:
    """What a number depends on, for every row."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        driver = text.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as exc:
        driver = f"unknown ({type(exc).__name__})"
    return {
        "num_ranks": M.num_ranks,
        "gpu": torch.cuda.get_device_name(M.device),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "multicast": "off",
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
    }


class Budget:
    """Seconds a section may use; rank 0 decides for all."""

    def __init__(self, section: str) -> None:
        """Start the clock of a section."""
        self.section = section
        self.end_s = time.monotonic() + SECTION_BUDGET_S[section]

    def allows(self, what: str) -> bool:
        """Whether there is time left; says what was skipped otherwise."""
        flag = torch.tensor([int(time.monotonic() < self.end_s)], device=M.device)
        dist.broadcast(flag, src=0)
        if not flag.item():
            say(f"{self.section}: out of time, skipped {what}")
            R.add(self.section, what, {}, error="section out of time")
        return bool(flag.item())


# --- running and timing -----------------------------------------------------------------------


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph, captured on the current stream."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        step()
    except Exception:
        try:
            graph.capture_end()
        except RuntimeError as exc:
            print(f"rank {M.rank}: end of a failed capture: {exc}"[:200], file=sys.stderr)
        raise
    graph.capture_end()
    return graph


class Verify(NamedTuple):
    """How to prove an arm right: spoil the outputs, run it, compare (raises if wrong)."""

    spoil: Callable[[], None]
    compare: Callable[[], None]


def prepare(
    label: str, step: Callable[[], object], *, graph: bool, verify: Verify | None = None
) -> tuple[Callable[[], object] | None, str]:
    """Warm a step up, capture it, check it; returns what to time, or why not."""

    def run_once(run: Callable[[], object]) -> Callable[[], None]:
        def once() -> None:
            run()
            raise_on_fault()

        return once

    run: Callable[[], object] = step
    outcome = attempt(label, run_once(step))
    if outcome.ok and graph:
        outcome = attempt(f"{label} (capture)", lambda: capture(step))
        if outcome.ok:
            run = outcome.value.replay
    if outcome.ok and verify:
        meet()
        outcome = attempt(f"{label} (spoil)", verify.spoil)
        meet()
        if outcome.ok:
            outcome = attempt(f"{label} (checked run)", run_once(run))
            meet()
        if outcome.ok:
            outcome = attempt(f"{label} (check)", verify.compare)
            meet()
    if not outcome.ok:
        reset_signals()
        return None, outcome.error
    return run, ""


class Timing(NamedTuple):
    """Of one arm, over rounds: device time of the slowest rank, host time of the slowest rank."""

    us: float
    p20_us: float
    p80_us: float
    host_us: float

    def values(self) -> dict[str, float]:
        """As fields of a row."""
        return {key: round(value, 3) for key, value in self._asdict().items()}


def soak(seconds: float) -> None:
    """Keep the GPU at full power, so that the clocks settle."""
    if seconds <= 0:
        return
    a, b = M.randn(8192, 8192), M.randn(8192, 8192)
    out = torch.empty_like(a)
    for _ in range(int(seconds * 700)):  # about 1.4 ms each
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()


def rotate(
    arms: dict[str, Callable[[], object]],
    *,
    backlog_us: int = 300,
    soak_s: float = 0.0,
    host_times: bool = True,
    rounds: int = ROUNDS,
) -> dict[str, Timing]:
    """Time all arms in one randomised rotation, the same on all ranks.

    Before each start event the GPU sleeps, so that the host is ahead, and meets its peers in a
    barrier. With host_times the host drains the GPU after each arm, so that no launch of a timed
    arm waits for room in the queue.
    """
    if not arms:
        return {}
    names = list(arms)
    for name in names:
        arms[name]()
        torch.cuda.synchronize()
    meet()
    soak(soak_s)
    shuffle = random.Random(1).shuffle
    events: dict[str, list] = {name: [] for name in names}
    host_us: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order = names[:]
        shuffle(order)
        for name in order:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(backlog_us * CYCLES_PER_US)
            M.start.barrier(channel=7, timeout_ms=20_000)
            begin.record()
            host_begin_s = time.perf_counter()
            arms[name]()
            host_us[name].append((time.perf_counter() - host_begin_s) * 1e6)
            end.record()
            events[name].append((begin, end))
            if host_times:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    outcome = attempt("rotation", raise_on_fault)
    if not outcome.ok:
        raise RuntimeError(f"rotation: {outcome.error}")
    device_us = [[b.elapsed_time(e) * 1e3 for b, e in events[name]] for name in names]
    samples = torch.tensor(
        [device_us, [host_us[name] for name in names]], dtype=torch.float64, device=M.device
    )
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    return {
        name: summary(samples[0, i].tolist(), samples[1, i].tolist())
        for i, name in enumerate(names)
    }


def summary(device_us: list[float], host_us: list[float]) -> Timing:
    """Median, p20 and p80 over rounds."""
    ordered = sorted(device_us)
    last = len(ordered) - 1
    return Timing(
        us=statistics.median(ordered),
        p20_us=ordered[round(0.2 * last)],
        p80_us=ordered[round(0.8 * last)],
        host_us=statistics.median(host_us),
    )


# --- moving and signalling --------------------------------------------------------------------

DEVICE_TO_DEVICE = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice


def copy(dst: int, src: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """One DMA copy between addresses."""
    checked(rt.cudaMemcpyAsync(dst, src, num_bytes, DEVICE_TO_DEVICE, stream.cuda_stream))


def receiver(order: str, step: int) -> int:
    """To whom this rank pushes at a step (1 .. n-1), so that no two ranks share a receiver."""
    return (M.rank - step) % M.num_ranks if order == "ring" else M.rank ^ step


def sender(order: str, step: int) -> int:
    """Whose push arrives here at a step, or from whom this rank pulls."""
    return (M.rank + step) % M.num_ranks if order == "ring" else M.rank ^ step


def steps() -> range:
    """The n - 1 steps in which each peer is served once."""
    return range(1, M.num_ranks)


def peer_bits() -> int:
    """Bit r for each peer r."""
    return ((1 << M.num_ranks) - 1) & ~(1 << M.rank)


def launch_barrier(
    word: int, pad: int, *, post: str = "store", poll: str = "acquire", deadline: str = "timer"
) -> None:
    """Our barrier kernel on the current stream."""
    barrier_kernel[(1,)](
        M.word(word),
        M.pad_table(pad),
        M.pad(pad),
        M.rank,
        M.num_ranks,
        M.fault.data_ptr(),
        DEADLINE_NS if deadline == "timer" else SPIN_LIMIT,
        POST=post,
        POLL=poll,
        DEADLINE=deadline,
        LANES=LANES,
        num_warps=1,
    )


def launch_post(word: int, pad: int, bits: int, slot: int, *, post: str = "store") -> None:
    """Post the epoch to several peers as one vector, on the current stream."""
    post_kernel[(1,)](
        M.word(word), M.pad_table(pad), bits, slot, POST=post, LANES=LANES, num_warps=1
    )


def launch_wait(
    word: int, pad: int, bits: int, *, advance: int, stamp_slot: int | None = None, **options: int
) -> None:
    """Wait on the current stream until the chosen words of the own pad are there."""
    wait_kernel[(1,)](
        M.word(word),
        M.pad(pad),
        bits,
        advance,
        M.fault.data_ptr(),
        DEADLINE_NS,
        M.stamps,
        stamp_slot or 0,
        STAMP=stamp_slot is not None,
        POLL=WAIT["POLL"],
        DEADLINE=WAIT["DEADLINE"],
        LANES=LANES,
        **{"num_warps": 1, **options},
    )


def launch_stamp(slot: int, **options: int) -> None:
    """Write the device clock to a stamp."""
    stamp_kernel[(1,)](M.stamps, slot, **{"num_warps": 1, **options})


def launch_spin(slot: int, length_us: int) -> None:
    """Keep one warp busy for a known time and stamp its end."""
    spin_kernel[(1,)](M.stamps, slot, length_us * 1000, num_warps=1)


def sum_slots(slots: torch.Tensor, out: torch.Tensor) -> None:
    """Sum over the first dim in fp32, rounded once."""
    block = 2048
    assert out.numel() % block == 0
    sum_slots_kernel[(out.numel() // block,)](
        slots, out, out.numel(), SLOTS=slots.shape[0], BLOCK=block, num_warps=8
    )


# --- A: copies --------------------------------------------------------------------------------


class Rect(NamedTuple):
    """One copy: `height` rows of `width` bytes; a height of 1 is a contiguous copy."""

    dst: int
    src: int
    width: int
    height: int = 1
    pitch: int = 0

    def issue(self, stream: torch.cuda.Stream) -> None:
        """Submit it."""
        if self.height == 1:
            copy(self.dst, self.src, self.width, stream)
            return
        result = rt.cudaMemcpy2DAsync(
            self.dst,
            self.pitch,
            self.src,
            self.pitch,
            self.width,
            self.height,
            DEVICE_TO_DEVICE,
            stream.cuda_stream,
        )
        checked(result)


def chain(rects: list[Rect]) -> Callable[[], None]:
    """The copies one after another on the high-priority stream."""

    def step() -> None:
        M.side.wait_stream(M.main)
        for rect in rects:
            rect.issue(M.side)
        M.main.wait_stream(M.side)

    return step


def fork(rects: list[Rect]) -> Callable[[], None]:
    """Each copy on a stream of its own."""

    def step() -> None:
        for stream, rect in zip(M.branches, rects, strict=True):
            stream.wait_stream(M.main)
            rect.issue(stream)
        for stream in M.branches[: len(rects)]:
            M.main.wait_stream(stream)

    return step


def batch(rects: list[Rect]) -> Callable[[], None]:
    """The copies as one submission (cudaMemcpyBatchAsync), without order among them."""
    attributes = rt.cudaMemcpyAttributes()
    attributes.srcAccessOrder = rt.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    dsts, srcs = [r.dst for r in rects], [r.src for r in rects]
    sizes, count = [r.width for r in rects], len(rects)

    def step() -> None:
        M.side.wait_stream(M.main)
        stream = M.side.cuda_stream
        checked(rt.cudaMemcpyBatchAsync(dsts, srcs, sizes, count, [attributes], [0], 1, stream))
        M.main.wait_stream(M.side)

    return step


def pattern(rank: int, num_bytes: int) -> torch.Tensor:
    """Words that differ by rank and by place, as uint8."""
    words = torch.arange(num_bytes // 4, dtype=torch.int32, device=M.device)
    return (words * 1_000_003 + (rank + 1) * 7_919_033).view(torch.uint8)


def copy_rects(direction: str, order: str, num_bytes: int, outbox: int, inbox: int) -> list[Rect]:
    """To or from each peer once; a rank's bytes land at its own place at the receiver."""
    rects = []
    for step in steps():
        if direction == "push":
            place = RECEIVE_BYTES_AT + M.rank * num_bytes
            rects.append(Rect(M.address(receiver(order, step), place), outbox, num_bytes))
        else:
            peer = sender(order, step)
            source = M.address(peer, PAYLOAD_BYTES_AT)
            rects.append(Rect(inbox + peer * num_bytes, source, num_bytes))
    return rects


def copy_verify(direction: str, num_bytes: int, inbox: torch.Tensor) -> Verify:
    """Every peer's pattern must have arrived whole."""
    place = inbox if direction == "pull" else M.arena[RECEIVE_BYTES_AT:]
    landed = place[: M.num_ranks * num_bytes].view(M.num_ranks, num_bytes)

    def compare() -> None:
        for peer in range(M.num_ranks):
            if peer != M.rank and not torch.equal(landed[peer], pattern(peer, num_bytes)):
                raise RuntimeError(f"the bytes of rank {peer} did not arrive")

    def spoil() -> None:
        landed.fill_(0xA5)

    return Verify(spoil, compare)


COPY_MODES = {
    "eager": (chain, False),
    "batch": (batch, False),
    "graph_chain": (chain, True),
    "graph_fork": (fork, True),
}


def ask_copies(budget: Budget) -> None:
    """A: contiguous copies in every form, then strided ones."""
    outbox = torch.empty(64 * MIB, dtype=torch.uint8, device=M.device)
    inbox = torch.empty(M.num_ranks * 64 * MIB, dtype=torch.uint8, device=M.device)
    outbox.copy_(pattern(M.rank, 64 * MIB))
    M.arena[PAYLOAD_BYTES_AT:RECEIVE_BYTES_AT].copy_(pattern(M.rank, 64 * MIB))
    meet()
    for mib in (1, 4, 16, 64):
        if budget.allows(f"copies of {mib} MiB"):
            ask_copies_of(mib * MIB, outbox, inbox)
    if budget.allows("strided copies"):
        ask_strided_copies()


def ask_copies_of(num_bytes: int, outbox: torch.Tensor, inbox: torch.Tensor) -> None:
    """All directions, orders and forms at one size, in one rotation."""
    arms, about = {}, {}
    for direction, order, mode in product(("push", "pull"), ("ring", "xor"), COPY_MODES):
        make, graph = COPY_MODES[mode]
        name = f"{direction} {order} {mode}"
        about[name] = {"direction": direction, "order": order, "mode": mode, "bytes": num_bytes}
        rects = copy_rects(direction, order, num_bytes, outbox.data_ptr(), inbox.data_ptr())
        # the form is what can go wrong, not the size
        verify = copy_verify(direction, num_bytes, inbox) if num_bytes == MIB else None
        run, error = prepare(name, make(rects), graph=graph, verify=verify)
        if run:
            arms[name] = run
        else:
            R.add("A", name, about[name], error=error)
    for name, timing in rotate(arms).items():
        add_copy_row(name, about[name], timing, num_bytes)
    say(f"A: {num_bytes // MIB} MiB copies done")


def add_copy_row(name: str, params: dict, timing: Timing, bytes_per_copy: int) -> None:
    """Rate from the device time of all n - 1 copies."""
    count = M.num_ranks - 1
    R.add(
        "A",
        name,
        {**params, "num_copies": count},
        **timing.values(),
        host_us_per_copy=round(timing.host_us / count, 3),
        gb_per_s=round(count * bytes_per_copy / timing.us / 1e3, 1),
    )


def ask_strided_copies() -> None:
    """Column slices: 2048 rows of 2 KiB in a pitch of 16 KiB, pushed to each peer's columns."""
    rows, width, pitch = 2048, 2 * KIB, 16 * KIB
    outbox = pattern(M.rank, rows * pitch)
    inbox = M.arena[RECEIVE_BYTES_AT : RECEIVE_BYTES_AT + rows * pitch].view(rows, pitch)
    mine = M.rank * width

    def compare() -> None:
        for peer in range(M.num_ranks):
            cols = slice(peer * width, (peer + 1) * width)
            want = pattern(peer, rows * pitch).view(rows, pitch)[:, cols]
            if peer != M.rank and not torch.equal(inbox[:, cols], want):
                raise RuntimeError(f"the columns of rank {peer} did not arrive")

    def spoil() -> None:
        inbox.fill_(0xA5)

    verify = Verify(spoil, compare)
    arms, about = {}, {}
    for order, mode in product(("ring", "xor"), ("eager", "graph_chain", "graph_fork")):
        make, graph = COPY_MODES[mode]
        name = f"strided push {order} {mode}"
        about[name] = {
            "direction": "strided push",
            "order": order,
            "mode": mode,
            "bytes": rows * width,
            "rows": rows,
            "width_bytes": width,
            "pitch_bytes": pitch,
        }
        rects = [
            Rect(
                M.address(receiver(order, step), RECEIVE_BYTES_AT + mine),
                outbox.data_ptr() + mine,
                width,
                rows,
                pitch,
            )
            for step in steps()
        ]
        run, error = prepare(name, make(rects), graph=graph, verify=verify)
        if run:
            arms[name] = run
        else:
            R.add("A", name, about[name], error=error)
    for name, timing in rotate(arms).items():
        add_copy_row(name, about[name], timing, rows * width)


# --- B and W: signals -------------------------------------------------------------------------

SIGNAL_BYTES = 4 * MIB
SIGNAL_REPEATS = 2
WRITE_VALUE = 0x5EED  # a stream write bakes its value into a graph


def stream_write(dst: int, value: int, stream: torch.cuda.Stream) -> None:
    """Write a 32-bit value in stream order; the default flags order it after earlier work."""
    checked(cu.cuStreamWriteValue32(cu.CUstream(stream.cuda_stream), cu.CUdeviceptr(dst), value, 0))


def signal_step(kind: str, outbox: torch.Tensor, *, payload: bool = True) -> Callable[[], None]:
    """Pushes to all peers, twice, each (or each group of n - 1) followed by a signal."""

    def after_push(peer: int, slot: int) -> None:
        target = M.address(peer, 4 * (SIGNAL_FLAGS + slot))
        if kind == "copy4":
            copy(target, M.word(SIGNAL_WORD).data_ptr(), 4, M.side)
        elif kind == "stream_write":
            stream_write(target, WRITE_VALUE, M.side)
        elif kind in ("post store", "post xchg"):
            with torch.cuda.stream(M.side):
                launch_post(SIGNAL_WORD, SIGNAL_FLAGS, 1 << peer, slot, post=kind.split()[1])
        elif kind == "post_side":
            M.signals.wait_stream(M.side)
            with torch.cuda.stream(M.signals):
                launch_post(SIGNAL_WORD, SIGNAL_FLAGS, 1 << peer, slot)

    def step() -> None:
        M.side.wait_stream(M.main)
        M.signals.wait_stream(M.main)
        for repeat in range(SIGNAL_REPEATS):
            slot = M.rank * SIGNAL_REPEATS + repeat
            place = RECEIVE_BYTES_AT + slot * SIGNAL_BYTES
            for peer in (receiver("ring", s) for s in steps()):
                if payload:
                    copy(M.address(peer, place), outbox.data_ptr(), SIGNAL_BYTES, M.side)
                after_push(peer, slot)
            if kind == "vector post":
                with torch.cuda.stream(M.side):
                    launch_post(SIGNAL_WORD, SIGNAL_FLAGS, peer_bits(), slot)
        M.main.wait_stream(M.side)
        M.main.wait_stream(M.signals)

    return step


def signal_verify(kind: str, epoch: int) -> Verify:
    """Every peer's words must carry the value that was signalled."""
    want = WRITE_VALUE if kind == "stream_write" else epoch

    def spoil() -> None:
        M.pad(SIGNAL_FLAGS).fill_(-1)
        M.word(SIGNAL_WORD).fill_(epoch)

    def compare() -> None:
        seen = M.pad(SIGNAL_FLAGS).tolist()
        for peer in range(M.num_ranks):
            words = seen[peer * SIGNAL_REPEATS : (peer + 1) * SIGNAL_REPEATS]
            if peer != M.rank and words != [want] * SIGNAL_REPEATS:
                raise RuntimeError(f"signals of rank {peer} are {words}, want {want}")

    return Verify(spoil, compare)


def ask_signals_of(kinds: tuple[str, ...]) -> None:
    """The kinds against no signal, eager and in a graph, in one rotation."""
    outbox = torch.empty(SIGNAL_BYTES, dtype=torch.uint8, device=M.device)
    outbox.copy_(pattern(M.rank, SIGNAL_BYTES))
    arms, about = {}, {}
    for epoch, (kind, mode) in enumerate(product(("none", *kinds), ("eager", "graph")), 101):
        name = f"{kind} {mode}"
        about[name] = {"kind": kind, "mode": mode, "bytes": SIGNAL_BYTES}
        verify = None if kind == "none" else signal_verify(kind, epoch)
        step = signal_step(kind, outbox)
        if kind == "stream_write" and mode == "graph":
            probe = attempt(f"{name} (capture probe)", lambda: probe_capture(step))  # noqa: B023, run at once
            if not probe.ok:
                R.add("B", name, about[name], error=probe.error, signal_arrived=False)
                continue
        run, error = prepare(name, step, graph=mode == "graph", verify=verify)
        if run:
            arms[name] = run
        else:
            R.add("B", name, about[name], error=error, signal_arrived=False)
    timings = rotate(arms, backlog_us=1500)
    for name, timing in timings.items():
        add_signal_row(name, about[name], timing, timings.get(f"none {about[name]['mode']}"))
    say(f"B: signals {', '.join(kinds)} done")


def add_signal_row(name: str, params: dict, timing: Timing, bare: Timing | None) -> None:
    """What a signal adds to the copies it follows."""
    groups = 1 if params["kind"] == "vector post" else M.num_ranks - 1
    count = 0 if params["kind"] == "none" else SIGNAL_REPEATS * groups
    added = {}
    if count and bare:
        added = {
            "added_us_per_signal": round((timing.us - bare.us) / count, 3),
            "added_host_us_per_signal": round((timing.host_us - bare.host_us) / count, 3),
            "signal_arrived": True,  # `prepare` has checked it
        }
    num_copies = SIGNAL_REPEATS * (M.num_ranks - 1)
    params = {**params, "num_copies": num_copies, "num_signals": count}
    R.add("B", name, params, **timing.values(), **added)


def probe_capture(step: Callable[[], None]) -> None:
    """Capture with the bare runtime and throw the graph away: a refusal then spoils nothing."""
    mode = rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    torch.cuda.synchronize()
    checked(rt.cudaStreamBeginCapture(M.main.cuda_stream, mode))
    error = None
    try:
        step()
    except RuntimeError as exc:
        error = exc
    code, graph = rt.cudaStreamEndCapture(M.main.cuda_stream)
    if error:
        raise error
    checked((code, graph))
    checked(rt.cudaGraphDestroy(graph))


def ask_signals(_budget: Budget) -> None:
    """B: all but the stream write."""
    ask_signals_of(("copy4", "post store", "post xchg", "post_side", "vector post"))


def ask_stream_writes(_budget: Budget) -> None:
    """W: the stream write, last of all."""
    ask_signals_of(("stream_write",))


# --- C: barriers ------------------------------------------------------------------------------

NUM_BARRIERS = 20
BARRIERS = [
    ("xchg", "atomic", "count"),
    ("xchg", "atomic", "timer"),
    ("xchg", "volatile", "count"),
    ("xchg", "volatile", "timer"),
    ("store", "atomic", "count"),
    ("store", "volatile", "count"),
    ("store", "acquire", "count"),
    ("store", "acquire", "timer"),
]


def ask_barriers(_budget: Budget) -> None:
    """C: a chain of barriers, torch's and ours, under a backlog and in a graph."""
    steps_of: dict[str, Callable[[], None]] = {
        "torch": repeated(lambda: M.start.barrier(channel=3, timeout_ms=20_000)),
        "empty kernel": repeated(lambda: launch_stamp(31)),
    }
    for i, (how, poll, deadline) in enumerate(BARRIERS):
        steps_of[f"{how} {poll} {deadline}"] = repeated(own_barrier(i, how, poll, deadline))
    arms, about = {}, {}
    for kind, mode in product(steps_of, ("eager", "graph")):
        name = f"{kind} {mode}"
        about[name] = {"kind": kind, "mode": mode, "num_barriers": NUM_BARRIERS}
        run, error = prepare(name, steps_of[kind], graph=mode == "graph")
        if run:
            arms[name] = run
        else:
            R.add("C", name, about[name], error=error)
    for name, timing in rotate(arms, backlog_us=3000).items():
        R.add(
            "C",
            name,
            about[name],
            **timing.values(),
            us_per_barrier=round(timing.us / NUM_BARRIERS, 3),
            host_us_per_barrier=round(timing.host_us / NUM_BARRIERS, 3),
        )
    say("C: barriers done")


def own_barrier(index: int, how: str, poll: str, deadline: str) -> Callable[[], None]:
    """A variant with words of its own."""
    word, pad = OWN_BARRIER_WORDS + index, OWN_BARRIERS + 64 * index
    return lambda: launch_barrier(word, pad, post=how, poll=poll, deadline=deadline)


def repeated(step: Callable[[], object]) -> Callable[[], None]:
    """A chain of the same step."""

    def run() -> None:
        for _ in range(NUM_BARRIERS):
            step()

    return run


# --- D: starting beside a GEMM ----------------------------------------------------------------

MAIN_BEGIN, READY, PROBE, GEMM_END, GEMM_BEGIN = range(5)  # stamps
PROBES: dict[str, Callable[[], None]] = {
    "wait w1 r32": lambda: launch_wait(
        QUIET_WORD, QUIET_FLAGS, peer_bits(), advance=0, stamp_slot=PROBE, maxnreg=32
    ),
    "wait w1": lambda: launch_wait(
        QUIET_WORD, QUIET_FLAGS, peer_bits(), advance=0, stamp_slot=PROBE
    ),
    "stamp w1 r32": lambda: launch_stamp(PROBE, maxnreg=32),
    "stamp w4": lambda: launch_stamp(PROBE, num_warps=4),
}
READY_AFTER_US = 100
COPY_BYTES = 32 * MIB  # about 90 us on the copy engine


def ask_start_delay(budget: Budget) -> None:
    """D: a side kernel that becomes ready in the middle of a GEMM, then gaps between GEMMs."""
    for shape in ((8192, 7168, 8192), (2048, 7168, 8192)):
        if budget.allows(f"start delay {shape}"):
            ask_start_delay_at(shape)
    for shape, count in (((2048, 1280, 8192), 20), ((2048, 7168, 8192), 8)):
        if budget.allows(f"gaps {shape}"):
            ask_gaps(shape, count)


def side_probe(
    probe: str, stream: torch.cuda.Stream, delay: str, gemm: Callable[[], object] | None
) -> Callable[[], None]:
    """Main stream: stamp, short spin, GEMM, stamp; side: a delay from the stamp on, the probe."""
    outbox = M.address(M.rank, PAYLOAD_BYTES_AT)
    inbox = M.address(receiver("ring", 1), RECEIVE_BYTES_AT)

    def step() -> None:
        launch_stamp(MAIN_BEGIN)
        stream.wait_stream(M.main)
        with torch.cuda.stream(stream):
            if delay == "spin":
                launch_spin(READY, READY_AFTER_US)
            else:
                copy(inbox, outbox, COPY_BYTES, stream)
            PROBES[probe]()
        # long enough for the side's delay to start before the GEMM takes every SM
        launch_spin(GEMM_BEGIN, 20)
        if gemm:
            gemm()
        launch_stamp(GEMM_END)
        M.main.wait_stream(stream)

    return step


def stamp_trials(run: Callable[[], object], rounds: int = ROUNDS) -> torch.Tensor:
    """Stamps [rank * rounds, 5] in us since the first stamp, of all ranks."""
    rows = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(600 * CYCLES_PER_US)
        M.start.barrier(channel=7, timeout_ms=20_000)
        run()
        torch.cuda.synchronize()
        rows.append(M.stamps[:5].tolist())
    # differences of integers first: float64 cannot hold the clock to the nanosecond
    mine = torch.tensor(
        [[(stamp - row[MAIN_BEGIN]) / 1e3 for stamp in row] for row in rows],
        dtype=torch.float64,
        device=M.device,
    )
    everyone = torch.empty(M.num_ranks * rounds, 5, dtype=torch.float64, device=M.device)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.cpu()


def ask_start_delay_at(shape: tuple[int, int, int]) -> None:
    """Every probe, priority and delay beside one GEMM, eager and in a graph."""
    m, n, k = shape
    a, b, out = M.randn(m, k), M.randn(n, k).t(), torch.empty(m, n, dtype=BF16, device=M.device)

    def gemm() -> None:
        torch.mm(a, b, out=out)

    gemm()
    soak(0.3)
    for mode, delay in product(("eager", "graph"), ("spin", "copy")):
        ready_us = None
        if delay == "copy":
            ready_us = ready_time_of_a_copy(mode)
            if ready_us is None:
                continue
        for probe, priority in product(PROBES, ("high", "default")):
            params = {
                "m": m,
                "n": n,
                "k": k,
                "mode": mode,
                "delay": delay,
                "probe": probe,
                "priority": priority,
            }
            stream = M.side if priority == "high" else M.low
            step = side_probe(probe, stream, delay, gemm)
            name = f"start {probe} {priority} {delay} {mode}"
            run, error = prepare(name, step, graph=mode == "graph")
            if run:
                add_start_row(name, params, stamp_trials(run), ready_us)
            else:
                R.add("D", name, params, error=error)
    say(f"D: start delay beside {shape} done")


def ready_time_of_a_copy(mode: str) -> float | None:
    """When a kernel behind the copy starts with no GEMM beside it, us after the first stamp."""
    step = side_probe("stamp w1 r32", M.side, "copy", None)
    run, error = prepare(f"copy alone {mode}", step, graph=mode == "graph")
    if run is None:
        R.add("D", f"copy alone {mode}", {"mode": mode}, error=error)
        return None
    return stamp_trials(run)[:, PROBE].median().item()


def add_start_row(name: str, params: dict, us: torch.Tensor, ready_us: float | None) -> None:
    """The delay from ready to start; a copy's ready time is that of the copy alone."""
    ready = us[:, READY] if ready_us is None else torch.full_like(us[:, PROBE], ready_us)
    delay_us = us[:, PROBE] - ready
    R.add(
        "D",
        name,
        {**params, "ready": "stamped" if ready_us is None else "as without a GEMM"},
        delay_us=round(delay_us.median().item(), 2),
        delay_max_us=round(delay_us.max().item(), 2),
        started_before_gemm_end=round((us[:, PROBE] < us[:, GEMM_END]).double().mean().item(), 3),
        ready_us=round(ready.median().item(), 2),
        gemm_us=round((us[:, GEMM_END] - us[:, GEMM_BEGIN]).median().item(), 2),
    )


def ask_gaps(shape: tuple[int, int, int], count: int) -> None:
    """A chain of GEMMs, bare, and with something already satisfied between each two."""
    m, n, k = shape
    a, b, out = M.randn(m, k), M.randn(n, k).t(), torch.empty(m, n, dtype=BF16, device=M.device)
    source = torch.zeros(64 * KIB, dtype=torch.uint8, device=M.device)
    target = M.address(receiver("ring", 1), RECEIVE_BYTES_AT)

    def gemms(between: str) -> Callable[[], None]:
        def step() -> None:
            done = []
            if "edge" in between:
                M.side.wait_stream(M.main)
                for i in range(count - 1):
                    if i == 0 or between == "edges":
                        copy(target, source.data_ptr(), source.numel(), M.side)
                    done.append(M.side.record_event())
            for i in range(count):
                if i and done:
                    M.main.wait_event(done[i - 1])
                if i and "wait" in between:
                    launch_wait(QUIET_WORD, QUIET_FLAGS, peer_bits(), advance=0, maxnreg=32)
                torch.mm(a, b, out=out)
            if done:
                M.main.wait_stream(M.side)

        return step

    kinds = ("nothing", "wait", "edge", "edges", "wait and edges")
    arms, about = {}, {}
    for between, mode in product(kinds, ("eager", "graph")):
        name = f"gap {between} {mode}"
        about[name] = {"m": m, "n": n, "k": k, "between": between, "mode": mode, "gemms": count}
        run, error = prepare(name, gemms(between), graph=mode == "graph")
        if run:
            arms[name] = run
        else:
            R.add("D", name, about[name], error=error)
    timings = rotate(arms, backlog_us=2500, soak_s=0.3)
    for name, timing in timings.items():
        bare = timings.get(f"gap nothing {about[name]['mode']}")
        added = {"added_us_per_gap": round((timing.us - bare.us) / (count - 1), 3)} if bare else {}
        R.add("D", name, about[name], **timing.values(), **added)
    say(f"D: gaps between {shape} done")


# --- E and F: plans ---------------------------------------------------------------------------


def parse_groups(text: str) -> list[int]:
    """Group sizes of "1/1/2"."""
    return [int(part) for part in text.split("/")]


def split(items: list, sizes: list[int]) -> Iterator[list]:
    """Cut a list into groups of the given sizes."""
    assert sum(sizes) == len(items), (sizes, len(items))
    begin = 0
    for size in sizes:
        yield items[begin : begin + size]
        begin += size


def runs(units: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted units as [begin, end) intervals: one GEMM each."""
    merged: list[list[int]] = []
    for unit in sorted(units):
        if merged and merged[-1][1] == unit:
            merged[-1][1] = unit + 1
        else:
            merged.append([unit, unit + 1])
    return [(begin, end) for begin, end in merged]


def signal(kind: str, peer: int, slot: int) -> None:
    """Tell a peer that the push before, on the side stream, is there."""
    if kind == "copy4":
        target = M.address(peer, 4 * (DATA_FLAGS + slot))
        copy(target, M.word(PUSH_WORD).data_ptr(), 4, M.side)
    elif kind == "post":
        with torch.cuda.stream(M.side):
            launch_post(PUSH_WORD, DATA_FLAGS, 1 << peer, slot)
    elif kind == "post_side":
        M.signals.wait_stream(M.side)
        with torch.cuda.stream(M.signals):
            launch_post(PUSH_WORD, DATA_FLAGS, 1 << peer, slot)
    elif kind != "post_last":
        raise ValueError(kind)


def open_call() -> None:
    """Fork the side streams; no peer reads what the coming pushes overwrite."""
    M.side.wait_stream(M.main)
    with torch.cuda.stream(M.side):
        launch_barrier(PUSH_WORD, PUSH_BARRIER)
    M.signals.wait_stream(M.side)


def close_call() -> None:
    """Join the side streams."""
    M.main.wait_stream(M.side)
    M.main.wait_stream(M.signals)


def wait_for(units: Iterable[int], pieces: int, *, first: bool) -> None:
    """Hold the main stream until these units (source * pieces + piece) have arrived."""
    bits = 0
    for unit in units:
        source, piece = divmod(unit, pieces)
        bits |= 1 << (source * PIECES_PER_SHARD_MAX + piece)
    launch_wait(WAIT_WORD, DATA_FLAGS, bits, advance=int(first))


def assert_rows_close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Relative error of every row; NaN never passes."""
    error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)
    worst = error.max().item()
    if not torch.isfinite(error).all() or worst > limit:
        raise RuntimeError(f"wrong result: worst row error {worst:.3g}, limit {limit:g}")


class AllGatherGemm:
    """out = gather(x) @ b, by plans that differ in order, grouping and signal."""

    def __init__(self, m: int, n: int, k: int) -> None:
        """Draw inputs, and a reference that is itself checked against float64."""
        self.m, self.shard_rows = m, m // M.num_ranks
        self.x, self.b = M.randn(self.shard_rows, k), M.randn(n, k).t()
        self.row_bytes = k * BF16.itemsize
        self.pushed = M.local(PAYLOAD_BYTES_AT, (m, k), BF16)  # peers write it
        self.staged = M.local(STAGING_BYTES_AT, (self.shard_rows, k), BF16)  # peers read it
        self.pulled = torch.empty(m, k, dtype=BF16, device=M.device)
        self.out = torch.empty(m, n, dtype=BF16, device=M.device)
        dist.all_gather_into_tensor(self.pulled, self.x)
        self.gathered = self.pulled.clone()
        self.want = torch.mm(self.gathered, self.b)
        torch.cuda.synchronize()

    def check_reference(self) -> None:
        """Sampled rows of torch's own product against float64."""
        rows = torch.linspace(0, self.m - 1, 64, device=M.device).long()
        exact = self.gathered[rows].double() @ self.b.double()
        assert_rows_close(self.want[rows], exact, 1e-2)

    def own_rows(self) -> slice:
        """Where the own shard belongs."""
        return slice(M.rank * self.shard_rows, (M.rank + 1) * self.shard_rows)

    def own_first(self, gathered: torch.Tensor, group: list[int], pieces: int) -> bool:
        """Compute the own shard at once, or put it beside the peers' rows of its group."""
        if len(group) == pieces:
            torch.mm(self.x, self.b, out=self.out[self.own_rows()])
            return True
        gathered[self.own_rows()].copy_(self.x)
        return False

    def gemms(self, gathered: torch.Tensor, group: list[int], pieces: int) -> None:
        """One GEMM for each run of adjacent rows."""
        unit_rows = self.shard_rows // pieces
        for begin, end in runs(group):
            rows = slice(begin * unit_rows, end * unit_rows)
            torch.mm(gathered[rows], self.b, out=self.out[rows])

    def arrivals(self, order: str, pieces: int) -> list[int]:
        """Units (source * pieces + piece) in the order in which they come, own ones first."""
        sources = [M.rank] + [sender(order, s) for s in steps()]
        return [source * pieces + piece for source in sources for piece in range(pieces)]

    def push(self, order: str, sizes: list[int], pieces: int, kind: str) -> Callable[[], None]:
        """Push straight from x; each push carries a signal, the main stream waits by group."""
        piece_bytes = self.shard_rows // pieces * self.row_bytes
        source = self.x.data_ptr()
        place = PAYLOAD_BYTES_AT + M.rank * self.shard_rows * self.row_bytes
        groups = list(split(self.arrivals(order, pieces), sizes))

        def step() -> None:
            open_call()
            for peer, piece in product([receiver(order, s) for s in steps()], range(pieces)):
                shift = piece * piece_bytes
                copy(M.address(peer, place + shift), source + shift, piece_bytes, M.side)
                signal(kind, peer, M.rank * PIECES_PER_SHARD_MAX + piece)
            first_wait = True
            for index, group in enumerate(groups):
                if index == 0 and self.own_first(self.pushed, group, pieces):
                    continue
                foreign = [unit for unit in group if unit // pieces != M.rank]
                wait_for(foreign, pieces, first=first_wait)
                first_wait = False
                self.gemms(self.pushed, group, pieces)
            close_call()

        return step

    def pull(self, order: str, sizes: list[int]) -> Callable[[], None]:
        """Stage x, barrier, pull by group with events, barrier: the earlier design."""
        shard_bytes = self.shard_rows * self.row_bytes
        inbox = self.pulled.data_ptr()
        groups = list(split(self.arrivals(order, 1), sizes))

        def step() -> None:
            self.staged.copy_(self.x)
            M.side.wait_stream(M.main)
            arrived = []
            with torch.cuda.stream(M.side):
                launch_barrier(PULL_WORD, PULL_BARRIER)
                for group in groups:
                    for peer in group:
                        if peer != M.rank:
                            remote = M.address(peer, STAGING_BYTES_AT)
                            copy(inbox + peer * shard_bytes, remote, shard_bytes, M.side)
                    arrived.append(M.side.record_event())
                launch_barrier(PULL_WORD, PULL_BARRIER)
            for index, group in enumerate(groups):
                if index == 0 and self.own_first(self.pulled, group, 1):
                    continue
                M.main.wait_event(arrived[index])
                self.gemms(self.pulled, group, 1)
            M.main.wait_stream(M.side)

        return step

    def verify(self) -> Verify:
        """No row of the result may come from an earlier run."""

        def spoil() -> None:
            for tensor in (self.out, self.pushed, self.pulled, self.staged):
                tensor.fill_(float("nan"))

        return Verify(spoil, lambda: assert_rows_close(self.out, self.want, 1e-2))

    def arms(self) -> Iterator[tuple[str, dict, Callable[[], object], bool]]:
        """Name, params, step, and whether the step yields the whole result."""
        gathered = torch.empty_like(self.gathered)
        yield "compute", {}, lambda: torch.mm(self.gathered, self.b, out=self.out), True
        yield "nccl", {}, lambda: dist.all_gather_into_tensor(gathered, self.x), False

        def serial() -> None:
            dist.all_gather_into_tensor(gathered, self.x)
            torch.mm(gathered, self.b, out=self.out)

        yield "serial", {}, serial, True
        plans = [(text, 1) for text in AG_GROUPS[M.num_ranks]]
        plans += [(text, 2) for text in AG_HALF_GROUPS[M.num_ranks]]
        for order, (text, pieces) in product(("ring", "xor"), plans):
            params = {"order": order, "groups": text, "pieces": pieces}
            shown = text if pieces == 1 else f"{text} halves"
            for kind in ("copy4", "post", "post_side"):
                step = self.push(order, parse_groups(text), pieces, kind)
                about = {**params, "design": "push", "signal": kind}
                yield f"push {order} {shown} {kind}", about, step, True
            if pieces == 1:
                about = {**params, "design": "pull", "signal": "events"}
                yield f"pull {order} {shown}", about, self.pull(order, parse_groups(text)), True


class GemmReduceScatter:
    """out = own rows of the sum over ranks of a @ b, by plans that push partial rows."""

    def __init__(self, m: int, n: int, k: int) -> None:
        """Draw inputs, and a reference that is itself checked against float64."""
        self.m, self.shard_rows = m, m // M.num_ranks
        self.a, self.b = M.randn(m, k), M.randn(n, k).t()
        self.slot_bytes = self.shard_rows * n * BF16.itemsize
        self.slots = M.local(PAYLOAD_BYTES_AT, (M.num_ranks, self.shard_rows, n), BF16)
        self.partial = torch.empty(m, n, dtype=BF16, device=M.device)
        self.out = torch.empty(self.shard_rows, n, dtype=BF16, device=M.device)
        self.want = torch.empty(self.shard_rows, n, dtype=torch.float32, device=M.device)
        torch.mm(self.a, self.b, out=self.partial)
        dist.reduce_scatter_tensor(self.want, self.partial.float())
        rows = torch.linspace(0, m - 1, 8 * M.num_ranks, device=M.device).long()
        self.exact = self.a[rows].double() @ self.b.double()
        dist.all_reduce(self.exact)
        self.exact_rows = rows
        torch.cuda.synchronize()

    def check_reference(self) -> None:
        """The own rows among the sampled ones against float64."""
        mine = self.exact_rows // self.shard_rows == M.rank
        rows = self.exact_rows[mine] - M.rank * self.shard_rows
        assert_rows_close(self.want[rows], self.exact[mine], 1e-2)

    def rows(self, begin: int, end: int) -> slice:
        """Rows of a run of ranks."""
        return slice(begin * self.shard_rows, end * self.shard_rows)

    def gemms(self, group: list[int]) -> None:
        """Partial rows of a group; alone, the own rows go straight to the own slot."""
        if group == [M.rank]:
            own = self.a[self.rows(M.rank, M.rank + 1)]
            torch.mm(own, self.b, out=self.slots[M.rank])
            return
        for begin, end in runs(group):
            rows = self.rows(begin, end)
            torch.mm(self.a[rows], self.b, out=self.partial[rows])

    def push(
        self, order: str, sizes: list[int], kind: str, total: Callable[[], object]
    ) -> Callable[[], None]:
        """Push each group's partial rows to their owners beside the next group's GEMM."""
        # the owners in the order in which they are served: each step all ranks serve another one
        served = [sender(order, s) for s in steps()] + [M.rank]
        groups = list(split(served, sizes))
        place = PAYLOAD_BYTES_AT + M.rank * self.slot_bytes
        partial = self.partial.data_ptr()

        def step() -> None:
            open_call()
            for group in groups:
                self.gemms(group)
                M.side.wait_stream(M.main)
                for peer in group:
                    if peer != M.rank:
                        source = partial + peer * self.slot_bytes
                        copy(M.address(peer, place), source, self.slot_bytes, M.side)
                        signal(kind, peer, M.rank * PIECES_PER_SHARD_MAX)
                if M.rank in group and len(group) > 1:
                    self.slots[M.rank].copy_(self.partial[self.rows(M.rank, M.rank + 1)])
            if kind == "post_last":
                with torch.cuda.stream(M.side):
                    slot = M.rank * PIECES_PER_SHARD_MAX
                    launch_post(PUSH_WORD, DATA_FLAGS, peer_bits(), slot)
            wait_for((r for r in range(M.num_ranks) if r != M.rank), 1, first=True)
            total()
            close_call()

        return step

    def sum_torch(self) -> None:
        """The sum over slots by torch."""
        torch.sum(self.slots, 0, out=self.out)

    def sum_triton(self) -> None:
        """The sum over slots by one kernel of ours."""
        sum_slots(self.slots, self.out)

    def verify(self) -> Verify:
        """No row of the result may come from an earlier run."""

        def spoil() -> None:
            for tensor in (self.out, self.slots, self.partial):
                tensor.fill_(float("nan"))

        # partial rows are rounded to bf16 once more than in the reference
        return Verify(spoil, lambda: assert_rows_close(self.out, self.want, 2e-2))

    def arms(self) -> Iterator[tuple[str, dict, Callable[[], object], bool]]:
        """Name, params, step, and whether the step yields the whole result."""

        def serial() -> None:
            torch.mm(self.a, self.b, out=self.partial)
            dist.reduce_scatter_tensor(self.out, self.partial)

        yield "compute", {}, lambda: torch.mm(self.a, self.b, out=self.partial), False
        yield "nccl", {}, lambda: dist.reduce_scatter_tensor(self.out, self.partial), False
        yield "serial", {}, serial, True
        sums = {"sum_torch": self.sum_torch, "sum_triton": self.sum_triton}
        for name, total in sums.items():
            yield name, {}, total, False
        kinds = ("copy4", "post", "post_side", "post_last")
        texts = RS_GROUPS[M.num_ranks]
        for order, text, kind, total in product(("ring", "xor"), texts, kinds, sums):
            about = {"order": order, "groups": text, "signal": kind, "sum": total}
            step = self.push(order, parse_groups(text), kind, sums[total])
            yield f"push {order} {text} {kind} {total}", {**about, "design": "push"}, step, True


def compare_plans(question: str, shape: tuple[int, int, int]) -> None:
    """All plans of one op at one shape: checked, captured, timed in one rotation."""
    op = AllGatherGemm(*shape) if question == "E" else GemmReduceScatter(*shape)
    outcome = attempt(f"{question} {shape} reference", op.check_reference)
    if not outcome.ok:
        raise RuntimeError(f"reference of {question} {shape}: {outcome.error}")
    m, n, k = shape
    arms, about = {}, {}
    for name, params, step, is_whole in op.arms():
        about[name] = {"m": m, "n": n, "k": k, **params}
        verify = op.verify() if is_whole else None
        run, error = prepare(f"{question} {name}", step, graph=True, verify=verify)
        if run:
            arms[name] = run
        else:
            R.add(question, name, about[name], error=error)
    # the last check left NaN behind: baselines must not run on it
    refill_inputs(op)
    prepared_s = time.monotonic() - START_S
    timings = rotate(arms, soak_s=0.7, host_times=False)
    for name, timing in timings.items():
        R.add(question, name, about[name], **timing.values(), **gains(timing, timings))
    say(f"{question}: {shape}, {len(arms)} arms, prepared at {prepared_s:.0f} s")


def refill_inputs(op: AllGatherGemm | GemmReduceScatter) -> None:
    """Random numbers where a lone step reads what another one writes."""
    if isinstance(op, GemmReduceScatter):
        meet()
        op.slots.normal_(generator=M.generator)
        op.partial.normal_(generator=M.generator)
        meet()


def gains(timing: Timing, timings: dict[str, Timing]) -> dict[str, float]:
    """Speedup over serial, and the share of the hideable time that is hidden."""
    if not {"compute", "nccl", "serial"} <= timings.keys():
        return {}
    serial_us = timings["serial"].us
    hideable_us = serial_us - max(timings["compute"].us, timings["nccl"].us)
    return {
        "speedup_over_serial": round(serial_us / timing.us, 3),
        "hidden": round((serial_us - timing.us) / hideable_us, 3) if hideable_us > 0 else 0.0,
    }


def ask_all_gather(budget: Budget) -> None:
    """E: push and pull at every grouping."""
    for shape in AG_SHAPES:
        if budget.allows(f"all-gather {shape}"):
            compare_plans("E", shape)
            torch.cuda.empty_cache()


def ask_reduce_scatter(budget: Budget) -> None:
    """F: push at every grouping and signal, two sums."""
    for shape in RS_SHAPES:
        if budget.allows(f"reduce-scatter {shape}"):
            compare_plans("F", shape)
            torch.cuda.empty_cache()


# --- the table --------------------------------------------------------------------------------


def print_table() -> None:
    """What fits below 10,000 characters; the file has everything."""
    if M.rank:
        return
    print(f"\n{M.num_ranks} ranks, {R.facts.get('gpu')}; us, slowest rank, median")
    for part in (table_a, table_b, table_c, table_d, table_e, table_f):
        try:
            part()
        except Exception:
            traceback.print_exc()
    errors = [f"{r['question']} {r['arm']}: {r['error'][:90]}" for r in R.rows if "error" in r]
    print(f"errors or skipped: {len(errors)}")
    for line in errors[:12]:
        print("  " + line)


def table_a() -> None:
    """A line per direction, order and size; a column per form."""
    rows = R.of("A")
    if not rows:
        return
    print("A: GB/s (host us of the whole call) " + " | ".join(COPY_MODES))
    keys = dict.fromkeys(
        (r["params"]["bytes"], r["params"]["direction"], r["params"]["order"]) for r in rows
    )
    for num_bytes, direction, order in keys:
        cells = []
        for mode in COPY_MODES:
            found = R.of("A", bytes=num_bytes, direction=direction, order=order, mode=mode)
            cell = f"{found[0]['gb_per_s']:5.0f} ({found[0]['host_us']:4.0f})" if found else "-"
            cells.append(cell)
        print(f"  {num_bytes // MIB:3d} MiB {direction:13s} {order:4s} " + " | ".join(cells))


def table_b() -> None:
    """A line per kind."""
    kinds = dict.fromkeys(r["params"]["kind"] for r in R.of("B"))
    if kinds:
        print("B: call us, +us per signal (+host us): eager | graph")
    for kind in kinds:
        cells = []
        for mode in ("eager", "graph"):
            found = R.of("B", kind=kind, mode=mode)
            cells.append(
                " / ".join(
                    f"{r['us']:.1f} {r.get('added_us_per_signal', 0):+.2f}"
                    f" ({r.get('added_host_us_per_signal', 0):+.1f})"
                    for r in found
                )
                or "-"
            )
        print(f"  {kind:13s} " + " | ".join(cells))


def table_c() -> None:
    """A line per barrier."""
    kinds = dict.fromkeys(r["params"]["kind"] for r in R.of("C"))
    if kinds:
        print("C: us per barrier: eager | graph | host us, eager")
    for kind in kinds:
        eager, graph = (R.of("C", kind=kind, mode=mode) for mode in ("eager", "graph"))
        cells = [f"{rows[0]['us_per_barrier']:.2f}" if rows else "-" for rows in (eager, graph)]
        cells += [f"{r['host_us_per_barrier']:.1f}" for r in eager]
        print(f"  {kind:22s} " + " | ".join(cells))


def table_d() -> None:
    """A line per shape, delay and probe; the columns are mode and priority."""
    starts = [r for r in R.of("D") if "delay_us" in r]
    if starts:
        print(
            "D: start delay us, median/max (share started before the GEMM's end):"
            " eager hi | eager lo | graph hi | graph lo"
        )
    keys = dict.fromkeys(tuple(r["params"][key] for key in ("m", "delay", "probe")) for r in starts)
    for m, delay, probe in keys:
        cells = []
        for mode, priority in product(("eager", "graph"), ("high", "default")):
            found = R.of("D", m=m, delay=delay, probe=probe, mode=mode, priority=priority)
            cells += [
                f"{r['delay_us']:.0f}/{r['delay_max_us']:.0f}({r['started_before_gemm_end']:.1f})"
                for r in found
            ]
        print(f"  {m} {delay:4s} {probe:13s} " + " | ".join(cells))
    for row in R.of("D"):
        if "added_us_per_gap" in row:
            p = row["params"]
            shape = f"{p['m']},{p['n']},{p['k']}"
            print(f"  {row['arm']:25s} {shape:15s} {row['added_us_per_gap']:+.2f} us per gap")


def print_plans(question: str, shapes: tuple, keys: tuple[str, ...]) -> None:
    """Baselines, the best plans, and the best plan for each value of each key."""
    for m, n, k in shapes:
        rows = R.of(question, m=m, n=n, k=k)
        fixed = [r for r in rows if "design" not in r["params"]]
        plans = sorted((r for r in rows if "design" in r["params"]), key=lambda r: r["us"])
        if not plans:
            continue
        head = ", ".join(f"{r['arm']} {r['us']:.1f}" for r in fixed)
        print(f"{question}: {m},{n},{k}: {head}")
        for row in plans[:5]:
            print(f"  {row['arm']:38s} {row['us']:8.1f}  hidden {row.get('hidden', 0):.2f}")
        for key in keys:
            best: dict[str, float] = {}
            for row in plans:
                best.setdefault(str(row["params"].get(key)), row["us"])
            print(f"  by {key}: " + ", ".join(f"{v} {us:.1f}" for v, us in best.items()))


def table_e() -> None:
    """All-gather plans."""
    print_plans("E", AG_SHAPES, ("design", "order", "signal", "pieces", "groups"))


def table_f() -> None:
    """Reduce-scatter plans."""
    print_plans("F", RS_SHAPES, ("order", "signal", "sum", "groups"))


# --- main -------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Budget], None]] = {
    "A": ask_copies,
    "B": ask_signals,
    "C": ask_barriers,
    "D": ask_start_delay,
    "E": ask_all_gather,
    "F": ask_reduce_scatter,
    "W": ask_stream_writes,
}


def compile_kernels() -> None:
    """First launches together, on all ranks, so that no wait counts a peer's compiler."""
    launch_stamp(MAIN_BEGIN)
    for probe in PROBES.values():
        probe()
    launch_spin(READY, 1)
    for how in ("store", "xchg"):
        launch_post(SIGNAL_WORD, SIGNAL_FLAGS, 1 << M.rank, 0, post=how)
    launch_wait(QUIET_WORD, QUIET_FLAGS, 0, advance=0)
    slots = M.local(PAYLOAD_BYTES_AT, (M.num_ranks, 2048), BF16)
    sum_slots(slots, torch.empty(2048, dtype=BF16, device=M.device))
    torch.cuda.synchronize()
    # the barriers poll peers: each rank compiles by a barrier with itself alone, then they meet
    for how, poll, deadline in BARRIERS:
        barrier_kernel[(1,)](
            M.word(31),
            M.pad_table(PUSH_BARRIER),
            M.pad(PUSH_BARRIER),
            0,
            1,
            M.fault.data_ptr(),
            DEADLINE_NS if deadline == "timer" else SPIN_LIMIT,
            POST=how,
            POLL=poll,
            DEADLINE=deadline,
            LANES=LANES,
            num_warps=1,
        )
    raise_on_fault()


def run_section(name: str) -> None:
    """One section; its failure does not cost the others."""
    say(f"section {name}")
    error = ""
    try:
        SECTIONS[name](Budget(name))
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"[:300]
        print(f"rank {M.rank}, section {name}:", file=sys.stderr)
        traceback.print_exc()
    if not agree(not error):
        say(f"section {name} failed")
        R.add(name, "section", {}, error=error or "failed on another rank")
    torch.cuda.empty_cache()


def main() -> None:
    """Ask the chosen sections, in the order of SECTIONS."""
    global M, R
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, by rank 0.")
    parser.add_argument("--sections", default="ABCDEFW", help="Any of ABCDEFW.")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections {sorted(unknown)}")
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    refuse_multicast()
    M = build_machine()
    if M.num_ranks not in AG_GROUPS:
        raise SystemExit(f"needs 2, 4 or 8 ranks, got {M.num_ranks}")
    R = Report(args.out)
    say(f"{M.num_ranks} ranks joined")
    compiled = attempt("compile", compile_kernels)
    say("kernels compiled" if compiled.ok else f"compile: {compiled.error}")
    meet()
    try:
        for name in SECTIONS:
            if name in args.sections:
                run_section(name)
    finally:
        print_table()
    say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
