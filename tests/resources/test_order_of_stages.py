"""The loop that GPUs run under every control, on CPU ranks: and that it sees a missing edge."""

import pytest
from on_ranks import on_ranks
from sharing_bodies import error_without_an_edge, plain_errors


@pytest.mark.parametrize("op", ["all_to_all", "all_reduce", "all_gather", "reduce_scatter"])
@on_ranks(2, 3)
def test_every_iteration_has_its_own_product(rank: int, ranks: int, op: str):
    found = plain_errors(rank, ranks, op, {2: 16, 3: 12}[ranks])
    assert len(found) == 4
    assert all(error <= tolerance for error, tolerance in found), found


@on_ranks(2)
def test_a_product_in_place_of_an_earlier_one_is_seen(rank: int, ranks: int):
    assert error_without_an_edge(rank, ranks) > 0.5
