"""Plans of experts on GPUs: values, gradients, replays, graphs, late ranks, DMA copies."""

import pytest
import torch
import torch.distributed as dist
from activities import copy_activities
from expert_bodies import by_expert, by_owner, multiplied, summed, tables, whole

import counterpoint as cp
from counterpoint.gpu.capture import no_collector
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.profile import traced

LOCAL = 4
SPECS = ("grouped", "grouped 4", "grouped 1/1/2 ring", "grouped 1/1/1/1", "grouped 3/1 xor",
         "grouped 4 chunks=2", "grouped 1/3 chunks=3")  # fmt: skip
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


@pytest.mark.drawn(21)
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


@pytest.mark.drawn(14)
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


@pytest.mark.parametrize(("spec", "more"), [("grouped 1/3", 0), ("grouped 4 chunks=2", 0),
                                            ("grouped 1/3", 1)])  # fmt: skip
@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_copies_are_dma_copies(gpus, op, spec, more):
    ranks = dist.get_world_size()
    k, n = 2048, 1024
    # as many rows of each rank, and to each, but not of each expert
    counts = [([256 + more, 256 - more] * (ranks * LOCAL))[: ranks * LOCAL]] * ranks
    x = torch.randn(256 * ranks * LOCAL, k, device="cuda").bfloat16()
    w = torch.randn(LOCAL, k, n, device="cuda").bfloat16()

    def call():
        return getattr(cp, op)(x, w, counts=counts, plan=spec)

    call()
    found = copy_activities(traced(call)[1])
    assert len(found) >= 2
    for step, (num_memcpy, num_kernels) in found.items():
        assert num_memcpy >= 1, f"{step}: no memcpy"
        assert num_kernels == 0, f"{step}: {num_kernels} kernels in a copy step"


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    "spec", ["grouped", "grouped 4", "grouped 1/3 xor", "grouped 2/2 chunks=2"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_counts_that_differ(gpus, k, n, dtype, spec):
    """Both ways, with the gradients of the first, which goes back with the plan of its name."""
    rank = dist.get_rank()
    for name, counts in tables(dist.get_world_size(), LOCAL).items():
        x, w, exact = operands(counts, k, n, dtype)
        rows = by_expert(exact.xs, counts)
        wants = multiplied(rows, exact.ws, counts)
        torch.autograd.backward([want.sum() for want in wants])
        poisoned()
        y, kept = cp.all_to_all_matmul(x, w, counts=counts, plan=spec, return_rows=True)
        assert exactly(y, wants[rank]) and exactly(kept, rows[rank]), name
        y.sum().backward()
        assert exactly(x.grad, exact.xs[rank].grad), name
        assert exactly(w.grad, exact.ws[rank].grad), name
        x, w, exact = operands(counts, k, n, dtype, back=True)
        wants = by_owner(multiplied(exact.xs, exact.ws, counts), counts)
        y = cp.matmul_all_to_all(x.detach(), w.detach(), counts=counts, plan=spec)
        assert exactly(y, wants[rank]), name
    cp.check()


@pytest.mark.parametrize("back", [False, True])
def test_counts_that_differ_are_in_no_replay(gpus, back):
    """Calls whose tensors lie where they lay, and whose table says something else."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op = cp.matmul_all_to_all if back else cp.all_to_all_matmul
    table = torch.full((ranks, ranks * LOCAL), 6)
    x, w, exact = operands(table.tolist(), 64, 48, torch.bfloat16, back=back)
    x, w = x.detach(), w.detach()
    for turn in range(8):
        table.fill_(
            6
        )  # as many rows of each rank, and to each: even experts have what odd ones lack
        table[:, 0::2] += turn % 4 + 1
        table[:, 1::2] -= turn % 4 + 1
        counts = table.tolist()
        xs, ws = [t.detach() for t in exact.xs], [t.detach() for t in exact.ws]
        wants = multiplied(xs if back else by_expert(xs, counts), ws, counts)
        wants = by_owner(wants, counts) if back else wants
        y = op(x, w, counts=table, plan="grouped 1/3")
        assert exactly(y, wants[rank]), turn
        del y
    cp.check()


@pytest.mark.parametrize("counted", ["equal", "host"])
@pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
def test_plans_for_a_mesh(gpus, op, counted):
    """A copy stream for each peer; it need not be a mesh."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = even(8) if counted == "equal" else tables(ranks, LOCAL)["uneven"]
    back = op == "matmul_all_to_all"
    m = 8 * ranks * LOCAL if counted == "equal" else 256 * LOCAL
    problem = cp.Problem(op, m, 48, 64, ranks, experts=LOCAL, counts=counted)
    plan = cp.build(problem, "grouped 1/3 chunks=2", machine=f"mi300x-{ranks}")
    x, w, exact = operands(counts, 64, 48, torch.bfloat16, back=back)
    wants = multiplied(exact.xs if back else by_expert(exact.xs, counts), exact.ws, counts)
    wants = by_owner(wants, counts) if back else wants
    for _ in range(4):  # eager, and of equal counts replayed
        y = getattr(cp, op)(x.detach(), w.detach(), counts=counts, plan=plan)
        assert exactly(y, wants[rank])
    cp.check()
