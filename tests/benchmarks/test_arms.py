"""The arms of each benchmark on CPU ranks, at small sizes: all are right, and give rows."""

import warnings
from math import isnan
from typing import Any

import pytest
import torch
from expert_bodies import small_kernels
from rank_bodies import by_reference, world
from rankpool import RankError, RankPool

from benchmarks import (
    attention,
    decode,
    decode_experts,
    dlrm,
    embedding,
    embedding_gradient,
    epilogue,
    evaluate,
    expert_calls,
    expert_layer,
    expert_tensors,
    experts,
    fp8,
    host_calls,
    invariant,
    norms,
    overlap,
    prefill,
    soak,
    steps_dlrm,
    training,
)
from benchmarks.declare import Arms, Bench, Benchmark, Case
from benchmarks.runner import measured
from benchmarks.steps_dlrm import BOTH, IN_BACKWARD, STEP
from benchmarks.steps_experts import WAITING, experts_arms
from counterpoint.experts.routes import exchange_routes
from counterpoint.measure.timing import relative_error

SMALL = expert_tensors.Model("small", 3, 24, 16, 2)
CASES: dict[str, tuple[Benchmark, Case]] = {
    "all_gather_matmul": (overlap.OVERLAP, overlap.case_of("all_gather_matmul", 64, 16, 32)),
    "matmul_reduce_scatter": (overlap.OVERLAP,
                              overlap.case_of("matmul_reduce_scatter", 64, 16, 32)),
    "fp8 gather": (fp8.FP8, overlap.case_of("all_gather_matmul", 64, 16, 128)),
    "fp8 scatter": (fp8.FP8, overlap.case_of("matmul_reduce_scatter", 64, 16, 128)),
    "decode": (decode.DECODE, decode.case_of(4, 32, 16)),
    "prefill": (prefill.PREFILL, prefill.case_of(16, 32, 16, "8B", "TP8")),
    "training": (training.TRAINING, training.case_of(32, 16, 24)),
    "dispatch": (experts.EXPERTS, experts.case_of("all_to_all_matmul", SMALL, 48, "uniform")),
    "dispatch, skewed": (experts.EXPERTS,
                         experts.case_of("all_to_all_matmul", SMALL, 48, "skewed")),
    "combine": (experts.EXPERTS, experts.case_of("matmul_all_to_all", SMALL, 48, "uniform")),
    "combine, skewed": (experts.EXPERTS, experts.case_of("matmul_all_to_all", SMALL, 48, "skewed")),
    "embedding": (embedding.EMBEDDING, embedding.case_of(3, 8, 5, 32)),
    "embedding gradient": (embedding_gradient.EMBEDDING_GRADIENT,
                           embedding_gradient.case_of("zipf", 16, 3, "float32", 50)),
    "embedding gradient, slices": (embedding_gradient.EMBEDDING_GRADIENT,
                                   embedding_gradient.sliced_case_of("hot", 16, 3, 400)),
    "attention": (attention.ATTENTION, attention.case_of(4, 2, 64, 16, False, attention.BOTH)),
    "attention, causal": (attention.ATTENTION,
                          attention.case_of(4, 4, 64, 16, True, attention.BOTH)),
    "norms": (norms.NORMS, norms.case_of(4, 32)),
    "epilogue": (epilogue.EPILOGUE, epilogue.case_of(64, 16, 32)),
    "invariant": (invariant.INVARIANT, invariant.case_of("matmul_all_reduce", 64, 16, 32)),
    "swiglu": (expert_layer.EXPERT_LAYER, expert_layer.case_of("swiglu", SMALL, 48, 2, "most")),
    "routing": (expert_layer.EXPERT_LAYER, expert_layer.case_of("routing", SMALL, 48)),
    "routes": (expert_layer.EXPERT_LAYER, expert_layer.case_of("routes", SMALL, 48, 2)),
    "evaluate": (evaluate.EVALUATE, overlap.case_of("all_gather_matmul", 64, 16, 32)),
    "few tokens": (decode_experts.DECODE_EXPERTS, decode_experts.case_of(SMALL, 5)),
    "one token": (decode_experts.DECODE_EXPERTS, decode_experts.case_of(SMALL, 1)),
    "expert calls": (expert_calls.EXPERT_CALLS, expert_calls.case_of(SMALL, 5)),
    "host calls": (host_calls.HOST_CALLS, host_calls.case_of("matmul_reduce_scatter", 8, 16, 8)),
    "shared experts": (expert_calls.EXPERT_CALLS, expert_calls.case_of(SMALL, 5, 24)),
}  # fmt: skip
ARMS = {
    "all_gather_matmul": {"compute", "communication", "serial", "auto", "plan serial"},
    "matmul_reduce_scatter": {"compute", "communication", "serial", "auto", "plan serial"},
    "fp8 gather": {"cast", "compute", "serial", "bf16", "fp8"},
    "fp8 scatter": {"cast", "compute", "serial", "bf16", "fp8"},
    "decode": {"serial", "matmul", "auto", "direct", "fused"},
    "prefill": {"serial", "matmul", "auto", f"serial, {prefill.BOTH}", f"auto, {prefill.BOTH}"},
    "training": {"serial", "async", "ours"},
    "dispatch": {"matmul looped", "pair looped", "in place looped", "communication",
                 *experts.ROUTED},
    "dispatch, skewed": {"matmul looped", "pair looped", "in place looped", "communication"},
    "combine": {"matmul looped", "pair looped", "in place looped", "in place looped, sum",
                "communication", *experts.ROUTED},
    "combine, skewed": {"matmul looped", "pair looped", "in place looped", "in place looped, sum",
                        "communication"},
    "embedding": {"bags cat", "bags permute", "ours serial", "fused", "fused copy", "auto"},
    "embedding gradient": {"torch", "torch sparse", "torch, sgd", *embedding_gradient.OURS},
    "embedding gradient, slices": {
        f"{what}, {n}" for what in ("gradient", "sgd") for n in embedding_gradient.SLICES
    },
    "attention": {"serial", "serial packed", "plan serial", "auto", *attention.SPECS},
    "attention, causal": {"serial", "serial packed", "plan serial", "auto", *attention.SPECS},
    "norms": {"serial", "norm", *norms.PLANS},
    "epilogue": {"compute", "serial", "serial compiled", "apart", "auto"},
    "invariant": {"compute", "auto", "invariant"},
    "swiglu": {"torch", "ours", "torch, forward + backward", "ours, forward + backward"},
    "routing": {"torch", "ours", "torch, forward + backward", "ours, forward + backward"},
    "routes": {"torch"},
    "evaluate": {"compute", "communication", "serial", "auto"},
    "few tokens": {*decode_experts.THEIRS, *decode_experts.OURS},
    "one token": {*decode_experts.THEIRS, *decode_experts.OURS},
    "expert calls": {"default", "max_rows", "torch", expert_calls.PRODUCT},
    "host calls": {host_calls.OURS, host_calls.DISPATCHER, host_calls.PRODUCT},
    "shared experts": {"behind", "shared", expert_calls.PRODUCT},
}  # fmt: skip

