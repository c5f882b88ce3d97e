"""Plans of attention: right where it is causal, and refused where a block is wrong."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from drawing import Draw
from plan_cases import ATTENTION, make_problem, prove, prove_or_refuse, specs
from plan_simulator import simulate

from counterpoint.errors import InputError, PlanError
from counterpoint.plan.attended import blocks
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan, Step
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem


@pytest.mark.drawn(4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ATTENTION)
def test_causal_plans_are_right(op: str, ranks: int):
    for rows in (2, 6):
        problem = make_problem(op, rows * ranks, 6, 2, ranks, causal=True, head_dim=1)
        for spec in specs(problem):
            plan = prove_or_refuse(problem, spec)
            assert plan is None or simulate(plan, seed=rows), spec


# of each, keys, and queries to a key
HEADS = ((1, 2, 3), (2, 4, 1), (2, 3, 2), (1, 1, 2), (2, 17, 1))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_plans_by_heads_are_right(ranks: int, draw: Draw):
    """Of heads that are as many in each part, or not; of several queries to a key."""
    specs = "by_heads", "by_heads chunks=3", "by_heads chunks=8"
    for heads, rows, spec in draw([*product(HEADS, (1, 3), specs)], 10):
        dim, key_heads, grouped = heads
        cols = key_heads * dim
        problem = Problem(ATTENTION[1], rows * ranks, grouped * cols, cols, ranks, head_dim=dim)
        assert simulate(prove(problem, spec), seed=rows), spec


def test_heads_that_are_not_those_of_the_keys_are_refused():
    problem = Problem(ATTENTION[1], 8, 12, 6, 2, head_dim=2)
    plan = build(problem, "by_heads chunks=3")
    steps = {step.name: step for step in plan.steps}

    def with_step(new: Step) -> Plan:
        return replace(plan, steps=tuple(new if s.name == new.name else s for s in plan.steps))

    first, other = steps["gradient_0"], steps["gradient_1"]
    for i in (0, 3, 4, 5):  # q, dy, y or lse of the heads beside
        reads = (*first.reads[:i], other.reads[i], *first.reads[i + 1 :])
        with pytest.raises(PlanError, match="gradient_0: q, k, v, dy, y, lse are not of the same"):
            validate(with_step(replace(first, reads=reads)))
    wrong_target = replace(first, writes=(other.writes[0], *first.writes[1:]))
    with pytest.raises(PlanError):
        validate(with_step(wrong_target))
    cut = replace(first.reads[0], cols=(0, 3))
    with pytest.raises(PlanError, match="do not fit an attention of 12 and 6 columns"):
        validate(with_step(replace(first, reads=(cut, *first.reads[1:]))))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_have_equal_work_and_none_of_it_masked(ranks: int):
    """Of a causal attention; a query attends to itself and all before it."""
    rows = 8
    problem = Problem(ATTENTION[0], rows * ranks, 1, 1, ranks, causal=True)
    for spec in ("serial", "shard_p2p ring", "shard_p2p ring chunks=3"):
        plan = build(problem, spec)
        cells: list[float] = []
        for rank in range(ranks):
            parts = (part for bound in bind(plan, rank).steps for part in bound.parts)
            made = (part for part in parts if len(part.reads) > 2 and part.write.buffer != "lse")
            sizes = [(part.reads[0].shape[0], part.reads[1].shape[0], part.diagonal)
                     for part in made]  # fmt: skip
            assert all(q == k for q, k, diagonal in sizes if diagonal)
            cells.append(sum(q * (k + 1) / 2 if d else q * k for q, k, d in sizes))
        whole = rows * ranks
        assert len(set(cells)) == 1 and sum(cells) == whole * (whole + 1) / 2, spec


def wrong(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans in which one step attends to something else."""
    attends = [s for s in plan.steps if s.kind == plan.steps[1].kind]

    def with_step(new: Step) -> Plan:
        steps = (new if s.name == new.name else s for s in plan.steps)
        return replace(plan, steps=tuple(steps))

    def without(step: Step) -> Plan:
        """Its signals stay."""
        return with_step(replace(step, args=(*step.args, ("peer", 0)), kind="barrier", reads=(),
                                 writes=()))  # fmt: skip

    for step in attends:
        args = {"peer": 0, "first": 0, **dict(step.args)}
        for name in ("peer", "first"):
            new = {**args, name: int(args[name]) + 1}
            yield f"{name} of {step.name}", with_step(replace(step, args=tuple(new.items())))
        q, k, _, *rest = step.reads
        yield f"k for v of {step.name}", with_step(replace(step, reads=(q, k, k, *rest)))
        if step.accumulates:
            least = len(step.reads) - (2 if step.kind == "attention" else 1)
            yield f"merges nothing: {step.name}", with_step(replace(step, reads=step.reads[:least]))
            yield f"without {step.name}", without(step)
    again = replace(attends[-1], name="again", waits=(), posts=())
    place = plan.steps.index(attends[-1]) + 1
    yield "twice", replace(plan, steps=(*plan.steps[:place], again, *plan.steps[place:]))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ATTENTION)
def test_a_block_that_is_wrong_is_refused(op: str, causal: bool):
    problem = make_problem(op, 24, 4, 2, 3, causal=causal, head_dim=2)
    plan = build(problem, "shard_p2p ring chunks=2")
    validate(plan)
    refused: set[str] = set()
    for what, mutant in wrong(plan):
        try:
            validate(mutant)
        except PlanError:
            refused.add(what.split()[0])
            continue
        # a block may be the same whosever it is said to be
        assert simulate(mutant, seed=1), what
    assert refused == {"k", "merges", "twice", "without"} | ({"peer", "first"} if causal else set())


def test_what_a_step_of_attention_has_to_be():
    problem = Problem(ATTENTION[0], 8, 4, 2, 2, head_dim=2)
    plan = build(problem, "shard_p2p")
    own = plan.steps[1]
    few = replace(own, reads=own.reads[:2])
    with pytest.raises(
        PlanError, match="step attend_0: an attention reads q, k, v and its targets"
    ):
        validate(replace(plan, steps=(plan.steps[0], few, *plan.steps[2:])))
    with pytest.raises(InputError, match="head_dim must be a divisor of N and of K"):
        Problem(ATTENTION[0], 8, 4, 2, 2, head_dim=3)
    with pytest.raises(InputError, match="rows must be equal on all ranks, and two halves"):
        Problem(ATTENTION[0], 6, 4, 2, 2, causal=True)
    with pytest.raises(InputError, match="causal must be left out: the op has no heads, got True"):
        Problem("all_gather_matmul", 8, 4, 2, 2, causal=True)


def test_blocks_by_hand():
    """Two ranks of parts 0, 3 and 1, 2, of two rows each."""
    p = Problem(ATTENTION[0], 8, 1, 1, 2, causal=True)
    assert [tuple(b) for b in blocks(p, 0, 0, 0, 4)] == [((0, 4), (0, 4), True)]
    assert [tuple(b) for b in blocks(p, 0, 1, 0, 4)] == [((2, 4), (0, 4), False)]
    assert [tuple(b) for b in blocks(p, 1, 0, 0, 4)] == [((0, 4), (0, 2), False)]
    assert blocks(p, 1, 0, 2, 2) == ()
    halves = [((0, 2), (0, 2), True), ((2, 4), (0, 2), False)]
    assert [tuple(b) for b in blocks(p, 1, 1, 0, 2)] == halves
