"""`make gpu`: tests and benchmarks on whatever GPUs are there, each part with its own time limit.

Rows as JSONL; installs nothing.

    SUITE=short          GPU tests with cases drawn of large grids, and each table in short form
    SUITE=NAME           one table in full, by its name in `counterpoint bench`; rows are added
    SUITE=models         the tables of whole models in full: the programs of the README
    SUITE=tests          the tests alone, all cases; on one GPU two ranks share it: all but times
    SUITE=characterize   the constants of this machine, and rows of them
    SUITE=sanitize       every kernel under compute-sanitizer's memcheck and racecheck, on 2 GPUs

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS, CHARACTERIZE, SANITIZE = "tests", "characterize", "sanitize"
MODELS = "models"
WHOLE = ("served", "fsdp", "transformers_experts", "tp_training")  # tables of whole models
# of the tests, LANES files at a time where they may share the GPUs; of one file; of what is in full
TESTS_S, TEST_S, CHARACTERIZE_S, LONG_S = 285, 280, 40, 560
SANITIZE_S = 480
START_S = 15  # of the processes of all tables
END_S = 10  # to end by itself
LANES = 12  # mostly kernels are compiled: a GPU idles beside four
# files that take longest: they compile many kernels
FIRST = (
    "test_batch_invariant_gpu", "test_experts_fused_gpu", "test_routes_on_device_gpu",
    "test_all_reduce_norm_gpu", "test_embedding_gpu",
)  # fmt: skip
ALONE = "alone"  # the mark of tests that count free memory or measure time
LOG_LINES = 120  # of what a part printed, where it failed
# of a table in short form; with those above at most 600 where nothing hangs
SHORT_S = {
    "overlap": 10, "few_rows": 10, "decode": 10, "experts": 10, "embedding": 10, "steps": 10,
    "training": 10, "resources": 10, "copies": 10, "transports": 10, "losses": 10, "ficco": 5,
    "evaluate": 10, "compile": 32, "soak": 5, "attention": 5, "embedding_gradient": 5,
    "norms": 5, "fp8": 10, "attention_replay": 3, "overlap_replay": 2, "epilogue": 3,
    "expert_layer": 4, "invariant": 3, "two_islands": 16, "prefill": 4, "decode_experts": 3,
    "fsdp": 15, "fsdp_models": 10, "expert_calls": 8, "transformers_experts": 0, "advise": 0,
    "host_calls": 2, "served": 0, "tp_training": 0,
}  # fmt: skip


class Part(NamedTuple):
    """One command of the suite."""

    arguments: list[str]
    """Of python."""
    limit_s: int
    beside: bool = False
    """Whether others may run on the same GPUs meanwhile."""


def tests(gpus: int, limit_s: int, out: Path, *options: str) -> dict[str, Part]:
    """The files of GPU tests, the longest first, and behind them what they have to run alone.

    Each has processes of its own.

    Args:
        gpus: how many.
        out: folder of rows, of what tests show: see support.py.
        limit_s: seconds of each.
        options: of pytest.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    # another torch than CI's may warn: warnings are printed here, not errors
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--durations=5"]
    pytest += ["-o", f"faulthandler_timeout={limit_s // 2}"]
    pytest += ["-p", "benchmarks.support", "--rows", str(out / f"support-{gpus}x.jsonl"), *options]
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    files.sort(key=lambda f: f.stem not in FIRST)

    def part(file: Path, which: str) -> Part:
        command = [*launcher, *pytest, "-m", which, str(file.relative_to(ROOT))]
        return Part(command, limit_s, which != ALONE)

    parts = {f.stem: part(f, f"not {ALONE}") for f in files}
    marked = [f for f in files if f"pytest.mark.{ALONE}" in f.read_text()]
    return parts | {f"{f.stem} {ALONE}": part(f, ALONE) for f in marked}


