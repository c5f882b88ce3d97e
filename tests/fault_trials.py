"""Ranks that are killed, stopped, sleep or exit at a random moment: who says what, and when.

    python -m fault_trials --trials 200     # `make faults`; one trial is 2 to 4 CPU ranks
    python -m fault_trials --soak 30        # minutes of 4 CPU ranks, rebuilt after each fault
    python -m fault_trials --guard --trials 50      # of programs without our operators
    python -m fault_trials --gpu --trials 20 --out FILE     # of 2 ranks on 2 GPUs, several at once

A trial is right if every survivor raises within the bound and a second, and names the rank that
failed and the state of its process. On GPUs it may do so at its next call, or at the next `check`;
calls are eager ones, and replays of a graph of many.
"""

import argparse
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mixed_calls import mixed_calls
from rank_bodies import by_reference
from rankpool import PRELOAD, RankError, RankPool
from torch._C._distributed_c10d import PrefixStore, TCPStore

import counterpoint as cp
from counterpoint.errors import PeerTimeoutError
from counterpoint.measure.timing import captured

BOUND_S, SLACK_S = 2.0, 1.0
KINDS = {"killed": "dead", "exits": "dead", "stops": "stopped", "sleeps": "alive"}
LATEST_S = 0.3  # when a rank fails, after its first calls
CHECK_EVERY = 4  # calls: on a GPU they return before they have run
POOL_ENV = {"TRITON_INTERPRET": "1"}
ON_GPUS = {"kinds": ("killed", "sleeps"), "ranks": 2, "latest_s": 1.0, "bound_s": 5.0}
GPU_LANES = 4  # trials at a time, on the same GPUs
GPU_ENV = {"NCCL_GRAPH_REGISTER": "0", "COUNTERPOINT_TIMEOUT_S": "120"}  # until all is compiled
COMPILE_S, HANG_S = 200.0, 90.0  # of all kernels, before the trials; of a trial


class Trial(NamedTuple):
    """What happens to whom, and when."""

    ranks: int
    victim: int
    kind: str
    after_s: float
    seed: int
    bound_s: float  # of every wait

    @property
    def dies(self) -> tuple[int, ...]:
        """Ranks whose processes end; one that only sleeps goes on, and is told."""
        return () if self.kind == "sleeps" else (self.victim,)


def trial_of(
    seed: int, *, ranks: int = 0, latest_s: float = LATEST_S, bound_s: float = BOUND_S,
    kinds: Sequence[str] = tuple(KINDS),
) -> Trial:  # fmt: skip
    """The trial of that number: each rank and each kind as often as others."""
    draw = random.Random(seed)
    ranks = ranks or draw.choice((2, 3, 4))
    kind, victim = kinds[seed % len(kinds)], seed // len(kinds) % ranks
    return Trial(ranks, victim, kind, draw.uniform(0, latest_s), seed, bound_s)


class Told(NamedTuple):
    """What a rank was told, how long after the fault (< 0: before it), after how many calls."""

    rank: int | None
    text: str
    after_s: float
    calls: int


def suffer(
    rank: int, trial: Trial, folder: Path, calls: Sequence[Callable[[], object]],
    group: dist.ProcessGroup | None = None,
) -> Told:  # fmt: skip
    """Call and call, until this rank fails, or hears that another one has."""
    draw, at, done = random.Random(trial.seed), folder / "at", folder / "done"
    sleeps, number = threading.Event(), 0
    if rank == trial.victim:
        threading.Thread(target=fail, args=(trial, at, sleeps), daemon=True).start()
    try:
        while True:
            draw.choice(calls)()
            number += 1
            if number % CHECK_EVERY == 0:
                cp.check(group)
            if sleeps.is_set():
                at.write_text(str(time.monotonic()))
                sleeps.clear()
                while len(list(done.iterdir())) < trial.ranks - 1:
                    time.sleep(0.01)
    except PeerTimeoutError as error:
        told_s = time.monotonic()
        latest_s = told_s + trial.after_s + 1  # without a fault by then, there is none
        while not (at.exists() and at.read_text()) and time.monotonic() < latest_s:
            time.sleep(0.01)
        (done / str(rank)).touch()
        if trial.kind == "stops":
            end_it(trial, done)
        after_s = told_s - float(at.read_text()) if at.exists() else -1.0
        return Told(error.rank, str(error), after_s, number)


def fail(trial: Trial, at: Path, sleeps: threading.Event) -> None:
    """What befalls the victim, whatever its main thread is at."""
    time.sleep(trial.after_s)
    if trial.kind == "sleeps":  # a rank that is busy with something else, between two calls
        sleeps.set()
        return
    at.with_name("pid").write_text(str(os.getpid()))
    at.write_text(str(time.monotonic()))
    if trial.kind == "exits":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if trial.kind == "killed" else signal.SIGSTOP)


