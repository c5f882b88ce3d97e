"""Calls that a rank leaves at some line: by an interrupt, an error, a lack of memory, or its end.

    python -m left_calls --trials 400        # `make interrupts`

Every line of ours that a call runs is one at which it can leave. A trial leaves one call of one
rank at one such line. All ranks then call on, each call with numbers of its own. A trial is right
if every later result is that of the same call of all ranks, or an error that names the rank.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_bodies import by_reference
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import CounterpointError

HOME = str(Path(cp.__file__).parent)
POOL_ENV = {"TRITON_INTERPRET": "1", "COUNTERPOINT_TIMEOUT_S": "15"}
K = 4
ERRORS: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "error": lambda: RuntimeError("of torch"),
    "memory": lambda: torch.OutOfMemoryError("none is left"),
}
ENDS = ("exit", *ERRORS)  # one that ends the process, and those that end the call


class Trial(NamedTuple):
    """Who leaves which call, at which of its lines in a thousand, and how."""

    ranks: int
    victim: int
    call: str
    warm: bool
    line: int
    kind: str


def gathers(number: float, group: dist.ProcessGroup) -> torch.Tensor:
    """One call: of each rank its number."""
    return cp.all_gather_matmul(torch.full((1, K), number), torch.eye(K), group=group)[:, 0]


def scatters(number: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all numbers."""
    x = torch.full((dist.get_world_size(group), K), number)
    return cp.matmul_reduce_scatter(x, torch.eye(K), group=group)[:, 0]


def copies(number: float, group: dist.ProcessGroup) -> torch.Tensor:
    """One call of a plan that overlaps."""
    x, w = torch.full((1, K), number), torch.eye(K)
    return cp.all_gather_matmul(x, w, group=group, plan="shard_p2p")[:, 0]


def several(number: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Two calls in one, with equal facts."""
    x = torch.full((1, 1), number)
    weights = [torch.ones(dist.get_world_size(group), 1)] * 2
    first, second = cp.all_gather_matmul(x, weights, group=group, gather_dim=1)
    assert torch.equal(first, second)
    return first[:, 0]


def backwards(number: float, group: dist.ProcessGroup) -> torch.Tensor:
    """A forward, and two calls of its backward: the sum of all numbers."""
    x = torch.ones(1, K, requires_grad=True)
    w = torch.full((K, K), number, requires_grad=True)
    y = cp.all_gather_matmul(x, w, group=group)
    return torch.autograd.grad(y.sum(), (x, w))[0][:, 0] / K


Call = Callable[[float, dist.ProcessGroup], torch.Tensor]
CALLS: dict[str, Call] = {
    "gathers": gathers, "scatters": scatters, "copies": copies, "several": several,
    "backwards": backwards,
}  # fmt: skip


def wanted(call: str, numbers: list[float]) -> list[float]:
    """What each rank's result of a call is, by the numbers of all."""
    total = sum(numbers)
    return {"gathers": numbers, "copies": numbers, "scatters": [total], "several": [total],
            "backwards": [total]}[call]  # fmt: skip


def number_of(rank: int, turn: int) -> float:
    """Of a rank in a call."""
    return 1.0 + rank + 10 * turn


def lines_of(call: Callable[[], object], leave_at: int, leave: Callable[[], None]) -> int:
    """Run a call, leave it at a line of ours, counted from 1; how many lines it has run."""
    count = 0

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == leave_at:
                leave()
        return line

    def entered(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def leave(kind: str) -> None:
    """What ends a call there."""
    if kind == "exit":
        os._exit(3)
    raise ERRORS[kind]()


def suffer(rank: int, ranks: int, trial: Trial) -> list[str]:
    """One rank's part of a trial: what of its results is neither right nor told."""
    with by_reference():
        call, group = CALLS[trial.call], dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        turn = lines = 0
        for turn in range(2 if trial.warm else 0):
            lines = lines_of(lambda t=turn: call(number_of(rank, t), group), 0, lambda: None)
        if not trial.warm:  # as many as such a call has in a group of its own
            own = dist.new_group()
            assert isinstance(own, dist.ProcessGroup)
            lines = lines_of(lambda: call(1.0, own), 0, lambda: None)
        dist.barrier()
        problems: list[str] = []

        def left(call: Call, turn: int, at: int) -> list[float]:
            """What it gives all the same, where it has fewer lines than the one before had."""
            found: list[list[float]] = []
            lines_of(lambda: found.append(call(number_of(rank, turn), group).tolist()), at,
                     lambda: leave(trial.kind))  # fmt: skip
            return found[0]

        for after in range(3):
            turn += 1
            try:
                if after == 0 and rank == trial.victim:
                    got = left(call, turn, 1 + trial.line * (lines - 1) // 1000)
                else:
                    got = call(number_of(rank, turn), group).tolist()
            except CounterpointError as error:
                if f"rank {trial.victim}" not in str(error):
                    problems.append(f"call {after} names another rank: {error}")
                continue
            except BaseException as error:
                if after or rank != trial.victim:
                    problems.append(f"call {after}: {type(error).__name__}: {error}")
                continue
            want = wanted(trial.call, [number_of(r, turn) for r in range(ranks)])
            if got != want:
                problems.append(f"call {after} is {got}, right is {want}")
        if trial.kind == "exit" and rank == trial.victim:
            os._exit(0)
        return [f"{trial}: rank {rank}: {problem}" for problem in problems]


def trial_of(seed: int, ranks: int = 0) -> Trial:
    """The trial of that number: each call and each kind as often as others."""
    draw = random.Random(seed)
    ranks = ranks or draw.choice((2, 4))
    names = list(CALLS)
    return Trial(
        ranks, draw.randrange(ranks), names[seed % len(names)], bool(seed // len(names) % 2),
        draw.randrange(1000), ENDS[seed // (2 * len(names)) % len(ENDS)],
    )  # fmt: skip


def problems_of(trial: Trial, pool: RankPool) -> list[str]:
    """What is wrong with a trial."""
    dies = (trial.victim,) if trial.kind == "exit" else ()
    found = pool.run(suffer, trial.ranks, trial, expect_dead=dies, timeout_s=120)
    return [problem for each in found if each for problem in each]


def main() -> int:
    """0 where all trials were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    args = parser.parse_args()
    wrong, start_s = 0, time.monotonic()
    with RankPool(env=POOL_ENV) as pool:
        for done, seed in enumerate(range(args.first, args.first + args.trials), 1):
            for problem in problems_of(trial_of(seed), pool):
                wrong += 1
                print(f"\n{seed}: {problem}", flush=True)
            print(f"\r{done}/{args.trials} trials, {wrong} wrong", end="", flush=True)
    print(f", {time.monotonic() - start_s:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
