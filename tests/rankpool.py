"""A pool of warm rank processes: a test on four ranks then takes some 50 ms, not seconds.

The test hands `RankPool.run` a module-level function, which each rank imports by name. Every
run has a gloo group of its own. A worker that took part in a failed run is replaced, so no
failure spreads to the next test.
"""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVarTuple
from unittest import mock

import numpy as np
import quick_interpreter
import torch

from counterpoint.group.ranks import (
    RankProcess,
    collect,
    describe_failures,
    end,
    exit_with_parent,
    gloo_group,
    report,
)

Ts = TypeVarTuple("Ts")

# imported once, before the workers are forked; pytest since multiprocessing imports the main
# module in each, inductor's configuration since use_deterministic_algorithms does (0.9 s)
PRELOAD = ["pytest", "numpy", "torch", "torch.distributed", "torch._inductor.config",
           "torch._inductor.compile_fx"]  # fmt: skip

TIMEOUT_S = 900.0  # only ends what hangs: no run takes as long, however slow the machine


class RankError(AssertionError):
    """A rank raised or died; the message holds the traceback of each."""


class RankHangError(RankError):
    """A rank did not return in time; the message holds its Python stacks."""


class Job(NamedTuple):
    fn: Callable[..., object]
    rank: int
    world_size: int
    args: tuple[object, ...]
    timeout_s: float
    store_path: str  # "": without a group
    seed: int
    test: str