def end_it(trial: Trial, done: Path) -> None:
    """The last survivor ends a rank that is stopped."""
    if len(list(done.iterdir())) == trial.ranks - 1:
        with suppress(ProcessLookupError, FileNotFoundError):  # another survivor was the last, too
            os.kill(int(done.with_name("pid").read_text()), signal.SIGKILL)


def suffer_on_cpu(rank: int, ranks: int, trial: Trial, folder: str) -> Told:
    """One rank's part of a trial."""
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(trial.bound_s)
    with by_reference():
        calls = [call.run for call in mixed_calls(torch.device("cpu"))]
        for call in calls:
            call()
        return suffer(rank, trial, Path(folder), calls)


def suffer_and_end(rank: int, ranks: int, trial: Trial, folder: str, port: int, kind: str) -> None:
    """As `suffer_on_cpu`, in a process that leaves a file and ends.

    On GPUs it has to, before anything is freed: NCCL may wait for a lost rank for ever, and to free
    memory waits for the GPU.
    """

    def leave(told: Told) -> None:
        told_in(folder, rank).write_bytes(pickle.dumps(told))
        (Path(folder) / "done" / str(rank)).touch()
        os._exit(0)

    try:
        with by_reference():  # of CPU ranks
            suffer_in_new_group(rank, ranks, trial, folder, port, kind, leave)
    except Exception:
        leave(Told(None, traceback.format_exc(), -1.0, 0))


def suffer_in_new_group(
    rank: int, ranks: int, trial: Trial, folder: str, port: int, kind: str,
    leave: Callable[[Told], None],
) -> None:  # fmt: skip
    """One rank's part of a trial, on a device of that kind; what it calls is compiled before."""
    device = join(rank, ranks, folder, port, kind)
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(trial.bound_s)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    calls = mixed_calls(device, group=group)
    runs: list[Callable[[], object]] = [call.run for call in calls]
    for run in runs:
        run()
    if kind == "cuda":
        ours = [call for call in calls if call.ours]
        replay, _ = captured(lambda i: ours[i].run(), len(ours))
        runs.append(replay)
    cp.check(group)
    leave(suffer(rank, trial, Path(folder), runs, group))


def join(rank: int, ranks: int, folder: str, port: int, kind: str) -> torch.device:
    """Make the default group, and make each call once in it: a rank may compile for long."""
    warnings.simplefilter("ignore")  # what NCCL and compilers say at first
    torch.use_deterministic_algorithms(False)  # else cuBLAS refuses
    on_gpu = kind == "cuda"
    device = torch.device(kind, rank) if on_gpu else torch.device(kind)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpu:
        torch.cuda.set_device(device)
    store = PrefixStore(folder, TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=ranks,
        device_id=device if on_gpu else None, timeout=timedelta(seconds=2 * HANG_S),
    )  # fmt: skip
    for call in mixed_calls(device):
        call.run()
    cp.check()
    return device


def compile_all(rank: int, ranks: int, folder: str, port: int, kind: str) -> None:
    """Fill the caches of compiled kernels, so that no trial takes long to begin."""
    join(rank, ranks, folder, port, kind)
    cp.release()
    dist.destroy_process_group()


def told_in(folder: str, rank: int) -> Path:
    """Where a rank that ends leaves what it was told."""
    return Path(folder) / f"told.{rank}"


def on_cpu(trial: Trial, pool: RankPool) -> list[Told | None]:
    """What the ranks of a trial on CPUs were told."""
    with folder_of_trial() as folder:
        return pool.run(suffer_on_cpu, trial.ranks, trial, folder, expect_dead=trial.dies)


def on_ending_ranks(trial: Trial, pool: RankPool, port: int, kind: str) -> list[Told | None]:
    """What ranks on devices of that kind were told; by a store that outlives them."""
    with folder_of_trial() as folder:
        files = [told_in(folder, rank) for rank in range(trial.ranks)]
        try:
            pool.run(
                suffer_and_end, trial.ranks, trial, folder, port, kind,
                group=False, timeout_s=HANG_S, expect_dead=range(trial.ranks),
            )  # fmt: skip
        except RankError as error:  # one that has left its file hangs in its end
            left = [f"{file.name}: {pickle.loads(file.read_bytes())}"
                    for file in files if file.exists()]  # fmt: skip
            raise RankError("\n".join([str(error), *left])) from error
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@contextmanager
def folder_of_trial() -> Iterator[str]:
    """Where ranks of a trial leave notes."""
    with tempfile.TemporaryDirectory(prefix="counterpoint-trial-") as folder:
        (Path(folder) / "done").mkdir()
        yield folder


def problems_of(trial: Trial, pool: RankPool) -> list[str]:
    """What ranks on CPUs did not say, or said too late."""
    return judge(trial, on_cpu(trial, pool))


