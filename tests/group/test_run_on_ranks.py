"""run_on_ranks of scripts that go wrong: always an error with the rank and why, and no process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import multiprocessing, os, signal, sys, threading, time, types
import torch.distributed as dist
import counterpoint as cp

def work(device, *args):
    return dist.get_rank()

def on_one(act):
    if dist.get_rank() == 1:
        act()
    return dist.get_rank()

class Two(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} of {second}")

class Unreadable:
    def __reduce__(self):
        return int, ("no number",)

class Unsayable(Exception):
    def __str__(self):
        raise ValueError("not to be said")
"""
GUARD = 'if __name__ == "__main__":\n    '
RUN = "cp.run_on_ranks(%s, ranks=2, timeout_s=120)"


def one(act: str) -> str:
    """A script whose rank 1 does that."""
    body = f"def fails(device):\n    def act():\n        {act}\n    return on_one(act)"
    return f"{body}\n\n{GUARD}{RUN % 'fails'}"


# the code of a script, and what its error says
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no guard, a function of another module": (
        RUN % "os.getpid",
        (" raised", 'put the call behind `if __name__ == "__main__":`'),
    ),
    "raises at import": (
        f'if __name__ != "__main__":\n    raise OSError("no such file")\n{RUN % "work"}',
        (" raised", "OSError: no such file"),
    ),
    "lambda": (
        GUARD + RUN % "lambda device: 1",
        ("InputError: run_on_ranks: fn must be a module-level function, got <lambda>",),
    ),
    "local": (
        f"def main():\n    def own(device): pass\n    {RUN % 'own'}\n{GUARD}main()",
        ("fn must be a module-level function, got main.<locals>.own",),
    ),
    "behind the guard": (
        f"{GUARD}def late(device): pass\n    {RUN % 'late'}",
        (" raised", "InputError: run_on_ranks: fn must be what a new process can import",
         "'late'"),
    ),
    "of another name": (
        f"work.__qualname__ = 'other'\n{GUARD}{RUN % 'work'}",
        ("InputError: run_on_ranks: fn must be picklable, got",),
    ),
    "of no module": (
        f"{GUARD}made = types.ModuleType('made'); sys.modules['made'] = made\n"
        f"    made.work = work; work.__module__ = 'made'\n    {RUN % 'work'}",
        (" raised", "fn must be what a new process can import", "No module named 'made'"),
    ),
    "arguments": (
        GUARD + RUN % "work, 3, threading.Lock()",
        ("InputError: run_on_ranks: args[1] must be picklable, got", "lock"),
    ),
    "arguments that are not read": (
        GUARD + RUN % "work, Unreadable()",
        (" raised", "arguments that it can unpickle, got invalid literal"),
    ),
    "a result that is none": (
        f"def fails(device):\n    return lambda: 1\n{GUARD}{RUN % 'fails'}",
        ("rank 1 raised", "CounterpointError: the result cannot be pickled"),
    ),
    "a result that is not read": (
        f"def fails(device):\n    return Unreadable()\n{GUARD}{RUN % 'fails'}",
        ("rank 1 raised", "a result that cannot be unpickled: ValueError("),
    ),
    "exits": (one("sys.exit(3)"), ("rank 1 raised", "SystemExit: 3")),
    "exits as if all were well": (
        one("os._exit(0)"), ("rank 1 died with exit code 0: it ended before it returned",)),
    "killed": (
        one("os.kill(os.getpid(), signal.SIGKILL)"),
        ("rank 1 died with exit code -9: killed by SIGKILL",),
    ),
    "two arguments": (one("raise Two(1, 2)"), ("rank 1 raised", "Two: 1 of 2")),
    "not to be said": (one("raise Unsayable"), ("rank 1 raised", "Unsayable")),
    "prints and fails": (
        one("print('x' * 5_000_000); raise ValueError('y' * 1_000_000)"),
        ("rank 1 raised", "ValueError: yyy"),
    ),
    "leaves a thread": (
        one("threading.Thread(target=time.sleep, args=(600,)).start(); raise Two(1, 2)"),
        ("rank 1 raised", "Two: 1 of 2"),
    ),
}  # fmt: skip


def of_session(session: int) -> list[int]:
    """Processes that belong to a session."""
    found: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == session:
                found.append(int(pid))
        except OSError:
            pass
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_goes_wrong_is_told(tmp_path: Path, name: str):
    code, wants = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\n{code}\n")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, start_new_session=True,
    )  # fmt: skip
    _, said = process.communicate(timeout=150)
    assert process.returncode == 1
    for want in wants:
        assert want in said, said[-3000:]
    for _ in range(50):  # the tracker of resources ends by itself
        if not (left := of_session(process.pid)):
            break
        time.sleep(0.1)
    assert not left, "a process is left"


def test_what_is_of_one_process_can_be_an_argument(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{HEAD}\ndef puts(device, queue):\n    queue.put(dist.get_rank())\n"
        f"{GUARD}queue = multiprocessing.get_context('spawn').Queue()\n"
        f"    {RUN % 'puts, queue'}\n    print(sorted(queue.get() for _ in range(2)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "[0, 1]\n", done.stderr
