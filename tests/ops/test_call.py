"""The road of a call: who meets when, which rank falls back, and what `plan=` takes."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import Case, Operands, by_reference, exact, operands, world
from rank_bodies import call as call_op

import counterpoint as cp
from counterpoint.errors import InputError, PlanError, UnsupportedError
from counterpoint.group.ranks import gather_object
from counterpoint.ops import call
from counterpoint.plan.families import build
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.run import execute_cuda

CPU = torch.device("cpu")
GATHER = Case("all_gather_matmul", "shard_p2p", (6, 6), 5, 4, bias=True)
SCATTER = Case("matmul_reduce_scatter", "graded", (6, 6), 5, 4)
REDUCE = Case("matmul_all_reduce", "fused", (6,), 5, 4)


def counted(patch: pytest.MonkeyPatch) -> list[object]:
    """The calls in which ranks have compared their facts."""
    found, agree = list[object](), call.agree

    def noted(*arguments: Any) -> int:
        found.append(arguments[0])
        return agree(*arguments)

    patch.setattr(call, "agree", noted)
    return found


def off(case: Case, rank: int, everyone: list[Operands], y: torch.Tensor) -> bool:
    return not torch.allclose(y.double(), exact(case, rank, everyone), atol=1e-5)


@pytest.mark.parametrize("case", [GATHER, SCATTER], ids=lambda case: case.op)
@on_ranks(2)
def test_facts_alone_decide_meetings(rank: int, ranks: int, case: Case) -> list[str]:
    """Calls of known sizes, in which rank 0 alone stores its tensors in another way each time."""
    problems: list[str] = []
    everyone = [operands(case, r, 0, CPU) for r in range(ranks)]
    mine = everyone[rank]
    with pytest.MonkeyPatch.context() as patch:
        met = counted(patch)
        call_op(case, mine)
        if len(met) != 1:
            problems.append(f"{len(met)} meetings at the first call")
        wide = torch.full((2 * case.k, case.n), torch.nan)[::2].copy_(mine.w)
        changes: list[dict[str, Any]] = [
            {"x": mine.x.t().contiguous().t()}, {"w": mine.w.t().contiguous().t()}, {"w": wide}, {}
        ]  # fmt: skip
        for change in changes:
            given = mine._replace(**change) if rank == 0 else mine
            if off(case, rank, everyone, call_op(case, given)):
                problems.append(f"other values where {list(change)} lie otherwise")
        if len(met) != 1:
            problems.append(f"{len(met) - 1} meetings of ranks that know these facts")
        case = Case(**vars(case) | {"n": 3})
        call_op(case, operands(case, rank, 0, CPU))
        if len(met) != 2:
            problems.append("no meeting at new sizes")
    return problems


@on_ranks(2)
def test_auto_is_serial_on_all_ranks_where_one_cannot(rank: int, ranks: int):
    """An explicit plan is refused on all of them; nobody is left waiting.

    Codes of a GPU for "auto" and for a plan by its name; the kernel does not fit rank 1's.
    """
    problem = Problem("matmul_all_reduce", 4, 64, 64, 2)

    def fits(site: object) -> Callable[..., None]:
        if rank == 1:
            raise UnsupportedError("1 blocks do not fit")
        return lambda _: None

    lanes = SimpleNamespace(register=lambda *_: 0)
    memory = SimpleNamespace(reserve=lambda _: None)
    workspace: Any = SimpleNamespace(
        kernels_refused="",
        group=world(), rank=rank, device=torch.device("cuda", 0), lanes=lanes, fused=memory,
        reserve=lambda _: None, gather=lambda problem: gather_object(problem, world()),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(execute_cuda, "fused_action", fits)
        fused, serial = build(problem, "fused"), build(problem, "serial")
        assert call.compiled(fused, "auto", workspace).program.plan == serial
        with pytest.raises(UnsupportedError, match=r"^1 blocks do not fit$"):
            call.compiled(fused, "fused", workspace)
        if rank == 0:  # where no kernel waits for peers, nobody is asked
            assert call.compiled(serial, "auto", workspace).program.plan == serial


@pytest.mark.parametrize("case", [GATHER, SCATTER, REDUCE], ids=lambda case: case.op)
@on_ranks(2)
def test_a_plan_is_text_a_plan_or_a_file(rank: int, ranks: int, case: Case, tmp_path: Path):
    """A plan as text, as a Plan, as a file by name and by Path: all give the same bits."""
    m = 12 if case.op == "all_gather_matmul" else sum(case.rows)
    problem = Problem(case.op, m, case.n, case.k, ranks, "float32", bias=case.bias)
    plan, other = build(problem, str(case.plan)), build(problem, "serial")
    file, second = (tmp_path / f"{name}.{rank}.json" for name in ("plan", "second"))
    file.write_text(to_json(plan))
    second.write_text(to_json(other))
    given = operands(case, rank, 0, CPU)
    specs: list[str] = []
    with by_reference(), pytest.MonkeyPatch.context() as patch:
        run = call.Ready.__call__

        def noted(ready: call.Ready, *arguments: Any) -> list[torch.Tensor]:
            assert ready.code is not None
            specs.append(ready.code.program.plan.spec)
            return run(ready, *arguments)

        patch.setattr(call.Ready, "__call__", noted)
        want = call_op(case, given)
        op = getattr(cp, case.op)
        forms: list[Plan | str | Path] = [plan, Plan.from_json(to_json(plan)), str(file), file]
        for form in forms:
            for _ in range(2):
                assert torch.equal(op(given.x, given.w, bias=given.bias, plan=form), want)
        assert set(specs) == {plan.spec} and len(specs) == 9
        # paths come and go, and another one may be where one has been
        for each in (file, second) * 4:
            op(given.x, given.w, bias=given.bias, plan=Path(os.fspath(each)))
        assert specs[9:] == [plan.spec, other.spec] * 4
    broken = tmp_path / f"broken.{rank}.json"
    broken.write_text("{}")
    missing = tmp_path / "none.json"
    of_file = f"^{case.op}: plan must be a file that can be read.*/none.json"
    other_plan = f"^{case.op}: plan must be for {case.op} M(12|6) N3 K5.*got for .* N4 K5 "
    narrow = given.w[:, :3].contiguous()
    for kind, wrong, w, bias, text in (
        (InputError, missing, given.w, given.bias, of_file),
        (PlanError, str(broken), given.w, given.bias, f"/broken.{rank}.json"),
        (InputError, str(second), narrow, None, other_plan),
    ):
        with pytest.raises(kind, match=text):
            op(given.x, w, bias=bias, plan=wrong)
