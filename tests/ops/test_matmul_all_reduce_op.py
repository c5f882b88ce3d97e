"""matmul_all_reduce as an operator, on CPU ranks: sums and bits, gradients, what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counterpoint.runtime.fused_call import grid
from counterpoint.runtime.launch_fused import (
    Fused,
    call_bytes,
    default_way,
    launch_of,
    padded_rows,
    where,
)
from rank_bodies import world
from rankpool import RankPool

import counterpoint as cp
from counterpoint.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.ops.matmul_all_reduce import way_of

TWO_SHOT = "fused two_shot 16x32x1 warps=4"
PLANS = ("auto", "serial", "fused", TWO_SHOT)


def wrong_sums(rank: int, ranks: int, plan: str) -> list[str]:
    found: list[str] = []
    for shape, n, dtype in [
        ((1, 64), 16, torch.float32), ((3, 31), 5, torch.bfloat16), ((2, 3, 8), 7, torch.float16),
        ((0, 8), 4, torch.float32), ((5, 1), 1, torch.float32),
    ]:  # fmt: skip
        for has_bias in (False, True):
            x = torch.randn(shape).to(dtype)
            w = torch.randn(n, shape[-1]).to(dtype).t()
            bias = torch.randn(n).to(dtype) if has_bias else None
            if bias is not None:
                dist.broadcast(bias, 0)
            y = cp.matmul_all_reduce(x, w, bias=bias, plan=plan)
            again = cp.matmul_all_reduce(x, w, bias=bias, plan=plan)
            want = x.double() @ w.double()
            dist.all_reduce(want)
            want = want if bias is None else want + bias
            everyone = [torch.empty_like(y) for _ in range(ranks)]
            dist.all_gather(everyone, y)
            scale = (x.double().abs() @ w.double().abs()).clamp_min(1.0)
            bound = 4 * ranks * torch.finfo(dtype).eps * scale + torch.finfo(dtype).eps * want.abs()
            if not bool(((y - want).abs() <= bound).all()) or y.shape != want.shape:
                found.append(f"{plan} {shape} {dtype}: off by {(y - want).abs().max()}")
            if not all(torch.equal(y, other) for other in everyone) or not torch.equal(y, again):
                found.append(f"{plan} {shape} {dtype}: other bits")
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_the_sum_over_ranks(pool: RankPool, plan: str, ranks: int):
    assert pool.run(wrong_sums, ranks, plan) == [[]] * ranks


def differentiated(rank: int, ranks: int) -> list[bool]:
    x, w, bias = torch.randn(4, 6), torch.randn(6, 5), torch.zeros(5)
    for t in (x, w, bias):
        t.requires_grad_()
    y = cp.matmul_all_reduce(x, w, bias=bias, plan="fused")
    dy = torch.arange(20.0).view(4, 5)
    y.backward(dy)
    pairs = [(x.grad, dy @ w.t()), (w.grad, x.t() @ dy), (bias.grad, dy.sum(0))]
    op = torch.ops.counterpoint.matmul_all_reduce
    arguments = (x, w, bias, "fused", world().group_name)
    results: dict[str, str] = torch.library.opcheck(op, arguments, raise_exception=True)
    compiled = torch.compile(cp.matmul_all_reduce, backend="aot_eager", fullgraph=True)
    same = torch.equal(compiled(x, w, bias=bias, plan="fused"), y)
    return [torch.allclose(a, b) for a, b in pairs if a is not None] + [
        set(results.values()) == {"SUCCESS"}, same
    ]  # fmt: skip


def test_gradients_and_the_dispatcher(pool: RankPool):
    assert pool.run(differentiated, 2) == [[True] * 5] * 2


def refusals(rank: int, ranks: int) -> list[str]:
    x, w = torch.randn(2, 4), torch.randn(4, 3)
    cases: list[dict[str, Any]] = [
        {"x": x[0]}, {"w": w.t()}, {"bias": torch.ones(4)}, {"plan": "fast"}, {"plan": 3},
        {"plan": "fused two_shot words 64x64x8 warps=4"},
        {"plan": "fused two_shot 48x64x8 warps=4"},
        {"x": x[: 1 + rank]}, {"plan": ("serial", "fused")[rank]},
    ]  # fmt: skip
    texts: list[str] = []
    for case in cases:
        try:
            cp.matmul_all_reduce(**{"x": x, "w": w} | case)
            texts.append("accepted")
        except cp.InputError as error:
            texts.append(str(error))
    assert cp.matmul_all_reduce(x, w).shape == (2, 3)
    return texts


def test_what_is_refused(pool: RankPool):
    wants = [
        "x must be [rows, ..., K] of 2 or more dims", "w must be [K=4, N], got (3, 4)",
        "bias must be [N=3]", "plan must be auto, serial, direct, fused or such as "
        "'fused two_shot 64x64x8 warps=4', got 'fast'",
        "plan must be text, got int", "got 'fused two_shot words 64x64x8 warps=4'",
        "plan must be block_n a power of 2 >= 16, got 48",
        "x.shape must be equal on all ranks", "plan must be equal on all ranks",
    ]  # fmt: skip
    for texts in pool.run(refusals, 2):
        for text, want in zip(texts, wants, strict=True):
            assert text.startswith("matmul_all_reduce: ") and want in text, (text, want)


@pytest.mark.parametrize("shots", [1, 2])
def test_specs_are_read_as_they_are_written(shots: Any):
    way = Fused(shots, 32, 128, 3, 8)
    assert Fused.parse(way.spec) == way


@pytest.mark.parametrize("n", [24, 512, 1000, 7168, 8192, 16384, 28672])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_defaults_fit_their_problem(n: int, ranks: int):
    for m in (1, 2, 3, 8, 31, 32, 64, 100, 256):
        way = default_way(m, n, ranks, 2, 132)
        assert way.block_n % ranks == 0 and way.block_n >= 16
        # of two shots each sends 1 / ranks of what one shot sends, and the sums
        other = Fused(2, way.block_n) if way.shots == 1 else None
        if other:
            assert call_bytes(way, m, n, ranks, 2) >= call_bytes(other, m, n, ranks, 2)
        assert padded_rows(m) >= m > padded_rows(m) // 2


def test_programs_share_the_tiles_evenly():
    for n, resident in [(8192, 200), (16384, 200), (16384, 100), (64, 1), (65, 1), (8192, 3)]:
        tiles, programs = -(-n // 64), grid(-(-n // 64), resident)
        rounds = -(-tiles // programs)
        assert programs <= resident and rounds == -(-tiles // resident)
        assert tiles > (rounds - 1) * programs, "no program has two tiles less than another"


def test_what_a_plan_stands_for(monkeypatch: pytest.MonkeyPatch):
    cpu, gpu, bf16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    assert {way_of(p, 1, 8192, 2, bf16, cpu) for p in ("auto", "serial", "direct")} == {"serial"}
    assert way_of("fused", 0, 8192, 2, bf16, cpu) == "serial"
    assert way_of("fused", 1, 8192, 8, bf16, cpu) == Fused(1)
    assert way_of("direct", 1, 8192, 2, bf16, gpu) == "direct"

    def auto(m: int, n: int, ranks: int = 4, dtype: torch.dtype = bf16) -> str:
        way = way_of("auto", m, n, ranks, dtype, gpu)
        return way if isinstance(way, str) else "fused"

    # 64 rows, of a w that is wider than a tile of 64 for each SM 32
    assert [auto(m, 8192) for m in (1, 64, 65, 1024, 1025)] == [
        "fused", "fused", "direct", "direct", "serial",
    ]  # fmt: skip
    assert [auto(m, 16384) for m in (32, 33, 512, 513)] == ["fused", "direct", "direct", "serial"]
    assert auto(1, 8192, dtype=torch.float32) == "direct"
    assert auto(1, 8192, ranks=3) == auto(1, 8192, ranks=64) == auto(0, 8192) == "serial"
    assert auto(65, 1001, ranks=8) == "serial"  # its parts are no words


def test_auto_is_serial_on_all_ranks_where_one_cannot(monkeypatch: pytest.MonkeyPatch):
    """No symmetric memory, no SMs left: what was serial stays so; an explicit plan says why."""
    from counterpoint.ops import matmul_all_reduce as module

    def cannot(*_: object) -> None:
        raise cp.UnsupportedError("no block fits")

    told = list[str]()

    def gather(mine: str, _: object) -> list[str]:
        told.append(mine)
        return [mine, ""]

    monkeypatch.setattr(module, "_Direct", cannot)
    monkeypatch.setattr(module, "_InOneKernel", lambda *_: SimpleNamespace())
    monkeypatch.setattr(module, "gather_object", gather)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    workspace: Any = SimpleNamespace(group=None)
    by_words: Any = module._by_words  # pyright: ignore[reportPrivateUsage]
    ready = by_words("direct", (), workspace, falls_back=True)
    assert type(ready).__name__ == "_Serial" and told == ["no block fits"]
    with pytest.raises(cp.UnsupportedError, match="no block fits"):
        by_words("direct", (), workspace, falls_back=False)
    # a peer that cannot: here it could
    monkeypatch.setattr(module, "gather_object", lambda mine, _: [mine, "no block fits"])
    assert type(by_words(Fused(1), (), workspace, falls_back=True)).__name__ == "_Serial"


def test_a_launch_that_skips_the_binder_passes_all_arguments_in_order():
    """As the kernel names them."""
    none: Any = SimpleNamespace(bases=torch.zeros(2), half_bytes=4096)
    workspace = SimpleNamespace(group=SimpleNamespace(size=lambda: 2), rank=1, timeout_s=2.0)
    memory: Any = SimpleNamespace(
        words=none, state=torch.zeros(3), fault=torch.zeros(1), workspace=workspace
    )
    x, w, y = torch.zeros(4, 64), torch.zeros(64, 64).t(), torch.zeros(4, 64)
    way, launched = Fused(2, 16, 32, 3), list[tuple[Any, ...]]()
    launch = launch_of(way, memory, where(memory), 7, x, w, None)

    def compiled(*arguments: Any, stream: object) -> None:
        launched.append(arguments)

    launch.use({(2, 1, 1): compiled}, 2)
    launch(x, w, None, y)
    (arguments,) = launched
    names = matmul_all_reduce_kernel.arg_names
    given = dict(zip(names, arguments, strict=True))
    assert given["x_ptr"] is x and given["bias_ptr"] is given["y_ptr"] is y
    expected = {"M": 4, "N": 64, "K": 64, "stride_xm": 64, "stride_wk": 1, "stride_wn": 64,
                "half_bytes": 4096, "rank": 1, "tag": 7,
                "timeout_ns": 2_000_000_000, "WORLD": 2, "SHOTS": 2, "SCATTER": False,
                "HAS_BIAS": False, "OWN": 4, "BLOCK_N": 16,
                "BLOCK_K": 32, "EVEN_N": True, "EVEN_K": True, "STAGES": 3,
                "NUM_WARPS": 4}  # fmt: skip
    assert {name: given[name] for name in expected} == expected


def normalised(rank: int, ranks: int, dtype: torch.dtype) -> list[bool]:
    x, w = torch.randn(2, 3, 8).to(dtype), torch.randn(8, 20).to(dtype)
    residual, weight = torch.randn(2, 3, 20).to(dtype), torch.randn(20).to(dtype)
    for t in (residual, weight):
        dist.broadcast(t, 0)
    got, total = cp.matmul_all_reduce_rms_norm(
        x, w, residual=residual, norm_weight=weight, eps=1e-5, plan="fused"
    )
    want_total = residual + cp.matmul_all_reduce(x, w, plan="fused")
    want = torch.nn.functional.rms_norm(want_total.double(), (20,), weight.double(), 1e-5)
    error = ((got.double() - want).norm() / want.norm()).item()
    op = torch.ops.counterpoint.add_rms_norm
    results: dict[str, str] = torch.library.opcheck(op, (want_total, residual, weight, 1e-5))
    return [error <= 2 * torch.finfo(dtype).eps, torch.equal(total, want_total),
            set(results.values()) == {"SUCCESS"}]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_and_the_norm_that_follow(pool: RankPool, dtype: torch.dtype):
    assert pool.run(normalised, 2, dtype) == [[True] * 3] * 2


def norm_refusals(rank: int, ranks: int) -> list[str]:
    x, w, r, g = torch.randn(2, 4), torch.randn(4, 3), torch.randn(2, 3), torch.ones(3)
    texts: list[str] = []
    cases: list[dict[str, Any]] = [
        {"residual": r[:1]}, {"norm_weight": r}, {"residual": r.double()}, {"eps": "small"},
        {"norm_weight": 1.0},
    ]  # fmt: skip
    for case in cases:
        try:
            cp.matmul_all_reduce_rms_norm(x, w, **{"residual": r, "norm_weight": g} | case)
            texts.append("accepted")
        except cp.InputError as error:
            texts.append(str(error))
    return texts


def test_what_the_norm_refuses(pool: RankPool):
    wants = [
        "residual must be (2, 3), got (1, 3)", "norm_weight must be [N=3], got (2, 3)",
        "residual must be torch.float32 on cpu as x, got torch.float64 on cpu",
        "eps must be a number >= 0, got small", "norm_weight must be a Tensor, got float",
    ]  # fmt: skip
    for texts in pool.run(norm_refusals, 2):
        assert texts == [f"matmul_all_reduce_rms_norm: {want}" for want in wants]


def in_turn_with_another_size(rank: int, ranks: int) -> str:
    """Both sizes have been called before; gloo would end the process that gets the other one."""
    w = torch.randn(16, 8)
    for m in (4, 2):
        cp.matmul_all_reduce(torch.randn(m, 16), w, plan="fused")
    try:
        cp.matmul_all_reduce(torch.randn(4 if rank else 2, 16), w, plan="fused")
    except cp.InputError as error:
        return str(error)
    return "no error"


def test_ranks_that_disagree_later_are_told_so(pool: RankPool):
    text = "x.shape must be equal on all ranks, (2, 16) as on rank 0, got (4, 16) on rank 1"
    assert all(text in found for found in pool.run(in_turn_with_another_size, 2))
