"""Pipelines under every control: the same results, in a graph and eagerly, again and again."""

import pytest
import torch
import torch.distributed as dist
from sharing_bodies import Loop

from counterpoint.errors import InputError, PeerTimeoutError, UnsupportedError
from counterpoint.gpu.delay import Delay
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager
from counterpoint.resources.search import Space

SIZE = 1024
SPECS = (
    "sequential", "overlap", "overlap priority", "overlap delay=5us", "overlap chunks=4",
    "overlap chunks=2 along=n", "overlap copy_engine", "overlap copy_engine chunks=2 delay=5us",
    "overlap max_ctas=8", "overlap num_sms=100",
)  # fmt: skip
SHAPED = ("overlap blocks_per_sm=2", "overlap priority blocks_per_sm=1", "overlap carve_out")


@pytest.fixture(autouse=True)
def no_registration(monkeypatch):
    """As `counterpoint bench resources` starts its ranks; NCCL reads it at its first capture."""
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("op", ["all_to_all", "all_reduce", "all_gather", "reduce_scatter"])
def test_every_control_gives_the_result(gpus, op, mode):
    loop = Loop(op, SIZE)
    for spec in SPECS:
        controls = Controls.parse(spec)
        if op == "reduce_scatter" and controls.transport != "sm":
            with pytest.raises(InputError, match="copies cannot add"):
                Eager(loop.pipeline, controls)
            continue
        with (Captured if mode == "graph" else Eager)(loop.pipeline, controls) as run:
            for call in range(2):
                loop.change(call)
                run()
                assert loop.error() <= loop.tolerance, (op, spec, call)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_shapes_of_a_triton_kernel_in_a_pipeline(gpus, mode):
    loop = Loop("all_to_all", SIZE, triton=True)
    for spec in SHAPED:
        with (Captured if mode == "graph" else Eager)(loop.pipeline, Controls.parse(spec)) as run:
            loop.change(1)
            run()
            assert loop.error() <= loop.tolerance


def test_one_capture_takes_many_shapes(gpus):
    loop = Loop("all_to_all", SIZE, triton=True)
    with Captured(loop.pipeline) as run:
        for blocks in run.shaped.feasible():
            run.set(Controls(blocks_per_sm=blocks))
            loop.change(1)
            run()
            assert loop.error() <= loop.tolerance
        with pytest.raises(InputError, match="captured as 'overlap'"):
            run.set(Controls(chunks=2))


def test_calls_again_and_again_with_a_late_rank(gpus):
    """Copies of one call never land in the results of another, whichever rank is late.

    Calls follow each other without a meeting of the ranks; each has inputs of its own.
    """
    loop = Loop("all_to_all", SIZE)
    delay, calls = Delay(gpus), 60
    inputs = [[torch.randn_like(x) for x in loop.xs] for _ in range(calls)]
    kept = [[torch.empty_like(r) for r in loop.results] for _ in range(calls)]
    loop.change(0)
    controls = Controls(transport="copy_engine")
    with Captured(loop.pipeline, controls) as graph, Eager(loop.pipeline, controls) as eager:
        for i in range(calls):
            for x, new in zip(loop.xs, inputs[i], strict=True):
                x.copy_(new)
            if i % dist.get_world_size() == dist.get_rank():
                delay(1e-4 * (i % 7))
            (graph if i % 3 else eager)()
            for keep, result in zip(kept[i], loop.results, strict=True):
                keep.copy_(result)
        for i in range(calls):
            for x, result, new, keep in zip(loop.xs, loop.results, inputs[i], kept[i], strict=True):
                x.copy_(new)
                result.copy_(keep)
            assert loop.error() <= loop.tolerance, i


@pytest.mark.alone
def test_a_delay_lasts_as_long_as_asked(gpus):
    delay = Delay(gpus)
    for seconds in (5e-6, 50e-6):
        delay(seconds)
        torch.cuda.synchronize()
        passed_s = int(delay._passed) * 1e-9
        assert seconds <= passed_s < seconds + 5e-6


@pytest.mark.own_gpu
def test_zero_cta_collectives(gpus):
    pipeline = Pipeline(dist.group.WORLD)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    memory = {"dtype": torch.float32, "memory": "library"}
    source, target = (
        pipeline.empty(ranks, 1 << 18, **memory),
        pipeline.empty(ranks, 1 << 18, **memory),
    )
    x = torch.randn(ranks, 1 << 18, device="cuda") + rank
    pipeline.compute(lambda: source.copy_(x), reads=[x], writes=[source])
    pipeline.all_to_all(target, source)
    with Captured(pipeline, Controls(transport="zero_cta")) as run:
        assert not run.collective_nodes, "a copy-engine collective has no kernel"
        run()
        torch.cuda.synchronize()
    want = torch.empty_like(x)
    dist.all_to_all_single(want, x)
    assert torch.equal(target, want)


