"""Ranks that are killed, stopped, sleep or exit at a random moment: who says what, and when.

    python -m fault_trials --trials 200     # `make faults`; one trial is 2 to 4 CPU ranks
    python -m fault_trials --soak 30        # minutes of 4 CPU ranks, rebuilt after each fault
    python -m fault_trials --gpu --trials 20 --out FILE     # of 2 GPUs

A trial is right if every survivor raises within the bound and a second, and names the rank that
failed and the state of its process.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from mixed_calls import mixed_calls
from rank_bodies import by_reference
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import PeerTimeoutError

BOUND_S, SLACK_S = 2.0, 1.0
KINDS = {"killed": "dead", "exits": "dead", "stops": "stopped", "sleeps": "alive"}
LATEST_S = 0.3  # when a rank fails, after its first calls
CHECK_EVERY = 8  # calls: on a GPU they return before they have run
POOL_ENV = {"TRITON_INTERPRET": "1"}


class Trial(NamedTuple):
    """What happens to whom, and when."""

    ranks: int
    victim: int
    kind: str
    after_s: float
    seed: int

    @property
    def bound_s(self) -> float:
        """Of every wait."""
        return BOUND_S

    @property
    def dies(self) -> tuple[int, ...]:
        """Ranks whose processes end; one that only sleeps goes on, and is told."""
        return () if self.kind == "sleeps" else (self.victim,)


def trial_of(seed: int, ranks: int = 0, latest_s: float = LATEST_S) -> Trial:
    """The trial of that number: each rank and each kind as often as others."""
    draw = random.Random(seed)
    ranks = ranks or draw.choice((2, 3, 4))
    kind = tuple(KINDS)[seed % len(KINDS)]
    return Trial(ranks, seed // len(KINDS) % ranks, kind, draw.uniform(0, latest_s), seed)


class Told(NamedTuple):
    """What a rank was told, how long after the fault, and after how many calls."""

    rank: int | None
    text: str
    after_s: float
    calls: int


def suffer(
    rank: int, trial: Trial, folder: Path, calls: Sequence[Callable[[], object]]
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
                cp.check()
            if sleeps.is_set():
                at.write_text(str(time.monotonic()))
                sleeps.clear()
                while len(list(done.iterdir())) < trial.ranks - 1:
                    time.sleep(0.01)
    except PeerTimeoutError as error:
        told_s = time.monotonic()
        while not at.exists() or not at.read_text():
            time.sleep(0.01)
        (done / str(rank)).touch()
        if trial.kind == "stops":
            end_it(trial, done)
        return Told(error.rank, str(error), told_s - float(at.read_text()), number)


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
        with suppress(ProcessLookupError):  # another survivor was the last one, too
            os.kill(int(done.with_name("pid").read_text()), signal.SIGKILL)


def suffer_on_cpu(rank: int, ranks: int, trial: Trial, folder: str) -> Told:
    """One rank's part of a trial."""
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(trial.bound_s)
    with by_reference():
        calls = [call.run for call in mixed_calls(rank, ranks, torch.device("cpu"))]
        for call in calls:
            call()
        return suffer(rank, trial, Path(folder), calls)


def problems_of(trial: Trial, pool: RankPool) -> list[str]:
    """What ranks did not say, or said too late."""
    with tempfile.TemporaryDirectory(prefix="counterpoint-trial-") as folder:
        (Path(folder) / "done").mkdir()
        found = pool.run(suffer_on_cpu, trial.ranks, trial, folder, expect_dead=trial.dies)
    return judge(trial, found)


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
        if told.after_s > trial.bound_s + SLACK_S and rank != trial.victim:
            problems.append(f"late; {where}")
    return problems


def run_trials(first: int, count: int) -> int:
    """How many of that many trials on CPU ranks were wrong."""
    wrong = 0
    with RankPool(env=POOL_ENV) as pool:
        for i in range(first, first + count):
            problems = problems_of(trial_of(i), pool)
            wrong += bool(problems)
            for problem in problems:
                print(f"\n{problem}", flush=True)
            print(f"\r{i + 1 - first}/{count} trials, {wrong} wrong", end="", flush=True)
    print()
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
    args = parser.parse_args()
    if args.soak is not None:
        from fault_soak import soak

        summary = soak(round(args.soak * 60 / args.every), args.every)
        print(json.dumps(summary._asdict()))
        return 0 if summary.good else 1
    return 1 if run_trials(args.first, args.trials) else 0


if __name__ == "__main__":
    sys.exit(main())
