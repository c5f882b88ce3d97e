"""Unmodified models under torch.compile on GPUs, through the whole of inductor."""

import pytest
import torch
import torch.distributed as dist
from compiled import leaves_of, step
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
