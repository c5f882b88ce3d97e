"""Experts compared: operands and the libraries' ways on CPU ranks, and what rows say."""

from typing import Any

import pytest
import torch
from expert_bodies import by_expert, by_owner, multiplied
from rank_bodies import world
from rankpool import RankPool

from counterpoint.choose.known import shipped
from counterpoint.errors import CounterpointError
from counterpoint.measure import compare_experts
from counterpoint.measure.compare_experts import CALLS, Layer, Operands, arms_of, errors_of, rows_of
from counterpoint.measure.timing import Times
from counterpoint.problem import Op, Problem
from counterpoint.runtime.ranks import gather_object

OPS: tuple[Op, ...] = ("all_to_all_matmul", "matmul_all_to_all")
SPECS = ["grouped ring", "serial fused"]
CPU = torch.device("cpu")


def errors(rank: int, ranks: int, op: Op, experts: int, planted: str) -> dict[str, float] | str:
    """Of all arms against fp64, and of the exact result against the reference of the tests."""
    problem = Problem(op, 12 * ranks * experts, 24, 16, ranks, experts=experts)
    found = Operands(problem, world(), CPU)
    xs, ws = ([t.double() for t in gather_object(mine, world())] for mine in (found.x, found.w))
    counts = found.counts.tolist()
    if found.there:
        want = multiplied(by_expert(xs, counts), ws, counts)[rank]
    else:
        want = by_owner(multiplied(xs, ws, counts), counts)[rank]
    assert torch.allclose(found.exact(), want[found.sample])
    right = getattr(compare_experts, op)

    def shifted(*arguments: Any, **more: Any) -> torch.Tensor:
        return right(*arguments, **more).roll(1, 0)

    with pytest.MonkeyPatch.context() as patch:
        if planted == "order":
            found.order, found.back = found.order.flip(0), found.back.flip(0)
        if planted == "operator":
            patch.setattr(compare_experts, op, shifted)
        try:
            return errors_of(found, arms_of(found, SPECS))
        except CounterpointError as error:
            return str(error)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_has_the_product(pool: RankPool, ranks: int, op: Op, experts: int):
    for found in pool.run(errors, ranks, op, experts, ""):
        assert set(found) == {"serial for each expert", *SPECS}
        assert all(0 < error < 8e-3 for error in found.values())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("planted", "named"), [("order", "serial for each expert"), ("operator", "grouped ring")]
)
def test_a_wrong_way_is_named_and_not_timed(pool: RankPool, op: Op, planted: str, named: str):
    for text in pool.run(errors, 2, op, 3, planted):
        assert f"{named}: error" in text and "against fp64" in text


def test_rows_have_the_faster_way_of_the_libraries():
    machine = shipped("NVIDIA H200", 2)
    assert machine is not None
    problem = Problem("all_to_all_matmul", 2048, 4096, 7168, 2, experts=32)
    took = {"communication": 4, "compute for each expert": 9, "serial for each expert": 14,
            "compute in one kernel": 10, "serial in one kernel": 13, "serial fused": 11,
            "grouped ring": 12}  # fmt: skip
    times: dict[str, Any] = {name: Times((t * CALLS,) * 3, 0.5) for name, t in took.items()}
    made = rows_of(problem, Layer("A experts up", 256), times, {"serial in one kernel": 1e-3},
                   machine, [1, 2])  # fmt: skip
    rows = {row["arm"]: row for row in made}
    seconds = {"communication": 4, "compute": 9, "serial": 13, "serial fused": 11,
               "grouped ring": 12}  # fmt: skip
    assert {arm: row["median_s"] for arm, row in rows.items()} == seconds
    assert rows["serial"]["way"] == "in one kernel" and rows["serial"]["error"] == 1e-3
    assert rows["serial"]["pick"] == "serial fused"
    assert rows["serial"]["experts"] == 32 and rows["serial"]["tokens"] == 256
    assert all("predicted_s" in rows[arm] for arm in ("serial", *SPECS))
