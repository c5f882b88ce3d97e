"""All-reduce and norm on GPUs: results, fp8, graphs, late ranks, a rank that is missing."""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from specs import SHORT_S

import counterpoint as cp
from counterpoint.errors import InputError
from counterpoint.gpu.capture import no_collector
from counterpoint.gpu.delay import Delay
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error
from counterpoint.norms import norms
from counterpoint.plan.families import build
from counterpoint.problem import Problem

FP8 = torch.float8_e4m3fn
PLANS = ("serial", "direct", "fused", "fused one_shot", "fused two_shot", "auto")
ROWS = (1, 3, 64, 512, 2048)
COLUMNS = (4096, 5120, 7168, 8192, 16384, 40, 1000, 1001, 40000)


def given(rows, n, dtype=torch.bfloat16, seed=0):
    """x of this rank; the residual, weight and bias of all."""
    own = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank() + 1)
    shared = torch.Generator("cuda").manual_seed(1000 * seed)
    x = torch.randn(rows, n, device="cuda", generator=own).to(dtype)
    shapes = (rows, n), (n,), (n,)
    return x, *(torch.randn(s, device="cuda", generator=shared).to(dtype) for s in shapes)


def plans_for(rows, n, dtype):
    """Those that take such rows."""
    name, ranks = str(dtype).removeprefix("torch."), dist.get_world_size()
    problem = Problem("all_reduce_norm", rows, n, ranks=ranks, dtype=name)
    for plan in PLANS:
        try:
            if plan != "auto":
                build(problem, plan)
        except InputError:
            continue
        yield plan


def same_on_all(y):
    first = y.clone().view(torch.uint8)
    dist.broadcast(first, 0)
    return torch.equal(first, y.view(torch.uint8))


def summed(tensors):
    """What h is, in fp64."""
    x, residual, *_ = tensors
    want = x.double()
    dist.all_reduce(want)
    return want if residual is None else want + residual.double()


def check(found, tensors, want, layer, what):
    """h against the sum, y against the norm of h in fp64."""
    (y, h), (x, _, weight, bias) = found, tensors
    most = 2 * torch.finfo(x.dtype).eps
    assert relative_error(h, want) <= most, what
    assert relative_error(y, normed(h, weight, bias, layer)) <= most, what
    assert same_on_all(y) and same_on_all(h), what


def normed(h, weight, bias, layer):
    n = (h.shape[-1],)
    if layer:
        return torch.nn.functional.layer_norm(h.double(), n, weight.double(), bias.double(), 1e-5)
    return torch.nn.functional.rms_norm(h.double(), n, weight.double(), 1e-5)


def call(tensors, layer, **options):
    x, residual, weight, bias = tensors
    if layer:
        return cp.all_reduce_layer_norm(x, residual, weight, bias, eps=1e-5, **options)
    return cp.all_reduce_rms_norm(x, residual, weight, eps=1e-5, **options)


@pytest.mark.shows("all_reduce_rms_norm all_reduce_layer_norm", "forward", "bf16 fp16 fp32")
@pytest.mark.parametrize("n", COLUMNS)
def test_the_result(gpus, n):
    """Every plan at every number of rows; x is as it was, memory is garbage before."""
    for rows in ROWS:
        every = rows == 3 and n in (5120, 1000, 1001)
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,):
            tensors = given(rows, n, dtype)
            before, want = tensors[0].clone(), summed(tensors)
            for plan in plans_for(rows, n, dtype):
                for layer in (False, True) if rows == 3 else (False,):
                    for _ in range(2):
                        torch.full((4 * rows * n,), torch.nan, device="cuda")  # what is reused
                        found = call(tensors, layer, plan=plan)
                        check(found, tensors, want, layer, (rows, dtype, plan, layer))
            assert torch.equal(tensors[0], before)
    x, _, weight, bias = given(3, n)
    bare = x, None, weight, bias
    check(call(bare, layer=False), bare, summed(bare), False, "no residual")
    cp.check()


