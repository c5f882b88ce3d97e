"""Twelve ranks that fail at a random moment, and a short soak; `make faults` does more of both."""

import gc
from contextlib import suppress
from functools import partial

import pytest
from fault_soak import soak
from fault_trials import KINDS, POOL_ENV, on_ending_ranks, problems_of, rows_of, trial_of
from rankpool import RankError, RankPool
from torch._C._distributed_c10d import TCPStore


def collected(rank: int, ranks: int) -> int:
    return gc.collect()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("number", range(12), ids=lambda n: f"{n} {tuple(KINDS)[n % len(KINDS)]}")
def test_every_survivor_names_who_failed_in_time(pool: RankPool, number: int):
    # groups of earlier tests end now, or the pool makes new ranks: in two of some 20 runs a rank
    # that was to join hung for good in the collector, as it imported
    with suppress(RankError):
        pool.run(collected, 4, group=False, timeout_s=20)
    assert problems_of(trial_of(number), pool) == []


@pytest.mark.apart("make faults")
def test_trials_at_a_time_whose_ranks_all_end():
    """As on GPUs, where no survivor goes on; each has a row."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    trials = [trial_of(i, ranks=2, kinds=("killed", "sleeps")) for i in range(2)]
    run = partial(on_ending_ranks, port=store.port, kind="cpu")
    with RankPool(env=POOL_ENV) as one, RankPool(env=POOL_ENV) as other:
        rows = list(rows_of(trials, run, [one, other]))
    assert [row["problems"] for row in rows] == [[], []]
    assert [[told and told["rank"] for told in row["told"]] for row in rows] == [[None, 0], [0, 0]]


@pytest.mark.apart("make faults")
def test_a_group_is_rebuilt_after_each_fault(capsys: pytest.CaptureFixture[str]):
    """One of each kind; results keep their bits, and nothing of a dead group stays."""
    summary = soak(4, 0.2)
    assert summary.good and sum(summary.faults.values()) == 4, capsys.readouterr().out
