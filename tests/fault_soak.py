"""Minutes of mixed operators on 4 CPU ranks, with a fault now and then and the group rebuilt.

Each result has to have the bits that the same call gave without a fault. After each fault the group
is rebuilt in one of three ways, in turn:

- release: who is left calls `release` and destroys the group;
- destroy: who is left only destroys the group;
- anew: all processes are started anew, as by torchrun's `--max-restarts`.

In the first two, those who are left then build a group in the same processes and compare calls in
it; after that, a new process takes the place of the dead one.
"""

import gc
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from fault_trials import KINDS, POOL_ENV, Told, Trial, judge, suffer, trial_of
from mixed_calls import MixedCall, mixed_calls
from rank_bodies import by_reference
from rankpool import RankError, RankHangError, RankPool

import counterpoint as cp
from counterpoint.errors import PeerTimeoutError
from counterpoint.group.ranks import describe_process, gloo_group

CPU = torch.device("cpu")
RANKS, TURNS = 4, 4
WAYS = ("release", "destroy", "anew")
HANG_S = 60.0  # beyond the fault: no rank that ends takes as long


class Known(NamedTuple):
    """What a rank finds without a fault."""

    bits: list[str]  # digests of results, by call
    segments: int  # of shared memory


class Lived(NamedTuple):
    """What a rank has to tell of one fault."""

    told: Told
    leaks: list[str]


class Summary(NamedTuple):
    """Of a soak."""

    minutes: float
    calls: int  # of each rank
    faults: dict[str, int]
    rebuilt: dict[str, int]
    right: int  # faults that all survivors named in time
    wrong_bits: int
    hangs: int
    leaked_segments: int
    problems: int

    @property
    def good(self) -> bool:
        """Whether all was as it should be."""
        bad = self.wrong_bits + self.hangs + self.leaked_segments + self.problems
        return not bad and self.right == sum(self.faults.values())


def digest(y: torch.Tensor) -> str:
    """Of the bits of a tensor."""
    flat = y.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest()


def segments() -> int:
    """How many segments of our shared memory this process maps or holds open."""
    count = Path("/proc/self/maps").read_text().count("/memfd:counterpoint")
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this loop
            count += "memfd:counterpoint" in os.readlink(fd)
    return count


def learn(rank: int, ranks: int) -> Known:
    """Every call twice, in other orders; plans of an operator have to agree to the bit."""
    with by_reference():
        calls = mixed_calls(CPU, turns=TURNS)
        bits = [digest(call.run()) for call in calls]
        gc.collect()
        order = random.Random(ranks).sample(range(len(calls)), len(calls))
        assert all(digest(calls[i].run()) == bits[i] for i in order), "other bits at the second run"
    of_op: dict[tuple[str, int], set[str]] = {}
    for call, each in zip(calls, bits, strict=True):
        of_op.setdefault((call.op, call.turn), set()).add(each)
    differ = {what for what, found in of_op.items() if len(found) > 1}
    assert not differ, f"plans differ: {differ}"
    assert len({next(iter(found)) for found in of_op.values()}) == len(of_op), "equal results"
    return Known(bits, segments())


def compared(
    calls: Sequence[MixedCall], known: Known, rank: int, folder: Path
) -> list[Callable[[], None]]:
    """The calls; each leaves a line where its result has other bits."""

    def once(call: MixedCall, bits: str) -> None:
        if digest(call.run()) != bits:
            with (folder / "wrong").open("a") as file:
                file.write(f"rank {rank} of {dist.get_world_size()}: {call.op} {call.plan}\n")

    return [lambda call=call, bits=bits: once(call, bits)
            for call, bits in zip(calls, known.bits, strict=True)]  # fmt: skip


