"""embedding_bag_all_to_all on GPUs: random layouts, graphs, gradients, late and missing ranks."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from embedding_cases import expected, pooled, problem_of, random_bags
from specs import SHORT_S

import counterpoint as cp
from counterpoint.choose.taken import Taken
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of


def dtype_of(layout):
    return getattr(torch, layout.dtype)


def drawn(seed):
    """A layout and arguments, equal on all ranks: dims, counts, dtypes and batches at random."""
    draw, ranks = random.Random(seed), dist.get_world_size()
    wide = draw.choice([(64, 128, 256), (128,), (8, 16, 72), (4, 10, 33, 128), (1, 300)])
    dims = tuple(
        tuple(draw.choice(wide) for _ in range(draw.randrange(1 if r == 0 else 0, 6)))
        for r in range(ranks)
    )
    batch = (*(draw.choice((0, 1, 33, 100, 257)) for _ in range(ranks - 1)), 64)
    mode = draw.choice(("sum", "mean", "weights"))
    own = {
        "dtype": draw.choice((torch.float32, torch.float16, torch.bfloat16)),
        "index": draw.choice((torch.int32, torch.int64)),
        "longest": draw.choice((1, 3, 6, 40)),
        "rows": draw.choice((1, 50, 5000)),
        "weighted": mode == "weights",
    }
    return problem_of(dims, batch, own["dtype"]), own, "mean" if mode == "mean" else "sum"


def everyones(layout, own, seed=0):
    return [random_bags(d, layout.m, seed=100 * seed + r, **own)
            for r, d in enumerate(layout.tables)]  # fmt: skip


def called(bags, layout, mode="sum", last=True, plan="fused", **more):
    offsets = bags.offsets if last else bags.offsets[:-1]
    return cp.embedding_bag_all_to_all(
        bags.tables, bags.indices, offsets, per_sample_weights=bags.weights, mode=mode,
        include_last_offset=last, batch=layout.rows, dims=layout.tables, dtype=dtype_of(layout),
        plan=plan, **more,
    )  # fmt: skip


def off(y, want):
    """How far beyond a rounding of fp32 sums of few numbers; 0 or less is right."""
    want = want.to(y.device)
    assert y.shape == want.shape
    if not y.numel():
        return 0.0
    bound = 2e-5 + torch.finfo(y.dtype).eps * want.abs()
    return ((y.double() - want).abs() - bound).nan_to_num(torch.inf).max().item()


@pytest.mark.drawn(6)
@pytest.mark.shows("embedding_bag_all_to_all", "forward", "bf16 fp16 fp32")
@pytest.mark.parametrize("seed", range(12))
def test_rows_of_all_tables_for_own_bags(gpus, seed):
    layout, own, mode = drawn(seed)
    rank = dist.get_rank()
    out = cp.PooledOutputs(layout.n, dtype_of(layout), layout.rows)
    for call in range(3):
        everyone = everyones(layout, own, 10 * seed + call)
        bags = everyone[rank].to(gpus)
        want = expected(everyone, layout, rank, mean=mode == "mean")
        y = called(bags, layout, mode, last=call > 0)
        assert off(y, want) <= 0
        for plan in ("fused", "serial", "auto"):
            for into in (out, None):
                same = called(bags, layout, mode, out=into, plan=plan)
                # to the bit: of weights, ways may contract a product and a sum, or not
                assert off(same, want) <= 0 and (bags.weights is not None or torch.equal(same, y))
    torch.cuda.synchronize()
    cp.check()


def test_a_rank_by_itself(gpus):
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    bags = random_bags((64, 24), 100, longest=9)
    y = cp.embedding_bag_all_to_all(
        bags.to(gpus).tables, bags.to(gpus).indices, bags.to(gpus).offsets, group=group,
        include_last_offset=True, mode="mean",
    )  # fmt: skip
    assert off(y, pooled(bags, 100, mean=True)) <= 0


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 8, 31])
def test_a_lookup_equals_the_fused_kernel(gpus, longest):
    """To the bit, with an all-to-all and a concat behind it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = problem_of(((128, 64),) * ranks, (500,) * ranks, torch.bfloat16)
    bags = random_bags((128, 64), layout.m, dtype=torch.bfloat16, rows=999,
                       longest=longest, seed=rank).to(gpus)  # fmt: skip
    # a rank by itself has the lookup alone, into its output
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    sent = cp.embedding_bag_all_to_all(
        bags.tables, bags.indices, bags.offsets, group=alone, include_last_offset=True
    )
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    want = got.view(ranks, 500, 192).permute(1, 0, 2).reshape(500, -1)
    assert torch.equal(called(bags, layout), want)