class RankPool:
    """Up to `max_ranks` warm workers; `env` is set in each before it imports a test module.

    `preload` is imported before they are forked: nothing that asks for GPUs, where they use some.
    """

    def __init__(
        self, *, max_ranks: int = 4, env: Mapping[str, str] | None = None,
        preload: Sequence[str] = PRELOAD,
    ) -> None:  # fmt: skip
        self._max_ranks = max_ranks
        self._env = dict(env or {})
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload])
        # inductor imports triton, which looks at the environment once: at the server's start
        with mock.patch.dict(os.environ, self._env):
            forkserver.ensure_running()
        self._folder = Path(tempfile.mkdtemp(prefix="rankpool-"))
        self._workers: dict[int, RankProcess] = {}
        self._num_runs = 0

    def run(
        self,
        fn: Callable[[int, int, *Ts], object],
        world_size: int,
        *args: *Ts,
        timeout_s: float = TIMEOUT_S,
        group: bool = True,
        expect_dead: Collection[int] = (),
        seed: int = 0,
    ) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on each rank and return the results in rank order.

        Args:
            fn: a module-level function.
            world_size: 1 to max_ranks.
            args: picklable; each rank gets a copy.
            timeout_s: after it, a rank that is still at it is reported with its stacks and
                killed. The timeout of the gloo group is 3/4 of it.
            group: make a gloo group of the ranks the default group.
            expect_dead: ranks that must die in `fn`; their result is None.
            seed: of torch and numpy, the same on all ranks.

        Raises:
            RankError: a rank raised or died, or one that should die did not.
            RankHangError: a rank did not return in time, or not soon after another failed.
        """
        __tracebackhide__ = True
        assert 1 <= world_size <= self._max_ranks, f"the pool has {self._max_ranks} ranks"
        self._num_runs += 1
        store_path = self._folder / f"store.{self._num_runs}"
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        jobs = [
            Job(fn, rank, world_size, args, timeout_s, str(store_path) if group else "", seed, test)
            for rank in range(world_size)
        ]
        clean = False
        try:
            workers = self._start(world_size)
            for worker, job in zip(workers, jobs, strict=True):
                worker.connection.send_bytes(pickle.dumps(job))
            outcomes = collect(workers, timeout_s=timeout_s, expect_dead=expect_dead)

            pending = [rank for rank in range(world_size) if rank not in outcomes]
            stacks = [self._stacks(rank) for rank in pending]
            unexpected = {
                rank: outcome
                for rank, outcome in outcomes.items()
                if not (outcome.status == "dead" and rank in expect_dead)
            }
            text = describe_failures(unexpected)
            if pending:
                raise RankHangError("\n".join([f"ranks {pending} hung", text, *stacks]))
            if text:
                raise RankError(f"{fn.__qualname__} failed\n{text}")
            survivors = [rank for rank in expect_dead if outcomes[rank].status != "dead"]
            if survivors:
                raise RankError(f"ranks {survivors} should have died and returned")
            clean = True
            return [None if r in expect_dead else outcomes[r].value for r in range(world_size)]
        finally:
            if not clean:
                self._end(range(world_size))
            store_path.unlink(missing_ok=True)

    def pids(self) -> list[int | None]:
        """Of the workers that are there, by rank: to see whether a run replaced one."""
        return [worker.process.pid for _, worker in sorted(self._workers.items())]

    def _start(self, world_size: int) -> list[RankProcess]:
        """The workers of the first ranks, those that are missing started at the same time."""
        for rank in range(world_size):
            if rank in self._workers and not self._workers[rank].process.is_alive():
                self._end([rank])
            if rank not in self._workers:
                ours, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_worker_main,
                    args=(theirs, self._stack_path(rank), self._env),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._workers[rank] = RankProcess(process, ours)
        return [self._workers[rank] for rank in range(world_size)]

    def _end(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._workers:
                end(self._workers.pop(rank))

    def _stack_path(self, rank: int) -> str:
        return str(self._folder / f"stacks.{rank}")

    def _stacks(self, rank: int) -> str:
        """The Python stack of each thread of a rank, also while it is blocked in C++."""
        pid = self._workers[rank].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)  # a stopped process writes first thing when it goes on
        text, deadline = "", time.monotonic() + 30
        while not text.endswith("in <module>\n") and time.monotonic() < deadline:
            time.sleep(0.02)  # the main thread's is the last one
            text = Path(self._stack_path(rank)).read_text()
        return f"--- rank {rank} (pid {pid}) is in\n{text.rstrip()}"

    def close(self) -> None:
        self._end(list(self._workers))
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _worker_main(connection: Connection, stack_path: str, env: Mapping[str, str]) -> None:
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pool
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        exit_with_parent()
        torch.set_num_threads(1)  # more ranks than cores
        # fills torch.empty with NaN (and the largest integer): a read of it shows in the result
        torch.use_deterministic_algorithms(True)
        if os.environ.get("TRITON_INTERPRET") == "1":
            quick_interpreter.install()
        follow = _no_one_follows
        if "COUNTERPOINT_REACHED" in os.environ:
            from reached import of_a_rank

            follow = of_a_rank()
        while True:
            try:
                payload = connection.recv_bytes()
            except EOFError:
                return
            report(connection, lambda payload=payload: _run_job(payload, follow))


def _no_one_follows(test: str) -> None:
    """Whose lines follow: see `reached.py`."""


def _run_job(payload: bytes, follow: Callable[[str], None]) -> Any:
    """Unpickle a job, which imports the test's module, and run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in pytest's own process
        warnings.filterwarnings("ignore", ".*torch.jit.script_method")  # torch's, as it compiles
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        job: Job = pickle.loads(payload)
        follow(job.test)
        torch.manual_seed(job.seed)  # pyright: ignore[reportUnknownMemberType]
        np.random.seed(job.seed)
        in_group = (
            gloo_group(job.rank, job.world_size, job.store_path, timeout_s=job.timeout_s)
            if job.store_path
            else nullcontext()
        )
        try:
            with in_group, mock.patch.dict(os.environ):  # what a test sets ends with it
                return job.fn(job.rank, job.world_size, *job.args)
        finally:
            _forget()
            follow("")


def _forget() -> None:
    """Drop what a test leaves behind in a worker, if it loaded the module that keeps it."""
    calls = {"counterpoint.group.workspace": "release_all", "torch._dynamo": "reset"}
    for module, call in calls.items():
        if module in sys.modules:
            getattr(sys.modules[module], call)()
