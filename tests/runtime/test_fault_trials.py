"""Twelve ranks that fail at a random moment, and a short soak; `make faults` does more of both."""

import pytest
from fault_soak import soak
from fault_trials import KINDS, problems_of, trial_of
from rankpool import RankPool


@pytest.mark.parametrize("number", range(12), ids=lambda n: f"{n} {tuple(KINDS)[n % len(KINDS)]}")
def test_every_survivor_names_who_failed_in_time(pool: RankPool, number: int):
    assert problems_of(trial_of(number), pool) == []


def test_a_group_is_rebuilt_after_each_fault(capsys: pytest.CaptureFixture[str]):
    """One of each kind; results keep their bits, and nothing of a dead group stays."""
    summary = soak(4, 0.2)
    assert summary.good and sum(summary.faults.values()) == 4, capsys.readouterr().out
