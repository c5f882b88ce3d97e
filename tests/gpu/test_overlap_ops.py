"""Both ops on GPUs: every published plan, on every group size, eager and replayed."""

import pytest
import torch
import torch.distributed as dist
from specs import specs

import counterpoint
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.timing import relative_error
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.run import compute, lanes_cuda, tables
from counterpoint.schedules.finer import NAMES

AG, RS = "all_gather_matmul", "matmul_reduce_scatter"
SHAPES = [(1, 1, 1), (37, 24, 40), (129, 257, 191), (256, 512, 512)]  # rows of a rank, N, K
RATIO = 2.0  # of the error of plain torch, against fp64
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


def operands(op, rows, n, k, group, dtype=torch.bfloat16, bias=False):
    """x, w, bias of this rank, the result in fp64, and the result of the serial way."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks, rank = group.size(), group.rank()
    m = rows * ranks
    x = torch.randn(rows if op == AG else m, k, device=device).to(dtype)
    w = torch.randn(n, k, device=device).to(dtype).t()
    if k == 1:
        # a sum of few products may cancel, and its relative error then says nothing
        x, w = x.abs(), w.abs()
    b = torch.randn(n, device=device).to(dtype) if bias else None
    extra = b.double() if bias else 0.0
    if op == AG:
        full = x.new_empty(m, k)
        compute.all_gather(full, x, group=group)
        want = full.double() @ w.double() + extra
        plain = full @ w + (b if bias else 0)
    else:
        total = x.double() @ w.double()
        dist.all_reduce(total, group=group)
        want = total[rank * rows : (rank + 1) * rows] + extra
        plain = x.new_empty(rows, n)
        compute.reduce_scatter(plain, x @ w, group=group)
        plain = plain + (b if bias else 0)
    return x, w, b, want, plain


def plans(op, group, rows, n, k, dtype=torch.bfloat16, **sizes):
    """All plans of a problem of so many rows a rank."""
    ranks = group.size()
    return specs(Problem(op, rows * ranks, n, k, ranks, dtype, **sizes))


def run(op, x, w, b, group, spec):
    call = getattr(counterpoint, op)
    return call(x, w, bias=b, group=group, plan=spec)


def check(got, want, plain, what):
    error, baseline = relative_error(got, want), relative_error(plain, want)
    bound = max(RATIO * baseline, ROUNDING[got.dtype])
    assert error <= bound, f"{what}: error {error:.2e}, plain torch has {baseline:.2e}"


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "forward", "bf16")
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", [AG, RS])
def test_every_plan_at_odd_shapes(groups, op, ranks):
    if ranks not in groups:
        pytest.skip(f"needs {ranks} GPUs")
    group = groups[ranks]
    for shape in SHAPES:
        for bias in (False, True):
            x, w, b, want, plain = operands(op, *shape, group, bias=bias)
            before = x.clone()
            for spec in plans(op, group, *shape):
                got = run(op, x, w, b, group, spec)
                check(got, want, plain, f"{op} {spec} {shape} on {ranks} ranks")
                assert torch.equal(run(op, x, w, b, group, spec), got), f"{spec}: bits differ"
            assert torch.equal(x, before), "the input was written to"
    counterpoint.check(group)


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "forward", "fp16 fp32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", [AG, RS])
def test_other_dtypes(groups, op, dtype):
    group = dist.group.WORLD
    x, w, b, want, plain = operands(op, 37, 96, 72, group, dtype, bias=True)
    for spec in plans(op, group, 37, 96, 72, dtype):
        check(run(op, x, w, b, group, spec), want, plain, f"{op} {spec} {dtype}")


@pytest.mark.parametrize("op", [AG, RS])
def test_unequal_rows(groups, op):
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    rows = [(5 * i + 3) % 7 for i in range(ranks)]
    starts = [sum(rows[:i]) for i in range(ranks + 1)]
    generator = torch.Generator().manual_seed(5)
    everything = torch.randn(sum(rows), 40, generator=generator).cuda().bfloat16()
    w = torch.randn(40, 24, device="cuda").bfloat16()
    mine = slice(starts[rank], starts[rank + 1])
    if op == AG:
        x, want = everything[mine], everything.double() @ w.double()
        plain = everything @ w
    else:
        x = everything + rank
        total, partial = x.double() @ w.double(), x @ w
        dist.all_reduce(total)
        dist.all_reduce(partial)
        want, plain = total[mine], partial[mine]
    problem = Problem(op, sum(rows), 24, 40, ranks, rows=tuple(rows))
    # and with a copy stream for each peer, though it need not be a mesh
    of_mesh = [build(problem, f"{name} ring", f"mi300x-{ranks}") for name in NAMES]
    for plan in (*specs(problem), *of_mesh):
        got = getattr(counterpoint, op)(x, w, plan=plan, rows=rows)
        assert got.shape == want.shape
        if want.numel():
            check(got, want, plain, f"{op} {plan} rows {rows}")


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "captured forward", "bf16")
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", [AG, RS])
def test_a_thousand_replays_mixed_with_eager_calls(groups, op, ranks):
    """Graphs of all plans and eager calls of others in turn, on one workspace, inputs changing."""
    if ranks not in groups:
        pytest.skip(f"needs {ranks} GPUs")
    group = groups[ranks]
    names = plans(op, group, 512 // (group.size() if op == RS else 1), 1024, 1024)
    # large enough that copies and matmuls of neighbouring calls would meet
    inputs = [operands(op, 512, 1024, 1024, group) for _ in range(3)]
    w = inputs[0][1]
    wants = {spec: [run(op, x, w, None, group, spec).clone() for x, *_ in inputs] for spec in names}
    first = inputs[0]
    for spec in names:
        check(wants[spec][0], first[3], first[4], f"{op} {spec}")
    static = first[0].clone()
    graphs = {}
    for spec in names:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(op, static, w, None, group, spec)
        graphs[spec] = graph, out
    wrong = torch.zeros(len(names), dtype=torch.int64, device="cuda")
    for i in range(1000):
        j, spec = i % 3, names[i % len(names)]
        graph, out = graphs[spec]
        static.copy_(inputs[j][0])
        graph.replay()
        wrong[i % len(names)] += (out != wants[spec][j]).any()
        if i % 5 == 0:
            other = names[(i * 7 + 3) % len(names)]
            eager = run(op, inputs[(j + 1) % 3][0], w, None, group, other)
            wrong[names.index(other)] += (eager != wants[other][(j + 1) % 3]).any()
    counterpoint.check(group)
    found = {spec: int(count) for spec, count in zip(names, wrong.tolist(), strict=True) if count}
    assert not found, f"{op}: replays with wrong bits: {found}"


@pytest.mark.alone
@pytest.mark.parametrize("op", [AG, RS])
def test_memory_is_flat_over_a_thousand_calls_of_varying_m(groups, op):
    group = dist.group.WORLD
    w = torch.randn(128, 128, device="cuda").bfloat16()
    sizes = [256, *(1 + 37 * i % 256 for i in range(999))]
    spec = "graded"

    def call(rows):
        shape = (rows if op == AG else rows * group.size(), 128)
        getattr(counterpoint, op)(torch.ones(shape, device="cuda").bfloat16(), w, plan=spec)

    for rows in sizes:
        call(rows)
    for _ in range(4):  # all that repeats is captured now
        for rows in set(sizes):
            call(rows)
    torch.cuda.synchronize()
    before = workspace_of(group, torch.device("cuda", torch.cuda.current_device())).num_bytes()
    reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    for rows in sizes:
        call(rows)
    torch.cuda.synchronize()
    after = workspace_of(group, torch.device("cuda", torch.cuda.current_device())).num_bytes()
    assert after == before
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)  # the driver's own, in 2 MiB pages


def test_capture_before_a_warm_call_is_refused(groups):
    group = dist.new_group()
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    counterpoint.all_gather_matmul(x, w, group=group, plan="graded")
    big = torch.randn(4096, 1024, device="cuda")
    w_big = torch.randn(1024, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    match = "workspace must be warm when a graph is captured, .*; call the op once at this size"
    with pytest.raises(counterpoint.InputError, match=match), torch.cuda.graph(graph):
        counterpoint.all_gather_matmul(big, w_big, group=group, plan="graded")
    y = counterpoint.all_gather_matmul(big, w_big, group=group, plan="graded")
    assert y.shape == (4096 * group.size(), 64)


def test_a_smaller_size_captures_after_a_larger_one(groups):
    group = dist.group.WORLD
    for op in (AG, RS):
        x, w, b, *_ = operands(op, 512, 256, 256, group)
        run(op, x, w, b, group, "shard_p2p ring")
        x, w, b, want, plain = operands(op, 96, 128, 192, group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(op, x, w, b, group, "shard_p2p ring")
        out.fill_(torch.nan)
        graph.replay()
        check(out, want, plain, f"{op} captured at a smaller size")


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "captured forward", "fp16")
@pytest.mark.parametrize("op", [AG, RS])
def test_a_plan_that_is_new_in_a_capture(groups, op):
    """Memory is warm, the plan and its kernels are not."""
    group = dist.group.WORLD
    x, w, b, *_ = operands(op, 512, 256, 256, group)
    run(op, x, w, b, group, "graded")
    x, w, b, want, plain = operands(op, 80, 176, 192, group, torch.float16, bias=True)
    graph = torch.cuda.CUDAGraph()
    spec = f"graded {group.size()} ring"
    with torch.cuda.graph(graph):
        out = run(op, x, w, b, group, spec)
    out.fill_(torch.nan)
    graph.replay()
    check(out, want, plain, f"{op} {spec} first met in a capture")


def test_a_first_call_in_a_capture_is_refused(groups):
    group = dist.new_group()
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    match = "workspace must be warm when a graph is captured, got none"
    with pytest.raises(counterpoint.InputError, match=match), torch.cuda.graph(graph):
        counterpoint.all_gather_matmul(x, w, group=group, plan="graded")


def test_calls_on_two_streams_stay_in_order(groups):
    group = dist.group.WORLD
    x, w, b, want, plain = operands(AG, 256, 256, 256, group)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        first = run(AG, x, w, b, group, "graded")
        with torch.cuda.stream(side):
            second = run(AG, x, w, b, group, "shard_p2p ring")
    torch.cuda.synchronize()
    check(first, want, plain, "main stream")
    check(second, want, plain, "side stream")


def test_tables_of_many_plans_have_room(gpus, monkeypatch):
    """A workspace has as many as it needs, and those that graphs point into stay."""
    monkeypatch.setattr(tables, "TABLE_WORDS", 8)
    group = dist.new_group()
    world = group.size()
    x, w = torch.randn(8 * world, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    lanes = lanes_cuda.lanes_of(workspace_of(group, gpus))
    plans = ("shard_p2p", "shard_p2p chunks=2", "uniform_fused_1d", "shard_p2p chunks=4")
    for _ in range(2):
        for plan in plans:
            y = counterpoint.all_gather_matmul(x, w, group=group, plan=plan)
            want = torch.empty(world * len(x), 64, device="cuda")
            compute.all_gather(want, x, group=group)
            assert relative_error(y, want.double() @ w.double()) < 1e-2
    assert lanes.tables.num_bytes > 8 * 8, "not enough plans"
    counterpoint.check(group)
    counterpoint.release(group)


@pytest.mark.shows("all_gather_matmul", "compiled forward", "bf16")
def test_compiles_without_a_graph_break(groups):
    group = dist.group.WORLD
    x, w, _, want, plain = operands(AG, 64, 64, 64, group)

    def layer(x, w):
        return counterpoint.all_gather_matmul(x, w, group=group, plan="graded")

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, w)
    check(got, want, plain, "compiled")
