"""Sums that go around: what they hide, whom they reach, and when they are chosen."""

from dataclasses import replace

import pytest
from plan_cases import AG, AR, RS, prove

from counterpoint.choose.by_model import by_model
from counterpoint.errors import InputError, PlanError
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.model.work import works
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Buffer, Region
from counterpoint.plan.validate import validate
from counterpoint.problem import Problem
from counterpoint.schedules.finer import NAMES
from counterpoint.schedules.makespan import running_sum_s

LONG = (8192, 8192, 3584)  # its matmuls take longer than its copies


def machine(ranks: int) -> Machine:
    return machine_of("test", f"h200-{ranks}")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_rank_adds_and_passes_on_to_the_next(ranks: int):
    plan = prove(Problem(RS, 16 * ranks, 48, 64, ranks), "running_sum")
    assert plan.spec == "running_sum chunks=2"
    matmuls = [step for step in plan.steps if step.lane == "compute"]
    assert {step.kind for step in matmuls} == {"matmul"} and len(matmuls) == 2 * ranks
    assert [step.accumulates for step in matmuls] == [False] * 2 + [True] * 2 * (ranks - 1)
    copies = [step for step in plan.steps if step.kind == "copy"]
    assert len(copies) == 2 * (ranks - 1)
    assert {region.at for step in copies for region in step.writes} == {(1,)}
    assert not any(step.waits for step in copies), "a kernel that waits takes a matmul's place"
    # what is added lies elsewhere than the result, which the user owns; on the way it is in place
    *_, total = matmuls[-1].reads
    assert (total.buffer, matmuls[-1].writes[0].buffer) == ("sums", "y")
    for rank in range(ranks):
        (part,) = bind(plan, rank).steps[-1].parts
        assert (part.reads[-1].rank, part.write.rank) == (rank, rank)


def test_several_products_are_added_one_after_another():
    plan = prove(Problem(RS, 8, 6, 7, 2, splits=(3, 4)), "running_sum chunks=1")
    reads = [step.reads[2:] for step in plan.steps if step.kind == "matmul"]
    own = Region("y", chunk=(0, 1))
    assert [[r.buffer for r in each] for each in reads] == [[], ["partial"], ["sums"], ["y"]]
    assert reads[-1] == (own,)


@pytest.mark.parametrize("op", [RS, AR])
def test_a_bias_is_added_once_at_the_end(op: str):
    plan = prove(Problem(op, 12, 5, 7, 3, bias=True), "running_sum")
    assert [step.name for step in plan.steps if step.arg("bias")] == ["add_bias"]
    assert plan.steps[-1].kind == "move"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("op", [RS, AR])
def test_pushes_are_hidden_where_matmuls_take_longer(op: str, ranks: int):
    plan, where = build(Problem(op, *LONG, ranks), "running_sum"), machine(ranks)
    spans = estimate(plan, where).spans
    waits = [s for s in spans if s.kind == "wait" and s.label.startswith("wait for matmul")]
    assert sum(span.end_s - span.start_s for span in waits) < 1e-6 * ranks


def test_a_sum_that_is_added_to_is_read_once_more():
    """Nothing else: what it holds is written in any case."""
    where = machine(2)
    program = bind(build(Problem(RS, *LONG, 2), "running_sum"), 0)
    priced = dict(zip((b.step.name for b in program.steps), works(program, where, {}), strict=True))
    more_s = priced["matmul_1_1"].seconds - priced["matmul_0_1"].seconds
    read_s = 2048 * 8192 * 2 / where.costs.hbm_bytes_per_s
    assert more_s == pytest.approx(read_s * where.costs.settling(4 * 168e-6), rel=0.05)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_closed_form_is_a_little_below_the_simulation(ranks: int, chunks: int):
    for shape in (LONG, (8192, 8192, 1024), (2048, 8192, 3584)):
        p, where = Problem(RS, *shape, ranks), machine(ranks)
        seconds = predicted_s(build(p, f"running_sum chunks={chunks}"), where)
        assert 0.8 < running_sum_s(p, chunks, where) / seconds < 1 + 1e-9, shape


def test_two_gpus_sum_so_where_matmuls_take_longer():
    where = machine(2)
    for shape in (LONG, (8192, 16384, 6656)):
        choice = by_model(Problem(RS, *shape, 2), where)
        assert choice.spec == "running_sum chunks=2", choice.explain()
    longer = by_model(Problem(RS, 8192, 8192, 1024, 2), where)
    assert longer.plan.family == "shard_p2p", longer.explain()


def test_between_two_gpus_there_is_one_pair_and_all_families_are_weighed():
    """Of 2048 rows, cuBLAS multiplies 512 at a time better than 1024, by these tiles."""
    columns = {256: 112, 512: 112, 1024: 256, 2048: 176}
    tiles = {(rows, 7168, 8192): (128, width) for rows, width in columns.items()}
    pair = by_model(Problem(AG, 2048, 7168, 8192, 2), machine(2), tiles=tiles)
    assert pair.spec == "uniform_unfused_1d ring", pair.explain()
    four = by_model(Problem(AG, 2048, 7168, 8192, 4), machine(4), tiles=tiles)
    weighed = {c.spec.split()[0] for c in four.table}
    assert not weighed & {*NAMES} and four.plan.family == "shard_p2p"


def test_scales_are_refused_and_so_are_sums_of_another_dtype():
    scaled = Problem(RS, 8, 16, 128, 2, scales="row", x_dtype="float8_e4m3fn")
    with pytest.raises(InputError, match="for operands without scales, got 'running_sum'"):
        build(scaled, "running_sum")
    plan = build(Problem(RS, 8, 16, 128, 2), "running_sum chunks=1")
    wide = Buffer("wide", (8, 16), "float32", "scratch", split=True)
    steps = tuple(
        replace(s, reads=(*s.reads[:2], Region("wide", shards=((0,),)))) if s.accumulates else s
        for s in plan.steps
    )
    with pytest.raises(PlanError, match="step matmul_1: adds to float32 in bfloat16"):
        validate(replace(plan, buffers=(*plan.buffers, wide), steps=steps))
    last = plan.steps[-1]
    twice = replace(last, reads=(*last.reads, last.reads[-1]))
    with pytest.raises(PlanError, match="reads x, w and, to accumulate, one sum"):
        validate(replace(plan, steps=(*plan.steps[:-1], twice)))
