import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.runtime.ranks import describe_process, group_of, spawn


def gather_ranks(rank: int, num_ranks: int, offset: int) -> tuple[torch.Tensor, int]:
    ranks = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(ranks, torch.tensor([rank + offset]))
    return torch.cat(ranks), torch.get_num_threads()


def test_spawn_joins_ranks_in_a_group_and_returns_their_results():
    results = spawn(gather_ranks, 2, 40, timeout_s=300)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(ranks.tolist(), threads) for ranks, threads in results] == [([40, 41], share)] * 2


def fail_or_wait(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ValueError("no shard")
    time.sleep(600)


def test_spawn_raises_with_the_traceback_and_leaves_no_process():
    with pytest.raises(CounterpointError, match="ValueError: no shard") as info:
        spawn(fail_or_wait, 2, timeout_s=300)
    assert "--- rank 1 raised" in str(info.value)
    assert "ranks [0] were killed" in str(info.value)
    # what is left are the workers of the pool
    children = multiprocessing.active_children()
    assert not [
        child for child in children if isinstance(child, multiprocessing.context.SpawnProcess)
    ]


def sleep(rank: int, num_ranks: int) -> None:
    time.sleep(600)


def test_spawn_names_the_rank_that_is_late():
    match = r"spawn: ranks \[0\] did not return from sleep within 0.5 s"
    with pytest.raises(PeerTimeoutError, match=match) as info:
        spawn(sleep, 1, timeout_s=0.5)
    assert (info.value.rank, info.value.step) == (0, "sleep")


def test_spawn_refuses():
    with pytest.raises(
        InputError, match=r"spawn: fn must be a module-level function, got .*lambda"
    ):
        spawn(lambda rank, num_ranks: None, 2, timeout_s=1)
    with pytest.raises(InputError, match="spawn: num_ranks must be >= 1, got 0"):
        spawn(sleep, 0, timeout_s=1)
    with pytest.raises(InputError, match="spawn: timeout_s must be > 0, got 0"):
        spawn(sleep, 1, timeout_s=0)


def test_describe_process():
    # a name with the characters that separate the fields of /proc/<pid>/stat
    code = "open('/proc/self/comm', 'w').write(') Z ('); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert describe_process(process.pid) == f"pid {process.pid} is alive"

        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert describe_process(process.pid) == f"pid {process.pid} is stopped"

        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert describe_process(process.pid) == f"pid {process.pid} is dead", "a zombie"
    assert describe_process(process.pid) == f"pid {process.pid} is dead", "and reaped"


@on_ranks(2)
def test_group_of(rank: int, world_size: int):
    world = dist.group.WORLD
    assert world is not None
    assert group_of(world.group_name) is world
    subgroup = dist.new_group([1])
    if rank == 1:
        assert group_of(subgroup.group_name) is subgroup
    with pytest.raises(InputError, match=r"name must be the group_name .*, got 'tp'; pass"):
        group_of("tp")
