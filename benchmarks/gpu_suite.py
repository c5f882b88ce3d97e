"""`make gpu`: the hardware, its constants, tests, benchmarks, on whatever GPUs are there.

Rows as JSONL; installs nothing.

    SUITE=smoke   the tests, and two shapes with few plans: 6 minutes on 2 GPUs
    SUITE=full    the tests, and every published shape with every plan: under 9 minutes
    SUITE=study   what decomposition, contention, copies and one kernel for a gather cost; decoding,
                  few rows, experts and embedding bags: 7 minutes; whole steps: at most 3
    SUITE=loops, SUITE=slow    the rest of the resource experiment, its rows appended: what takes
                  four minutes more, and what takes as long as full again

Each part starts one process for each GPU; pytest runs tests/gpu in step on all ranks. A hang ends
in the stacks of all ranks.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# of tests and of the benchmark
LIMITS_S = {"smoke": (420, 60), "full": (420, 210), "study": (0, 0), "loops": (0, 0),
            "slow": (0, 0)}  # fmt: skip
LOOPS_S = 520  # of the resource experiment: slow takes about 500 s with 4 GPUs
REST = ("loops", "slow")  # of that experiment alone
STUDY = ("losses", "copies", "few_rows", "decode", "experts", "embedding", "steps")
EMBEDDING_S, EXPERTS_S, STEPS_S = 150, 310, 180
DECODE_S = 120
LOSSES_S = 100
SHORT_S = 60  # of each other part
PARTS = ("hardware", "characterize", "losses", "copies", "tests", "bench", "training", "few_rows",
         "decode", "experts", "embedding", "steps", "sharing", "resources")  # fmt: skip


def main() -> int:
    """Run the suite; exit code 0 when the tests pass and the rows are written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=tuple(LIMITS_S), default="full")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=PARTS, help="some parts of the suite"
    )
    parser.add_argument("--gpus", type=int, default=0, help="how many; 0: all that are there")
    args = parser.parse_args()

    import torch

    num_gpus = args.gpus or torch.cuda.device_count()
    if num_gpus < 2:
        print(f"make gpu: needs 2 GPUs or more, torch sees {num_gpus}; `counterpoint doctor` helps")
        return 2
    # groups of 2, 4 and 8 ranks are measured
    num_gpus = 8 if num_gpus >= 8 else 4 if num_gpus >= 4 else 2
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().split()[-1].lower()
    rows = {part: args.out / f"{file}-{num_gpus}x-{gpu}.jsonl" for part, file in (
        ("hardware", "hardware"), ("characterize", "characterize"),
        ("losses", "losses"), ("copies", "copies"), ("bench", "overlap"),
        ("training", "training"), ("few_rows", "few-rows"),
        ("decode", "decode"), ("experts", "experts"), ("embedding", "embedding"),
        ("steps", "steps"), ("sharing", "sharing"), ("resources", "resources"),
    )}  # fmt: skip
    test_s, bench_s = LIMITS_S[args.suite]
    # another torch than CI's may warn: warnings are printed here, not errors
    tests = ["-m", "pytest", "tests/gpu", "-q", "-x", "-p", "no:cacheprovider", "-W", "default",
             "-o", f"faulthandler_timeout={test_s - 10}", "--durations=8"]  # fmt: skip
    suite = ["--suite", "full" if args.suite == "study" else args.suite]
    parts = {
        "hardware": (["benchmarks/ask_hardware.py"], SHORT_S),
        "characterize": (["benchmarks/characterize.py"], SHORT_S),
        "losses": (["benchmarks/losses.py"], LOSSES_S),
        "copies": (["benchmarks/copies.py"], SHORT_S),
        "tests": (tests, test_s),
        "bench": (["benchmarks/overlap.py", *suite], bench_s),
        "training": (["benchmarks/training.py", *suite], SHORT_S),
        "few_rows": (["benchmarks/few_rows.py", *suite], DECODE_S),
        "experts": (["benchmarks/experts.py", "--soak", "100000"], EXPERTS_S),
        "decode": (["benchmarks/decode.py", *suite, "--soak", "1000000"], DECODE_S),
        "embedding": (["benchmarks/embedding.py", "--soak", "100000"], EMBEDDING_S),
        "steps": (["benchmarks/steps.py", *suite], STEPS_S),
        "sharing": (["benchmarks/ask_sharing.py"], SHORT_S),
        "resources": (["benchmarks/resources.py", *suite], LOOPS_S),
    }
    # what is measured here stays here, and nothing measured before is used
    os.environ["COUNTERPOINT_CACHE"] = str(args.out / "cache")
    if args.suite == "smoke":
        del parts["hardware"]
    if args.suite == "study":
        parts = {name: parts[name] for name in STUDY}
    else:
        parts = {name: part for name, part in parts.items() if name not in STUDY}
    if args.suite in REST:
        parts = {"resources": parts["resources"]}
    for name, (command, limit_s) in parts.items():
        if name in args.only:
            if name in rows:
                if args.suite not in REST:
                    rows[name].unlink(missing_ok=True)  # rows are appended
                command = [*command, "--out", str(rows[name])]
            start_s = time.monotonic()
            code = _torchrun(num_gpus, command, limit_s, name in ("tests", "sharing", "resources"))
            print(f"make gpu: {name} ended with {code} in {time.monotonic() - start_s:.0f} s")
            if code:
                return code
    return 0


def _torchrun(num_gpus: int, command: list[str], limit_s: int, sharing: bool) -> int:
    # captured collectives of NCCL hang on memory that is open to peers where they register it
    register = {"NCCL_GRAPH_REGISTER": "0"} if sharing else {}
    environment = (
        os.environ
        | register
        | {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT / 'benchmarks'}",
            "OMP_NUM_THREADS": "4",
            "PYTHONUNBUFFERED": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc-per-node={num_gpus}")
    if command[0] == "-m":
        launcher, command = [*launcher, "-m"], command[1:]
    # a session of its own, so that no rank outlives the launcher
    process = subprocess.Popen([*launcher, *command], cwd=ROOT, env=environment,
                               start_new_session=True)  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"make gpu: not done after {limit_s} s")
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
