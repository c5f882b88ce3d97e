"""Experts in one kernel on GPUs: layouts, uneven and changing counts, graphs, gradients, faults."""

import random

import pytest
import torch
import torch.distributed as dist
from expert_bodies import by_expert, by_owner, multiplied, summed, tables, whole
from specs import SHORT_S

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error

OPS = (cp.all_to_all_matmul, cp.matmul_all_to_all)
K, N, ROOM = 72, 88, 512


def mine(tensors, dtype=torch.bfloat16):
    """This rank's of them, on its GPU, stored as it was."""
    return tensors[dist.get_rank()].to("cuda", dtype)


def padded(x):
    """x and rows that nobody may look at."""
    full = x.new_full((ROOM, x.shape[1]), torch.nan)
    full[: len(x)] = x
    return full


def reference(op, all_of, counts):
    """What each rank has to get, exact; and the rows that come."""
    if op is cp.all_to_all_matmul:
        rows = by_expert([x.double() for x in all_of.xs], counts)
        return multiplied(rows, [w.double() for w in all_of.ws], counts), rows
    products = multiplied([x.double() for x in all_of.xs], [w.double() for w in all_of.ws], counts)
    return by_owner(products, counts), all_of.xs


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16, "kn"), (torch.float16, "nk")], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_every_row_is_where_it_belongs(gpus, op, dtype, stored):
    """Tables of all kinds one after the other, host-known and device-known; bit for bit."""
    ranks = dist.get_world_size()
    for local in (1, 3, 8):
        for name, counts in tables(ranks, local).items():
            back = op is cp.matmul_all_to_all
            all_of = whole(counts, K, N, dtype, back=back, stored=stored)
            want = mine(reference(op, all_of, counts)[0], torch.float64).to(dtype)
            x, w = mine(all_of.xs, dtype), mine(all_of.ws, dtype)
            table = torch.tensor(counts)
            y = op(x, w, counts=table, plan="fused")
            assert torch.equal(y, want), (local, name, "host")
            there = table.to(torch.int32).cuda()
            y = op(padded(x), w, counts=there, max_rows=ROOM, plan="auto")
            assert torch.equal(y[: len(want)], want), (local, name, "device")
    cp.check()


def test_rows_that_came_and_sums_of_rows(gpus):
    ranks = dist.get_world_size()
    counts = tables(ranks, 4)["uneven"]
    there, back = whole(counts, K, N, torch.bfloat16), whole(counts, K, N, torch.bfloat16,
                                                             back=True)  # fmt: skip
    table = torch.tensor(counts)
    _, rows = cp.all_to_all_matmul(
        mine(there.xs), mine(there.ws), counts=table, plan="fused", return_rows=True
    )
    assert torch.equal(rows, mine(by_expert(there.xs, counts)))
    want = reference(cp.matmul_all_to_all, back, counts)[0][dist.get_rank()].to(torch.bfloat16)
    for dtype in (torch.int32, torch.int64):
        index = torch.randint(len(want), (37, 3), device="cuda", dtype=dtype)
        weights = torch.randn(37, 3, device="cuda")
        out = cp.matmul_all_to_all(mine(back.xs), mine(back.ws), counts=table, plan="fused",
                                   sum_of=(index, weights))  # fmt: skip
        exact = summed(want.cuda().double(), index.long(), weights.double())
        plain = summed(want.cuda(), index.long(), weights.bfloat16())
        assert relative_error(out, exact) <= relative_error(plain, exact)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("known", ["host", "device"])
