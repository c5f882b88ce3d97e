"""Gradients on GPUs: every backward plan, lists of weights, graphs of a training step."""

import pytest
import torch
import torch.distributed as dist
from grad_bodies import GradCase, several_weights, wrong_grads
from rank_bodies import Case
from specs import specs

import counterpoint as cp
from counterpoint.measure.timing import relative_error
from counterpoint.operators import op_names
from counterpoint.ops.call import prepare
from counterpoint.ops.samples import operands, operator_of
from counterpoint.problem import Problem

OPS = ["all_gather_matmul", "matmul_reduce_scatter"]
BACKWARD = [op for op in op_names() if "matmul" in op and op.endswith(("_backward", "_wgrad"))]


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "backward", "bf16 fp32")
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_fp64(gpus, op):
    ranks = dist.get_world_size()
    uneven = ((5 * torch.arange(ranks) + 3) % 7).tolist()
    problems = []
    for plan in ("auto", "serial", "graded"):
        for dtype, layout in ((torch.bfloat16, "transposed"), (torch.float32, "plain")):
            case = Case(op, plan, (24,) * ranks, 72, 40, dtype, bias=True, layout=layout)
            problems += wrong_grads(GradCase(case))
        case = Case(op, plan, tuple(uneven), 40, 24, torch.bfloat16, inner=(2,))
        problems += wrong_grads(GradCase(case))
        for needs in ((True, False), (False, True)):
            problems += wrong_grads(GradCase(Case(op, plan, (8,) * ranks, 40, 24), needs))
    assert not problems, "\n".join(problems)
    cp.check()


def test_several_weights(gpus):
    for plan in ("serial", "graded", "shard_p2p"):
        rows = (16,) * dist.get_world_size()
        assert not several_weights(dist.get_rank(), len(rows), plan, rows, torch.bfloat16)


@pytest.mark.parametrize("op", BACKWARD)
def test_every_backward_plan_eager_and_replayed(gpus, op):
    """Errors are those of serial; replays with changed inputs follow them."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for rows, n, k in ((37, 24, 40), (256, 512, 384)):
        problem = Problem(op, rows * ranks, n, k, ranks)
        torch.manual_seed(rank)
        given = operands(problem, rank, gpus)
        want = [t.double() for t in prepare(operator_of(op), given, "serial", [], group)(given)]
        for spec in specs(problem)[1:]:
            ready = prepare(operator_of(op), given, spec, [], group)
            for _ in range(4):  # the last two are replays of what the third captured
                got = ready(given)
            for a, b in zip(got, want, strict=True):
                assert relative_error(a, b) < 2**-7, f"{op} {spec}"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static = ready(given)
            given[0].mul_(2)
            graph.replay()
            for a, b in zip(static, want, strict=True):
                assert relative_error(a, 2 * b) < 2**-7, f"{op} {spec} replayed"
            given[0].div_(2)
    cp.check()


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter", "captured forward, captured backward", "bf16"
)
def test_a_training_step_in_one_graph(gpus):
    """Forward and backward of a sequence-parallel MLP, captured, against eager."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(256, 512, device=gpus).bfloat16().requires_grad_()
    up = torch.randn(384, 512, device=gpus).bfloat16().requires_grad_()
    down = torch.randn(512, 384, device=gpus).bfloat16().requires_grad_()
    target = torch.randn(256, 512, device=gpus).bfloat16()

    def step():
        hidden = torch.relu(cp.all_gather_matmul(x, up.t(), plan="graded"))
        y = cp.matmul_reduce_scatter(hidden, down.t(), plan="graded")
        return torch.autograd.grad((y * target).sum(), (x, up, down))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    for factor in (1.0, 0.5, -1.0):
        with torch.no_grad():
            target.mul_(factor)
        want = step()
        graph.replay()
        for a, b in zip(grads, want, strict=True):
            assert torch.equal(a, b)
    cp.check()