MODELS = {
    "dlrm": (dlrm.SMALL, "uniform"), "dlrm, Zipf": (dlrm.SMALL, "zipf"),
    "paper": (dlrm.SMALL_PAPER, "uniform"),
}  # fmt: skip


def rows_of(rank: int, ranks: int, name: str) -> list[dict[str, Any]]:
    benchmark, case = CASES[name]
    with by_reference():
        return measured(benchmark, case, Bench(world(), torch.device("cpu"), rounds=2))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", CASES)
def test_arms_are_right_and_give_rows(pool: RankPool, name: str):
    rows, *_ = pool.run(rows_of, 2, name, timeout_s=90)
    timed = {row["arm"]: row for row in rows if "refused" not in row}
    assert ARMS[name] <= set(timed)
    assert all(row["median_s"] > 0 and row["ranks"] == 2 for row in timed.values())
    errors = {arm: row["error"] for arm, row in timed.items() if "error" in row}
    limit = fp8.LIMIT if CASES[name][0] is fp8.FP8 else 2e-2
    assert len(errors) >= 1 and all(0 <= error < limit for error in errors.values())
    refused = [row["refused"] for row in rows if "refused" in row]
    assert all("GPU" in reason for reason in refused)


def steps_of(rank: int, ranks: int, which: str, planted: str) -> list[dict[str, Any]]:
    def arms(_: Case, bench: Bench) -> Arms:
        if which in MODELS:
            sizes, named = MODELS[which]
            made = steps_dlrm.dlrm_arms(sizes, torch.float32, bench, named)
        else:
            made = experts_arms(SMALL._replace(experts=int(which)), 96, torch.float32, bench)
        if planted:  # on one rank alone
            check = made.check
            off = rank
            made.check = lambda name, got: [e + off * (name == planted) for e in check(name, got)]
        return made

    benchmark = Benchmark("steps", lambda _: [], arms, calls=0, rounds=2)
    with by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the interpreter's own
        return measured(benchmark, Case("small", {}), Bench(world(), torch.device("cpu")))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("which", "ranks"), [("dlrm", 2), ("dlrm, Zipf", 3), ("paper", 2), ("3", 2), ("1", 3)]
)
def test_steps(pool: RankPool, which: str, ranks: int):
    """Each update is held against fp64, too."""
    rows, *_ = pool.run(steps_of, ranks, which, "", timeout_s=120)
    found = {row["arm"]: row for row in rows}
    if which in MODELS:
        ways, checked = ("fused", "torch", "lookup"), (BOTH, STEP, IN_BACKWARD)
        sides = ("pooling, by torch", "exchange", "tables, by fused")
    else:
        ways, checked = (*WAITING, "torch, counts", "default", "fused"), ("forward", BOTH)
        sides = ("matmuls, by forward", "exchanges, by forward + backward")
    for way in ways:
        assert all(0 <= found[f"{what}, by {way}"]["error"] < 1e-5 for what in checked)
    assert set(sides) <= set(found) and not any("error" in found[side] for side in sides)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("which", "arm"),
    [
        ("dlrm", f"{BOTH}, by lookup"),
        ("dlrm", f"{IN_BACKWARD}, by torch"),
        ("3", f"{BOTH}, by fused"),
        ("3", "forward, by fused"),
    ],
)
def test_steps_that_are_off_on_one_rank_are_refused(pool: RankPool, which: str, arm: str):
    with pytest.raises(RankError) as raised:
        pool.run(steps_of, 2, which, arm, timeout_s=120)
    assert str(raised.value).count(f"small, {arm}: off by") >= 1