def judge(trial: Trial, found: Sequence[Told | None]) -> list[str]:
    """What is wrong with what ranks were told; None: of one that has died."""
    problems: list[str] = []
    for rank, told in enumerate(found):
        if told is None:
            if rank not in trial.dies:
                problems.append(f"{trial}: rank {rank} was told nothing")
            continue
        where = f"{trial}: rank {rank} after {told.after_s:.2f} s: {told.text}"
        if told.rank != trial.victim:
            problems.append(f"names rank {told.rank}; {where}")
        if f"is {KINDS[trial.kind]}" not in told.text:
            problems.append(f"does not say {KINDS[trial.kind]}; {where}")
        if told.after_s < 0:
            problems.append(f"without a fault; {where}")
        if told.after_s > trial.bound_s + SLACK_S and rank != trial.victim:
            problems.append(f"late; {where}")
    return problems


def rows_of(
    trials: Sequence[Trial], run: Callable[[Trial, RankPool], list[Told | None]],
    pools: Sequence[RankPool],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row of each trial, in order; as many at a time as there are pools."""
    free: SimpleQueue[RankPool] = SimpleQueue()
    for pool in pools:
        free.put(pool)

    def row_of(trial: Trial) -> dict[str, Any]:
        pool, found = free.get(), list[Told | None]()
        try:
            found = run(trial, pool)
            problems = judge(trial, found)
        except RankError as error:  # it hung, too
            problems = [f"{trial}: {error}"]
        finally:
            free.put(pool)
        told = [each and each._asdict() for each in found]
        return {**trial._asdict(), "told": told, "problems": problems}

    with ThreadPoolExecutor(len(pools)) as lanes:
        yield from lanes.map(row_of, trials)


def run_trials(trials: Sequence[Trial], out: str, *, gpu: bool) -> int:
    """How many of the trials were wrong. Their rows and a summary go to the file `out`, if any."""
    start_s, wrong = time.monotonic(), 0
    with ExitStack() as stack:
        file = stack.enter_context(open(out, "w")) if out else None
        lanes, env = (GPU_LANES, GPU_ENV) if gpu else (1, POOL_ENV)
        preload = () if gpu else PRELOAD
        pools = [stack.enter_context(RankPool(env=env, preload=preload)) for _ in range(lanes)]
        run = on_cpu
        if gpu:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            run = partial(on_ending_ranks, port=store.port, kind="cuda")
            print("compiling", flush=True)
            with folder_of_trial() as folder:
                pools[0].run(
                    compile_all, ON_GPUS["ranks"], folder, store.port, "cuda",
                    group=False, timeout_s=COMPILE_S,
                )  # fmt: skip
        for done, row in enumerate(rows_of(trials, run, pools), 1):
            wrong += bool(row["problems"])
            if file is not None:
                print(json.dumps(row), file=file, flush=True)
            for problem in row["problems"]:
                print(f"\n{problem}", flush=True)
            print(f"\r{done}/{len(trials)} trials, {wrong} wrong", end="", flush=True)
        print()
        if file is not None:
            kinds = Counter(trial.kind for trial in trials)
            seconds = round(time.monotonic() - start_s, 1)
            summary = {"trials": len(trials), "kinds": kinds, "wrong": wrong, "seconds": seconds}
            print(json.dumps({**summary, "gpu": gpu, "torch": torch.__version__}), file=file)
    return wrong


def main() -> int:
    """0 where all trials were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="of calls that are compared")
    parser.add_argument(
        "--every", type=float, default=60.0, metavar="S", help="of the soak's faults"
    )
    parser.add_argument("--gpu", action="store_true", help="2 ranks on 2 GPUs: killed, or asleep")
    parser.add_argument("--out", default="", metavar="FILE", help="of a row for each trial")
    parser.add_argument("--guard", action="store_true", help="see guard_trials.py")
    args = parser.parse_args()
    if args.guard:
        import guard_trials

        gpus = torch.cuda.device_count() if args.gpu else 0
        numbers = range(args.first, args.first + args.trials)
        preload = () if gpus else PRELOAD
        with RankPool(env=GPU_ENV if gpus else POOL_ENV, preload=preload) as pool:
            return guard_trials.run_trials(numbers, pool, gpus)
    if args.gpu and torch.cuda.device_count() < 2:
        parser.error(f"--gpu needs 2 GPUs, there are {torch.cuda.device_count()}")
    if args.soak is not None:
        from fault_soak import soak

        summary = soak(round(args.soak * 60 / args.every), args.every)
        print(json.dumps(summary._asdict()))
        return 0 if summary.good else 1
    more: dict[str, Any] = ON_GPUS if args.gpu else {}
    trials = [trial_of(i, **more) for i in range(args.first, args.first + args.trials)]
    return 1 if run_trials(trials, args.out, gpu=args.gpu) else 0


if __name__ == "__main__":
    sys.exit(main())
