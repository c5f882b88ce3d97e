"""Twelve ranks that fail at a random moment; `make faults` runs 200."""

import pytest
from fault_trials import KINDS, problems_of, trial_of
from rankpool import RankPool


@pytest.mark.parametrize("number", range(12), ids=lambda n: f"{n} {tuple(KINDS)[n % len(KINDS)]}")
def test_every_survivor_names_who_failed_in_time(pool: RankPool, number: int):
    assert problems_of(trial_of(number), pool) == []
