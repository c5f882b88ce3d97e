"""fp8 operands on GPUs: every family and kind of scale against fp64, graphs, compile, layers."""

import warnings

import pytest
import torch
import torch.distributed as dist
from scaled_bodies import AG, AR, E5M2, KINDS, RS, Case, call, off, operands

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.gpu.capture import no_collector
from counterpoint.nn.rowwise import by_columns, quantised
from counterpoint.plan.families import families
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem

PLANS = {AG: "shard_p2p", RS: "shard_p2p", AR: "shard_p2p"}


@pytest.fixture(autouse=True)
def _of_hopper(gpus):
    if torch.cuda.get_device_capability(gpus) != (9, 0):
        pytest.skip("fp8 with scales of blocks is of compute capability 9.0")


def specs(op):
    """Each family that takes operands with scales, and chunks of shards."""
    ranks = dist.get_world_size()
    problem = Problem(op, 4 * ranks, 16, 128, ranks, scales="row")
    found = [name for name in families(op) if not operation_of(op).family(name).refusal(problem)]
    return ["auto", *found, "shard_p2p ring chunks=3"]


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "forward", "fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [AG, RS, AR])
def test_every_family_against_fp64(gpus, op, kind):
    """Rows that are no multiple of 4 or 16, so that chunks and their scales lie anywhere."""
    ranks = dist.get_world_size()
    problems = []
    for i, spec in enumerate(specs(op)):
        for j, (rows, k, n) in enumerate(((64, 1024, 512), (13, 640, 272), (256, 4096, 1024))):
            case = Case(op, kind, spec, (rows,) * ranks, k, n, bias=(i + j) % 2 == 0)
            if kind != "block" and (i + j) % 3 == 0:
                case = case._replace(x_dtype=E5M2)
            problems += off(case, 31 * i + j)
        if op != AR and spec != "direct":
            uneven = tuple(11 * r + 3 for r in range(ranks))
            problems += off(Case(op, kind, spec, uneven, 256, 48, inner=(3,)), 7 * i)
    cp.check()
    assert not problems, "\n".join(problems)


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "captured forward", "fp8"
)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_the_users_own_and_replayed_calls(gpus, kind):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for op, plan in PLANS.items():
        case = Case(op, kind, plan, (24,) * ranks, 512, 256, bias=True)
        sets = [operands(case, ranks, seed, gpus)[rank] for seed in range(3)]
        want = [call(case, mine) for mine in sets]
        assert not torch.equal(want[0], want[1])
        for _ in range(4):  # the third is a graph
            assert all(torch.equal(call(case, m), y) for m, y in zip(sets, want, strict=True))
        static = operands(case, ranks, 0, gpus)[rank]
        call(case, static)
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            y = call(case, static)
        for mine, result in zip(sets, want, strict=True):
            for target, source in zip(static[:2], mine[:2], strict=True):
                target.data.copy_(source.data)
                target.scale.copy_(source.scale)
            static.bias.copy_(mine.bias)
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, result)
    cp.check()


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "compiled forward", "fp8"
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(gpus, kind):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for op, plan in PLANS.items():
        case = Case(op, kind, plan, (32,) * ranks, 512, 256, bias=True)
        mine = operands(case, ranks, 3, gpus)[rank]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inductor's own imports warn
            torch.compiler.reset()  # one function for all cases would recompile too often
            y = torch.compile(call, fullgraph=True)(case, mine)
        assert torch.equal(y, call(case, mine))
    cp.check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_is_of_the_products(gpus, kind):
    """Gate and up with SiLU, and GELU of one weight, by every family; in a graph, too."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for spec in specs(AG):
        for rows, activation in ((64, "silu_mul"), (13, "gelu"), (256, "relu_mul")):
            gated = activation.endswith("_mul")
            case = Case(AG, kind, spec, (rows,) * ranks, 640, 512, bias=not gated)
            (x, w, bias), (_, up, _) = (operands(case, ranks, s, gpus)[rank] for s in (17, 18))
            gate = cp.all_gather_matmul(x, w, bias=bias, plan=spec)
            product = cp.all_gather_matmul(x, up, plan=spec) if gated else None
            want = torch.ops.counterpoint.activated(gate, product, activation, None, 0)

            def run(
                x=x, w=(w, up) if gated else w, bias=bias, plan=spec, activation=activation
            ):  # fmt: skip
                return cp.all_gather_matmul(x, w, bias=bias, plan=plan, activation=activation)

            eager = [run() for _ in range(4)]  # the third is a graph
            graph = torch.cuda.CUDAGraph()
            with no_collector(), torch.cuda.graph(graph):
                captured = run()
            graph.replay()
            assert all(torch.equal(y, want) for y in (*eager, captured)), (spec, activation)
    cp.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_behind_a_sum(gpus, kind):
    """As behind the sum that is there, eagerly and in a graph; its result in fp8, too."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for rows, plan in ((8, "direct"), (256, "shard_p2p")):
        case = Case(AR, kind, plan, (rows,) * ranks, 512, 256, bias=True)
        x, w, bias = operands(case, ranks, 13, gpus)[rank]
        alike = torch.Generator("cuda").manual_seed(3)
        residual = torch.randn(rows * ranks, 256, device=gpus, generator=alike).bfloat16()
        weight = torch.randn(256, device=gpus, generator=alike).bfloat16()
        total = call(case, operands(case, ranks, 13, gpus)[rank])
        for out in (None, torch.float8_e4m3fn):

            def run(out=out, plan=plan, x=x, w=w, bias=bias, residual=residual, weight=weight):
                return cp.matmul_all_reduce_rms_norm(
                    x, w, bias=bias, residual=residual, norm_weight=weight, plan=plan, out_dtype=out
                )

            given = total, residual, weight, None, None, "rms", 1e-6, bool(out)
            eager = [run() for _ in range(4)]  # the third is a graph
            want = torch.ops.counterpoint.add_norm(*given)  # known since the first of them
            graph = torch.cuda.CUDAGraph()
            with no_collector(), torch.cuda.graph(graph):
                captured = run()
            graph.replay()
            for found in (*eager, captured):
                assert all(torch.equal(a.float(), b.float())
                           for a, b in zip(found, want, strict=True))  # fmt: skip
    cp.check()