def agreed_ways(group):
    """What auto has decided in the group so far."""
    workspace = workspace_of(group, torch.device("cuda", torch.cuda.current_device()))
    return [taken.plan.spec for key, taken in workspace.agreed.items() if key[-1] == "auto"
            and isinstance(taken, Taken)]  # fmt: skip


@pytest.mark.parametrize("longest", [1, 100])
def test_auto_is_one_way_on_all_ranks(gpus, longest):
    """Though each has another number of indices, and other numbers come later."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group()
    layout = problem_of(((128,),) + ((128, 64),) * (ranks - 1), (200,) * ranks, torch.bfloat16)
    for call, most in enumerate((longest, 3, 40)):
        everyone = [random_bags(d, layout.m, seed=9 * call + r, dtype=torch.bfloat16,
                                longest=most * (1 + 9 * (r == 0)))
                    for r, d in enumerate(layout.tables)]  # fmt: skip
        bags = everyone[rank].to(gpus)
        want = called(bags, layout, plan="serial", group=group)
        assert torch.equal(called(bags, layout, plan="auto", group=group), want)
        ways = agreed_ways(group)
        assert len(ways) == 1 and ways[0] in ("fused", "serial")
        everyones_ways = [None] * ranks
        dist.all_gather_object(everyones_ways, ways)
        assert everyones_ways == [ways] * ranks
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_collector(), torch.cuda.graph(graph):
        y = called(bags, layout, plan="auto", group=group)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, want)
    cp.check(group)


def kinds(layout, own, device, count):
    """Arguments, and the output that each has, bits checked against fp64 first."""
    rank, found = dist.get_rank(), []
    for i in range(count):
        everyone = everyones(layout, own, 50 + i)
        bags = everyone[rank].to(device)
        y = called(bags, layout)
        assert off(y, expected(everyone, layout, rank, mean=False)) <= 0
        found.append((bags, y))
    return found


def some_layout():
    ranks = dist.get_world_size()
    dims = tuple((128, 64) if r % 2 else (256,) for r in range(ranks))
    return problem_of(dims, tuple(300 + 70 * r for r in range(ranks)), torch.bfloat16)


def gaps():
    """Nobody gets a row of the last rank, and the first has no bags: little is sent at all."""
    ranks = dist.get_world_size()
    dims = (*((128, 64),) * (ranks - 1), ())
    return problem_of(dims, tuple(90 * r for r in range(ranks)), torch.bfloat16)


FUSED, SERIAL = "fused", "serial"
TURNS = {"fused": (FUSED,), "serial": (SERIAL,),
         "both": (FUSED, SERIAL, SERIAL, FUSED, FUSED, SERIAL, FUSED)}  # fmt: skip


@pytest.mark.drawn(6)
@pytest.mark.parametrize("some", [some_layout, gaps])
@pytest.mark.parametrize("plans", TURNS)
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
def test_late_ranks_change_no_bit(gpus, into, plans, some):
    """3,000 calls without a meeting in between; each is compared on the device."""
    layout, plans = some(), TURNS[plans]
    own = {"dtype": torch.bfloat16, "rows": 999, "longest": 9}
    cases = kinds(layout, own, gpus, 5)
    out = cp.PooledOutputs(layout.n, dtype_of(layout), layout.rows) if into else None
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device=gpus)
    for i in range(3000):
        bags, want = cases[i % 5]
        if draw.random() < 0.05:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        y = called(bags, layout, out=out, plan=plans[i % len(plans)])
        if draw.random() < 0.02:
            delay(1e-4)  # and is read late
        wrong += (y != want).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


@pytest.mark.shows("embedding_bag_all_to_all", "captured forward", "bf16 fp32")
@pytest.mark.parametrize("plan", [FUSED, SERIAL])
def test_graphs_of_calls(gpus, plan):
    """Replays among eager calls, of two layouts, and new indices in the memory of old ones."""
    cases = []
    ranks = dist.get_world_size()
    small = problem_of(((16,),) * ranks, (64,) * ranks, torch.float32)
    for layout in (some_layout(), small):
        own = {"dtype": dtype_of(layout), "rows": 99, "longest": 5}
        ((bags, want),) = kinds(layout, own, gpus, 1)
        called(bags, layout, plan=plan)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with no_collector(), torch.cuda.graph(graph):
            y = called(bags, layout, plan=plan)
        cases.append((layout, bags, want, graph, y))
    draw, delay, late = random.Random(3), Delay(gpus), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device=gpus)
    for _ in range(300):
        layout, bags, want, graph, y = draw.choice(cases)
        if late.random() < 0.2:
            delay(1e-4)
        if draw.random() < 0.8:
            y.fill_(torch.nan)
            graph.replay()
            wrong += (y != want).any()
        else:
            other = draw.choice((FUSED, SERIAL))
            wrong += (called(bags, layout, plan=other) != want).any()
    layout, bags, want, graph, y = cases[1]
    bags.indices.zero_()
    graph.replay()
    assert not wrong and torch.equal(y, called(bags, layout)) and not torch.equal(y, want)
    torch.cuda.synchronize()
    cp.check()


@pytest.mark.shows("embedding_bag_all_to_all", "captured forward", "fp32")
@pytest.mark.parametrize("plan", [FUSED, SERIAL])
def test_graphs_into_outputs(gpus, plan):
    """Each graph has an output of its own; replays, also twice in a row, among calls in turn.

    What a replay has left is read late, when another rank may have come to the next one.
    """
    ranks = dist.get_world_size()
    layout = problem_of(((16, 40),) * ranks, (64, *(33,) * (ranks - 1)), torch.float32)
    out = cp.PooledOutputs(layout.n, torch.float32, layout.rows, captured=2)
    cases = kinds(layout, {"rows": 99, "longest": 5}, gpus, 3)
    graphs = []
    for bags, want in cases:
        called(bags, layout, out=out, plan=plan)
        if len(graphs) < 2:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with no_collector(), torch.cuda.graph(graph):
                y = called(bags, layout, out=out, plan=plan)
            graphs.append((graph, y, want))
    graph, text = torch.cuda.CUDAGraph(), "one for each call that a CUDA graph records, got 2"
    with pytest.raises(cp.InputError, match=text), torch.cuda.graph(graph):
        called(*cases[2][:1], layout, out=out, plan=plan)
    draw, delay, late = random.Random(3), Delay(gpus), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device=gpus)
    for _ in range(600):
        if late.random() < 0.1:
            delay(1e-4)
        which = draw.choice((0, 0, 1, 2))
        if which < 2:
            graph, y, want = graphs[which]
            graph.replay()
        else:
            bags, want = draw.choice(cases)
            y = called(bags, layout, out=out, plan=draw.choice((FUSED, SERIAL)))
        if late.random() < 0.1:
            delay(1e-4)
        wrong += (y != want).any()
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


def test_beside_other_fused_operators(gpus):
    """They share epoch, flags and memory."""
    layout, own = some_layout(), {"dtype": torch.bfloat16, "rows": 99, "longest": 5}
    cases = kinds(layout, own, gpus, 3)
    ranks = dist.get_world_size()
    x, w = (
        torch.randn(4 * ranks, 256, device=gpus).bfloat16(),
        torch.randn(256, 512, device=gpus).bfloat16(),
    )
    counts = torch.full((ranks, ranks), 4)  # an expert on each rank, which gets 4 rows of each

    def others():
        summed = cp.matmul_all_reduce(x, w, plan="fused")
        return summed, cp.all_to_all_matmul(x, w[None], counts=counts, plan="fused")

    first = others()
    for i in range(60):
        bags, want = cases[i % 3]
        assert torch.equal(called(bags, layout), want)
        assert all(torch.equal(y, known) for y, known in zip(others(), first, strict=True))
    cp.check()


@pytest.mark.drawn(6)
@pytest.mark.shows("embedding_bag_all_to_all", "backward", "bf16 fp32")
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
@pytest.mark.parametrize("seed", range(6))
def test_gradients(gpus, seed, into):
    """Against fp64, dense and sparse; the same bits in each run."""
    layout, own, mode = drawn(100 + seed)
    own["rows"] = max(own["rows"], 50)  # sums of a few hundred rows
    rank, everyone = dist.get_rank(), everyones(layout, own, seed)
    dys = [torch.randn(n, layout.n, generator=torch.Generator().manual_seed(r))
           .to(dtype_of(layout)) for r, n in enumerate(layout.rows)]  # fmt: skip
    exact = everyones(layout, own, seed)
    for bags in exact:
        bags.tables = [t.double().requires_grad_() for t in bags.tables]
        if bags.weights is not None:
            bags.weights = bags.weights.double().requires_grad_()
    for r, dy in enumerate(dys):
        expected(exact, layout, r, mean=mode == "mean").backward(dy.double())
    bags = everyone[rank].to(gpus)
    leaves = [*bags.tables, *([] if bags.weights is None else [bags.weights])]
    wants = [*exact[rank].tables, *([] if exact[rank].weights is None else [exact[rank].weights])]
    out = cp.PooledOutputs(layout.n, dtype_of(layout), layout.rows) if into else None
    bits = []
    for sparse in (False, True, False):
        for leaf in leaves:
            leaf.requires_grad_()
            leaf.grad = None
        plan = ("fused", "serial", "auto")[seed % 3]
        called(bags, layout, mode, sparse=sparse, out=out, plan=plan).backward(dys[rank].to(gpus))
        for leaf, want in zip(leaves, wants, strict=True):
            grad = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
            full = torch.zeros(leaf.shape).double() if want.grad is None else want.grad
            bound = 1e-4 + 2 * torch.finfo(grad.dtype).eps * full.abs()
            assert ((grad.cpu() - full).abs() <= bound).all()
        bits.append([leaf.grad.to_dense() for leaf in leaves])
    for one, other in zip(bits[0], bits[2], strict=True):
        assert torch.equal(one, other)
    torch.cuda.synchronize()
    cp.check()


def test_one_rank_alone_changes_what_it_trains(gpus):
    """Ranks meet no more for that, and all take part in each backward."""
    layout, rank = some_layout(), dist.get_rank()
    ((bags, want),) = kinds(layout, {"dtype": torch.bfloat16, "rows": 99}, gpus, 1)
    for step in range(4):
        for t in bags.tables:
            t.grad = None
            t.requires_grad_(rank == step % 2)
        y = called(bags, layout)
        y.backward(torch.ones_like(y))
        assert torch.equal(y, want)
        assert all((t.grad is not None) == (rank == step % 2) for t in bags.tables)
    torch.cuda.synchronize()
    cp.check()


def test_other_tables_of_one_rank_without_dims(gpus):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for wide in (8, 24, 8):
        dims = ((16,),) * (ranks - 1) + ((wide,),)
        layout = problem_of(dims, (40,) * ranks, torch.float32)
        everyone = everyones(layout, {"rows": 9}, wide)
        bags = everyone[rank].to(gpus)
        y = cp.embedding_bag_all_to_all(
            bags.tables, bags.indices, bags.offsets, include_last_offset=True
        )
        assert off(y, expected(everyone, layout, rank, mean=False)) <= 0
    cp.check()


@pytest.mark.parametrize("plan", ["fused", "serial", "auto"])
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
def test_no_bags(gpus, into, plan):
    group, ranks = dist.new_group(), dist.get_world_size()
    layout = problem_of(((64,),) * ranks, (0,) * ranks, torch.float32)
    out = cp.PooledOutputs(64 * ranks, dtype_of(layout), layout.rows, group=group) if into else None
    bags = random_bags((64,), 0).to(gpus)
    assert called(bags, layout, group=group, out=out, plan=plan).shape == (0, 64 * ranks)
    torch.cuda.synchronize()
    cp.check(group)


@pytest.mark.parametrize("plan", ["fused", "serial", "auto"])
@pytest.mark.parametrize("alone", [False, True], ids=["ranks", "alone"])
def test_captures_of_what_no_eager_call_had(gpus, monkeypatch, alone, plan):
    """New dtypes are refused, and leave nothing behind; another number of indices is taken."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = [dist.new_group([r]) for r in range(ranks)][rank] if alone else dist.new_group()
    layout = problem_of(((24, 8),) * group.size(), (30,) * group.size(), torch.float32)

    def some(longest, index=torch.int64):
        own = {"longest": longest, "index": index, "rows": 60}
        everyone = [random_bags(d, layout.m, seed=r, **own)
                    for r, d in enumerate(layout.tables)]  # fmt: skip
        bags = everyone[group.rank()].to(gpus)
        return bags, expected(everyone, layout, group.rank(), mean=False)

    short, want = some(2)
    assert off(called(short, layout, group=group, plan=plan), want) <= 0
    other, want = some(2, torch.int32)
    other.tables = short.tables  # the same values
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(cp.InputError, match="the first call of"), torch.cuda.graph(graph):
        called(other, layout, group=group, plan=plan)
    assert off(called(other, layout, group=group, plan=plan), want) <= 0
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")  # which a capture leaves out
    for longest in (60, 300):
        long, want = some(longest)
        long.tables = short.tables
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            y = called(long, layout, group=group, plan=plan)
        y.fill_(torch.nan)
        graph.replay()
        bound = 1e-4 + 1e-6 * want.abs()
        assert ((y.double().cpu() - want).abs() <= bound).all()
    torch.cuda.synchronize()
    cp.check(group)


def test_values_are_checked_when_asked(gpus, monkeypatch):
    layout = some_layout()
    ((bags, _),) = kinds(layout, {"dtype": torch.bfloat16, "rows": 9}, gpus, 1)
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    called(bags, layout)
    if dist.get_rank() == 0:
        bags.indices[0] += 99
    with pytest.raises(
        cp.InputError, match=r"indices of tables\[0\] must be 0 to 8, got .* rank 0"
    ):
        called(bags, layout)


def test_a_missing_rank_is_named(gpus):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    layout = some_layout()
    ((bags, _),) = kinds(layout, {"dtype": torch.bfloat16, "rows": 9}, gpus, 1)
    called(bags, layout, group=group)
    cp.check(group)
    dist.barrier()
    missing = group.size() - 1
    if group.rank() != missing:
        start_s = time.monotonic()
        called(bags, layout, group=group)
        called(bags, layout, group=group)  # waits no more
        torch.cuda.synchronize()
        assert time.monotonic() - start_s < 10  # the bound of other groups
        with pytest.raises(cp.PeerTimeoutError, match=rf"ranks \[{missing}\] did not signal step "
                           "'rows of own bags'"):  # fmt: skip
            cp.check(group)
    dist.barrier()