def test_a_step_is_off_beyond_what_rounding_explains():
    """In bf16, steps smaller than half the distance of two numbers change nothing."""
    before = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = before.double().abs() * 1e-3
    right = (before.double() + want).bfloat16()
    assert relative_error(right.double() - before.double(), want) > 0.2
    assert steps_dlrm.beyond_rounding(right, before, want) == 0
    wrong = (before.double() + 60 * want).bfloat16()
    assert 0.5 < steps_dlrm.beyond_rounding(wrong, before, 30 * want) < 1
    assert isnan(steps_dlrm.beyond_rounding(right.fill_(torch.nan), before, want))


def off_in_bf16(rank: int, ranks: int) -> list[float]:
    """Errors of a step in bf16 before and after a table of one rank is 2 % off."""
    bench = Bench(world(), torch.device("cpu"))
    with by_reference():
        arms = steps_dlrm.dlrm_arms(dlrm.SMALL, torch.bfloat16, bench, "uniform")
        name = f"{BOTH}, by fused"
        arms.calls[name](0)
        right = arms.check(name, torch.empty(0))
        way = arms.calls[name].__defaults__[0]  # type: ignore[attr-defined]
        if rank == 0:
            steps_dlrm.parameters(way)[0].grad.mul_(1.02)
        wrong = arms.check(name, torch.empty(0))
    return [*right[:-1], wrong[0]]


