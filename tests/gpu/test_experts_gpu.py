"""The operators of experts on GPUs: values, gradients, layouts, counts on the host and the GPU."""

import warnings

import pytest
import torch
import torch.distributed as dist
from expert_bodies import by_expert, by_owner, multiplied, summed, tables, whole

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.experts.steps_counted import grouped
from counterpoint.gpu.capture import no_collector
from counterpoint.measure.timing import relative_error

K, N, LOCAL = 64, 48, 3  # both are multiples of 8: the library's grouped matmul takes bf16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def poisoned():
    """Memory that will be handed out next holds NaN: what is not written shows."""
    torch.cuda.empty_cache()
    torch.full((64 << 20,), float("nan"), device="cuda")


@pytest.fixture(scope="module", params=["uneven", "an expert without rows", "one pair", "nothing"])
def counts(request, gpus):
    # 40 rows at most for each pair of rank and expert
    table = tables(dist.get_world_size(), LOCAL)[request.param]
    return [[8 * n for n in row] for row in table]


def operands(counts, dtype, known, back=False, stored="kn"):
    """(x, w, counts, max_rows) of this rank, and the same of all in fp64."""
    rank = dist.get_rank()
    given = whole(counts, K, N, dtype, back=back, stored=stored)
    x, w = given.xs[rank].cuda(), given.ws[rank].cuda()
    if stored == "nk":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    exact = given.double()
    if known == "host":
        return x.requires_grad_(), w.requires_grad_(), torch.tensor(counts), None, exact
    room = 8 + sum(map(sum, counts))
    # equally many rows on all ranks, some of them nobody's
    x = torch.cat((x, torch.full((room - len(x), K), float("nan"), device="cuda", dtype=dtype)))
    table = torch.tensor(counts, device="cuda", dtype=torch.int32)
    return x.requires_grad_(), w.requires_grad_(), table, room, exact


def exactly(got, want):
    """Small integers: bit by bit, but for the rounding of bf16 and fp16."""
    return torch.equal(got.cpu(), want.detach().to(got.dtype))


