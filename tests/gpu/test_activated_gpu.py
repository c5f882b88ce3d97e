"""all_gather_matmul with an activation on GPUs: families and sizes against fp64, bits, graphs."""

import warnings

import pytest
import torch
import torch.distributed as dist

import counterpoint as cp
from counterpoint.gpu.capture import no_collector
from counterpoint.measure.timing import relative_error
from counterpoint.ops.activations import NAMES, activate
from counterpoint.plan.families import families
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem
from counterpoint.run.activated import FUNCTIONS, multiplied
from counterpoint.run.invariant_matmul import by_kernel, gated_tile

AG = "all_gather_matmul"
SIZES = ((64, 1024, 512), (13, 640, 272), (130, 1000, 100), (2, 72, 40), (520, 2048, 1024))


def normal(*shape, dtype=torch.bfloat16, seed=0):
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=made).to(dtype)


def operands(m, k, n, dtype=torch.bfloat16, columns=True):
    """x of this rank, that of all ranks, gate and up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    xs = [normal(m, k, dtype=dtype, seed=r) for r in range(ranks)]
    shape = (n, k) if columns else (k, n)
    ws = [normal(*shape, dtype=dtype, seed=100 + 10 * rank + i).mul_(k**-0.5) for i in range(2)]
    return xs[rank], torch.cat(xs), [w.t() if columns else w for w in ws]


def exact(activation, x, weights, bias=None, dtype=torch.float64):
    gate = x.to(dtype) @ weights[0].to(dtype)
    gate = gate if bias is None else gate + bias.to(dtype)
    y = FUNCTIONS[activation.removesuffix("_mul")](gate)
    return y * (x.to(dtype) @ weights[1].to(dtype)) if activation.endswith("_mul") else y


def call(activation, x, ws, bias=None, **options):
    w = ws if activation.endswith("_mul") else ws[0]
    return cp.all_gather_matmul(x, w, bias=bias, activation=activation, **options)


def specs(activation, m, n, k, dtype="bfloat16"):
    gated, ranks = activation.endswith("_mul"), dist.get_world_size()
    p = Problem(AG, m * ranks, n * (1 + gated), k, ranks, dtype, activation=activation)
    found = [f for f in families(AG) if not operation_of(AG).family(f).refusal(p)]
    return ["auto", *found, "shard_p2p ring chunks=2", "shard_p2p invariant"]


@pytest.mark.parametrize("activation", NAMES)
def test_every_family_against_fp64(gpus, activation):
    problems = []
    for i, (m, k, n) in enumerate(SIZES):
        x, whole, ws = operands(m, k, n, columns=i % 2 == 0)
        bias = None if activation.endswith("_mul") or i % 2 else normal(n, seed=7)
        want, plain = (exact(activation, whole, ws, bias, d) for d in (torch.float64, x.dtype))
        limit = 2 * relative_error(plain, want)
        for plan in specs(activation, m, n, k):
            for _ in range(2):
                y = call(activation, x, ws, bias, plan=plan)
                error = relative_error(y, want)
                if y.shape != want.shape or not error <= limit:
                    problems.append(f"{plan} {m},{k},{n}: {error:.3g} of {limit:.3g}")
    cp.check()
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(gpus, dtype):
    for activation in ("gelu", "silu_mul"):
        x, whole, ws = operands(130, 1000, 104, dtype)
        want = exact(activation, whole, ws)
        plain = relative_error(exact(activation, whole, ws, dtype=dtype), want)
        for plan in ("auto", "serial", "shard_p2p", "serial invariant"):
            error = relative_error(call(activation, x, ws, plan=plan), want)
            assert error <= 3 * plain + 1e-6, (activation, plan, error, plain)


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul", "gelu", "relu", "silu"])
def test_one_kernel_has_the_bits_of_three(gpus, activation):
    """Of the invariant matmul's products: fused or stored between, at all numbers of rows."""
    gated = activation.endswith("_mul")
    for k, n in ((1024, 512), (1000, 104)):
        for columns in (True, False):
            _, whole, ws = operands(1024, k, n, columns=columns)
            p = Problem(AG, len(whole), n * (1 + gated), k, 1, activation=activation,
                        invariant=True)  # fmt: skip
            products = [torch.empty(len(whole), n, device=gpus, dtype=whole.dtype) for _ in ws]
            for w, product in zip(ws, products, strict=True):
                by_kernel(whole, w, None, product)
            want = activate(products[: 1 + gated], activation)
            for m in (1, 2, 16, 17, 32, 33, 64, 65, 200, 256, 512, len(whole)):
                y = torch.full((m, n), float("nan"), device=gpus, dtype=whole.dtype)
                multiplied(p, whole[-m:], ws[0], None, y, ws[1] if gated else None)
                assert torch.equal(y, want[-m:]), (k, n, columns, m)