def test_a_table_that_is_off_in_bf16_is_seen(pool: RankPool):
    """What dense layers round is in what is wanted, too: 2 % are more than rounding explains."""
    *right, wrong = pool.run(off_in_bf16, 2, timeout_s=120)[0]
    assert max(right) < 2 * steps_dlrm.EXACT < 0.019 < wrong < 0.025


def test_mlperf_tables_are_shared_by_their_work():
    for ranks in (2, 4, 8):
        owners = embedding.shards(ranks)
        assert sorted(t for own in owners for t in own) == list(range(26))
        work = [sum(embedding.MLPERF_POOLING[t] for t in own) for own in owners]
        assert max(work) <= max(100, 1.1 * sum(work) / ranks)


def compared(rank: int, ranks: int, op: str) -> tuple[list[bool], list[bool], str]:
    """Whether calls differ: as they are, with other bits wanted; and a quiet call that is off."""
    bench = Bench(world(), torch.device("cpu"))
    if op not in soak.ROUTED:
        return soaked(rank, op, bench)
    # what overflows: by kernels, as on GPUs, where the host reads no routes
    kernels = small_kernels() if soak.ROUTED[op] == "overflows" else by_reference()
    with kernels, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_routes, "_look", lambda *_: None)
        return soaked(rank, op, bench)


def soaked(rank: int, op: str, bench: Bench) -> tuple[list[bool], list[bool], str]:
    sets = soak.sets_of(op, bench)
    found = soak.Soaked(op, sets, bench)
    quiet = [bool(found.differs(i)) for i in range(2 * len(sets))]
    found.bits = [bits.nan_to_num() + 1 for bits in found.bits]
    off = [bool(found.differs(i)) for i in range(len(sets))]
    shifted = [each._replace(exact=each.exact.roll(1, 0) + rank) for each in sets]
    try:
        soak.Soaked(op, shifted, bench)
    except soak.CounterpointError as error:
        return quiet, [d for d, s in zip(off, sets, strict=True) if len(s.exact)], str(error)
    return quiet, off, ""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("op", soak.CALLS)
def test_a_soak_counts_what_is_wrong(pool: RankPool, op: str):
    for quiet, off, error in pool.run(compared, 2, op, timeout_s=90):
        assert not any(quiet) and off and all(off)
        assert error.startswith(f"soak of {op}: a quiet call is off by")


def test_soaked_routes_drop_and_overflow_and_come_back(pool: RankPool):
    """Of each kind there are sets that overflow, or drop, and sets that do not."""
    for drops, overflows, first in pool.run(rooms, 2):
        assert drops == [False, True, True] and overflows == [False, False, True]
        assert not first, "a graph begins with a quiet call"


def rooms(rank: int, ranks: int) -> tuple[list[bool], list[bool], bool]:
    bench = Bench(world(), torch.device("cpu"))
    every = []
    for op in soak.ROUTED:
        bench.seeded(0)
        every.append(soak.sets_of(op, bench))
    kept = [[torch.equal(a.exact, b.exact) for a, b in zip(every[0], some, strict=True)]
            for some in every]  # fmt: skip
    overflows = [len({each.overflows for each in some}) == 2 for some in every]
    return [not all(each) for each in kept], overflows, any(some[0].overflows for some in every)


def test_soaked_tables_differ_and_give_each_rank_a_row_to_sum():
    for ranks in (2, 4, 8):
        found = soak.tables(ranks)
        assert all(not torch.equal(a, b) for a, b in zip(found, found[1:], strict=False))
        assert found[soak.SUMMED].sum(1).min() > 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 26])
def test_tables_are_balanced(ranks: int):
    """No rank has more than the mean, but where the heaviest table alone is more."""
    pooling = dlrm.LARGE.model.pooling
    owners, work = dlrm.balanced(pooling, ranks)
    each = list(zip(pooling, owners, strict=True))
    assert work == [sum(p for p, owner in each if owner == r) for r in range(ranks)]
    assert sum(work) == 214 and min(work) > 0
    assert max(work) == max(100, 214 // ranks)
