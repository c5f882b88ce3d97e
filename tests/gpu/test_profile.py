"""A profiled run shows what happened: DMA copies, and the time that events measure."""

import torch
import torch.distributed as dist

import counterpoint
from counterpoint.measure.timing import rotate

LONG_S = 0.5e-3


def large(op):
    """A call that takes more than half a millisecond on any group of 2 to 8 H200s."""
    rows, n, k = 1024, 7168, 8192
    ranks = dist.get_world_size()
    x = torch.randn(rows if op == "all_gather_matmul" else rows * ranks, k, device="cuda")
    w = torch.randn(k, n, device="cuda").bfloat16()
    return x.bfloat16(), w


def test_timeline_spans_the_time_that_events_measure(gpus):
    for op, spec in (
        ("all_gather_matmul", "shard_p2p ring push"),
        ("all_gather_matmul", "shard_p2p ring pull"),
        ("matmul_reduce_scatter", "shard_p2p ring"),
    ):
        x, w = large(op)

        def call(op=op, x=x, w=w, spec=spec):
            return getattr(counterpoint, op)(x, w, plan=spec)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        group = dist.group.WORLD
        # behind a backlog, so that host time is in neither
        times = rotate({"call": call}, group=group, device=gpus, rounds=9, soak_s=0.2,
                       backlog_cycles=4_000_000)  # fmt: skip
        event_s = times["call"].median_s
        assert event_s >= LONG_S

        def behind_a_backlog(call=call):
            torch.cuda._sleep(4_000_000)
            return call()

        spans_s = []
        for _ in range(3):
            torch.mm(w.t(), w)  # as warm as in the rotation
            _, timeline = counterpoint.profile(behind_a_backlog)
            mine = [s for s in timeline.spans if s.rank == dist.get_rank()]
            mine = [s for s in mine if not s.lane.startswith("stream")]
            spans_s.append(max(s.end_s for s in mine) - min(s.start_s for s in mine))
        span_s = sorted(spans_s)[1]
        ratio = torch.tensor(span_s / event_s, device=gpus)
        dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
        assert abs(ratio.item() - 1) <= 0.05, f"{op} {spec}: {span_s * 1e3:.3f} ms in the trace, "\
            f"{event_s * 1e3:.3f} ms by events"  # fmt: skip
        kinds = {s.kind for s in mine}
        assert {"copy", "matmul", "barrier"} <= kinds, kinds


def test_copies_are_dma_copies(gpus):
    from counterpoint.measure.profile import copy_activities

    for op, spec in (
        ("all_gather_matmul", "shard_p2p ring push"),
        ("all_gather_matmul", "graded 2 ring pull" if dist.get_world_size() == 2 else
         "shard_p2p ring pull"),
        ("all_gather_matmul", "uniform_fused_2d ring"),
        ("all_gather_matmul", "uniform_fused_1d ring"),
        ("matmul_reduce_scatter", "shard_p2p ring"),
    ):  # fmt: skip
        x, w = large(op)

        def call(op=op, x=x, w=w, spec=spec):
            return getattr(counterpoint, op)(x, w, plan=spec)

        call()
        found = copy_activities(call)
        assert found
        for step, (num_memcpy, num_other) in found.items():
            assert num_memcpy >= 1, f"{op} {spec} {step}: no memcpy"
            assert num_other == 0, f"{op} {spec} {step}: {num_other} kernels in a copy step"
