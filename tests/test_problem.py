"""Problem: what it refuses, and the sizes that follow from it."""

from dataclasses import FrozenInstanceError, replace
from typing import Any, get_args

import pytest
import torch
from plan_cases import AG, AG_BACKWARD, AG_WGRAD, AR, BIASED, NORM, OPS, RS, make_problem

from counterpoint.errors import InputError
from counterpoint.operators import declaration, op_names
from counterpoint.problem import ITEM_BYTES, DType, Problem


@pytest.mark.parametrize("name", get_args(DType))
def test_a_dtype_of_torch_is_that_of_its_name(name: Any):
    named, given = (
        Problem("all_gather_matmul", 8, 3, 5, 4, dtype=dtype)
        for dtype in (name, getattr(torch, name))
    )
    assert given == named and given.dtype == name and str(given) == str(named)


@pytest.mark.parametrize("op", OPS)
def test_only_some_ops_have_a_bias_or_several_weights(op: Any):
    if op not in BIASED:
        why = "a norm by RMS adds none" if op == NORM else "the op adds none"
        with pytest.raises(InputError, match=f"^{op}: bias must be False: {why}"):
            make_problem(op, 16, 3, 5, 4, bias=True)
    if op in (AG, RS, AG_WGRAD, AG_BACKWARD):
        whole = "5" if op == RS else "3"
        with pytest.raises(InputError, match=f"^{op}: splits must be counts >= 0 that .* {whole},"):
            make_problem(op, 16, 3, 5, 4, splits=(4, 3))
    else:
        with pytest.raises(InputError, match=f"^{op}: splits must be empty: the op has one weight"):
            make_problem(op, 16, 3, 5, 4, splits=(1, 2))


def test_an_operator_is_its_file_and_no_table():
    assert len(OPS) >= 8 and list(OPS) == sorted(OPS)
    for op in op_names():
        assert declaration(op).families
    for name in ("families", "operation", "no_such_file", "", "..problem", None):
        assert declaration(name) is None  # type: ignore[arg-type]


def test_rows_are_equal_unless_they_are_given():
    assert Problem("all_gather_matmul", 12, 1, 1, 4).rows == (3, 3, 3, 3)
    assert Problem("all_gather_matmul", 12, 1, 1, 4) == Problem(
        "all_gather_matmul", 12, 1, 1, 4, rows=(3, 3, 3, 3)
    )
    unequal = Problem("all_gather_matmul", 9, 1, 1, 4, rows=(4, 0, 5, 0))
    assert unequal.row_starts == (0, 4, 4, 9, 9)


def test_a_list_of_rows_becomes_a_tuple_so_that_problems_hash():
    problem = Problem("all_gather_matmul", 3, 1, 1, 2, rows=[1, 2])  # type: ignore[arg-type]
    assert problem.rows == (1, 2)
    assert len({problem, Problem("all_gather_matmul", 3, 1, 1, 2, rows=(1, 2))}) == 1


def test_a_problem_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Problem("all_gather_matmul", 4, 1, 1, 2).m = 8  # type: ignore[misc]


@pytest.mark.parametrize("dtype", get_args(DType))
def test_bytes_and_flop(dtype: Any):
    gather = Problem("all_gather_matmul", 10, 7, 5, 3, dtype, rows=(2, 5, 3))
    item_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    assert gather.item_bytes == item_bytes
    assert gather.flop == 2 * 10 * 7 * 5
    # the rank with the smallest shard receives the most
    assert gather.link_bytes == (5 + 3) * 5 * item_bytes
    scatter = Problem("matmul_reduce_scatter", 10, 7, 5, 3, dtype, rows=(2, 5, 3))
    # the rank with the most rows receives two partials of them
    assert scatter.link_bytes == 2 * 5 * 7 * item_bytes


@pytest.mark.parametrize("dtype", get_args(DType))
def test_bytes_and_flop_of_gradients(dtype: Any):
    item_bytes = ITEM_BYTES[dtype]
    # shards of x, [rows, K], as of the forward gather
    wgrad = Problem("all_gather_matmul_wgrad", 10, 7, 5, 3, dtype, rows=(2, 5, 3))
    assert wgrad.flop == 2 * 10 * 7 * 5
    assert wgrad.link_bytes == (5 + 3) * 5 * item_bytes
    # and two partials of the own rows of dx, [rows, K]: the rank with the most rows
    both = Problem("all_gather_matmul_backward", 10, 7, 5, 3, dtype, rows=(2, 5, 3))
    assert both.flop == 4 * 10 * 7 * 5
    assert both.link_bytes == (2 + 3 + 2 * 5) * 5 * item_bytes
    # shards of dy, [rows, N]
    scatter = Problem("matmul_reduce_scatter_backward", 10, 7, 5, 3, dtype, rows=(2, 5, 3))
    assert scatter.flop == 4 * 10 * 7 * 5
    assert scatter.link_bytes == (5 + 3) * 7 * item_bytes


def test_one_rank_moves_nothing():
    assert [make_problem(op, 8, 4, 4, 1).link_bytes for op in OPS] == [0] * len(OPS)


def test_rows_of_an_all_reduce_are_on_all_ranks():
    problem = Problem(AR, 9, 6, 5, 4)
    assert str(problem) == "matmul_all_reduce M9 N6 K5 bfloat16 on 4 ranks"
    assert sum(problem.rows) == 9 and problem.flop == 2 * 9 * 6 * 5
    # of what is scattered and gathered again, three of four parts each
    even = Problem(AR, 8, 6, 5, 4)
    assert even.link_bytes == 2 * 3 * 2 * 6 * 2


def test_a_problem_prints_on_one_line():
    even = Problem("all_gather_matmul", 8, 4, 2, 2, bias=True)
    assert str(even) == "all_gather_matmul M8 N4 K2 bfloat16 +bias on 2 ranks"
    several = Problem("all_gather_matmul", 8, 4, 2, 2, splits=[3, 1])  # type: ignore[arg-type]
    assert str(several) == "all_gather_matmul M8 N3+1 K2 bfloat16 on 2 ranks"
    assert hash(several) == hash(replace(several, splits=(3, 1)))
    uneven = Problem("matmul_reduce_scatter", 3, 4, 2, 2, "float32", rows=(1, 2))
    assert str(uneven) == "matmul_reduce_scatter M3 N4 K2 float32 on 2 ranks rows 1/2"
