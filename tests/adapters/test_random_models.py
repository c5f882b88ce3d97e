"""A few of the random models of `make models`."""

from pathlib import Path

import pytest
from random_models import as_written, by_inductor
from rankpool import RankPool


def test_models_as_written(pool: RankPool, thorough: bool):
    assert not as_written(pool, range(8 if thorough else 1), 0)


@pytest.mark.apart("make models")
def test_models_by_inductor_cold_warm_and_on_other_ranks(tmp_path: Path, thorough: bool):
    assert not by_inductor(range(3, 6 if thorough else 4), 2, str(tmp_path))
