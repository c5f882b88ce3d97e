"""From rows that known constants would give, the fit finds these constants again."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from counterpoint.costs import Costs
from counterpoint.errors import InputError
from counterpoint.machine import DeviceSpec, LinkSpec, Machine
from counterpoint.model.calibrate import Matmul, Row, error, fit, fit_matmuls
from counterpoint.model.calibrate_cpu import fit_cpu, nic_of
from counterpoint.plan.steps import Buffer, Lane, Plan, Region, Signal, Step
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.ranges import RANGES

MIB = 1 << 20
MACHINE = preset("h200-4")
SHAPES = ((4096, 4096), (2048, 8192), (6144, 5120), (10240, 8192))
ROWS = (256, 512, 1024, 2048, 4096, 8192)
TRUTHS = {
    "near the datasheet": replace(
        MACHINE.costs, gemm_flop_per_s=849e12, gemm_settled=1.217,
        copy_bytes_per_s=377e9, collective_bytes_per_s=307e9, matmul_beside_copy=1.15,
        collective_small_s=16e-6,
    ),
    "slow": Costs(
        gemm_flop_per_s=603e12, gemm_settled=1.083, gemm_settling_s=0.7e-3,
        hbm_bytes_per_s=2.1e12, kernel_s=3.3e-6, copy_bytes_per_s=111e9, copy_overhead_s=9.1e-6,
        barrier_s=7.7e-6, collective_bytes_per_s=83e9, all_gather_s=41e-6, reduce_scatter_s=37e-6,
        collective_small_s=13e-6,
        direct_bytes_per_s=71e9, direct_s=17e-6,
        matmul_beside_copy=1.29, copy_beside_matmul=1.23, host_call_s=71e-6, host_step_s=23e-6,
    ),
    "fast": Costs(
        gemm_flop_per_s=913e12, gemm_settled=1.363, gemm_settling_s=0.12e-3,
        hbm_bytes_per_s=4.6e12, kernel_s=0.7e-6, copy_bytes_per_s=441e9, copy_overhead_s=1.3e-6,
        barrier_s=1.9e-6, collective_bytes_per_s=428e9, all_gather_s=29e-6, reduce_scatter_s=23e-6,
        collective_small_s=19e-6,
        direct_bytes_per_s=431e9, direct_s=4e-6,
        matmul_beside_copy=1.02, copy_beside_matmul=1.0, host_call_s=11e-6, host_step_s=2e-6,
    ),
}  # fmt: skip
OF_MATMULS = ("gemm_flop_per_s", "gemm_settled", "gemm_settling_s")


def beside(truth: Costs, matmul_s: float, copy_s: float, which: str) -> dict[str, Any]:
    """A matmul and a copy that start together, as the model has it; `which` ends last."""
    factors = {"matmul": truth.beside_copy(matmul_s), "copy": truth.copy_beside_matmul}
    own_s, other_s = (matmul_s, copy_s) if which == "matmul" else (copy_s, matmul_s)
    both_s = other_s * factors["copy" if which == "matmul" else "matmul"]
    seconds = both_s + own_s - both_s / factors[which]
    assert seconds >= both_s
    return {"question": "beside", "which": which, "seconds": seconds,
            "alone_s": own_s, "other_s": other_s}  # fmt: skip


def rows_of(truth: Costs, tile: tuple[int, int] | None) -> list[dict[str, Any]]:
    """What `characterize` would measure where `truth` holds."""
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        for m in ROWS:
            seconds = truth.matmul_s(m, n, k, 2, MACHINE.sms, tile)
            rows.append({"question": "matmul", "rows": m, "n": n, "k": k, "tile": tile,
                         "seconds": seconds * truth.settling(seconds)})  # fmt: skip
    for size in (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        rows.append({"question": "copy", "num_bytes": size, "seconds": truth.copy_s(size)})
        direct_s = truth.direct_s + 3 * size / truth.direct_bytes_per_s
        rows.append({"question": "direct", "num_bytes": 3 * size, "seconds": direct_s})
        for kind in ("all_gather", "reduce_scatter"):
            seconds = truth.collective_s(kind, 3 * size)
            rows.append({"question": "collective", "kind": kind, "num_bytes": 3 * size,
                         "seconds": seconds})  # fmt: skip
    for size in (32 * MIB, 128 * MIB):
        rows.append({"question": "memory", "num_bytes": size, "seconds": truth.memory_s(size)})
    rows += [{"question": "barrier", "seconds": truth.barrier_s}]
    rows += [{"question": "kernel", "seconds": truth.kernel_s}]
    for steps in (5, 11):
        seconds = truth.host_call_s + steps * truth.host_step_s
        rows.append({"question": "host", "num_steps": steps, "seconds": seconds})
    rows += [beside(truth, 2e-3, 1.5e-3, "matmul"), beside(truth, 1.5e-3, 2e-3, "copy")]
    return rows


def matmuls_of(rows: Sequence[Row]) -> list[Matmul]:
    return [
        Matmul(row["rows"], row["n"], row["k"], row["seconds"], row["tile"])
        for row in rows
        if row["question"] == "matmul"
    ]


tiles = pytest.mark.parametrize("tile", [None, (128, 256)], ids=["any tile", "known tile"])


@pytest.mark.drawn(2)
@tiles
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_known_constants_are_found(truth: Costs, tile: tuple[int, int] | None):
    found = fit(rows_of(truth, tile), MACHINE)
    for field in fields(Costs):
        want, got = getattr(truth, field.name), getattr(found, field.name)
        if field.name in OF_MATMULS:
            continue  # one makes up for another: see below
        if "beside" in field.name:
            # each as if the other one were not slowed, and by constants of matmuls
            assert got == pytest.approx(want, abs=0.07), field.name
        else:
            assert got == pytest.approx(want, rel=0.02), field.name


@pytest.mark.drawn(2)
@tiles
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_matmuls_are_predicted_by_what_is_found(truth: Costs, tile: tuple[int, int] | None):
    rows = rows_of(truth, tile)
    found = fit(rows, MACHINE)
    assert error(matmuls_of(rows), found, MACHINE) ** 0.5 < 0.01
    # a higher rate with more loss of clock gives the same times: what can be told is that, near
    assert found.gemm_flop_per_s == pytest.approx(truth.gemm_flop_per_s, rel=0.15)
    # of other shapes, and twice as long as what was timed
    for m, n, k in ((300, 3000, 5000), (4096, 7168, 8192), (16384, 14336, 8192)):
        want, got = (
            s * costs.settling(s)
            for costs in (truth, found)
            for s in (costs.matmul_s(m, n, k, 2, MACHINE.sms, tile),)
        )
        assert got == pytest.approx(want, rel=0.04)


def test_the_fit_does_not_depend_on_where_it_starts():
    truth = TRUTHS["slow"]
    rows = rows_of(truth, None)
    elsewhere = replace(MACHINE, measured=TRUTHS["fast"])
    assert fit(rows, elsewhere) == fit(rows, MACHINE)


def test_noise_in_one_row_moves_little():
    true_rows = rows_of(TRUTHS["near the datasheet"], None)
    noisy = [true_rows[0] | {"seconds": true_rows[0]["seconds"] * 1.3}, *true_rows[1:]]
    assert true_rows[0]["question"] == "matmul"
    assert error(matmuls_of(true_rows), fit(noisy, MACHINE), MACHINE) ** 0.5 < 0.05


def test_a_line_counts_small_copies_as_much_as_large_ones():
    truth = TRUTHS["near the datasheet"]
    largest = {"question": "copy", "num_bytes": 64 * MIB}
    rows = [
        row | {"seconds": row["seconds"] * 1.05} if largest.items() <= row.items() else row
        for row in rows_of(truth, None)
    ]
    found = fit(rows, MACHINE)
    assert found.copy_overhead_s == pytest.approx(truth.copy_overhead_s, rel=0.1)
    assert found.copy_bytes_per_s == pytest.approx(truth.copy_bytes_per_s, rel=0.05)


def test_a_search_keeps_the_rest():
    costs = TRUTHS["slow"]
    seconds = costs.matmul_s(2048, 4096, 4096, 2, MACHINE.sms)
    matmul = Matmul(2048, 4096, 4096, seconds * costs.settling(seconds), None)
    found = fit_matmuls([matmul], costs, MACHINE)
    for field in fields(Costs):
        if field.name not in OF_MATMULS:
            assert getattr(found, field.name) == getattr(costs, field.name)
    assert error([matmul], found, MACHINE) ** 0.5 < 0.01


def is_of(question: str, **facts: str) -> Callable[[Row], bool]:
    return lambda row: {"question": question, **facts}.items() <= row.items()


@pytest.mark.parametrize(
    ("missing", "want"),
    [
        (is_of(question), f"some of question '{question}', got none")
        for question in ("matmul", "copy", "collective", "memory", "barrier", "kernel", "host")
    ]
    + [
        (is_of("beside", which=which), f"some of question 'beside', which '{which}', got none")
        for which in ("matmul", "copy")
    ]
    + [
        (is_of("collective", kind=kind), f"some of question 'collective', kind '{kind}', got none")
        for kind in ("all_gather", "reduce_scatter")
    ],
)
def test_a_question_that_is_missing_is_named(missing: Callable[[Row], bool], want: str):
    rows = [row for row in rows_of(MACHINE.costs, None) if not missing(row)]
    with pytest.raises(InputError, match=f"^fit: rows must be {want}$"):
        fit(rows, MACHINE)


def test_times_that_do_not_grow_are_refused():
    rows = rows_of(MACHINE.costs, None)
    one_size = [r for r in rows if r["question"] != "copy" or r["num_bytes"] == MIB]
    with pytest.raises(InputError, match=r"question 'copy' that grow .*, got sizes \[1048576\]"):
        fit(one_size, MACHINE)
    shrinking = [
        r | {"seconds": 1 / r["num_bytes"]} if r["question"] == "collective" else r for r in rows
    ]
    with pytest.raises(InputError, match="times of question 'collective' that grow with the bytes"):
        fit(shrinking, MACHINE)


def test_a_unit_slip_in_a_row_is_refused():
    rows = [
        r | {"seconds": r["seconds"] * 1e6} if r["question"] == "barrier" else r
        for r in rows_of(MACHINE.costs, None)
    ]
    with pytest.raises(InputError, match="Costs: barrier_s must be a number from 0 to"):
        fit(rows, MACHINE)


@pytest.mark.parametrize(
    "bad",
    [
        {"seconds": float("nan")}, {"seconds": 0.0}, {"seconds": None}, {"seconds": -1e-3},
        {"num_bytes": 1e308}, {"num_bytes": "1"}, {"tile": [128]}, {"tile": [0, 2**40]},
        {"question": None},
    ],
)  # fmt: skip
def test_numbers_of_a_row_have_ranges(bad: dict[str, Any]):
    rows = [*rows_of(MACHINE.costs, None), {"question": "barrier", "seconds": 1e-6} | bad]
    with pytest.raises(InputError, match=r"^fit: rows\[\d+\](\.\w+(\[0\])?)? must be a"):
        fit(rows, MACHINE)


def test_every_number_of_a_file_has_a_range():
    read = (Problem, DeviceSpec, LinkSpec, Machine, Costs, Buffer, Region, Signal, Step, Lane, Plan)
    for kind in read:
        for name, hint in get_type_hints(kind).items():
            if re.search(r"\b(int|float)\b", str(hint)) and f"{kind.__name__}.{name}" not in RANGES:
                raise AssertionError(f"{kind.__name__}.{name}: {hint}")


def test_without_collectives_of_our_own_their_constants_stay():
    """On a number of ranks that is no power of two there are none."""
    rows = [row for row in rows_of(TRUTHS["slow"], None) if row["question"] != "direct"]
    found, base = fit(rows, MACHINE), MACHINE.costs
    assert (found.direct_s, found.direct_bytes_per_s) == (base.direct_s, base.direct_bytes_per_s)
    assert found.copy_bytes_per_s != base.copy_bytes_per_s


def test_rows_of_cpu_ranks_give_their_machine():
    """Lines of time: fp32 products, copies, exchanges; and what an exchange beside them costs."""
    cores = replace(MACHINE.device, num_sms=1, max_blocks_per_sm=1)
    machine = replace(MACHINE, device=cores, gemm_tile=(16, 16))
    rows: list[dict[str, Any]] = [
        {"question": "matmul", "rows": m, "n": 64, "k": 64, "seconds": 2e-5 + 2 * m * 4096 / 25e9}
        for m in (64, 1024)
    ]
    for question, start_s, rate in (
        ("copy", 1e-5, 8e9), ("memory", 5e-6, 1e10), ("exchange", 2e-3, 25e6),
        ("far gather", 1e-3, 35e6),
    ):  # fmt: skip
        rows += ({"question": question, "num_bytes": size, "seconds": start_s + size / rate}
                 for size in (MIB, 4 * MIB))  # fmt: skip
    rows += ({"question": "collective", "kind": kind, "num_bytes": size,
              "seconds": 1e-3 + slower * size / 5e7}
             for kind, slower in (("all_gather", 1), ("reduce_scatter", 2))
             for size in (MIB, 4 * MIB))  # fmt: skip
    rows += [{"question": "kernel", "seconds": 1e-6}, {"question": "barrier", "seconds": 3e-4}]
    rows += ({"question": "beside", "which": which, "seconds": 1.2 + extra_s, "alone_s": 1.2,
              "other_s": 1.0}
             for which, extra_s in (("matmul", 0.3), ("copy", 0.1)))  # fmt: skip
    found = fit_cpu(rows, machine)
    costs, nic = found.costs, found.nic
    assert nic is not None
    got = (costs.gemm_flop_per_s, costs.kernel_s, costs.copy_bytes_per_s, costs.barrier_s,
           costs.collective_bytes_per_s, nic.bytes_per_s, nic.latency_s, nic.collective_bytes_per_s,
           costs.matmul_beside_copy, costs.copy_beside_matmul)  # fmt: skip
    assert got == pytest.approx((50e9, 1e-5, 8e9, 3e-4, 5e7, 25e6, 2e-3, 35e6, 1.3, 1.1))
    assert costs.reduce_scatter_s > costs.all_gather_s == pytest.approx(1e-3)
    assert nic_of(rows[:2]) is None
