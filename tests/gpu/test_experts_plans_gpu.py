"""Plans of experts on GPUs: values, gradients, replays, graphs, late ranks, DMA copies."""

import pytest
import torch
import torch.distributed as dist
from activities import copy_activities
from expert_bodies import by_expert, by_owner, multiplied, summed, whole

import counterpoint as cp
from counterpoint.measure.profile import traced
from counterpoint.runtime.capture import no_collector
from counterpoint.runtime.workspace import workspace_of

LOCAL = 4
SPECS = ("grouped", "grouped 4", "grouped 1/1/2 ring", "grouped 1/1/1/1", "grouped 3/1 xor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 48), (37, 29))  # odd ones: rows that lie on no word


def poisoned():
    """Memory that will be handed out next holds NaN: what is not written shows."""
    torch.cuda.empty_cache()
    torch.full((64 << 20,), float("nan"), device="cuda")


def even(count):
    ranks = dist.get_world_size()
    return [[count] * (ranks * LOCAL)] * ranks


def operands(counts, k, n, dtype, *, back=False, stored="kn"):
    """x and w of this rank, and those of all in fp64."""
    rank = dist.get_rank()
    given = whole(counts, k, n, dtype, back=back, stored=stored)
    x, w = given.xs[rank].cuda(), given.ws[rank].cuda()
    if stored == "nk":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    return x.requires_grad_(), w.requires_grad_(), given.double()


def exactly(got, want):
    """Small integers: bit by bit, but for the rounding of bf16 and fp16."""
    return torch.equal(got.detach().cpu(), want.detach().to(got.dtype))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("stored", ["kn", "nk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_out_and_its_gradients(gpus, k, n, dtype, stored, spec):
    counts, rank = even(6), dist.get_rank()
    x, w, exact = operands(counts, k, n, dtype, stored=stored)
    rows = by_expert(exact.xs, counts)
    wants = multiplied(rows, exact.ws, counts)
    generator = torch.Generator().manual_seed(3)
    dys = [torch.randint(-3, 4, t.shape, generator=generator).double() for t in wants]
    torch.autograd.backward(wants, dys)
    poisoned()
    y, kept = cp.all_to_all_matmul(x, w, counts=counts, plan=spec, return_rows=True)
    assert exactly(y, wants[rank]) and exactly(kept, rows[rank])
    y.backward(dys[rank].to(dtype).cuda())
    assert exactly(x.grad, exact.xs[rank].grad) and exactly(w.grad, exact.ws[rank].grad)
    cp.check()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_back_and_its_gradients(gpus, k, n, dtype, spec):
    counts, rank = even(6), dist.get_rank()
    x, w, exact = operands(counts, k, n, dtype, back=True)
    wants = by_owner(multiplied(exact.xs, exact.ws, counts), counts)
    generator = torch.Generator().manual_seed(3)
    dys = [torch.randint(-3, 4, t.shape, generator=generator).double() for t in wants]
    torch.autograd.backward(wants, dys)
    poisoned()
    y = cp.matmul_all_to_all(x, w, counts=counts, plan=spec)
    assert exactly(y, wants[rank])
    y.backward(dys[rank].to(dtype).cuda())
    assert exactly(x.grad, exact.xs[rank].grad) and exactly(w.grad, exact.ws[rank].grad)
    index = torch.randperm(len(y), generator=generator).view(-1, 2)
    weights = torch.ones(index.shape)
    out = cp.matmul_all_to_all(
        x.detach(), w.detach(), counts=counts, plan=spec, sum_of=(index.cuda(), weights.cuda())
    )
    rounded = wants[rank].detach().to(dtype).double()
    assert exactly(out, summed(rounded, index, weights.double()))


@pytest.mark.parametrize("back", [False, True])
def test_repeated_calls_and_counts_that_change(gpus, back):
    """Eager, then replayed; more rows come, memory grows, and the first sizes come again."""
    op = cp.matmul_all_to_all if back else cp.all_to_all_matmul
    cp.all_to_all_matmul(
        *operands(even(2), 64, 48, torch.bfloat16)[:2], counts=even(2), plan="grouped 2/2"
    )
    workspace_of(dist.group.WORLD, gpus).lanes.replays.clear()
    for count in (4, 4, 512, 4):
        counts, rank = even(count), dist.get_rank()
        x, w, exact = operands(counts, 64, 48, torch.bfloat16, back=back)
        x, w = x.detach(), w.detach()
        for turn in range(6):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(turn))
            xs = [t.detach()[order] for t in exact.xs]
            rows = xs if back else by_expert(xs, counts)
            wants = multiplied(rows, [v.detach() for v in exact.ws], counts)
            wants = by_owner(wants, counts) if back else wants
            x.copy_(xs[rank])
            y = op(x, w, counts=counts, plan="grouped 1/3")
            assert exactly(y, wants[rank]), (count, turn)
            del y
    assert workspace_of(dist.group.WORLD, gpus).lanes.replays.graphs
    cp.check()


@pytest.mark.parametrize("late", [0, 1])
def test_in_a_graph_with_a_late_rank(gpus, late):
    """A layer of both operators, captured; every replay reads what is there by then."""
    counts, rank = even(8), dist.get_rank()
    x, up, exact = operands(counts, 64, 48, torch.bfloat16)
    down = whole(counts, 48, 64, torch.bfloat16).ws
    mine = down[rank].cuda()
    x, up = x.detach(), up.detach()

    def layer():
        h = cp.all_to_all_matmul(x, up, counts=counts, plan="grouped 1/3")
        return cp.matmul_all_to_all(torch.sign(h), mine, counts=counts, plan="grouped 3/1")

    layer()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_collector(), torch.cuda.graph(graph):
        y = layer()
    for turn in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(turn))
        xs = [t.detach()[order] for t in exact.xs]
        hs = multiplied(by_expert(xs, counts), [v.detach() for v in exact.ws], counts)
        backs = multiplied([h.sign() for h in hs], [v.double() for v in down], counts)
        x.copy_(xs[rank])
        y.fill_(float("nan"))
        if rank == late:
            torch.cuda._sleep(20_000_000)
        graph.replay()
        assert exactly(y, by_owner(backs, counts)[rank]), turn
    cp.check()


@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_copies_are_dma_copies(gpus, op):
    ranks = dist.get_world_size()
    counts, k, n = [[256] * (ranks * LOCAL)] * ranks, 2048, 1024
    x = torch.randn(256 * ranks * LOCAL, k, device="cuda").bfloat16()
    w = torch.randn(LOCAL, k, n, device="cuda").bfloat16()

    def call():
        return getattr(cp, op)(x, w, counts=counts, plan="grouped 1/3")

    call()
    found = copy_activities(traced(call)[1])
    assert len(found) >= 2
    for step, (num_memcpy, num_kernels) in found.items():
        assert num_memcpy >= 1, f"{step}: no memcpy"
        assert num_kernels == 0, f"{step}: {num_kernels} kernels in a copy step"


def test_uneven_counts_are_refused(gpus):
    counts = [list(row) for row in even(2)]
    counts[0][1] = 3
    x, w, _ = operands(counts, 64, 48, torch.bfloat16)
    with pytest.raises(cp.InputError, match="plan must be for equal counts known to the host"):
        cp.all_to_all_matmul(x, w, counts=counts, plan="grouped")
    table = torch.tensor(even(2), device="cuda")
    x, w, _ = operands(even(2), 64, 48, torch.bfloat16)
    with pytest.raises(cp.InputError, match="plan must be for equal counts known to the host"):
        cp.all_to_all_matmul(x, w, counts=table, max_rows=99, plan="grouped")
