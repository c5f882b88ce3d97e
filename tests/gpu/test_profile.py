"""A profiled run shows what happened: DMA copies, and the time that events measure."""

import pytest
import torch
import torch.distributed as dist
from activities import copy_activities

import counterpoint
from counterpoint.group.symmetric import allocate
from counterpoint.measure.profile import traced

LONG_S = 0.5e-3


def large(op):
    """A call that takes more than half a millisecond on any group of 2 to 8 H200s."""
    rows, n, k = 2048, 7168, 8192
    ranks = dist.get_world_size()
    x = torch.randn(rows if op == "all_gather_matmul" else rows * ranks, k, device="cuda")
    w = torch.randn(k, n, device="cuda").bfloat16()
    return x.bfloat16(), w


CALLS = [
    ("all_gather_matmul", "shard_p2p ring"),
    ("matmul_reduce_scatter", "shard_p2p ring"),
]


@pytest.mark.alone
@pytest.mark.parametrize(("op", "spec"), CALLS, ids=" ".join)
def test_timeline_spans_the_time_that_events_measure(gpus, op, spec):
    x, w = large(op)
    meeting = allocate(1 << 16, dist.group.WORLD, gpus)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def call():
        torch.cuda._sleep(20_000_000)  # the host, slow under a profiler, is ahead of the GPU
        meeting.handle.barrier(channel=0)
        start.record()
        getattr(counterpoint, op)(x, w, plan=spec)
        end.record()

    call()
    ratios = []
    for _ in range(3):
        _, timeline = counterpoint.profile(call)
        event_s = start.elapsed_time(end) * 1e-3
        assert event_s >= LONG_S
        mine = [s for s in timeline.spans if s.rank == dist.get_rank() and s.kind != "other"]
        span_s = max(s.end_s for s in mine) - min(s.start_s for s in mine)
        ratios.append(span_s / event_s)
        assert {"copy", "matmul", "barrier"} <= {s.kind for s in mine}
    assert abs(sorted(ratios)[1] - 1) <= 0.05, f"spans / events: {ratios}"


@pytest.mark.parametrize(
    ("op", "spec"),
    [*CALLS, ("all_gather_matmul", "uniform_fused_2d"), ("all_gather_matmul", "uniform_fused_1d")],
    ids=" ".join,
)
def test_copies_are_dma_copies(gpus, op, spec):
    x, w = large(op)

    def call():
        return getattr(counterpoint, op)(x, w, plan=spec)

    call()
    found = copy_activities(traced(call)[1])
    assert len(found) >= dist.get_world_size() - 1
    for step, (num_memcpy, num_kernels) in found.items():
        assert num_memcpy >= 1, f"{step}: no memcpy"
        assert num_kernels == 0, f"{step}: {num_kernels} kernels in a copy step"
