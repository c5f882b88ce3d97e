"""Run the tests of what the docs tell users of other frameworks to write, with the real packages.

Each environment, in out/, lies over .venv, whose torch stays. For each framework it prints its
version and how many tests passed, or why it is not here. Standard library only.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

VENV = Path(".venv")
# what the modules of vLLM import that its tests name: its wheel is built for CUDA, and asks for a
# torch of its own
PARTS_OF_VLLM = ["aiohttp", "cachetools", "cbor2", "cloudpickle", "depyf", "msgspec", "openai",
                 "oss-harmony", "prometheus_client", "psutil", "py-cpuinfo", "pybase64", "pyzmq",
                 "regex", "sentencepiece", "transformers>=5.16.1,<5.21", "uvloop",
                 "xgrammar"]  # fmt: skip
PARTS_OF_TORCHREC = ["--no-deps", "tensordict", "torchmetrics", "lightning-utilities",
                     "pyre-extensions", "iopath", "tqdm", "portalocker", "typing-inspect",
                     "mypy-extensions", "cloudpickle", "orjson", "pyvers", "importlib-metadata",
                     "zipp"]  # fmt: skip
# what pip installs, in its calls one after another
WANTED = {
    "out/frameworks": [["transformers>=5.24", "accelerate"], ["torchtitan"], ["lightning"]],
    "out/vllm": [["--no-deps", "vllm==0.33.0"], PARTS_OF_VLLM],
    # its declared dependencies are builds for CUDA
    "out/torchrec": [["--no-deps", "torchrec==1.9.2", "fbgemm-gpu-cpu==1.8.0"], PARTS_OF_TORCHREC],
}
OF_FSDP = "tests/fsdp/test_frameworks.py"


class Framework(NamedTuple):
    """Its package, the environment that has it, and the arguments of pytest for its tests."""

    name: str
    at: str
    tests: list[str]


FRAMEWORKS = [
    Framework("transformers", "out/frameworks", ["tests/adapters/test_transformers.py", OF_FSDP,
                                                 "-k", "not lightning and not prepares"]),
    Framework("accelerate", "out/frameworks", [OF_FSDP, "-k", "accelerate"]),
    Framework("lightning", "out/frameworks", [OF_FSDP, "-k", "lightning"]),
    Framework("torchtitan", "out/frameworks", ["tests/adapters/test_torchtitan.py"]),
    Framework("torchrec", "out/torchrec", ["tests/adapters/test_torchrec.py"]),
    Framework("vllm", "out/vllm", ["tests/adapters/test_vllm.py",
                                   "tests/adapters/test_vllm_norms.py"]),
]  # fmt: skip


def main() -> int:
    """Whether a test failed, or no framework is here."""
    why = {at: made(Path(at), wanted) for at, wanted in WANTED.items()}
    wrong, here = False, 0
    for each in FRAMEWORKS:
        python = Path(each.at) / "bin" / "python"
        code = f"import importlib.metadata as m; print(m.version({each.name!r}))"
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if asked.returncode:
            print(f"{each.name}: not here: {why[each.at] or asked.stderr.splitlines()[-1]}")
            continue
        here += 1
        print(f"{each.name} {asked.stdout.strip()}: ", end="", flush=True)
        command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal"]
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", *each.tests], capture_output=True, text=True
        )
        print(run.stdout.strip().rpartition("\n")[2] if run.stdout else run.stderr, flush=True)
        if run.returncode:
            wrong = True
            print(run.stdout)
    return int(wrong or not here)


def made(at: Path, wanted: list[list[str]]) -> str:
    """Make an environment over .venv; what could not be installed there, and why."""
    stamp, said = at / ".ready", at / "setup.log"
    if stamp.exists():
        return ""
    print(f"setting up: {at} ", end="", flush=True)
    start_s, why = time.monotonic(), list[str]()
    subprocess.run([sys.executable, "-m", "venv", "--clear", at], check=True)
    code = "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
    below = subprocess.run([VENV / "bin/python", "-c", code], capture_output=True, text=True)
    (folder,) = at.glob("lib/python*/site-packages")
    (folder / "below.pth").write_text(below.stdout)
    for requirements in wanted:
        pins = ["-c", str(VENV / "constraints.txt")]
        command = [at / "bin/python", "-m", "pip", "install", "--no-input", *pins, *requirements]
        run = subprocess.run(command, capture_output=True, text=True)
        with said.open("a") as log:
            log.write(run.stdout + run.stderr)
        if run.returncode:
            last = re.findall(r"^ERROR: (.*)$", run.stderr, re.MULTILINE)
            why.append(last[-1] if last else f"pip failed; all it said is in {said}")
    print(f"{time.monotonic() - start_s:.0f} s", flush=True)
    if not why:
        stamp.touch()
    return "; ".join(why)


if __name__ == "__main__":
    sys.exit(main())