@pytest.mark.shows("all_reduce_rms_norm all_reduce_layer_norm", "forward", "fp8")
@pytest.mark.parametrize("n", [4096, 7168, 1001, 40000])
def test_results_in_fp8(gpus, n):
    """The nearest numbers there are, by a scale that is given and by one of each row."""
    for rows in (1, 16, 512):
        tensors = given(rows, n)
        _, _, weight, bias = tensors
        for plan in plans_for(rows, n, torch.bfloat16):
            for layer in (False, True):
                scale = torch.tensor(0.01, device="cuda")
                static, h = call(tensors, layer, plan=plan, out_dtype=FP8, scale=scale)
                by_row, other, scales = call(tensors, layer, plan=plan, out_dtype=FP8)
                norm = normed(h, weight, bias, layer)
                what = rows, plan, layer
                assert torch.equal(h, other), what
                largest = norm.abs().amax(1, keepdim=True)
                assert scales.shape == (rows, 1), what
                assert relative_error(scales * 448, largest) < 1e-5, what
                for got, by in ((static, scale), (by_row, scales)):
                    want = (norm / by.double()).clamp(-448, 448)
                    # half the distance of two values, at least that of subnormal ones; and what
                    # fp32 rounds before
                    near = (want.abs() / 16).clamp(min=2**-10) + 2**-13
                    assert ((got.double() - want).abs() <= near).all(), what
                    assert same_on_all(got), what
                assert same_on_all(scales), what


@pytest.mark.shows("all_reduce_rms_norm", "captured forward", "bf16 fp8")
@pytest.mark.parametrize("plan", ["direct", "fused one_shot", "fused two_shot", "auto"])
def test_graphs_and_eager_calls_mix_while_ranks_are_late(gpus, plan):
    """Sizes mix, nobody meets in between, each result is compared on the device."""
    delay, draw = Delay(gpus), random.Random(dist.get_rank())
    sizes = ((1, 8192), (64, 4096), (7, 64))
    cases = [given(*size, seed=s) for s in range(3) for size in sizes]
    options = {"plan": plan}
    want = [call(case, layer=False, **options) for case in cases]
    for case, found in zip(cases, want, strict=True):
        check(found, case, summed(case), False, plan)
    quantized = [call(case, layer=True, out_dtype=FP8, **options) for case in cases]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def compare(i):
        for got, first in zip(call(cases[i], layer=False, **options), want[i], strict=True):
            wrong.add_((got != first).any())
        fp8 = call(cases[i], layer=True, out_dtype=FP8, **options)
        for got, first in zip(fp8, quantized[i], strict=True):
            wrong.add_((got.view(torch.uint8) != first.view(torch.uint8)).any())

    graphs = []
    for i in range(len(cases)):
        graphs.append(torch.cuda.CUDAGraph())
        with no_collector(), torch.cuda.graph(graphs[-1]):
            compare(i)
    order = list(range(len(cases))) * 40
    random.Random(0).shuffle(order)
    for turn, i in enumerate(order):
        if draw.random() < 0.1:
            delay(draw.choice((1e-5, 1e-4, 3e-4)))
        graphs[i].replay() if turn % 3 else compare(i)
    torch.cuda.synchronize()
    cp.check()
    assert not wrong


