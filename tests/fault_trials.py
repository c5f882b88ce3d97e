"""Ranks that are killed, stopped, sleep or exit at a random moment: who says what, and when.

    python -m fault_trials --trials 200     # `make faults`; one trial is 2 to 4 CPU ranks

A trial is right if every survivor raises within the bound and a second, and names the rank that
failed and the state of its process.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from embedding_cases import random_bags
from rank_bodies import Case, by_reference, operands
from rank_bodies import call as call_op
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import PeerTimeoutError

BOUND_S, SLACK_S = 2.0, 1.0
KINDS = {"killed": "dead", "exits": "dead", "stops": "stopped", "sleeps": "alive"}
LATEST_S = 0.3  # when a rank fails, after its first calls
MATMULS = (
    ("all_gather_matmul", "shard_p2p"), ("all_gather_matmul", "serial"),
    ("matmul_reduce_scatter", "graded"), ("matmul_reduce_scatter", "serial"),
    ("matmul_all_reduce", "serial"), ("matmul_all_reduce", "auto"),
)  # fmt: skip
NUM_CALLS = len(MATMULS) + 2


class Trial(NamedTuple):
    """What happens to whom, and when."""

    ranks: int
    victim: int
    kind: str
    after_s: float
    seed: int


def trial_of(seed: int) -> Trial:
    """The trial of that number: each rank and each kind as often as others."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4))
    kind = tuple(KINDS)[seed % len(KINDS)]
    return Trial(ranks, seed // len(KINDS) % ranks, kind, draw.uniform(0, LATEST_S), seed)


def call_number(i: int, rank: int, ranks: int) -> None:
    """A call of some operator; all ranks make the same ones in the same order."""
    if i < len(MATMULS):
        op, plan = MATMULS[i]
        rows = (4,) if op == "matmul_all_reduce" else (2,) * ranks
        case = Case(op, plan, rows, 5, 4)
        call_op(case, operands(case, rank, 0, torch.device("cpu")))
    elif i == len(MATMULS):
        counts = torch.full((ranks, 2 * ranks), 2)
        cp.all_to_all_matmul(torch.ones(4 * ranks, 4), torch.ones(2, 4, 3), counts=counts)
    else:
        bags = random_bags((4,), 2 * ranks, seed=rank)
        cp.embedding_bag_all_to_all(
            bags.tables, bags.indices, bags.offsets, include_last_offset=True
        )


class Told(NamedTuple):
    """What a survivor was told, and how long after the fault."""

    rank: int | None
    text: str
    after_s: float


def suffer(rank: int, _: int, trial: Trial, folder: str) -> Told | None:
    """Call and call, until this rank fails, or hears that another one has."""
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(BOUND_S)
    draw, at, done = random.Random(trial.seed), Path(folder) / "at", Path(folder) / "done"
    sleeps = threading.Event()
    with by_reference():
        for i in range(NUM_CALLS):
            call_number(i, rank, trial.ranks)
        if rank == trial.victim:
            threading.Thread(target=fail, args=(trial, at, sleeps), daemon=True).start()
        try:
            while not sleeps.is_set():
                call_number(draw.randrange(NUM_CALLS), rank, trial.ranks)
        except PeerTimeoutError as error:
            told_s = time.monotonic()
            while not at.exists() or not at.read_text():
                time.sleep(0.01)
            (done / str(rank)).touch()
            if trial.kind in ("stops", "sleeps"):
                end_it(trial, done)
            return Told(error.rank, str(error), told_s - float(at.read_text()))
    assert rank == trial.victim, "a rank that is not to fail leaves no call"
    at.write_text(str(time.monotonic()))
    while len(list(done.iterdir())) < trial.ranks - 1:
        time.sleep(0.01)
    os._exit(0)


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
    """The last survivor ends a rank that is stopped; one that sleeps goes by itself."""
    if trial.kind == "stops" and len(list(done.iterdir())) == trial.ranks - 1:
        with suppress(ProcessLookupError):  # another survivor was the last one, too
            os.kill(int(done.with_name("pid").read_text()), signal.SIGKILL)


def problems_of(trial: Trial, pool: RankPool) -> list[str]:
    """What survivors did not say, or said too late."""
    with tempfile.TemporaryDirectory(prefix="counterpoint-trial-") as folder:
        (Path(folder) / "done").mkdir()
        found = pool.run(suffer, trial.ranks, trial, folder, expect_dead=(trial.victim,))
    problems: list[str] = []
    for rank, told in enumerate(found):
        if rank == trial.victim:
            continue
        where = f"{trial}: rank {rank} after {told.after_s:.2f} s: {told.text}"
        if told.rank != trial.victim:
            problems.append(f"names rank {told.rank}; {where}")
        if f"is {KINDS[trial.kind]}" not in told.text:
            problems.append(f"does not say {KINDS[trial.kind]}; {where}")
        if told.after_s > BOUND_S + SLACK_S:
            problems.append(f"late; {where}")
    return problems


def main() -> int:
    """0 where all trials were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    args = parser.parse_args()
    wrong = 0
    with RankPool(env={"TRITON_INTERPRET": "1"}) as pool:
        for i in range(args.first, args.first + args.trials):
            problems = problems_of(trial_of(i), pool)
            wrong += bool(problems)
            for problem in problems:
                print(f"\n{problem}", flush=True)
            done = i + 1 - args.first
            print(f"\r{done}/{args.trials} trials, {wrong} wrong", end="", flush=True)
    print()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