def test_layers_in_fp8(gpus):
    """Forward of what was quantised, backward of bf16 to the bit; compiled with inductor."""
    ranks = dist.get_world_size()
    torch.manual_seed(1)
    with gpus:
        up = cnn.ColumnParallelLinear(512, 256 * ranks, dtype=torch.bfloat16)
        down = cnn.RowParallelLinear(256 * ranks, 512, dtype=torch.bfloat16)
    for layer, features, rows in ((up, 512, 64), (down, 256, 64 * ranks)):
        torch.manual_seed(2 + dist.get_rank())
        x = torch.randn(rows, features, device=gpus, dtype=torch.bfloat16, requires_grad=True)
        want = layer(x)
        dy = torch.randn_like(want)
        grads = torch.autograd.grad(want, [x, *layer.parameters()], dy)
        y = cnn.to_fp8(layer)(x)
        assert (y - want).float().norm() / want.float().norm() < 0.06
        op = cp.all_gather_matmul if layer is up else cp.matmul_reduce_scatter
        again = op(quantised(x), by_columns(layer.weight), bias=layer.bias.detach())
        assert torch.equal(y, again)
        ours = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inductor's own imports warn
            compiled = torch.compile(layer, fullgraph=True)(x)
        # inductor's quotients may round to the neighbouring fp8 number
        assert (compiled - y).float().norm() / y.float().norm() < 0.01
        (dx,) = torch.autograd.grad(compiled, [x], dy)
        assert torch.equal(dx, grads[0])
    cp.check()


def test_operands_that_lie_anywhere(gpus):
    """Scales and operands at odd addresses, w row by row, scales of w either way."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for kind in KINDS:
        case = Case(RS, kind, "graded", (16,) * ranks, 512, 256)
        x, w, _ = operands(case, ranks, 9, gpus)[rank]
        want = cp.matmul_reduce_scatter(x, w, plan=case.plan)
        wide = torch.empty(x.scale.numel() + 1, device=gpus)[1:].view(x.scale.shape)
        odd = cp.Scaled(x.data, wide.copy_(x.scale))
        rows = cp.Scaled(w.data.contiguous(), w.scale.contiguous())
        assert torch.equal(cp.matmul_reduce_scatter(odd, rows, plan=case.plan), want)
    cp.check()