def separate(suite: str, out: Path, gpus: int) -> dict[str, Part]:
    """The parts that are no tables, by name.

    Args:
        suite: as in the command line.
        out: folder of rows.
        gpus: how many.
    """
    rows = str(out / f"characterize-{gpus}x.jsonl")
    constants = ["-m", "counterpoint", "characterize", "--ranks", str(gpus), "--rows", rows]
    if suite == "short":
        quick = Part([*constants, "--quick"], CHARACTERIZE_S)
        return tests(gpus, TEST_S, out) | {CHARACTERIZE: quick}
    if suite == TESTS:
        return tests(gpus, TEST_S, out, "--all-cases")
    if suite == SANITIZE:
        return {SANITIZE: Part(["-m", "sanitize", "--out", str(out)], SANITIZE_S)}
    return {CHARACTERIZE: Part(constants, LONG_S)} if suite == CHARACTERIZE else {}


def run_separate(parts: Mapping[str, Part], out: Path, total_s: float) -> list[str]:
    """Run the parts, `LANES` at a time of those that may have others beside; names that failed.

    Args:
        parts: those with others beside come first.
        out: folder of what they print, and of their caches.
        total_s: of all; what begins later fails.
    """
    deadline_s = time.monotonic() + total_s

    def ended(name: str) -> str:
        part, log, start_s = parts[name], out / f"{name}.log", time.monotonic()
        limit_s = min(part.limit_s, max(0, deadline_s - start_s))
        with log.open("w") as file:
            cache = out / "cache" / name.split()[0]
            code = run([sys.executable, *part.arguments], limit_s, cache, file)
        lines = log.read_text(errors="replace").splitlines() or ["it printed nothing"]
        shown = lines[-LOG_LINES:] if code else lines[-1:]
        took_s = time.monotonic() - start_s
        said = f"make gpu: {name} ended with {code} in {took_s:.0f} s"
        print("\n".join([said, *shown]), flush=True)
        return name if code else ""

    beside = [name for name, part in parts.items() if part.beside]
    with ThreadPoolExecutor(LANES) as lanes:
        failed = list(lanes.map(ended, beside))
    failed += [ended(name) for name in parts if name not in beside]
    return [name for name in failed if name]


def tables_of(suite: str) -> dict[str, int]:
    """Tables of a suite, each with its seconds."""
    if suite == "short":
        return SHORT_S
    names = WHOLE if suite == MODELS else [suite] if suite in SHORT_S else []
    return dict.fromkeys(names, LONG_S)


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


def run(command: Sequence[str], limit_s: float, cache: Path, log: IO[str] | None = None) -> int:
    """Exit code of a command; 124 where it was not done in time.

    Args:
        command: program and arguments.
        limit_s: seconds.
        cache: folder of what is measured.
        log: where it prints; None: here.
    """
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
    errors = subprocess.STDOUT if log else None
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stdout=log, stderr=errors
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"make gpu: not done after {limit_s:.0f} s", file=log, flush=True)
        process.terminate()  # a launcher ends its ranks, whose sessions are their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
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
        "--suite",
        choices=("short", TESTS, CHARACTERIZE, SANITIZE, MODELS, *SHORT_S),
        default="short",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--gpus", type=int, default=0, help="how many; 0: all that are there")
    args = parser.parse_args()

    import torch

    gpus = args.gpus or torch.cuda.device_count()
    suite = args.suite
    if gpus < (1 if suite == TESTS else 2):
        print(f"make gpu: needs 2 GPUs or more, torch sees {gpus}; `counterpoint doctor` helps")
        print("make gpu: on one GPU, SUITE=tests runs the tests, whose ranks share it")
        return 2
    gpus = 8 if gpus >= 8 else 4 if gpus >= 4 else 2  # groups of 2, 4 and 8 ranks are measured
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    total_s = TESTS_S + CHARACTERIZE_S if suite == "short" else LONG_S
    failed = run_separate(separate(suite, out, gpus), out, total_s)
    more = ["--ranks", str(gpus), *(["--short"] if suite == "short" else [])]
    failed += run_tables(tables_of(suite), more, out, out / "cache")
    said = f"failed: {', '.join(failed)}" if failed else "all parts passed"
    print(f"make gpu: {said}, in {time.monotonic() - start_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
