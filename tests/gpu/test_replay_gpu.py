"""Eager calls that repeat are replayed: right, in order, bounded, and the choice is one."""

import pytest
import torch
import torch.distributed as dist
from rank_bodies import world

import counterpoint as cp
from counterpoint.group.ranks import gather_object
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error
from counterpoint.ops import auto
from counterpoint.run import compute, replay

SPEC = "shard_p2p ring"


def result(x, w, group=None):
    full = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    compute.all_gather(full, x, group=group)
    return full.double() @ w.double()


def test_repeated_calls_are_replayed_and_right(gpus):
    x, w = (
        torch.randn(128, 256, device=gpus).bfloat16(),
        torch.randn(256, 96, device=gpus).bfloat16(),
    )
    cp.all_gather_matmul(x, w, plan=SPEC)
    replays = workspace_of(world(), gpus).lanes.replays
    torch.cuda.synchronize()
    replays.clear()  # tests before this one may have filled it
    for i in range(20):
        x.copy_(torch.randn(128, 256, device=gpus))
        y = cp.all_gather_matmul(x, w, plan=SPEC)
        assert relative_error(y, result(x, w)) < 2**-7, i
        del y
    assert replays.graphs
    # another layout at the same address is another call
    square = torch.randn(256, 256, device=gpus).bfloat16()
    for _ in range(4):
        for each in (square, square.t()):
            y = cp.all_gather_matmul(x, each, plan=SPEC)
            assert relative_error(y, result(x, each)) < 2**-7
    cp.check()


def test_replays_on_other_streams_and_beside_eager_plans(gpus):
    x, w = (
        torch.randn(512, 1024, device=gpus).bfloat16(),
        torch.randn(1024, 512, device=gpus).bfloat16(),
    )
    want = cp.all_gather_matmul(x, w, plan="shard_p2p")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    wrong = torch.zeros((), dtype=torch.int64, device=gpus)
    specs = ("shard_p2p", "graded", "uniform_fused_1d", "serial")
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            y = cp.all_gather_matmul(x, w, plan=specs[i % len(specs)])
            results.append((streams[i % 3], y))
        if len(results) == 6:
            for stream, y in results:
                torch.cuda.current_stream().wait_stream(stream)
                wrong += (
                    relative := (y.double() - want.double()).norm() / want.double().norm()
                ) > 1e-2
                assert relative.shape == ()
            results.clear()
    assert wrong.item() == 0
    cp.check()


@pytest.mark.alone
def test_memory_is_flat_over_a_thousand_calls(gpus):
    x, w = (
        torch.randn(128, 512, device=gpus).bfloat16(),
        torch.randn(512, 256, device=gpus).bfloat16(),
    )
    for op in (cp.all_gather_matmul, cp.matmul_reduce_scatter):
        for _ in range(20):
            op(x, w, plan="graded")
        torch.cuda.synchronize()
        dist.barrier()
        allocated = torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(1000):
            op(x, w, plan="graded")
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert abs(torch.cuda.mem_get_info()[0] - free) <= 4 << 20
    cp.check()


def test_growth_drops_what_was_captured(gpus):
    small = torch.randn(64, 512, device=gpus).bfloat16()
    w = torch.randn(512, 128, device=gpus).bfloat16()
    for _ in range(5):
        cp.all_gather_matmul(small, w, plan=SPEC)
    arena = workspace_of(world(), gpus).num_bytes()[0]
    rows = arena // 1024 // dist.get_world_size() + 512
    large = torch.randn(rows, 512, device=gpus).bfloat16()
    y = cp.all_gather_matmul(large, w, plan=SPEC)
    assert relative_error(y, result(large, w)) < 2**-7
    for _ in range(5):
        y = cp.all_gather_matmul(small, w, plan=SPEC)
        assert relative_error(y, result(small, w)) < 2**-7
    cp.check()


def test_auto_is_one_choice_on_all_ranks(gpus):
    """And the matmul library's tiles are known to it."""
    ranks = dist.get_world_size()
    x = torch.randn(8192 // ranks, 8192, device=gpus).bfloat16()
    w = torch.randn(1280, 8192, device=gpus).bfloat16().t()
    y = cp.all_gather_matmul(x, w)
    assert relative_error(y, result(x, w)) < 2**-7
    known = auto.knowledge_of(workspace_of(world(), gpus))
    assert known.machine is not None
    tile = auto.matmul_tile(8192 // ranks, 1280, 8192, torch.bfloat16, gpus, True)
    assert tile is None or (tile[0] * tile[1] >= 64 * 64)
    codes = workspace_of(world(), gpus).code
    specs = [known.code.program.plan.spec for key, known in codes.items()
             if key[2] == "auto" and known.code]  # fmt: skip
    assert specs
    everyone = gather_object(specs, world())
    assert all(each == everyone[0] for each in everyone)
    assert any(spec != "serial" for spec in specs), specs
    cp.check()


def test_graphs_are_bounded(gpus, monkeypatch):
    """More calls in turn than there is room for: those that have a graph keep it."""
    monkeypatch.setattr(replay, "MAX_GRAPHS", 8)
    replays = workspace_of(world(), gpus).lanes.replays
    replays.clear()
    w = torch.randn(256, 128, device=gpus).bfloat16()
    xs = [torch.randn(64, 256, device=gpus).bfloat16() for _ in range(12)]
    wants = [result(x, w) for x in xs]
    for _ in range(6):
        for x, want in zip(xs, wants, strict=True):
            assert relative_error(cp.all_gather_matmul(x, w, plan=SPEC), want) < 2**-7
    kept = set(replays.graphs)
    assert len(kept) == 8
    for _ in range(2):
        for x in xs:
            cp.all_gather_matmul(x, w, plan=SPEC)
    assert set(replays.graphs) == kept, "graphs of a cycle that does not fit push one another out"
    # what is no longer called makes room
    for _ in range(30):
        cp.all_gather_matmul(xs[-1], w, plan=SPEC)
    assert set(replays.graphs) != kept
    cp.check()


@pytest.mark.alone
@pytest.mark.own_gpu
def test_a_graph_takes_little_memory(gpus):
    w = torch.randn(256, 128, device=gpus).bfloat16()
    xs = [torch.randn(64, 256, device=gpus).bfloat16() for _ in range(64)]
    for x in xs:
        cp.all_gather_matmul(x, w, plan=SPEC)
    workspace_of(world(), gpus).lanes.replays.clear()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(4):
        for x in xs:
            cp.all_gather_matmul(x, w, plan=SPEC)
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] <= 64 * (256 << 10)
    cp.check()