@pytest.mark.drawn(24)
@pytest.mark.shows("all_to_all_matmul", "forward, backward", "bf16 fp16 fp32")
@pytest.mark.parametrize("plan", ["auto", "serial"])
@pytest.mark.parametrize("known", ["host", "device"])
@pytest.mark.parametrize("stored", ["kn", "nk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_its_gradients(counts, dtype, stored, known, plan):
    rank = dist.get_rank()
    x, w, table, room, exact = operands(counts, dtype, known, stored=stored)
    assert grouped(x, K, N) == (dtype == torch.bfloat16), "the library's grouped matmul is meant"
    rows = by_expert(exact.xs, counts)
    wants = multiplied(rows, exact.ws, counts)
    generator = torch.Generator().manual_seed(3)
    dys = [torch.randint(-3, 4, t.shape, generator=generator).double() for t in wants]
    torch.autograd.backward(wants, dys)
    poisoned()
    y, kept = cp.all_to_all_matmul(x, w, counts=table, max_rows=room, plan=plan, return_rows=True)
    r, t = len(wants[rank]), len(exact.xs[rank])
    assert exactly(y[:r], wants[rank]) and exactly(kept[:r], rows[rank])
    assert len(y) == (room or r)
    dy = torch.full_like(y, float("nan"))
    dy[:r] = dys[rank]
    poisoned()
    y.backward(dy)
    assert exactly(x.grad[:t], exact.xs[rank].grad) and not x.grad[t:].any()
    assert exactly(w.grad, exact.ws[rank].grad) and w.grad.stride() == w.stride()


@pytest.mark.drawn(24)
@pytest.mark.shows("matmul_all_to_all", "forward, backward", "bf16 fp16 fp32")
@pytest.mark.parametrize("plan", ["auto", "serial"])
@pytest.mark.parametrize("known", ["host", "device"])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_back_and_its_gradients(counts, dtype, sums, known, plan):
    rank = dist.get_rank()
    x, w, table, room, exact = operands(counts, dtype, known, back=True)
    results = by_owner(multiplied(exact.xs, exact.ws, counts), counts)
    generator, sum_ofs = torch.Generator().manual_seed(5), []
    for y in results:
        # a row is named once: what is named twice is added in the dtype of x
        index = torch.randperm(len(y), generator=generator).view(-1, 2)
        sum_ofs.append((index, torch.ones(index.shape, dtype=torch.float64).requires_grad_()))
    back = results
    if sums:
        results = [summed(y, *each) for y, each in zip(results, sum_ofs, strict=True)]
    dys = [torch.randint(-3, 4, t.shape, generator=generator).double() for t in results]
    torch.autograd.backward(results, dys)
    index, weights = (t.detach().cuda() for t in sum_ofs[rank])
    weights = weights.float().requires_grad_()
    poisoned()
    y = cp.matmul_all_to_all(
        x, w, counts=table, max_rows=room, plan=plan, sum_of=(index, weights) if sums else None
    )
    t, r = len(results[rank]), len(exact.xs[rank])
    if sums:
        rounded = back[rank].detach().to(dtype).double()
        assert exactly(y, rounded[index.cpu()].sum(1))
    else:
        assert exactly(y[:t], back[rank]) and len(y) == (room or t)
    dy = torch.full_like(y, float("nan"))
    dy[:t] = dys[rank]
    poisoned()
    y.backward(dy)
    assert exactly(x.grad[:r], exact.xs[rank].grad) and not x.grad[r:].any()
    assert exactly(w.grad, exact.ws[rank].grad)
    if sums and t:
        bound = 2 * torch.finfo(dtype).eps
        assert relative_error(weights.grad.cpu(), sum_ofs[rank][1].grad) <= bound


@pytest.mark.shows(
    "all_to_all_matmul matmul_all_to_all", "compiled forward, compiled backward", "bf16"
)
def test_a_device_known_table_is_compiled_once():
    torch._dynamo.utils.counters.clear()

    def layer(x, up, down, table):
        h = torch.relu(cp.all_to_all_matmul(x, up, counts=table, max_rows=4096))
        return cp.matmul_all_to_all(h, down, counts=table, max_rows=1024)

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    ranks = dist.get_world_size()
    for name in ("uneven", "sparse"):
        counts = torch.tensor(tables(ranks, LOCAL)[name], device="cuda")
        t = int(counts[dist.get_rank()].sum())
        x = torch.randn(1024, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        up, down = (
            torch.randn(LOCAL, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for shape in ((K, N), (N, K))
        )
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
            for fn in (traced, layer):
                y = fn(x, up, down, counts)[:t]
                loss = y.float().square().sum()
                found.append([y, *torch.autograd.grad(loss, (x, up, down))])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_more_rows_than_there_is_room_for():
    ranks = dist.get_world_size()
    table = torch.full((ranks, ranks * LOCAL), 2, device="cuda")
    x, w = torch.randn(2 * ranks * LOCAL, K, device="cuda"), torch.randn(LOCAL, K, N, device="cuda")
    needed = 2 * ranks * LOCAL
    with pytest.raises(cp.InputError, match=f"max_rows must be >= {needed} on rank"):
        cp.all_to_all_matmul(x, w, counts=table, max_rows=needed - 1, plan="serial")
    y = cp.all_to_all_matmul(x, w, counts=table, max_rows=needed, plan="serial")
    # a call of facts that are known looks at the table alone, and all ranks see the same
    with pytest.raises(cp.InputError, match="max_rows must be >="):
        cp.all_to_all_matmul(x, w, counts=table, max_rows=needed - 1, plan="serial")
    assert y.shape == (needed, N)


def test_serial_is_not_captured():
    ranks = dist.get_world_size()
    table = torch.ones(ranks, ranks * LOCAL, device="cuda", dtype=torch.int64)
    x, w = torch.randn(ranks * LOCAL, K, device="cuda"), torch.randn(LOCAL, K, N, device="cuda")
    cp.all_to_all_matmul(x, w, counts=table, max_rows=len(x), plan="serial")
    torch.cuda.synchronize()
    refused, graph = pytest.raises(cp.InputError, match="while a graph"), torch.cuda.CUDAGraph()
    with refused, no_collector(), torch.cuda.graph(graph):
        _ = x + 1  # torch warns of an empty graph
        cp.all_to_all_matmul(x, w, counts=table, max_rows=len(x), plan="serial")


@pytest.mark.parametrize("max_rows", [None, 4096])
def test_the_layer(max_rows):
    """On all GPUs as on the CPU in fp64, gradients too."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layer = cnn.ExpertParallelMLP(64, 48, 4 * ranks, max_rows=max_rows).cuda().bfloat16()
    whole_weights = []
    for p in (layer.gate_up, layer.down):
        parts = [torch.empty_like(p) for _ in range(ranks)]
        dist.all_gather(parts, p.detach())
        whole_weights.append(torch.cat(parts).cpu().double().requires_grad_())
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(ranks, 100, 64, generator=generator).bfloat16()
    scores = torch.randn(ranks, 100, 4 * ranks, generator=generator).softmax(-1)
    weights, experts = scores.topk(2)
    gate_up, down = whole_weights
    exact = xs.double().requires_grad_()
    gate, up = torch.einsum("rtf,ehf->rteh", exact, gate_up).chunk(2, -1)
    every = torch.einsum("rteh,efh->rtef", torch.nn.functional.silu(gate) * up, down)
    chosen = torch.gather(every, -2, experts[..., None].expand(-1, -1, -1, 64))
    want = (weights.double()[..., None] * chosen).sum(-2)
    want.square().sum().backward()
    x = xs[rank].cuda().requires_grad_()
    y = layer(x, experts[rank].cuda(), weights[rank].cuda())
    y.float().square().sum().backward()
    mine = slice(4 * rank, 4 * rank + 4)
    for got, exactly_ in (
        (y.detach(), want[rank].detach()), (x.grad, exact.grad[rank]),
        (layer.gate_up.grad, gate_up.grad[mine]), (layer.down.grad, down.grad[mine]),
    ):  # fmt: skip
        assert relative_error(got.cpu(), exactly_) <= 8 * torch.finfo(torch.bfloat16).eps
