"""Unmodified models under torch.compile on GPUs, through the whole of inductor."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from compiled import leaves_of, sequence_parallel, step
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh

import counterpoint as cp
from benchmarks.blocks import DECODE, Sizes, made
from counterpoint.measure.timing import relative_error

MATCHED = {"llama checkpoint": 8, "gpt2": 8, "mixtral tp": 16, DECODE: 2}


@pytest.mark.parametrize("name", MATCHED)
def test_results_are_as_near_to_fp64_as_torchs(gpus, name):
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")

    def results(dtype, options):
        torch._dynamo.reset()
        model, x = made(name, Sizes(batch=2, sequence=64), mesh, dtype=dtype)
        leaves = leaves_of(model, x) if name != DECODE else []
        run = torch.compile(model, options=options) if options is not None else model
        with torch.set_grad_enabled(bool(leaves)), fresh_cache():
            return step(run, x, leaves), run

    want, _ = results(torch.float64, None)
    torchs, _ = results(torch.bfloat16, {})
    ours, compiled = results(torch.bfloat16, cp.compile_options())
    report = cp.explain(compiled)
    assert report.matched == len(report.found) == MATCHED[name], str(report)
    assert all(one.plans for one in report.found), str(report)
    for mine, theirs, exact in zip(ours, torchs, want, strict=True):
        assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 1e-3
    cp.check()


class Normed(nn.Module):
    """A model, and what it makes over the largest of all ranks: a collective without a matmul."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, x):
        y = self.model(x)
        return y / collectives.all_reduce(y.abs().amax(), "max", self.group)


def test_torchs_overlap_scheduling_keeps_what_is_left(gpus):
    group = dist.group.WORLD
    assert group is not None
    torch._dynamo.reset()
    mesh = DeviceMesh.from_group(group, "cuda")
    model, x = made("llama tp", Sizes(batch=2, sequence=64), mesh, dtype=torch.bfloat16)
    whole = Normed(model, group)
    options = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    compiled = torch.compile(whole, options=cp.compile_options(options))
    with torch.no_grad(), fresh_cache():
        want, got = whole(x), compiled(x)
    report = cp.explain(compiled)
    assert (report.matched, len(report.found)) == (2, 3), str(report)
    assert relative_error(got, want.double()) < 2e-2
    cp.check()


class Gated(nn.Module):
    """The MLP of a decoder."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_gate_and_up_are_one_operator_in_inference(gpus):
    """Of 512 rows in all, for which the model predicts a gain on H200s."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")

    def results(dtype, options):
        torch._dynamo.reset()
        model, x = sequence_parallel(Gated(4096, 14336), "down", dtype, (1, 512, 4096), mesh)
        run = torch.compile(model, options=options) if options is not None else model
        with torch.no_grad(), fresh_cache():
            return run(x), run

    want, _ = results(torch.float64, None)
    torchs, _ = results(torch.bfloat16, {})
    ours, compiled = results(torch.bfloat16, cp.compile_options())
    report = cp.explain(compiled)
    assert report.found[0].operator == "all_gather_matmul of 2 weights with silu_mul", str(report)
    assert report.matched == len(report.found) == 2 and report.found[0].plans
    assert relative_error(ours, want) <= 2 * relative_error(torchs, want) + 1e-3
    cp.check()
