"""What auto takes for experts: by prediction, plans and one kernel alike, equally on all ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counterpoint.model.experts import predict
from counterpoint.ops.experts_choice import _predicted

from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import shipped
from counterpoint.ops.experts import Exchange, check_operands
from counterpoint.plan import direct
from counterpoint.plan.families import build
from counterpoint.plan.validate import validate
from counterpoint.problem import EXPERTS, Problem

RANKS = 4
MACHINE = shipped("NVIDIA H200", RANKS)
# rows of a rank, k, n and experts of a rank
SIZES = [(32768, 7168, 4096, 32), (8192, 7168, 4096, 32), (2048, 7168, 4096, 32),
         (8192, 4096, 28672, 1), (64, 256, 256, 2)]  # fmt: skip


def given(rows: int, k: int, n: int, experts: int, *, out: bool, equal: bool = True) -> Exchange:
    """A call of host-known counts; nothing of its tensors is read."""
    counts = torch.full((RANKS, RANKS * experts), rows // (RANKS * experts))
    if not equal:
        counts[0, 0] += 1
        counts[0, 1] -= 1
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    w = torch.empty(experts, n, k, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    op = "all_to_all_matmul" if out else "matmul_all_to_all"
    return Exchange(op, x, w, counts, rows, out, True, "auto")


def workspace() -> Any:
    code: dict[Any, Any] = {}
    group = SimpleNamespace(size=lambda: RANKS)
    return SimpleNamespace(group=group, code=code, remember=code.__setitem__)


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_auto_takes_what_the_chooser_says(sizes: tuple[int, int, int, int], out: bool):
    assert MACHINE is not None
    rows, k, n, experts = sizes
    here = workspace()
    way = _predicted(given(*sizes, out=out), here, MACHINE)
    op = EXPERTS[0] if out else EXPERTS[1]
    problem = Problem(op, rows, n, k, RANKS, experts=experts)
    choice = by_model(problem, MACHINE)
    assert choice.spec == {"fused": direct.FUSED}.get(way, way)
    assert choice.plan.family == choice.spec.split()[0] and choice.timeline.spans
    assert _predicted(given(*sizes, out=out), here, MACHINE) == way and len(here.code) == 1


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_of_uneven_counts_one_kernel_is_weighed_alone(sizes: tuple[int, int, int, int], out: bool):
    assert MACHINE is not None
    rows, k, n, experts = sizes
    # the second one is on another rank where each has one
    guess = predict(rows + (experts == 1), k, n, experts, "bfloat16", RANKS, MACHINE,
                    back=not out, equal=False)  # fmt: skip
    way = _predicted(given(*sizes, out=out, equal=False), workspace(), MACHINE)
    assert way == ("fused" if guess.fused else "serial")


def test_all_ways_are_taken_somewhere():
    assert MACHINE is not None
    ways = {
        _predicted(given(*sizes, out=out), workspace(), MACHINE).split()[0]
        for sizes in SIZES for out in (True, False)
    }  # fmt: skip
    assert ways == {"serial", "fused", "grouped"}


def test_nothing_to_multiply_is_serial():
    assert MACHINE is not None
    assert _predicted(given(0, 64, 64, 2, out=True), workspace(), MACHINE) == "serial"


@pytest.mark.parametrize("op", EXPERTS)
def test_one_kernel_is_a_plan_that_is_proved_and_priced(op: Any):
    """It computes what the serial plan does, and its prediction is that of the kernel."""
    assert MACHINE is not None
    problem = Problem(op, 8192, 4096, 7168, RANKS, experts=32)
    plan = build(problem, direct.FUSED)
    validate(plan)
    assert plan.spec == direct.FUSED and build(problem, plan.spec) == plan
    back = op == "matmul_all_to_all"
    guess = predict(8192, 7168, 4096, 32, "bfloat16", RANKS, MACHINE, back=back)
    (one,) = (c for c in by_model(problem, MACHINE).table if c.spec == direct.FUSED)
    assert one.seconds == pytest.approx(guess.fused_s, rel=1e-6)


@pytest.mark.parametrize(
    ("more", "text"),
    [({"ranks": 3, "m": 192}, "power of two"), ({"n": 12}, "multiples of 8"),
     ({"dtype": "float32"}, "16-bit"), ({"experts": 512, "m": 4096}, "1024 experts")],
)  # fmt: skip
def test_what_one_kernel_does_not_take(more: dict[str, Any], text: str):
    facts: dict[str, Any] = {"m": 256, "n": 64, "k": 64, "ranks": 4, "experts": 2} | more
    problem = Problem("all_to_all_matmul", **facts)
    assert text in direct.refusal(problem, direct.FUSED)
    assert MACHINE is not None
    assert direct.FUSED not in {c.spec for c in by_model(problem, MACHINE).table}


def test_the_choosers_name_is_taken_by_the_operators():
    x, w = torch.empty(4, 8), torch.empty(2, 8, 16)
    assert check_operands("all_to_all_matmul", x, w, direct.FUSED) == "fused"
    assert check_operands("all_to_all_matmul", x, w, "grouped 1/1") == "grouped 1/1"
