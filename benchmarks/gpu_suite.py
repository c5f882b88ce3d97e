"""`make gpu`: tests and benchmarks on whatever GPUs are there, each part with its own time limit.

Rows as JSONL; installs nothing.

    SUITE=short          all GPU tests, and each table in short form: under 9 minutes on 2 GPUs
    SUITE=NAME           one table in full, by its name in `counterpoint bench`; rows are added
    SUITE=tests          the tests alone
    SUITE=characterize   the constants of this machine, and rows of them

A part that fails does not stop those behind it; the exit code says that there was one. A hang ends
in the stacks of all ranks.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS, CHARACTERIZE = "tests", "characterize"
TESTS_S, CHARACTERIZE_S, LONG_S = 330, 25, 560
START_S = 15  # of the processes of all tables
# of a table in short form; with those above at most 540 where nothing hangs
SHORT_S = {
    "overlap": 20, "few_rows": 10, "decode": 10, "experts": 15, "embedding": 15, "steps": 20,
    "training": 10, "resources": 20, "copies": 10, "transports": 10, "losses": 10, "evaluate": 10,
    "soak": 10,
}  # fmt: skip


def separate(suite: str, out: Path, gpus: int) -> dict[str, tuple[list[str], int]]:
    """Arguments of python and seconds of the parts that are no tables, by name.

    Args:
        suite: as in the command line.
        out: folder of rows.
        gpus: how many.
    """
    # another torch than CI's may warn: warnings are printed here, not errors
    tests = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={gpus}",
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-o",
        f"faulthandler_timeout={TESTS_S - 10}",
        "--durations=8",
    ]
    rows = str(out / f"characterize-{gpus}x.jsonl")
    constants = ["-m", "counterpoint", "characterize", "--ranks", str(gpus), "--rows", rows]
    if suite == "short":
        return {TESTS: (tests, TESTS_S), CHARACTERIZE: ([*constants, "--quick"], CHARACTERIZE_S)}
    found = {TESTS: (tests, LONG_S), CHARACTERIZE: (constants, LONG_S)}
    return {name: part for name, part in found.items() if name == suite}


def run_separate(found: Mapping[str, tuple[Sequence[str], int]], cache: Path) -> list[str]:
    """Run the parts one after another; names of those that failed."""
    failed: list[str] = []
    for name, (arguments, limit_s) in found.items():
        print(f"make gpu: {name}, at most {limit_s} s", flush=True)
        start_s = time.monotonic()
        code = run([sys.executable, *arguments], limit_s, cache)
        print(
            f"make gpu: {name} ended with {code} in {time.monotonic() - start_s:.0f} s", flush=True
        )
        failed += [name] if code else []
    return failed


def run_tables(
    limits_s: Mapping[str, int], more: Sequence[str], out: Path, cache: Path,
    module: str = "benchmarks.runner",
) -> list[str]:  # fmt: skip
    """Run tables in one set of processes, in a new one behind each that fails; names of those."""
    done, failed, left = out / "done.txt", list[str](), list(limits_s)
    done.unlink(missing_ok=True)
    while left:
        limit_s = max(limits_s[name] for name in left)
        arguments = [*left, *more, "--out", str(out), "--done", str(done), "--limit", str(limit_s)]
        total_s = START_S + sum(limits_s[name] for name in left)
        print(f"make gpu: {', '.join(left)}, at most {total_s} s", flush=True)
        code = run([sys.executable, "-m", module, *arguments], total_s, cache)
        ended = done.read_text().split() if done.exists() else []
        left = [name for name in left if name not in ended]
        if left and code:
            print(f"make gpu: {left[0]} ended with {code}", flush=True)
            failed.append(left.pop(0))
        elif left:
            return [*failed, *left]  # a runner that says that all is well has not run them
    return failed


def run(command: Sequence[str], limit_s: float, cache: Path) -> int:
    """Exit code of a command; 124 where it was not done in time."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", ROOT))),
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # captured collectives of NCCL hang on memory that is open to peers where they register it
        "NCCL_GRAPH_REGISTER": "0",
        # what is measured here stays here, and nothing measured before is used
        "COUNTERPOINT_CACHE": str(cache),
    }
    # a session of its own, so that no rank outlives the launcher
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"make gpu: not done after {limit_s} s")
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """0 where all parts passed, 1 where one did not, 2 where there are too few GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite", choices=("short", TESTS, CHARACTERIZE, *SHORT_S), default="short"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--gpus", type=int, default=0, help="how many; 0: all that are there")
    args = parser.parse_args()

    import torch

    gpus = args.gpus or torch.cuda.device_count()
    if gpus < 2:
        print(f"make gpu: needs 2 GPUs or more, torch sees {gpus}; `counterpoint doctor` helps")
        return 2
    gpus = 8 if gpus >= 8 else 4 if gpus >= 4 else 2  # groups of 2, 4 and 8 ranks are measured
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start_s, suite = time.monotonic(), args.suite
    failed = run_separate(separate(suite, out, gpus), out / "cache")
    more = ["--ranks", str(gpus), *(["--short"] if suite == "short" else [])]
    tables = SHORT_S if suite == "short" else {suite: LONG_S} if suite in SHORT_S else {}
    failed += run_tables(tables, more, out, out / "cache")
    said = f"failed: {', '.join(failed)}" if failed else "all parts passed"
    print(f"make gpu: {said}, in {time.monotonic() - start_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
