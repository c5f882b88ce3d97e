"""FSDP2 models, overlapped on GPUs: torch's bits on two, copies instead of NCCL, captured, late."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Step, batch, made, mesh_of, same, trained
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import counterpoint as cp
from counterpoint.choose.known import Knowledge
from counterpoint.fsdp.launch_gathers import Kept
from counterpoint.fsdp.member import Member

STEPS = {
    "mixed": Step(), "fp32": Step(policy=None), "clipped": Step(clip=True),
    "uneven rows": Step(hidden=(96, 97, 95, 96)), "accumulated": Step(micro=3),
    "a frozen block": Step(frozen=(1,)), "checkpointed": Step(checkpoint=True),
    "never resharded": Step(keep=True), "divided by 3": Step(factor=3.0),
    "3 ahead": Step(prefetch=3),
}  # fmt: skip
MEMORY = ["kept", "ring"]


@pytest.fixture(autouse=True)
def nothing_is_predicted(monkeypatch):
    """Such small groups would be left to torch."""
    nothing = Knowledge(None, {})
    monkeypatch.setattr("counterpoint.fsdp.overlapped.knowledge_of", lambda workspace: nothing)


@pytest.fixture
def exact(monkeypatch):
    """Results that do not depend on the run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", STEPS)
def test_bits_are_torchs_on_2_gpus(gpus, exact, name, memory):
    step, rank, ranks = STEPS[name], dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(ranks, "cuda")
    want = trained(made(step, mesh), step, rank)
    model = made(step, mesh)
    overlapped = cp.overlap(model, trial_steps=0, memory=memory)
    got = trained(model, step, rank)
    assert overlapped.explain().count("gathered in place") == 5, overlapped.explain()
    if ranks == 2:
        assert same(want, got)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    overlapped.off()


@pytest.mark.parametrize("memory", MEMORY)
def test_bits_of_parameters_that_are_sharded_by_columns(gpus, exact, memory):
    """Copies of several rows, in the midst of those that have one."""
    rank, mesh = dist.get_rank(), mesh_of(dist.get_world_size(), "cuda")
    made_by = partial(made, Step(), mesh, by=lambda p: Shard(p.ndim - 1))
    want = trained(made_by(), Step(), rank)
    model = made_by()
    overlapped = cp.overlap(model, trial_steps=0, memory=memory)
    got = trained(model, Step(), rank)
    assert overlapped.explain().count("gathered in place") == 5, overlapped.explain()
    assert same(want, got) or mesh.size() > 2
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    overlapped.off()


@pytest.mark.own_gpu
@pytest.mark.parametrize("memory", MEMORY)
def test_copy_engines_move_all_of_it(gpus, memory):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = made(Step(), mesh_of(ranks, "cuda"))
    overlapped = cp.overlap(model, trial_steps=0, memory=memory)
    x = batch(rank, 0, gpus)
    for _ in range(2):
        model(x).float().square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        model(x).float().square().mean().backward()
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    assert not [name for name in names if "nccl" in name.lower()]
    assert sum("PtoP" in name for name in names) >= (ranks - 1) * 4 * 3
    assert sum("sum_kernel" in name for name in names) == 5
    assert not [name for name in names if "chunk_cat" in name or "split_with_sizes" in name]
    overlapped.off()


@pytest.mark.parametrize("memory", MEMORY)
def test_a_captured_step_gathers_what_is_there_when_it_is_replayed(gpus, memory):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(ranks, "cuda")
    theirs, ours = made(Step(), mesh), made(Step(), mesh)
    overlapped = cp.overlap(ours, trial_steps=0, memory=memory)
    x = batch(rank, 0, gpus)

    def step(model):
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(ours)
            ours.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step(ours)
    for _ in range(4):
        graph.replay()
        want = step(theirs)
        torch.testing.assert_close(loss, want)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), rtol=1e-2, atol=1e-4)
        with torch.no_grad():
            for model in (ours, theirs):
                for p in model.parameters():
                    p.to_local().sub_(p.grad.to_local(), alpha=0.5)
        theirs.zero_grad()
    torch.cuda.synchronize()
    cp.check()
    del graph, loss
    overlapped.off()


@pytest.mark.parametrize("memory", MEMORY)
def test_late_ranks_change_no_bit(gpus, exact, memory):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh, step = mesh_of(ranks, "cuda"), Step(steps=60, prefetch=1)

    def run(late):
        model = made(step, mesh)
        overlapped = cp.overlap(model, trial_steps=0, memory=memory)
        drawn = random.Random(3)

        def wait(*_):
            if late and drawn.random() < 0.1 and drawn.randrange(ranks) == rank:
                torch.cuda._sleep(drawn.randrange(2_000_000))

        def late_in_both(module, args, result):
            wait()
            if result.requires_grad:
                result.register_hook(wait)

        for block in model:
            block.register_forward_hook(late_in_both)
        found = trained(model, step, rank)
        overlapped.off()
        return found

    assert same(run(False), run(True))


def test_a_trial_measures_and_decides_alike_on_all_ranks(gpus):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = made(Step(), mesh_of(ranks, "cuda"))
    overlapped = cp.overlap(model, trial_steps=8)
    trained(model, Step(steps=74), rank)  # two show what memory there is
    assert overlapped.verdict is not None
    found = [None] * ranks
    dist.all_gather_object(found, overlapped.verdict)
    assert all(each == found[0] for each in found)
    print(overlapped.explain())


def test_shards_that_are_published_late_are_waited_for(gpus, exact, monkeypatch):
    """By their owner, who copies them himself, and by its peers; also those of the step before."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh, publish = mesh_of(ranks, "cuda"), Kept._publish

    def late(self: Kept, members: list[Member], stream: torch.cuda.Stream) -> None:
        if stream is self.publisher:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000 * (1 + (rank + members[0].index) % 2))
        publish(self, members, stream)

    monkeypatch.setattr(Kept, "_publish", late)
    want = trained(made(Step(), mesh), Step(), rank)
    model = made(Step(), mesh)
    overlapped = cp.overlap(model, trial_steps=0, memory="kept")
    got = trained(model, Step(), rank)
    assert same(want, got) or ranks > 2
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    overlapped.off()