def test_gradients_are_those_of_the_libraries(gpus, op, known):
    ranks = dist.get_world_size()
    counts = tables(ranks, 4)["uneven"]
    all_of = whole(counts, K, N, torch.bfloat16, back=op is cp.matmul_all_to_all, stored="nk")
    found = []
    for plan in ("serial", "fused"):
        x, w = (mine(t).clone().requires_grad_() for t in (all_of.xs, all_of.ws))
        table, room = torch.tensor(counts), {}
        given = x
        if known == "device" and plan == "fused":
            table, room = table.cuda(), {"max_rows": ROOM}
            given = torch.cat([x, x.new_full((ROOM - len(x), K), torch.nan)])
        y = op(given, w, counts=table, plan=plan, **room)
        rows = sum(counts[dist.get_rank()]) if op is cp.matmul_all_to_all else len(
            by_expert(whole(counts, K, N, torch.bfloat16).xs, counts)[dist.get_rank()])  # fmt: skip
        (y[:rows].float() ** 2).sum().backward()
        found.append((y[:rows].detach(), x.grad, w.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=1e-1)


@pytest.mark.shows("all_to_all_matmul matmul_all_to_all", "captured forward", "bf16")
@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_follows_its_counts(gpus, op):
    """One graph, other counts and rows at each replay; ranks late at random, no meeting between."""
    ranks, delay, draw = dist.get_world_size(), Delay(gpus), random.Random(dist.get_rank())
    back = op is cp.matmul_all_to_all
    kinds = list(tables(ranks, 4).values())
    alls = [whole(counts, K, N, torch.bfloat16, back=back, stored="nk") for counts in kinds]
    x, w = padded(mine(alls[0].xs)), mine(alls[0].ws)
    counts = torch.tensor(kinds[0], device="cuda")
    op(x, w, counts=counts, max_rows=ROOM)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_collector(), torch.cuda.graph(graph):
        y = op(x, w, counts=counts, max_rows=ROOM)
    inputs = [(torch.tensor(c, device="cuda"), padded(mine(a.xs)), mine(a.ws))
              for c, a in zip(kinds, alls, strict=True)]  # fmt: skip
    wants = [mine(reference(op, a, c)[0], torch.float64).bfloat16()
             for c, a in zip(kinds, alls, strict=True)]  # fmt: skip
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        which = i * 7 % len(kinds)
        for to, source in zip((counts, x, w), inputs[which], strict=True):
            to.copy_(source)
        delay(draw.choice((0.0, 0.0, 20e-6, 100e-6)))
        graph.replay()
        wrong += (y[: len(wants[which])] != wants[which]).sum()
    assert not wrong.item()
    cp.check()


@pytest.mark.parametrize("op", OPS)
def test_rows_that_are_none_have_no_gradient(gpus, op, monkeypatch):
    """All new memory is full of NaN: the forward leaves it so there, and the gradient is zero."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group, back = dist.new_group(), op is cp.matmul_all_to_all
    empty = torch.Tensor.new_empty

    def full_of_nan(like, *size, **more):
        made = empty(like, *size, **more)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    kinds = list(tables(ranks, 4).values())
    alls = [whole(counts, K, N, torch.bfloat16, back=back, stored="nk") for counts in kinds]
    x, w = padded(mine(alls[0].xs)), mine(alls[0].ws)
    counts = torch.tensor(kinds[0], device="cuda")
    where = ("fused", group.group_name, ranks)

    def run(clear):
        if back:
            return (torch.ops.counterpoint.matmul_all_to_all(
                x, w, counts, None, ROOM, False, clear, *where),)  # fmt: skip
        return torch.ops.counterpoint.all_to_all_matmul(
            x, w, counts, ROOM, False, True, True, clear, *where
        )

    with torch.inference_mode():
        run(False)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with no_collector(), torch.cuda.graph(graph):
        pairs = list(zip(run(False), run(True), strict=True))
    for own, all_of in zip(kinds, alls, strict=True):
        for to, source in ((counts, own), (x, padded(mine(all_of.xs))), (w, mine(all_of.ws))):
            to.copy_(torch.as_tensor(source))
        graph.replay()
        products, rows = (mine(t) for t in reference(op, all_of, own))
        for (leaves, clears), want in zip(pairs, (products, rows), strict=False):
            assert torch.equal(leaves[: len(want)], want) and leaves[len(want) :].isnan().all()
            assert torch.equal(clears[: len(want)], want) and not clears[len(want) :].any()
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = op(*inputs, counts=counts, max_rows=ROOM, group=group)
        y[: len(products)].sum().backward()
        dx, dw = (each.grad for each in inputs)
        assert torch.isfinite(dx).all() and torch.isfinite(dw).all()
        assert not dx[len(all_of.xs[rank]) :].any()
    cp.check(group)


@pytest.mark.parametrize("op", OPS)
def test_dropped_rows_are_said(gpus, op):
    """On all ranks, also where it shows in the backward first, and by `check`."""
    group, ranks = dist.new_group(), dist.get_world_size()
    counts = tables(ranks, 2)["even"]
    all_of = whole(counts, K, N, torch.bfloat16, back=op is cp.matmul_all_to_all)
    x, w = (mine(t).requires_grad_() for t in (all_of.xs, all_of.ws))
    table = torch.tensor(counts, device="cuda")
    fewer = torch.zeros_like(table)
    op(x, w, counts=fewer, max_rows=3, group=group)  # the first call looks at the counts
    fewer.copy_(table)
    said = pytest.raises(cp.InputError, match=r"max_rows must be as many .* dropped rows")
    with said:  # a peer that has dropped rows may say so before this rank's own call
        y = op(x, w, counts=fewer, max_rows=3, group=group)
        assert y.shape == (3, N) and y.isnan().all()
        cp.check(group)
    with pytest.raises(cp.InputError, match="dropped rows"):
        op(x, w, counts=fewer, max_rows=3, group=group)
    dist.barrier()


def test_rows_to_sum_that_are_none(gpus):
    group, ranks = dist.new_group(), dist.get_world_size()
    counts = tables(ranks, 2)["even"]
    all_of = whole(counts, K, N, torch.bfloat16, back=True)
    x, w, table = mine(all_of.xs), mine(all_of.ws), torch.tensor(counts, device="cuda")
    index = torch.tensor([[0, 1], [2, -1]], device="cuda")
    weights = torch.ones(2, 2, device="cuda")
    more = {"counts": table, "max_rows": 64, "group": group}
    out = cp.matmul_all_to_all(x, w, **more, sum_of=(index[:, :0], weights[:, :0]))
    assert not out.any() and out.shape == (2, N)
    out = cp.matmul_all_to_all(x, w, **more, sum_of=(index, weights))
    with pytest.raises(cp.InputError, match="sum_of must be of rows that come back"):
        cp.check(group)
    assert out[0].isfinite().all() and out[1].isnan().all()
    dist.barrier()


def test_an_address_of_one_rank_decides_nothing(gpus):
    """w at an odd address on one rank alone, inference first, and nothing to send at first."""
    ranks, group = dist.get_world_size(), dist.new_group()
    counts = tables(ranks, 2)["uneven"]
    for op in OPS:
        back = op is cp.matmul_all_to_all
        all_of = whole(counts, K, N, torch.bfloat16, back=back)
        x, w = mine(all_of.xs), mine(all_of.ws)
        if dist.get_rank() == 0:
            room = w.new_empty(w.numel() + 1)
            room[1:] = w.reshape(-1)
            w = room[1:].view(w.shape)
        want = mine(reference(op, all_of, counts)[0], torch.float64).bfloat16()
        none = torch.zeros(ranks, 2 * ranks, dtype=torch.int64, device="cuda")
        with torch.inference_mode():
            op(padded(x), w, counts=none, max_rows=ROOM, group=group)
        y = op(padded(x), w, counts=torch.tensor(counts, device="cuda"), max_rows=ROOM, group=group)
        assert torch.equal(y[: len(want)], want)
    cp.check(group)


def test_a_graph_outlives_what_it_was_compiled_by(gpus):
    """Memory grows and compiled code is dropped between capture and replay."""
    ranks, group = dist.get_world_size(), dist.new_group()
    counts = tables(ranks, 2)["uneven"]
    for op in OPS:
        all_of = whole(counts, K, N, torch.bfloat16, back=op is cp.matmul_all_to_all)
        x, w = padded(mine(all_of.xs)), mine(all_of.ws)
        table = torch.tensor(counts, device="cuda")
        op(x, w, counts=table, max_rows=ROOM, group=group)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with no_collector(), torch.cuda.graph(graph):
            y = op(x, w, counts=table, max_rows=ROOM, group=group)
        workspace_of(group, gpus).drop_code()
        junk = [torch.full((n,), -1, dtype=torch.int32, device="cuda") for n in range(50, 400, 7)]
        large = x.new_zeros(64 * ROOM, K)
        op(large, w, counts=table, max_rows=64 * ROOM, group=group)
        want = mine(reference(op, all_of, counts)[0], torch.float64).bfloat16()
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y[: len(want)], want)
        assert all((each == -1).all() for each in junk)
    cp.check(group)


@pytest.mark.parametrize("op", OPS)
def test_a_missing_rank_is_named(gpus, op):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    ranks = dist.get_world_size()
    counts = tables(ranks, 2)["even"]
    all_of = whole(counts, K, N, torch.bfloat16, back=op is cp.matmul_all_to_all)
    x, w, table = mine(all_of.xs), mine(all_of.ws), torch.tensor(counts, device="cuda")
    op(x, w, counts=table, max_rows=64, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != ranks - 1:
        op(x, w, counts=table, max_rows=64, group=group)
        torch.cuda.synchronize()
        with pytest.raises(cp.PeerTimeoutError, match=rf"ranks \[{ranks - 1}\] did not signal"):
            cp.check(group)
    dist.barrier()


def test_what_the_kernels_do_not_take(gpus):
    ranks = dist.get_world_size()
    counts = torch.ones(ranks, ranks, dtype=torch.int64)
    for dtype, n in ((torch.float32, 16), (torch.bfloat16, 12)):
        x = torch.randn(ranks, 16, device="cuda").to(dtype)
        w = torch.randn(1, 16, n, device="cuda").to(dtype)
        with pytest.raises(cp.InputError, match="plan must be for 16-bit numbers, K and N"):
            cp.all_to_all_matmul(x, w, counts=counts, plan="fused")
        assert cp.all_to_all_matmul(x, w, counts=counts).shape == (ranks, n)  # by the libraries


def test_a_layer_of_experts_learns_as_with_the_libraries(gpus):
    """Routing that changes, forward and backward: the same losses, in one kernel and by torch."""
    losses = []
    for plan, room in (("serial", None), ("auto", 1024)):
        torch.manual_seed(0)
        layer = cnn.ExpertParallelMLP(64, 32, 4 * dist.get_world_size(), plan=plan, max_rows=room,
                                        device="cuda", dtype=torch.bfloat16)  # fmt: skip
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
        draw = torch.Generator("cuda").manual_seed(dist.get_rank())
        found = []
        for _ in range(5):
            x = torch.randn(48, 64, device="cuda", generator=draw).bfloat16()
            scores = torch.randn(48, layer.num_experts, device="cuda", generator=draw)
            weights, experts = scores.softmax(-1).topk(3)
            loss = (layer(x, experts, weights) - x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][0] != losses[0][-1]
