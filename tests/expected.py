"""Say how long `make test` will take here, from a second of work on each core."""

import os
import subprocess
import sys

# of `make test` on 2 cores that do 4,000 loops of WORK a second, for so many seconds
LOOPS = {"": 4000 * 400, "--all-cases": 4000 * 1900}
WORK = """
import json, time
table = {str(i): [i, i / 7] for i in range(500)}
loops, end_s = 0, time.monotonic() + 1
while time.monotonic() < end_s:
    json.loads(json.dumps(table))
    loops += 1
print(loops)
"""


def loops_per_s(cores: int) -> float:
    """Loops of WORK that this machine does in a second, beside whatever else it does."""
    command = [sys.executable, "-c", WORK]
    each = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return sum(int(process.communicate()[0]) for process in each)


def main() -> None:
    cases = " ".join(sys.argv[1:]).strip()
    if cases in LOOPS:  # a part of the tests is another matter
        cores = len(os.sched_getaffinity(0))
        minutes = LOOPS[cases] / loops_per_s(cores) / 60
        print(f"about {minutes:.0f} minutes, by what {cores} cores did in a second just now;")
        print("more the first time: kernels are compiled", flush=True)


if __name__ == "__main__":
    main()