def live(
    rank: int, ranks: int, trial: Trial, folder: str, known: dict[int, list[Known]], way: str
) -> Lived:
    """One rank, until it fails, or has heard of a fault and is in a group again."""
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(trial.bound_s)
    here, leaks = Path(folder), list[str]()
    with by_reference():
        if found := segments():
            leaks.append(f"{found} segments before the first call")
        calls = mixed_calls(CPU, turns=TURNS)
        told = suffer(rank, trial, here, compared(calls, known[ranks][rank], rank, here))
        if way == "anew":
            return Lived(told, leaks)
        if way == "release":
            with suppress(PeerTimeoutError):  # what made the group unusable
                cp.release()
            if found := segments():
                leaks.append(f"{found} segments after the release")
        dist.destroy_process_group()
        left = [r for r in range(ranks) if r not in trial.dies]
        rank, ranks = left.index(rank), len(left)
        with gloo_group(rank, ranks, f"{folder}/again", timeout_s=HANG_S):
            calls = mixed_calls(CPU, turns=TURNS)
            for once in compared(calls, known[ranks][rank], rank, here):
                once()
            gc.collect()
            if (found := segments()) != known[ranks][rank].segments:
                leaks.append(
                    f"{found} segments in the next group, not {known[ranks][rank].segments}"
                )
    return Lived(told, leaks)


class _Tally:
    """What has been found so far."""

    def __init__(self) -> None:
        self.calls = self.right = self.wrong_bits = self.hangs = self.leaks = self.problems = 0
        self.faults: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.rebuilt: dict[str, int] = dict.fromkeys(WAYS, 0)
        self.pids: set[int] = set()

    def fault(self, trial: Trial, way: str, pool: RankPool, known: dict[int, list[Known]]) -> str:
        """One fault; what is to be said of it."""
        self.faults[trial.kind] += 1
        self.rebuilt[way] += 1
        with tempfile.TemporaryDirectory(prefix="counterpoint-soak-") as name:
            folder = Path(name)
            (folder / "done").mkdir()
            said: list[str] = []
            try:
                found = pool.run(
                    live, trial.ranks, trial, name, known, way,
                    expect_dead=trial.dies, timeout_s=trial.after_s + HANG_S,
                )  # fmt: skip
                said += self._add(trial, found)
            except RankHangError as error:
                self.hangs += 1
                said.append(f"{trial}: {error}")
            except RankError as error:
                self.problems += 1
                said.append(f"{trial}: {error}")
            if (folder / "wrong").exists():
                lines = (folder / "wrong").read_text().splitlines()
                self.wrong_bits += len(lines)
                said += [f"wrong bits: {line}" for line in lines]
        self.pids |= {pid for pid in pool.pids() if pid is not None}
        return "\n".join(said) or "right"

    def _add(self, trial: Trial, found: Sequence[Lived | None]) -> list[str]:
        lived = [each for each in found if each is not None]
        leaks = [f"{trial}: {leak}" for each in lived for leak in each.leaks]
        problems = judge(trial, [each and each.told for each in found])
        self.calls += max(each.told.calls for each in lived)
        self.leaks += len(leaks)
        self.right += not problems
        return problems + leaks


def soak(num_faults: int, every_s: float) -> Summary:
    """So many faults, one each `every_s` or so; a line for each."""
    tally, start_s, before = _Tally(), time.monotonic(), set(os.listdir("/dev/shm"))
    pool = RankPool(env=POOL_ENV)
    try:
        known = {n: pool.run(learn, n) for n in (RANKS - 1, RANKS)}
        for number in range(num_faults):
            trial, way = (
                trial_of(number, ranks=RANKS, latest_s=2 * every_s),
                WAYS[number % len(WAYS)],
            )
            said = tally.fault(trial, way, pool, known)
            minutes = (time.monotonic() - start_s) / 60
            fault = f"rank {trial.victim} {trial.kind}, {way}, {tally.calls} calls so far"
            print(f"{minutes:.1f} min: {fault}: {said}", flush=True)
            if way == "anew" and number + 1 < num_faults:
                pool.close()
                pool = RankPool(env=POOL_ENV)
    finally:
        pool.close()
    alive = [pid for pid in tally.pids if not describe_process(pid).endswith("dead")]
    left = set(os.listdir("/dev/shm")) - before
    for what in (*alive, *left):
        print(f"left behind: {what}", flush=True)
    return Summary(
        round((time.monotonic() - start_s) / 60, 2), tally.calls, tally.faults, tally.rebuilt,
        tally.right, tally.wrong_bits, tally.hangs, tally.leaks + len(left) + len(alive),
        tally.problems,
    )  # fmt: skip
