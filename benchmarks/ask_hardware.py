"""Ask the machine first: what copies, signals, barriers and waits cost, before a plan assumes it.

    torchrun --standalone --nproc-per-node N benchmarks/ask_hardware.py --out FILE.jsonl

    A  copies to every peer once: push or pull, ring or XOR, single, batched, in a graph
    B  a signal behind each copy: a 4-byte copy, a stream write-value, a kernel, one kernel for all
    C  a barrier: torch's, and one warp that posts to all peers and polls all words at once
    D  a one-warp kernel beside cuBLAS: when does it start, and what does a wait between GEMMs add

It imports nothing from counterpoint. Times are medians over rounds of the slowest rank, behind a
backlog and a device-side barrier, all arms of a question in one randomised rotation. How finely
shards are best grouped is the business of benchmarks/overlap.py.
"""

import argparse
import datetime
import faulthandler
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from cuda.bindings import driver as cu
from cuda.bindings import runtime as rt

MIB = 1 << 20
NUM_BYTES = 512 * MIB
POSTED = 32  # the words of a pad that question B writes; those before are question C's
D2D = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
Arm = Callable[[], object]


@triton.jit
def now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def stamp_kernel(out_ptr):
    tl.store(out_ptr, now_ns())


@triton.jit
def sleep_kernel(out_ptr, duration_ns):
    start_ns = now_ns()
    end_ns = start_ns
    while end_ns - start_ns < duration_ns:
        end_ns = now_ns()
    tl.store(out_ptr, end_ns)