def test_a_replayed_graph_sees_new_inputs(gpus):
    tensors = given(8, 8192)
    call(tensors, layer=False)
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph):
        found = call(tensors, layer=False)
    for seed in (1, 2):
        for old, new in zip(tensors, given(8, 8192, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        check(found, tensors, summed(tensors), False, seed)


@pytest.mark.shows("all_reduce_rms_norm", "compiled forward", "bf16")
def test_a_compiled_call_is_the_eager_one(gpus):
    tensors = given(8, 4096)
    want = call(tensors, layer=False, plan="fused")

    def one(x, residual, weight, bias):
        return call((x, residual, weight, bias), layer=False, plan="fused")

    found = torch.compile(one, fullgraph=True)(*tensors)
    assert all(map(torch.equal, found, want))


@pytest.mark.shows("all_reduce_rms_norm", "backward", "bf16")
def test_the_gradient(gpus):
    x, residual, weight, bias = given(16, 4096)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    y, h = call((x, residual, weight, bias), layer=False)
    dy = given(16, 4096, seed=5)[1]
    found = torch.autograd.grad(y, leaves, dy)
    wide = [h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    norm = torch.nn.functional.rms_norm(wide[0], (4096,), wide[1], 1e-5)
    dh, dweight = torch.autograd.grad(norm, wide, dy.double())
    for got, want in zip(found, (dh, dh, dweight), strict=True):
        assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("plan", ["direct", "fused one_shot", "fused two_shot"])
def test_a_missing_rank_is_named(gpus, plan):
    group = dist.new_group()
    workspace_of(group, gpus).timeout_s = SHORT_S
    tensors = given(4, 256)
    call(tensors, layer=False, group=group, plan=plan)
    torch.cuda.synchronize()
    dist.barrier()
    missing = group.size() - 1
    if group.rank() != missing:
        call(tensors, layer=False, group=group, plan=plan)
        torch.cuda.synchronize()
        with pytest.raises(cp.PeerTimeoutError, match=rf"ranks \[{missing}\] did not signal"):
            cp.check(group)
    dist.barrier()


@pytest.mark.shows("matmul_all_reduce_rms_norm", "forward", "bf16 fp8")
@pytest.mark.shows("matmul_all_reduce_rms_norm", "backward", "bf16")
@pytest.mark.shows("matmul_all_reduce_layer_norm", "forward", "bf16")
def test_a_norm_behind_a_matmul(gpus):
    _, residual, weight, bias = given(16, 4096)
    w = given(2048, 4096, seed=7)[0].mul_(2048**-0.5).requires_grad_()
    a = given(16, 2048, seed=8)[0]
    options = {"residual": residual, "norm_weight": weight, "eps": 1e-5}
    y, h = cp.matmul_all_reduce_rms_norm(a, w, **options)
    assert relative_error(y, normed(h, weight, None, False)) < 1e-2 and same_on_all(y)
    (dw,) = torch.autograd.grad(y.sum(), w)
    wide = h.detach().double().requires_grad_()
    (dh,) = torch.autograd.grad(normed(wide, weight, None, False).sum(), wide)
    assert relative_error(dw, a.double().t() @ dh) < 2e-2
    y, h = cp.matmul_all_reduce_layer_norm(a, w, norm_bias=bias, **options)
    assert relative_error(y, normed(h, weight, bias, True)) < 1e-2
    with torch.no_grad():
        y, h, scales = cp.matmul_all_reduce_rms_norm(a, w, out_dtype=FP8, **options)
    assert relative_error(y.double() * scales, normed(h, weight, None, False)) < 4e-2


def test_a_server_has_ever_other_numbers_of_rows(gpus):
    """The kernel is compiled once for all of them, and what is kept of it is bounded."""
    norms.launch_of.cache_clear()
    norms.compiled.cache_clear()
    weight = torch.randn(512, device="cuda").bfloat16()
    for m in (*range(1, 200, 7), 3, 64, 5000):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        (y, h) = torch.ops.counterpoint.add_norm(x, None, weight, None, None, "rms", 1e-5, False)
        assert torch.equal(h, x)
        assert relative_error(y, normed(x, weight, None, False)) < 1e-2
    assert norms.compiled.cache_info().currsize == 1


def test_compiled_inference_has_it_for_an_all_reduce_and_a_norm(gpus):
    """In the place of torch's three operators, by inductor."""
    x, residual, weight, _ = given(16, 4096)
    group, options = dist.group.WORLD, cp.compile_options()

    def layer(x, residual):
        h = collectives.all_reduce(torch.relu(x), "sum", group) + residual
        return F.rms_norm(h, (4096,), weight, 1e-5), h

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own imports warn
        y, h = torch.compile(layer, options=options, dynamic=False)(x, residual)
    (report,) = options["joint_custom_pre_pass"].reports
    assert [one.operator for one in report.found] == ["all_reduce_rms_norm"]
    total = torch.relu(x).double()
    dist.all_reduce(total)
    assert relative_error(h, total + residual.double()) < 1e-2
    assert relative_error(y, normed(h, weight, None, False)) < 1e-2
    cp.check()
