"""`make gpu`: tests and benchmarks on whatever GPUs are there, each part with its own time limit.

Rows as JSONL; installs nothing.

    SUITE=short   all GPU tests, and each table in short form: under 9 minutes on 2 GPUs SUITE=NAME
one table in full, by the name that `counterpoint bench` has for it; rows are added SUITE=tests
the tests alone SUITE=characterize   the constants of this machine, and rows of them

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
TESTS_S, CHARACTERIZE_S, LONG_S = 240, 30, 560
# seconds of a table in short form; with those above at most 540
SHORT_S = {
    "overlap": 30, "few_rows": 20, "decode": 20, "experts": 25, "embedding": 20, "steps": 30,
    "training": 20, "resources": 30, "copies": 15, "transports": 15, "losses": 15, "evaluate": 15,
    "soak": 15,
}  # fmt: skip


def parts(suite: str, out: Path, gpus: int, gpu: str) -> dict[str, tuple[list[str], int]]:
    """Arguments of python and seconds, by the name of a part.

    Args:
        suite: as in the command line.
        out: folder of rows.
        gpus: how many.
        gpu: their name, in the names of files.
    """

    def table(name: str, *more: str) -> list[str]:
        path = out / f"{name.replace('_', '-')}-{gpus}x-{gpu}.jsonl"
        ranks = ["--ranks", str(gpus)]
        return ["-m", "benchmarks.runner", name, *ranks, "--out", str(path), *more]

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
    rows = out / f"characterize-{gpus}x-{gpu}.jsonl"
    constants = ["-m", "counterpoint", "characterize", "--ranks", str(gpus), "--rows", str(rows)]
    if suite == "short":
        found = {TESTS: (tests, TESTS_S), CHARACTERIZE: ([*constants, "--quick"], CHARACTERIZE_S)}
        return found | {
            name: (table(name, "--short"), limit_s) for name, limit_s in SHORT_S.items()
        }
    if suite in (TESTS, CHARACTERIZE):
        return {suite: (tests if suite == TESTS else constants, LONG_S)}
    return {suite: (table(suite), LONG_S)}


def run_all(found: Mapping[str, tuple[Sequence[str], int]], cache: Path) -> list[str]:
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
    print(f"make gpu: {len(found) - len(failed)} of {len(found)} parts passed"
          + (f"; failed: {', '.join(failed)}" if failed else ""), flush=True)  # fmt: skip
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
    gpu = torch.cuda.get_device_name().split()[-1].lower()
    return 1 if run_all(parts(args.suite, out, gpus, gpu), out / "cache") else 0


if __name__ == "__main__":
    sys.exit(main())
