"""Copies and transports move the bytes that they should, and nothing else runs for them."""

import pytest
import torch
import torch.distributed as dist
from activities import device_activities

import counterpoint
from benchmarks.peer_moves import ring
from benchmarks.transports import TRANSPORTS, missing, open_transport
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import driver
from counterpoint.gpu.driver import Copy, copies_async, copy_async, copy_batch_async
from counterpoint.group.symmetric import allocate
from counterpoint.measure.profile import traced
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.problem import ITEM_BYTES, Problem

SENTINEL = 0xA5
SIZES = (1, 15, 4096, 70001, 1 << 20)  # bytes
GUARD = 64  # bytes between two copies
NUM_COPIES = 56


class Ends:
    """Memory of all ranks to copy from and to; what is written is known by what was there."""

    def __init__(self, device, num_bytes=8 << 20):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.source = allocate(num_bytes, dist.group.WORLD, device)
        self.target = allocate(num_bytes, dist.group.WORLD, device)
        self.stream = torch.cuda.Stream(device)
        self.fill()

    def fill(self):
        """New random bytes on each rank, and no trace of the copies before."""
        meet()
        self.source.local().random_(0, 256)
        self.target.local().fill_(SENTINEL)
        meet()

    def peer(self, i):
        return ring(self.rank, self.ranks)[i % (self.ranks - 1)]

    def sender(self, i, direction):
        """Whose bytes the i-th copy brings to this rank."""
        if direction == "pull":
            return self.peer(i)
        return (self.rank - 1 - i % (self.ranks - 1)) % self.ranks

    def between(self, i, direction, start, pitch, width, height=1):
        """The i-th copy: the same place at both ends."""
        peer = self.peer(i)
        to, at = (peer, self.rank) if direction == "push" else (self.rank, peer)
        target, source = self.target.buffer_ptrs[to], self.source.buffer_ptrs[at]
        return Copy(target + start, pitch, source + start, pitch, width, height)


def meet():
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def ends(gpus):
    return Ends(gpus)


def spans():
    """(start, size) of each copy of a batch."""
    start = GUARD
    for i in range(NUM_COPIES):
        size = SIZES[i % len(SIZES)] if i < 2 * len(SIZES) else 4096 + i
        yield start, size
        start += size + GUARD


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_batch_moves_its_bytes_and_no_others(ends, direction):
    for _ in range(3):
        ends.fill()
        want = ends.target.local().clone()
        copies = []
        for i, (start, size) in enumerate(spans()):
            copies.append(ends.between(i, direction, start, size, size))
            sent = ends.source.peer(ends.sender(i, direction))
            want[start : start + size] = sent[start : start + size]
        meet()
        with torch.cuda.stream(ends.stream):
            copy_batch_async(copies, ends.stream.cuda_stream)
        meet()
        assert torch.equal(ends.target.local(), want)


def test_a_batch_is_in_stream_order_as_a_whole(ends):
    """What is written before it on the stream is what it reads, and it is there behind it."""
    size, stream = 1 << 16, ends.stream
    ends.fill()
    later = torch.empty(size * 8, dtype=torch.uint8, device="cuda").random_(0, 256)
    seen = torch.empty_like(later)
    torch.cuda.synchronize()
    local = [Copy(ends.target.local().data_ptr() + i * size, size,
                  ends.source.local().data_ptr() + i * size, size, size, 1)
             for i in range(8)]  # fmt: skip
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        ends.source.local()[: later.numel()].copy_(later)
        copy_batch_async(local, stream.cuda_stream)
        seen.copy_(ends.target.local()[: later.numel()])
    meet()
    assert torch.equal(seen, later)


def test_a_batch_is_refused_on_the_legacy_stream(ends):
    copies = [ends.between(i, "push", i * 4096, 4096, 4096) for i in range(4)]
    ends.fill()
    with pytest.raises(InputError, match="stream must be another than the legacy one, got 0"):
        copy_batch_async(copies, torch.cuda.default_stream().cuda_stream)
    meet()
    assert (ends.target.local() == SENTINEL).all(), "a refused batch has copied"
    meet()  # all have looked
    copies_async(copies, torch.cuda.default_stream().cuda_stream, capturing=False)
    meet()
    for i in range(4):
        rows = slice(i * 4096, (i + 1) * 4096)
        assert torch.equal(
            ends.target.local()[rows], ends.source.peer(ends.sender(i, "push"))[rows]
        )