def test_gated_tiles_have_the_same_bits(gpus):
    """All of them, with gate before up in memory and behind it."""
    sms = torch.cuda.get_device_properties(gpus).multi_processor_count
    _, whole, ws = operands(600, 2048, 1024)
    products = [torch.empty(len(whole), 1024, device=gpus, dtype=whole.dtype) for _ in ws]
    for w, product in zip(ws, products, strict=True):
        by_kernel(whole, w, None, product)
    tiles = {gated_tile(m, n, sms, whole.dtype) for m in (64, 128, 256, 512, 8192)
             for n in (1536, 3584, 7168, 28672)}  # fmt: skip
    assert len(tiles) > 3
    for tile in tiles:
        for gate, up in ((0, 1), (1, 0)):
            want = activate([products[gate], products[up]], "silu_mul")
            y = torch.full_like(want, float("nan"))
            by_kernel(whole, ws[gate], None, y, tile, "silu", ws[up])
            assert torch.equal(y, want), (tile, gate)


def test_bits_of_rows_in_the_invariant_mode(gpus):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, _, ws = operands(8, 1536, 768)
    x = normal(2048, 1536, seed=3)

    def of(m, plan):
        shares = [(m + r) // ranks for r in range(ranks)]
        start = sum(shares[:rank])
        part = x[start : start + shares[rank]]
        with cp.batch_invariant():
            return call("silu_mul", part, ws, rows=shares, plan=plan)

    want = of(2048, "serial")
    for plan in ("auto", "serial", "shard_p2p", "graded"):
        for m in (1, 2, 15, 16, 33, 64, 65, 257, 1000):
            assert torch.equal(of(m, plan), want[:m]), (plan, m)
    part = x[rank * 32 :][:32].clone().requires_grad_()
    with cp.batch_invariant():
        trained = call("silu_mul", part, ws)
    assert torch.equal(trained, want[: 32 * ranks]), "other bits in training"


@pytest.mark.parametrize("activation", NAMES)
def test_gradients(gpus, activation):
    x, whole, ws = operands(64, 512, 256)
    gated = activation.endswith("_mul")
    given = [t.detach().clone().requires_grad_() for t in (x, *ws[: 1 + gated])]
    y = call(activation, given[0], given[1:])
    dy = normal(*y.shape, seed=dist.get_rank())
    got = torch.autograd.grad(y, given, dy)

    def by_torch(dtype):
        rows, *weights = [t.detach().to(dtype).requires_grad_() for t in (whole, *ws[: 1 + gated])]
        grads = torch.autograd.grad(
            exact(activation, rows, weights, dtype=dtype), [rows, *weights], dy.to(dtype)
        )
        dx = grads[0].double()
        dist.all_reduce(dx)
        return dx.chunk(dist.get_world_size())[dist.get_rank()], *grads[1:]

    want, plain = by_torch(torch.float64), by_torch(torch.bfloat16)
    for name, g, w, p in zip(("dx", "dw", "dup"), got, want, plain, strict=False):
        assert relative_error(g, w) <= 2 * relative_error(p, w) + 4e-3, name


def test_replayed_captured_and_compiled(gpus):
    for activation, plan in (("silu_mul", "shard_p2p"), ("gelu_tanh", "graded"),
                             ("silu_mul", "serial"), ("gelu", "serial")):  # fmt: skip
        sets = [operands(48, 512, 256)]
        sets.append((sets[0][0] * 2, None, [w * 0.5 for w in sets[0][2]]))
        want = [call(activation, x, ws, plan=plan) for x, _, ws in sets]
        for _ in range(4):  # the third is a graph
            for (x, _, ws), y in zip(sets, want, strict=True):
                assert torch.equal(call(activation, x, ws, plan=plan), y)
        static = sets[0][0].clone(), [w.clone() for w in sets[0][2]]
        call(activation, *static, plan=plan)
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            y = call(activation, *static, plan=plan)
        for (x, _, ws), result in zip(sets, want, strict=True):
            static[0].copy_(x)
            for target, w in zip(static[1], ws, strict=True):
                target.copy_(w)
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, result)
        del graph
        x, _, ws = sets[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inductor's own imports warn
            torch.compiler.reset()
            function = torch.compile(
                lambda x, ws, a=activation, p=plan: call(a, x, ws, plan=p), fullgraph=True
            )
            assert torch.equal(function(x, ws), want[0])
    cp.check()


def test_weights_that_do_not_lie_alike(gpus):
    x, whole, ws = operands(64, 512, 256)
    mixed = [ws[0], ws[1].contiguous()]
    for plan in ("serial", "shard_p2p", "serial invariant"):
        y = call("silu_mul", x, mixed, plan=plan)
        assert relative_error(y, exact("silu_mul", whole, ws)) < 1e-2
    p = Problem(AG, len(whole), 512, 512, 1, activation="silu_mul")
    y, aligned = (torch.empty(len(whole), 256, device=gpus, dtype=x.dtype) for _ in range(2))
    loose = torch.empty(len(whole), 513, device=gpus, dtype=x.dtype)[:, 1:].copy_(whole)
    multiplied(p, loose, ws[0], None, y, ws[1])  # no descriptor of it: by the library
    multiplied(p, whole, ws[0], None, aligned, ws[1])
    assert relative_error(y, aligned.double()) < 1e-2
