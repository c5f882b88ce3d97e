"""The loop that GPUs run under every control, on CPU ranks: and that it sees a missing edge."""

import pytest
from rankpool import RankPool
from sharing_bodies import error_without_an_edge, plain_errors


@pytest.mark.parametrize("op", ["all_to_all", "all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 16), (3, 12)])
def test_every_iteration_has_its_own_product(pool: RankPool, op: str, ranks: int, size: int):
    for found in pool.run(plain_errors, ranks, op, size):
        assert len(found) == 4
        assert all(error <= tolerance for error, tolerance in found), found


def test_a_product_in_place_of_an_earlier_one_is_seen(pool: RankPool):
    for error in pool.run(error_without_an_edge, 2):
        assert error > 0.5
