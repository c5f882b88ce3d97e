"""Batch-invariant calls on GPUs: bits of rows for M of 1 to 8192, by all plans, and in graphs.

Legend: M rows in all; shares of them are about equal, so that who owns a row changes with M.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

import counterpoint as cp
from counterpoint.gpu.capture import no_collector
from counterpoint.measure.timing import relative_error
from counterpoint.plan.families import families
from counterpoint.run.invariant_matmul import WAVES, Tile, by_kernel
from counterpoint.tensor_parallel.plan_fused_sum import FEW_ROWS

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MOST = 8192
ROWS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 63, 64, 65, 100, 128, 257, 512, 1000, 2048, 4099, MOST)
FEW = (1, 2, 16, 33, 64, 130, 1024)
TILES = (*WAVES, Tile(16, 64, 128, 4, 5), Tile(16, 32, 64, 4, 8), Tile(32, 64, 128, 4, 5),
         Tile(64, 64, 128, 4, 3, per_sm=2), Tile(128, 128, 64, 4, 4), Tile(64, 16, 64, 4, 3),
         Tile(128, 256, 64, 8, 3))  # fmt: skip


class Layer:
    """One operator on this rank, and its result for all rows by the serial plan."""

    def __init__(self, op, n, k, dtype=torch.bfloat16, columns=True):
        self.op, self.rank, self.ranks = op, dist.get_rank(), dist.get_world_size()
        own = torch.Generator("cuda").manual_seed(7 + self.rank)
        alike = torch.Generator("cuda").manual_seed(5)

        def normal(*shape, generator=own):
            return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

        gathers = op == "all_gather_matmul"
        self.x = normal(MOST, k, generator=alike if gathers else own)
        self.w = (normal(n, k).t() if columns else normal(k, n)).mul_(k**-0.5)
        self.want = self.whole("serial", MOST)

    def shares(self, m):
        return [(m + r) // self.ranks for r in range(self.ranks)]

    def kept(self, m):
        start = sum(self.shares(m)[: self.rank])
        return slice(start, start + self.shares(m)[self.rank])

    def call(self, m, plan, x=None):
        x, rows = self.x[:m] if x is None else x, {"rows": self.shares(m)}
        if self.op == "all_gather_matmul":
            x = x[self.kept(m)]
        if self.op == "matmul_all_reduce":
            rows = {}
        return getattr(cp, self.op)(x, self.w, plan=f"{plan} invariant", **rows)

    def whole(self, plan, m):
        """All rows of the result, on every rank."""
        y = self.call(m, plan)
        if self.op != "matmul_reduce_scatter":
            return y
        found = torch.zeros(m, y.shape[1], device="cuda", dtype=y.dtype)
        found[self.kept(m)] = y
        dist.all_reduce(found)  # to zeros
        return found

    def takes(self, m, plan):
        """Whether there is such a plan for so many rows; one kernel has room for a tile of few."""
        if plan.startswith("fused") and m > FEW_ROWS:
            return False
        rows = () if self.op == "matmul_all_reduce" else tuple(self.shares(m))
        (k, n), name = self.w.shape, str(self.w.dtype).removeprefix("torch.")
        p = cp.Problem(self.op, m, n, k, self.ranks, name, rows, invariant=True)
        return plan == "auto" or not p.operation.family(plan.split()[0]).refusal(p)

    def differ(self, m, plan):
        rows = self.kept(m) if self.op == "matmul_reduce_scatter" else slice(0, m)
        return int((self.call(m, plan) != self.want[rows]).sum())


def specs(op):
    found = [name for name in families(op) if name not in ("islands", "running_sum")]
    if op == "all_gather_matmul":
        found = [name for name in found if not name.endswith("2d")]
    if op == "matmul_all_reduce":
        found += ["fused one_shot 32x64x4 warps=4", "fused two_shot 64x128x3 warps=8"]
    return ["auto", *found, "shard_p2p ring chunks=2"]


@pytest.mark.drawn(2)  # of tens of tiles each, all of which are compiled
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_tiles_have_the_same_bits(gpus, dtype, columns):
    """The matmul alone: tiles, both kernels, descriptors and addresses, rows at any place."""
    for n, k in ((1024, 8192), (520, 1000), (100, 72)):
        x = torch.randn(MOST, k, device="cuda").to(dtype)
        w = torch.randn(n, k, device="cuda").to(dtype).t()
        w = w if columns else w.contiguous()
        want = torch.empty(MOST, n, device="cuda", dtype=dtype)
        by_kernel(x, w, None, want)
        exact = x[:512].double() @ w.double()
        own, torchs = (relative_error(y[:512], exact) for y in (want, x @ w))
        chain = k**0.5 * torch.finfo(torch.float32).eps  # fp32 is added up in one chain of K
        assert own <= 1.1 * torchs + chain * (dtype == torch.float32)
        wrong = {}
        for m in ROWS:
            y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
            by_kernel(x[-m:], w, None, y)
            wrong[m] = int((y != want[-m:]).sum())
        assert not any(wrong.values()), (n, k, wrong)
        tiles = (
            TILES if dtype != torch.float32 else (Tile(16, 32, 16, 4, 3), Tile(64, 32, 16, 8, 3))
        )
        for tile in tiles:
            m = min(tile.block_m, 32) if tile.block_m <= 32 else 1000
            y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
            by_kernel(x[13 : 13 + m], w, None, y, tile)
            wrong[tile] = int((y != want[13 : 13 + m]).sum())
            loose = torch.empty(m, k + 1, device="cuda", dtype=dtype)[:, 1:]  # no descriptor
            by_kernel(loose.copy_(x[13 : 13 + m]), w, None, y.fill_(float("nan")), tile)
            wrong[tile, "addresses"] = int((y != want[13 : 13 + m]).sum())
        assert not any(wrong.values()), (n, k, wrong)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
@pytest.mark.parametrize("op", OPS)
def test_bits_of_rows_for_all_m_and_plans(gpus, op, columns):
    layer = Layer(op, 2048, 1536, columns=columns)
    met, wrong = set(), {}
    for plan in specs(op):
        for m in ROWS if plan in ("auto", "serial") else FEW:
            if layer.takes(m, plan):
                wrong[plan, m] = layer.differ(m, plan)
                met.add(plan)
    assert met == {*specs(op)}
    assert not any(wrong.values()), {k: v for k, v in wrong.items() if v}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_bits_in_other_dtypes(gpus, op, dtype):
    layer = Layer(op, 520, 1000, dtype)
    wrong = {(p, m): layer.differ(m, p) for p in ("auto", "shard_p2p") for m in (1, 2, 33, 130)}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("op", OPS)
def test_it_is_as_exact_as_without(gpus, op):
    layer = Layer(op, 2048, 1536)
    exact = layer.x[:256].double() @ layer.w.double()
    if op != "all_gather_matmul":
        dist.all_reduce(exact)
    with_nccl = layer.x[:256] @ layer.w
    if op != "all_gather_matmul":
        dist.all_reduce(with_nccl)
    own, theirs = (relative_error(y[:256], exact) for y in (layer.want, with_nccl))
    assert own <= 1.1 * theirs


@pytest.mark.parametrize("plan", ["auto", "shard_p2p", "direct", "fused"])
def test_in_a_graph(gpus, plan):
    """In the mode while captured, replayed outside of it, with other rows."""
    layer = Layer("matmul_all_reduce", 2048, 1536)
    for m in (1, 48):
        x = layer.x[:m].clone()
        with cp.batch_invariant():
            warm = cp.matmul_all_reduce(x, layer.w, plan=plan)
            graph = torch.cuda.CUDAGraph()
            with no_collector(), torch.cuda.graph(graph):
                y = cp.matmul_all_reduce(x, layer.w, plan=plan)
        graph.replay()
        assert torch.equal(y, warm) and torch.equal(y, layer.want[:m])
        x.copy_(layer.x[500 : 500 + m])
        graph.replay()
        assert torch.equal(y, layer.want[500 : 500 + m])
    cp.check()


def test_compiled_and_the_norm(gpus):
    layer = Layer("matmul_all_reduce", 2048, 1536)
    norm = torch.ones(2048, device="cuda", dtype=torch.bfloat16)

    def normed(x):
        return cp.matmul_all_reduce_rms_norm(
            x, layer.w, residual=torch.zeros_like(layer.want[: len(x)]), norm_weight=norm
        )

    with cp.batch_invariant(), torch.no_grad():
        whole, total = normed(layer.x)
        assert torch.equal(total, layer.want)
        compiled = torch.compile(normed, backend="aot_eager", fullgraph=True, dynamic=False)
        for m in (1, 7, 64, 130):
            y, h = compiled(layer.x[:m])
            assert torch.equal(y, whole[:m]) and torch.equal(h, total[:m])


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
# in one block of columns, and in two; not all of the one kernel are of 2, 4, 8, ... columns
@pytest.mark.parametrize("n", [4096, 5120, 7168, 16384, 20000])
def test_norms_of_sums(gpus, n, layer):
    """For all M and plans, of y, h and scales; in a graph, too."""
    own = torch.Generator("cuda").manual_seed(7 + dist.get_rank())
    alike = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(MOST, n, device="cuda", generator=own).bfloat16()
    residual = torch.randn(MOST, n, device="cuda", generator=alike).bfloat16()
    weight, bias = torch.randn(2, n, device="cuda", generator=alike).bfloat16()

    def call(m, plan, fp8=False):
        given, options = (x[:m], residual[:m], weight), {"plan": f"{plan} invariant"}
        options |= {"out_dtype": torch.float8_e4m3fn} if fp8 else {}
        if layer:
            return cp.all_reduce_layer_norm(*given, bias, **options)
        return cp.all_reduce_rms_norm(*given, **options)

    def takes(plan, m):
        p = cp.Problem("all_reduce_norm", m, n, ranks=dist.get_world_size(), invariant=True)
        try:
            return plan == "auto" or bool(cp.build(p, plan))
        except cp.InputError:
            return False

    if dist.get_world_size() <= 4:  # of more, not all rows fit the registers of a program
        assert takes("fused", 1) == (n <= 16384)
    for fp8 in (False, True):
        whole, wrong = call(MOST, "serial", fp8), {}
        for plan in ("auto", "serial", "direct", "fused", "fused one_shot", "fused two_shot"):
            for m in ROWS if plan == "auto" else FEW:
                if not takes(plan, m):
                    continue
                got = [t.float() for t in call(m, plan, fp8)]
                wrong[plan, m] = sum(int((a != b[:m].float()).sum())
                                     for a, b in zip(got, whole, strict=True))  # fmt: skip
        assert not any(wrong.values()), {k: v for k, v in wrong.items() if v}
    whole = call(33, "auto")
    graph = torch.cuda.CUDAGraph()
    with no_collector(), torch.cuda.graph(graph):
        y, h = call(33, "auto")
    graph.replay()
    assert torch.equal(y, whole[0]) and torch.equal(h, whole[1])
    cp.check()


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_bias_is_added_to_the_rounded_sum(gpus, op):
    """Eagerly, replayed, and in a graph of the user's own."""
    layer = Layer(op, 1024, 1536)
    bias = torch.randn(1024, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    call, bias = getattr(cp, op), bias.bfloat16()
    for m in (layer.ranks, 64, 512):
        x, options = layer.x[:m], {"bias": bias, "plan": "auto invariant"}
        want = layer.call(m, "auto") + bias
        for _ in range(4):  # the third is a graph
            assert torch.equal(call(x, layer.w, **options), want)
        graph = torch.cuda.CUDAGraph()
        with no_collector(), torch.cuda.graph(graph):
            y = call(x, layer.w, **options)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)
    cp.check()


def test_what_a_compiled_model_has_keeps_to_the_mode(gpus):
    """Compiled outside of it, by inductor."""
    layer, group = Layer("matmul_all_reduce", 1024, 1536), dist.group.WORLD

    def summed(x):
        return collectives.wait_tensor(collectives.all_reduce(x @ layer.w, "sum", group)) + 0

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own imports warn
        compiled = torch.compile(summed, options=cp.compile_options(), dynamic=False)
        for m in (1, 64):
            compiled(layer.x[:m])
            with cp.batch_invariant():
                assert torch.equal(compiled(layer.x[:m]), layer.want[:m])
    cp.check()
