"""The pool must tell the truth about ranks that fail, hang or die, and then go on."""

import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rankpool import TIMEOUT_S, RankError, RankHangError, RankPool

from counterpoint.group import ranks


def sum_of_ranks(rank: int, world_size: int) -> int:
    x = torch.tensor([rank])
    dist.all_reduce(x)
    return int(x)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_run_has_a_group_of_its_size(pool: RankPool, world_size: int):
    assert pool.run(sum_of_ranks, world_size) == [sum(range(world_size))] * world_size


def scaled_rank(rank: int, world_size: int, scale: float) -> torch.Tensor:
    assert not dist.is_initialized()
    return torch.full((2,), scale * rank)


def test_results_come_in_rank_order_and_workers_stay(pool: RankPool):
    first = pool.run(scaled_rank, 3, 0.5, group=False)
    pids = pool.pids()
    second = pool.run(scaled_rank, 3, 0.5, group=False)
    assert [x.tolist() for x in first] == [[0, 0], [0.5, 0.5], [1, 1]]
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert pool.pids() == pids


def uninitialized(rank: int, world_size: int) -> torch.Tensor:
    return torch.stack(
        [torch.empty(8), torch.ones(8).new_empty(8), torch.empty_like(torch.ones(8))]
    )


def test_uninitialized_memory_is_nan(pool: RankPool):
    (x,) = pool.run(uninitialized, 1, group=False)
    assert x.isnan().all()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("old name", FutureWarning, stacklevel=1)


def test_a_warning_in_a_rank_fails_the_test(pool: RankPool):
    with pytest.raises(RankError, match="FutureWarning: old name"):
        pool.run(warn, 1, group=False)


def fail_on_odd_ranks(rank: int, world_size: int) -> None:
    if rank % 2:
        raise ValueError(f"bad shard of {rank}")
    dist.barrier()


def test_errors_of_all_ranks_are_reported(pool: RankPool):
    with pytest.raises(RankError, match="bad shard of 1") as info:
        pool.run(fail_on_odd_ranks, 4)
    text = str(info.value)
    assert "bad shard of 3" in text
    assert text.count("in fail_on_odd_ranks") == 4, "a traceback of each rank, also the peers'"
    assert "Timed out" not in text, "peers of a failed rank do not wait for the timeout"
    assert pool.run(sum_of_ranks, 4) == [6] * 4


def hang(rank: int, world_size: int, how: str, note: Path) -> None:
    if rank != 1:
        return
    note.touch()
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how != "blocked":
        time.sleep(0.01)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("how", ["loop", "blocked", "stopped"])
def test_a_hang_is_reported_with_stacks(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
):
    note, wait, bounds = tmp_path / "hangs", ranks.wait, list[float]()

    def until_it_hangs(pending: list[Any], bound_s: float) -> list[Any]:
        """The time is up once rank 0 has returned and rank 1 hangs."""
        bounds.append(bound_s)
        while len(pending) == 1 and not note.exists():
            time.sleep(0.01)
        return wait(pending) if len(pending) > 1 else []

    monkeypatch.setattr(ranks, "wait", until_it_hangs)
    with pytest.raises(RankHangError, match=r"ranks \[1\] hung") as info:
        pool.run(hang, 2, how, note, group=False)
    assert 0 < bounds[-1] <= bounds[0] <= TIMEOUT_S
    text = str(info.value)
    assert "test_rankpool.py" in text and "in hang" in text
    assert "--- rank 0" not in text
    monkeypatch.undo()
    assert pool.run(sum_of_ranks, 2) == [1, 1]


def wait_for_nobody(rank: int, world_size: int, note: Path) -> None:
    if rank == 0:
        note.touch()
        time.sleep(3600)
    while not note.exists():
        time.sleep(0.01)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    raise RuntimeError(f"waits for {backend.options._timeout}")


def test_the_group_times_out_before_the_pool(pool: RankPool, tmp_path: Path):
    with pytest.raises(RankHangError, match=r"ranks \[0\] hung") as info:
        pool.run(wait_for_nobody, 2, tmp_path / "hangs")
    assert "--- rank 1 raised" in str(info.value)
    assert "in wait_for_nobody" in str(info.value)
    assert f"waits for {timedelta(seconds=0.75 * TIMEOUT_S)}" in str(info.value)


def die(rank: int, world_size: int, victim: int) -> str:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()
    return "peer saw it"


def test_a_rank_may_be_expected_to_die(pool: RankPool):
    assert pool.run(die, 2, 1, expect_dead=(1,)) == ["peer saw it", None]
    assert pool.run(sum_of_ranks, 2) == [1, 1]
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        pool.run(die, 2, 1)
    with pytest.raises(RankError, match=r"ranks \[0\] should have died"):
        pool.run(sum_of_ranks, 2, expect_dead=(0,))