@triton.jit(do_not_specialize=["rank", "distance"])
def post_kernel(pad_ptrs, epoch_ptr, rank, distance, WORLD: tl.constexpr, ALL: tl.constexpr):
    epoch = tl.load(epoch_ptr)
    tl.debug_barrier()
    if ALL:  # one vector to all peers
        lanes = tl.arange(0, 32)
        mask = (lanes < WORLD) & (lanes != rank)
        pads = tl.load(pad_ptrs + lanes, mask=mask, other=0).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pads + 32 + rank, epoch, mask=mask, sem="release", scope="sys")
    else:
        pad = tl.load(pad_ptrs + (rank + distance) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad + 32 + rank, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(
    pad_ptrs, epoch_ptr, fault_ptr, rank,
    WORLD: tl.constexpr, POLL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, 32)
    mask = (lanes < WORLD) & (lanes != rank)
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    pads = tl.load(pad_ptrs + lanes, mask=mask, other=0).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    # pairs with the poll below, on the peers
    tl.atomic_xchg(pads + rank, epoch, mask=mask, sem="release", scope="sys")
    own = tl.load(pad_ptrs + rank).to(tl.pointer_type(tl.int32)) + lanes
    late = mask
    start_ns = now_ns() if BOUNDED else 0
    num_late = tl.sum(late.to(tl.int32))
    while num_late > 0:
        if POLL == "atomic":
            seen = tl.atomic_add(own, 0, mask=late, sem="acquire", scope="sys")
        else:
            seen = tl.load(own, mask=late, other=0, volatile=True)
        late = late & (seen - epoch < 0)
        num_late = tl.sum(late.to(tl.int32))
        if BOUNDED:
            if num_late > 0:
                if now_ns() - start_ns > 5_000_000_000:
                    tl.store(fault_ptr, 1)
                    num_late = 0


def ok(result):
    """The value of a CUDA call; raises on an error status."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) > 1 else None


class Bench:
    """Ranks, buffers, one way to time arms, and the questions."""

    def __init__(self, out: str) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.handle, self.peers, _ = self.symmetric(NUM_BYTES, torch.uint8)
        _, self.pads, self.pad = self.symmetric(1024, torch.int32)
        self.pad_table = torch.tensor(self.pads, dtype=torch.int64, device=self.device)
        self.local = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8, device=self.device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.fault = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.high, self.low = torch.cuda.Stream(priority=-5), torch.cuda.Stream()
        self.path, self.start_s = out, time.monotonic()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        self.facts = {
            "ranks": self.world, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
            "triton": triton.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "multicast": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1",
            "commit": os.environ.get("COUNTERPOINT_COMMIT", ""), "table": "hardware",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        }  # fmt: skip
        torch.cuda.synchronize()
        dist.barrier()

    def symmetric(self, size: int, dtype: torch.dtype):
        """Handle, addresses by rank, and the own tensor of a zero-filled symmetric buffer."""
        own = symmetric_memory.empty(size, dtype=dtype, device=self.device).zero_()
        handle = symmetric_memory.rendezvous(own, dist.group.WORLD.group_name)
        every = range(self.world)
        return handle, [handle.get_buffer(r, (size,), dtype).data_ptr() for r in every], own

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.start_s:4.0f} s] {text}", flush=True)

    def row(self, question: str, arm: str, **values: object) -> None:
        if self.rank == 0:
            with open(self.path, "a") as file:
                row = {"question": question, "arm": arm, **values, **self.facts}
                file.write(json.dumps(row) + "\n")

    def rotate(self, arms: dict[str, Arm], rounds: int = 9) -> dict[str, float]:
        """Median over rounds of the slowest rank's seconds."""
        for arm in arms.values():
            arm()
        a = torch.randn(8192, 8192, device=self.device).bfloat16()
        for _ in range(200):
            torch.mm(a, a)
        names, shuffle = list(arms), random.Random(0)
        taken = torch.zeros(len(names), rounds, device=self.device)
        index = {name: i for i, name in enumerate(names)}
        for i in range(rounds):
            shuffle.shuffle(names)
            for name in names:
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                dist.barrier()
                torch.cuda.synchronize()
                torch.cuda._sleep(2_000_000)
                self.handle.barrier(channel=1)
                start.record()
                arms[name]()
                end.record()
                torch.cuda.synchronize()
                taken[index[name], i] = start.elapsed_time(end) * 1e-3
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return {name: statistics.median(taken[i].tolist()) for name, i in index.items()}

    def host_us(self, arm: Arm, calls: int = 20) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(60_000_000)
        start_s = time.perf_counter()
        for _ in range(calls):
            arm()
        taken = (time.perf_counter() - start_s) / calls * 1e6
        torch.cuda.synchronize()
        return taken

    def forked(self, body: Callable[[int], object]) -> Arm:
        """`body` on the high-priority stream, forked from and joined to the current one."""

        def arm() -> None:
            main = torch.cuda.current_stream()
            self.high.wait_stream(main)
            with torch.cuda.stream(self.high):
                body(self.high.cuda_stream)
            main.wait_stream(self.high)

        return arm

    def graphed(self, arm: Arm) -> Arm:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            arm()
        return graph.replay

    def copies(self) -> None:
        """A: each peer once, at four sizes."""
        for mib in (1, 4, 16, 64):
            size = mib * MIB
            arms, hosts = {}, {}
            for order in ("ring", "xor"):
                for direction in ("push", "pull"):
                    pairs = self.pairs(order, direction, size)
                    for kind, arm in self.copy_arms(pairs, size).items():
                        arms[f"{order} {direction} {kind}"] = arm
                    for kind in ("single", "batched"):
                        name = f"{order} {direction} {kind}"
                        hosts[name] = self.host_us(arms[name])
            times, total = self.rotate(arms), size * (self.world - 1)
            for arm, seconds in times.items():
                self.row("A copies", arm, mib=mib, us=seconds * 1e6,
                         gb_per_s=total / seconds / 1e9, host_us=hosts.get(arm))  # fmt: skip
            best = sorted(times, key=times.__getitem__)[:6]
            self.say(f"A {mib} MiB: " + ", ".join(
                f"{a} {times[a] * 1e6:.0f} us {total / times[a] / 1e9:.0f} GB/s" for a in best
            ))  # fmt: skip
        rows, width, pitch = 2048, 2048, 16384

        def strided(stream: int) -> None:
            for d in range(1, self.world):
                target = self.peers[(self.rank + d) % self.world] + self.rank * width
                source = self.local.data_ptr()
                ok(rt.cudaMemcpy2DAsync(target, pitch, source, pitch, width, rows, D2D, stream))

        arm = self.forked(strided)
        for name, seconds in self.rotate({"single": arm, "graph": self.graphed(arm)}).items():
            rate = rows * width * (self.world - 1) / seconds / 1e9
            self.row("A strided copies, 2048 rows of 2 KiB", name, us=seconds * 1e6, gb_per_s=rate)
            self.say(f"A strided {name}: {seconds * 1e6:.0f} us {rate:.0f} GB/s")

    def pairs(self, order: str, direction: str, size: int) -> list[tuple[int, int]]:
        """(target, source) of a copy with each peer."""
        me, local = self.rank, self.local.data_ptr()
        distances = range(1, self.world)
        peers = [(me + d) % self.world if order == "ring" else me ^ d for d in distances]
        if direction == "push":
            return [(self.peers[q] + me * size, local + q * size) for q in peers]
        return [(local + q * size, self.peers[q] + me * size) for q in peers]

    def copy_arms(self, pairs: list[tuple[int, int]], size: int) -> dict[str, Arm]:
        def single(stream: int) -> None:
            for target, source in pairs:
                ok(rt.cudaMemcpyAsync(target, source, size, D2D, stream))

        def batched(stream: int) -> None:
            attributes = rt.cudaMemcpyAttributes()
            stream_order = rt.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            attributes.srcAccessOrder = stream_order
            targets, sources = [t for t, _ in pairs], [s for _, s in pairs]
            ok(rt.cudaMemcpyBatchAsync(targets, sources, [size] * len(pairs), len(pairs),
                                       [attributes], [0], 1, stream))  # fmt: skip

        def at_once() -> None:
            main = torch.cuda.current_stream()
            for target, source in pairs:
                stream = torch.cuda.Stream(priority=-5)
                stream.wait_stream(main)
                ok(rt.cudaMemcpyAsync(target, source, size, D2D, stream.cuda_stream))
                main.wait_stream(stream)

        return {
            "single": self.forked(single),
            "batched": self.forked(batched),
            "graph": self.graphed(self.forked(single)),
            "graph, joined one by one": self.graphed(at_once),
        }

    def signals(self) -> None:
        """B: two pushes of 4 MiB to each peer, each followed by a signal."""
        size, me, world = 4 * MIB, self.rank, self.world
        ring = [(d, (me + d) % world) for d in range(1, world)] * 2

        def pushes(signal, after=lambda: None) -> Arm:
            def body(stream: int) -> None:
                for d, q in ring:
                    target = self.peers[q] + me * size
                    ok(rt.cudaMemcpyAsync(target, self.local.data_ptr(), size, D2D, stream))
                    signal(d, self.pads[q] + 4 * (POSTED + me), stream)
                after()

            return self.forked(body)

        def copy4(_, word, stream):
            ok(rt.cudaMemcpyAsync(word, self.epoch.data_ptr(), 4, D2D, stream))

        def write_value(_, word, stream):
            ok(cu.cuStreamWriteValue32(stream, word, 7, 0))

        def post(d, one: bool):
            post_kernel[(1,)](self.pad_table, self.epoch, me, d, WORLD=world, ALL=not one,
                              num_warps=1)  # fmt: skip

        def nothing(*_):
            pass

        bodies = {
            "no signal": pushes(nothing),
            "4-byte copy": pushes(copy4),
            "kernel": pushes(lambda d, *_: post(d, True)),
            "one kernel behind all": pushes(nothing, lambda: post(0, False)),
            "write value": pushes(write_value),
        }
        arms: dict[str, Arm] = {}
        for name, arm in bodies.items():
            for mode in ("eager", "graph"):
                self.pad.zero_()
                self.epoch.fill_(5)
                torch.cuda.synchronize()
                dist.barrier()
                arm()
                arms[f"{name} {mode}"] = self.graphed(arm) if mode == "graph" else arm
                arms[f"{name} {mode}"]()
                torch.cuda.synchronize()
                dist.barrier()
                words = [self.pad[POSTED + r].item() for r in range(world) if r != me]
                want = {"no signal": 0, "write value": 7}.get(name, 5)
                if words != [want] * (world - 1):
                    raise RuntimeError(f"{name} {mode}: signals {words}, not {want}")
        times = self.rotate(arms, rounds=15)
        for arm, seconds in times.items():
            base = times[f"no signal {arm.rsplit(' ', 1)[1]}"]
            each = (seconds - base) / len(ring) * 1e6
            self.row("B signals", arm, us=seconds * 1e6, us_per_signal=each, pushes=len(ring))
            self.say(f"B {arm}: {seconds * 1e6:.0f} us, {each:+.2f} us a push")
        self.epoch.zero_()

    def barriers(self) -> None:
        """C: 20 in a row."""
        num = 20
        self.pad.zero_()
        torch.cuda.synchronize()
        dist.barrier()

        def own(poll: str, bounded: bool) -> Arm:
            def arm() -> None:
                for _ in range(num):
                    barrier_kernel[(1,)](self.pad_table, self.epoch, self.fault, self.rank,
                                         WORLD=self.world, POLL=poll, BOUNDED=bounded,
                                         num_warps=1)  # fmt: skip

            return arm

        bodies: dict[str, Arm] = {
            "torch": lambda: [self.handle.barrier(channel=2) for _ in range(num)],
            "one warp, atomic": own("atomic", False),
            "one warp, volatile": own("volatile", False),
            "one warp, atomic, bounded": own("atomic", True),
        }
        arms: dict[str, Arm] = {}
        for name, arm in bodies.items():
            arm()
            arms[f"{name} eager"], arms[f"{name} graph"] = arm, self.graphed(arm)
        for arm, seconds in self.rotate(arms, rounds=15).items():
            self.row("C barriers", arm, us=seconds / num * 1e6)
            self.say(f"C {arm}: {seconds / num * 1e6:.2f} us a barrier")
        if self.fault.item():
            raise RuntimeError("a barrier gave up")

    def beside_cublas(self) -> None:
        """D: a kernel that becomes ready 100 us into a GEMM; and what stands between two GEMMs."""
        stamps = torch.zeros(8, dtype=torch.int64, device=self.device)
        for m, n, k in ((8192, 7168, 8192), (2048, 7168, 8192)):
            a = torch.randn(m, k, device=self.device).bfloat16()
            b = torch.randn(n, k, device=self.device).bfloat16().t()
            c = torch.empty(m, n, device=self.device, dtype=torch.bfloat16)
            for warps in (1, 4):
                for name, stream in (("high priority", self.high), ("default", self.low)):

                    def beside(warps=warps, stream=stream, a=a, b=b, c=c) -> None:
                        main = torch.cuda.current_stream()
                        stream.wait_stream(main)
                        with torch.cuda.stream(stream):
                            sleep_kernel[(1,)](stamps[0:], 100_000, num_warps=1)
                            stamp_kernel[(1,)](stamps[1:], num_warps=warps)
                        stamp_kernel[(1,)](stamps[2:], num_warps=1)
                        torch.mm(a, b, out=c)
                        stamp_kernel[(1,)](stamps[3:], num_warps=1)
                        main.wait_stream(stream)

                    beside()
                    for mode, arm in (("eager", beside), ("graph", self.graphed(beside))):
                        delays_us, gemms_us = [], []
                        for _ in range(9):
                            torch.cuda.synchronize()
                            torch.cuda._sleep(2_000_000)
                            arm()
                            slept, started, begun, ended = stamps.tolist()[:4]
                            delays_us.append((started - slept) / 1e3)
                            gemms_us.append((ended - begun) / 1e3)
                        delay, gemm = statistics.median(delays_us), statistics.median(gemms_us)
                        arm_name = f"{m},{n},{k} {warps} warps {name} {mode}"
                        self.row("D start beside cuBLAS", arm_name, delay_us=delay, gemm_us=gemm)
                        self.say(f"D {arm_name}: {delay:.1f} us after it may, GEMM {gemm:.0f} us")
        self.between_gemms(stamps)

    def between_gemms(self, stamps: torch.Tensor, num: int = 8) -> None:
        a = torch.randn(1024, 8192, device=self.device).bfloat16()
        b = torch.randn(7168, 8192, device=self.device).bfloat16().t()
        c = torch.empty(1024, 7168, device=self.device, dtype=torch.bfloat16)

        def chain(between: Arm) -> Arm:
            def arm() -> None:
                self.low.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.low):
                    stamp_kernel[(1,)](stamps[4:], num_warps=1)
                for _ in range(num):
                    torch.mm(a, b, out=c)
                    between()
                torch.cuda.current_stream().wait_stream(self.low)

            return self.graphed(arm)

        times = self.rotate({
            "GEMM, GEMM": chain(lambda: None),
            "GEMM, one-warp kernel, GEMM": chain(lambda: stamp_kernel[(1,)](stamps[5:],
                                                                            num_warps=1)),
            "GEMM, edge from a side stream, GEMM": chain(
                lambda: torch.cuda.current_stream().wait_stream(self.low)),
        }, rounds=15)  # fmt: skip
        for arm, seconds in times.items():
            added = (seconds - times["GEMM, GEMM"]) / num * 1e6
            self.row("D gap between GEMMs", arm, us=seconds * 1e6 / num, added_us=added)
            self.say(f"D {arm}: {seconds * 1e6 / num:.1f} us, {added:+.2f} us")


def main() -> None:
    """Ask the chosen questions in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--questions", default="ABCD")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(280, exit=True)
    bench = Bench(args.out)
    asked = {"A": bench.copies, "B": bench.signals, "C": bench.barriers, "D": bench.beside_cublas}
    for letter, question in asked.items():
        if letter in args.questions:
            question()
            torch.cuda.synchronize()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