@pytest.mark.parametrize("spec", ["overlap", "sequential", "overlap copy_engine delay=5us"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_stages_may_allocate(gpus, mode, spec):
    """Attention makes its own result: in a graph the capture's memory holds it, and no other's."""
    pipeline, ranks = Pipeline(dist.group.WORLD), dist.get_world_size()
    bf16 = {"dtype": torch.bfloat16, "device": gpus}
    queries = [torch.empty(ranks, 8, 512, 64, **bf16) for _ in range(4)]
    k, v = torch.empty(2, ranks, 8, 512, 64, **bf16)
    sent = [torch.empty_like(k) for _ in range(2)]
    received = [pipeline.empty(*k.shape, dtype=torch.bfloat16) for _ in range(2)]
    results = [torch.empty_like(k) for _ in queries]

    def attend(q, out):
        # the scaled copy and the result are both new, and gone when the stage has ended
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q * 0.5, k, v))

    for i, (q, result) in enumerate(zip(queries, results, strict=True)):
        out, got = sent[i % 2], received[i % 2]
        pipeline.compute(lambda q=q, out=out: attend(q, out), reads=[q, k, v], writes=[out])
        pipeline.all_to_all(got, out)
        pipeline.compute(lambda r=result, g=got: r.copy_(g), reads=[got], writes=[result])
    with (Captured if mode == "graph" else Eager)(pipeline, Controls.parse(spec)) as run:
        for call in range(3):
            draw = torch.Generator(gpus).manual_seed(10 * call + dist.get_rank())
            for tensor in (*queries, k, v):
                tensor.normal_(generator=draw)
            torch.full((64 << 20,), torch.nan, device=gpus)  # in what a call's own memory might be
            torch.cuda.synchronize()
            dist.barrier()
            run()
            for q, result in zip(queries, results, strict=True):
                attend(q, sent[0])
                want = torch.empty_like(sent[0])
                dist.all_to_all_single(want, sent[0])
                torch.testing.assert_close(result, want)


def test_captured_collectives_on_symmetric_memory_are_refused(gpus, monkeypatch):
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    loop = Loop("all_reduce", SIZE)
    with pytest.raises(UnsupportedError, match="set NCCL_GRAPH_REGISTER=0"):
        Captured(loop.pipeline)


def test_a_kernel_of_the_library_is_not_shaped(gpus):
    pipeline = Pipeline(dist.group.WORLD)
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    out, target = torch.empty_like(a), torch.empty_like(a)
    pipeline.compute(lambda: torch.mm(a, a, out=out), reads=[a], writes=[out])
    pipeline.all_to_all(target, out)
    with pytest.raises(UnsupportedError, match=r"nothing can be shaped; nvjet.* clusters"):
        Captured(pipeline, Controls(blocks_per_sm=1)).__enter__()
    with pytest.raises(UnsupportedError, match="no Triton kernels are known"):
        Eager(pipeline, Controls(blocks_per_sm=1)).__enter__()


def test_tune_decides_alike_and_remembers(gpus, tmp_path, monkeypatch):
    from counterpoint.resources import tune

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    monkeypatch.setenv("COUNTERPOINT_CACHE", folder[0])
    loop = Loop("all_to_all", SIZE, triton=True)
    space = Space(transports=("copy_engine",), blocks_per_sm=(4, 2), chunks=(), delays_s=(5e-6,))
    with tune(loop.pipeline, budget_s=5, space=space) as tuned:
        loop.change(1)
        tuned()
        assert loop.error() <= loop.tolerance
        specs = [None] * dist.get_world_size()
        dist.all_gather_object(specs, (tuned.controls.spec, tuned.found.why))
        assert len(set(specs)) == 1
        assert not tuned.remembered
        text = tuned.explain()
        for controls in (OFF, SEQUENTIAL, Controls(priority=True), Controls(blocks_per_sm=2)):
            assert f"  {controls.spec} " in text
    dist.barrier()
    with tune(loop.pipeline, budget_s=5, space=space) as again:
        assert (again.controls, again.remembered) == (tuned.controls, True)
        assert "remembered" in again.explain()


def test_a_rank_that_does_not_come_is_named(gpus, monkeypatch):
    monkeypatch.setenv("COUNTERPOINT_TIMEOUT_S", "0.5")
    loop = Loop("all_to_all", SIZE)
    run = Eager(loop.pipeline, Controls(transport="copy_engine"))
    run()
    torch.cuda.synchronize()
    dist.barrier()
    late = dist.get_world_size() - 1
    if dist.get_rank() != late:
        run()
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError, match=rf"ranks \[{late}\] did not .*all_to_all"):
            run()
