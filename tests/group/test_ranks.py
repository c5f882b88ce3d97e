import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from processes import python, python_of

import counterpoint as cp
from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.group.ranks import describe_process, group_of, spawn


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


WORK = """
import os, sys, time
import torch
import torch.distributed as dist
import counterpoint as cp

def work(device, offset):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    y = cp.all_gather_matmul(x, torch.ones(4, 3))
    y.sum().backward()
    return dist.get_rank() + offset, tuple(y.shape), str(device), bool((x.grad != 0).all())

def fail(device):
    if dist.get_rank() == 1:
        raise ValueError("no shard")

def sleep(device):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)
"""
SAID = "[(5, (4, 3), 'cpu', True), (6, (4, 3), 'cpu', True)]"
FAILS = "cp.run_on_ranks(fail)"


def test_run_on_ranks_in_a_notebook():
    """Where no file has the functions, and threads of torch have run before."""
    before = "a = torch.randn(500, 500, requires_grad=True)\n(a @ a).sum().backward()\n"
    calls = "print(cp.run_on_ranks(work, 5))\nprint(cp.run_on_ranks(lambda d: d.type, ranks=1))\n"
    refused = f"try: {FAILS}\nexcept cp.CounterpointError as error: print(error)"
    # there each piece of a line that print writes goes its own way
    pieces = """
class Pieces(io.TextIOBase):
    def write(self, s):
        os.write(1, f"<{s}>".encode())
        return len(s)

def say(device):
    print("rank", dist.get_rank())
    print("end", end="")

sys.stdout.flush()
sys.stdout = Pieces()
cp.run_on_ranks(say, ranks=1)
torch.cuda.is_initialized = lambda: True
try:
    cp.run_on_ranks(work, 5)
except cp.UnsupportedError as error:
    os.write(1, str(error).encode())
"""
    said = python("-c", f"import io{WORK}{before}{calls}{refused}{pieces}")
    assert said.splitlines()[:4] == [SAID, "['cpu']", "run_on_ranks: fail failed",
                                     "--- rank 1 raised"]  # fmt: skip
    assert "in fail\nValueError: no shard" in said
    assert "<rank 0\n><end>run_on_ranks: this notebook has used its GPU" in said


def test_run_on_ranks_of_torchrun(tmp_path: Path):
    script = tmp_path / "script.py"
    guarded = f"    print(cp.run_on_ranks(work, 5), flush=True)\n    {FAILS}\n"
    script.write_text(f'{WORK}if __name__ == "__main__":\n{guarded}')
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ranks = python_of(1, *torchrun, str(script), OMP_NUM_THREADS="1")
    assert ranks.stdout.count(SAID) == 2
    assert "ValueError: no shard" in ranks.stderr


def test_run_on_ranks_of_a_script_that_calls_it_when_it_is_imported(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(f"{WORK}cp.run_on_ranks(work, 5, ranks=1)\n")
    said = python_of(1, str(script)).stderr
    assert 'put the call behind `if __name__ == "__main__":`' in said


def test_ctrl_c_leaves_no_process(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(f'{WORK}if __name__ == "__main__":\n    cp.run_on_ranks(sleep, ranks=1)\n')
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert describe_process(pid) == f"pid {pid} is dead"
    # the rank says nothing
    assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1


@on_ranks(2)
def test_run_on_ranks_within_a_group(rank: int, world_size: int):
    assert cp.run_on_ranks(lambda device, offset: dist.get_rank() + offset, 3) == [3, 4]


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
