"""Slices of tables that the backward of embedding bags has: how they are cut, and how many."""

from itertools import product

import pytest
from embedding_cases import problem_of

import counterpoint as cp
from counterpoint.choose.slices import COUNTS, MIN_SLICE_S, slices_of
from counterpoint.embedding.plan_slices import backward_s, slice_s, tables_by_slice
from counterpoint.machine_of import shipped
from counterpoint.problem import Problem

MACHINE = shipped("NVIDIA H200", 2) or cp.preset("h200-2")


def bags_of(pooling: int, tables: int = 8, batch: int = 65536, d: int = 128) -> Problem:
    dims, counts = ((d,) * tables,) * 2, (batch // 2,) * 2
    return problem_of(dims, counts, "bfloat16", indices=(batch * tables * pooling,) * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(), (8,), (8, 8, 8, 8), (1, 300, 2), (5, 1, 1, 1, 40, 7, 7)])
def test_each_table_is_in_one_slice(dims: tuple[int, ...]):
    for count in COUNTS:
        cut = tables_by_slice(dims, count)
        assert len(cut) == count
        assert [t for some in cut for t in some] == list(range(len(dims)))


def test_slices_have_about_as_many_columns():
    assert tables_by_slice((8,) * 8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    for dims, count in product(((16, 8, 8, 32, 64, 8, 120), (128,) * 13), (2, 3, 4)):
        wide = [sum(dims[t] for t in some) for some in tables_by_slice(dims, count)]
        assert max(wide) - min(wide) <= 2 * max(dims)


def test_one_index_a_bag_is_exchanged_in_slices_and_many_are_not():
    """What is longer, the exchange or what does not wait for it, decides."""
    few, many = slices_of(bags_of(1), MACHINE), slices_of(bags_of(100), MACHINE)
    assert few.number > 1 and few.seconds[few.number] < few.seconds[1]
    assert many.number == 1 and set(many.seconds) > {1}
    assert f"{few.number} slices of tables" in str(few) and "in one" in str(few)
    assert str(many).startswith("1 slice of tables, ")
    assert f"its backward: {few}\n" in cp.choose(bags_of(1), MACHINE).explain()


def test_a_gain_within_the_error_of_predictions_is_left():
    """On a datasheet 6 % is not enough."""
    unmeasured = slices_of(bags_of(1), cp.preset("h200-2"))
    gain = unmeasured.seconds[1] / min(unmeasured.seconds.values())
    assert unmeasured.number == 1 and 1.0 < gain < 1.15


def test_no_more_slices_than_the_host_keeps_up_with():
    for batch in (512, 4096, 16384, 65536):
        p = bags_of(1, batch=batch)
        whole_s = slice_s(p, MACHINE, [sum(dims) for dims in p.tables])
        for count in slices_of(p, MACHINE).seconds:
            assert count == 1 or whole_s / count >= MIN_SLICE_S
    assert slices_of(bags_of(1, batch=512), MACHINE).number == 1


@pytest.mark.parametrize("tables", [((128,),) * 2, ((128,) * 8, ())])
def test_nothing_to_cut(tables: tuple[tuple[int, ...], ...]):
    """A table for each rank, or all on one: another rank has no part of most slices."""
    indices = tuple(65536 * len(dims) for dims in tables)
    found = slices_of(problem_of(tables, (32768, 32768), "bfloat16", indices=indices), MACHINE)  # type: ignore[arg-type]
    assert found.number <= max(map(len, tables))


@pytest.mark.parametrize("pooling", [1, 8, 100])
def test_slices_save_no_more_than_what_they_hide(pooling: int):
    p = bags_of(pooling)
    sent_s = slice_s(p, MACHINE, [sum(dims) for dims in p.tables])
    whole_s = backward_s(p, MACHINE, 1)
    for count in COUNTS[1:]:
        assert backward_s(p, MACHINE, count) >= whole_s - 2 * sent_s
        assert backward_s(p, MACHINE, count) >= sent_s
    alone = problem_of(((128,) * 8,), (65536,), "bfloat16", indices=(65536 * 8,))  # type: ignore[arg-type]
    assert slices_of(alone, MACHINE) == (1, {1: backward_s(alone, MACHINE, 1)})