def test_a_batch_is_refused_in_a_capture_and_single_copies_replay(ends):
    copies = [ends.between(i, "push", i * 4096, 4096, 4096) for i in range(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        with pytest.raises(InputError, match="stream must be one that is not captured"):
            copy_batch_async(copies, stream)
        copies_async(copies, stream, capturing=True)
    for _ in range(2):
        ends.fill()
        graph.replay()
        meet()
        for i in range(8):
            rows = slice(i * 4096, (i + 1) * 4096)
            sent = ends.source.peer(ends.sender(i, "push"))
            assert torch.equal(ends.target.local()[rows], sent[rows])
        assert (ends.target.local()[8 * 4096 :] == SENTINEL).all()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_strided_copies_beside_a_batch(ends, direction):
    """Columns of a matrix by pitch, rows below them as a batch."""
    rows, width, pitch = 37, 200, 1024
    ends.fill()
    want = ends.target.local().clone()
    copies, half = [], len(want) // 2
    for i in range(4):
        copies.append(ends.between(i, direction, i * 256, pitch, width, rows))
        copies.append(ends.between(i, direction, half + i * 5000, 4999, 4999))
        sent = ends.source.peer(ends.sender(i, direction))
        for row in range(rows):
            start = row * pitch + i * 256
            want[start : start + width] = sent[start : start + width]
        want[half + i * 5000 :][:4999] = sent[half + i * 5000 :][:4999]
    meet()
    copies_async(copies, ends.stream.cuda_stream, capturing=False)
    meet()
    assert torch.equal(ends.target.local(), want)


def test_this_machine_has_batches_and_copy_engines(gpus):
    assert driver.no_batches() == ""
    assert driver.num_copy_engines(gpus.index) >= 1


SPECS = [
    ("all_gather_matmul", "shard_p2p ring"),
    ("matmul_reduce_scatter", "shard_p2p ring"),
    ("all_gather_matmul", "uniform_fused_1d"),
    ("all_gather_matmul", "uniform_fused_2d"),
    ("matmul_reduce_scatter", "uniform_fused_1d"),
]
# of steps that are no matmul and no copy
KERNELS = {"barrier": "signal_kernel", "wait": "signal_kernel", "reduce": "reduce_kernel"}


@pytest.mark.own_gpu
@pytest.mark.parametrize(("op", "spec"), SPECS, ids=" ".join)
def test_what_runs_is_the_plans_copies_matmuls_and_signals(gpus, op, spec):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, n, k = 512, 1024, 2048
    gathers = op == "all_gather_matmul"
    x = torch.randn(rows if gathers else rows * ranks, k, device=gpus).bfloat16()
    w = torch.randn(k, n, device=gpus).bfloat16()

    def call():
        return getattr(counterpoint, op)(x, w, plan=spec)

    call()
    meet()
    found = device_activities(traced(call)[1])
    meet()

    plan = build(Problem(op, rows * ranks, n, k, ranks), spec)
    copied, remote = {}, 0
    for bound in bind(plan, rank).steps:
        if bound.step.kind != "copy":
            continue
        signals = 4 * len(bound.posts)
        total, far = signals, signals
        for part in bound.parts:
            height, width = part.write.shape
            num_bytes = height * width * ITEM_BYTES[plan.buffer(part.write.buffer).dtype]
            total += num_bytes
            if {part.write.rank, part.reads[0].rank} != {rank}:
                far += num_bytes
        copied[bound.step.name] = total
        remote += far
    assert copied

    seen = dict.fromkeys(copied, 0)
    for activity in found:
        if activity.kind == "copy":
            assert activity.name.startswith("Memcpy"), f"{activity} in a copy step"
            seen[activity.step] += activity.num_bytes
        elif activity.kind in KERNELS:
            assert activity.name == KERNELS[activity.kind], activity
        elif activity.kind == "move":
            # of this rank alone, in torch: rows to their places, or a sum in fp32 rounded
            assert "Memcpy" in activity.name or "elementwise" in activity.name, activity
            assert not spec.startswith("shard_p2p"), f"{activity}: such a plan moves nothing"
        else:
            assert activity.kind == "matmul", f"{activity} is of no step"
            assert "copy" not in activity.name.lower(), f"{activity}: a copy in a matmul"
    assert seen == copied
    if spec.startswith("shard_p2p"):  # whose steps are single copies, one record each
        names = {a.name for a in found if a.kind == "copy"}
        peers = sum(a.num_bytes for a in found if a.kind == "copy" and "PtoP" in a.name)
        assert peers == remote, f"{peers} bytes between peers of {remote}: {names}"


ROOM = 4 << 20


def test_no_transport_is_missing_but_perhaps_zero_cta(gpus):
    lacking = {name: missing(name, dist.group.WORLD, gpus) for name in TRANSPORTS}
    assert {name for name, why in lacking.items() if why} <= {"nccl_zero_cta"}
    why = lacking["nccl_zero_cta"]
    if why:
        with pytest.raises(UnsupportedError, match="transport nccl_zero_cta: "):
            open_transport("nccl_zero_cta", dist.group.WORLD, gpus, ROOM)
        assert "; " in why, f"does not say what would provide it: {why}"


@pytest.fixture
def no_registration(monkeypatch):
    """NCCL reads it at its first capture."""
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")


@pytest.mark.drawn(6)
@pytest.mark.parametrize("where", ["default stream", "side stream", "graph"])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_again_and_again_with_a_late_rank(gpus, no_registration, name, where):
    """Calls follow each other without a meeting of the hosts; a rank is late by turns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if missing(name, dist.group.WORLD, gpus):
        pytest.skip(missing(name, dist.group.WORLD, gpus))
    transport = open_transport(name, dist.group.WORLD, gpus, ROOM)
    part, calls = 48 * 1024 + 16, 12
    moves = [transport.all_gather(part), transport.all_to_all(part)]
    inputs = torch.randint(0, 256, (calls, ROOM), dtype=torch.uint8, device=gpus)
    kept = torch.full((calls, ranks * part), SENTINEL, dtype=torch.uint8, device=gpus)
    side = torch.cuda.Stream() if where == "side stream" else torch.cuda.current_stream()
    for move in moves:
        move()
    meet()
    if where == "graph":
        graphs = [torch.cuda.CUDAGraph() for _ in moves]
        for graph, move in zip(graphs, moves, strict=True):
            with torch.cuda.graph(graph):
                move()
        moves = [graph.replay for graph in graphs]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(calls):
            transport.source.copy_(inputs[i])
            if i % ranks == rank:
                torch.cuda._sleep(300_000 * (i % 5))
            moves[i % 2]()
            kept[i].copy_(transport.target[: ranks * part])
    meet()
    transport.check()
    for i in range(calls):
        want = torch.empty(ranks * part, dtype=torch.uint8, device=gpus)
        if i % 2:
            dist.all_to_all_single(want, inputs[i, : ranks * part].contiguous())
        else:
            dist.all_gather(list(want.chunk(ranks)), inputs[i, :part].contiguous())
        assert torch.equal(kept[i], want), (name, where, i)
    del moves
    transport.close()


def test_copies_of_ranks_out_of_step_stay_right(ends):
    """Pushes in ring order, one rank late by turns: two copies may meet on a link, nothing else."""
    size, rounds = 1 << 20, 2
    for late in range(ends.ranks):
        ends.fill()
        with torch.cuda.stream(ends.stream):
            if late == ends.rank:
                torch.cuda._sleep(200_000)
            for i in range(rounds * (ends.ranks - 1)):
                if i * size < ends.target.num_bytes:
                    copy = ends.between(i, "push", i * size, size, size)
                    copy_async(copy, ends.stream.cuda_stream)
        meet()
        for i in range(min(rounds * (ends.ranks - 1), ends.target.num_bytes // size)):
            rows = slice(i * size, (i + 1) * size)
            sent = ends.source.peer(ends.sender(i, "push"))
            assert torch.equal(ends.target.local()[rows], sent[rows]), (late, i)
