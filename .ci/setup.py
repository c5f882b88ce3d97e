"""Make .venv: `run` what the library needs, `docs` what its site needs as well, `dev` what all its
checks need. Safe to repeat.

A torch that the Python at hand already has is used, with its numpy and triton; otherwise the
versions in constraints.txt are installed. Standard library only.
"""

from __future__ import annotations  # an old Python is to reach the line that says so

import re
import subprocess
import sys
import time
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
KEPT = ("torch", "numpy", "triton")  # what is there stays: they belong together
RUN = ("torch", "pictures")
EXTRAS = {"run": RUN, "docs": (*RUN, "docs"), "dev": (*RUN, "dev", "docs")}
USABLE = "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)"


def main(want: str) -> None:
    """Create or complete .venv, and leave its stamp."""
    make_venv()
    pins = torch_and_pins(VENV)
    needed = [line for line in requirements(want) if name_of(line) not in installed(VENV)]
    needed += cuda_bindings()
    pip(VENV, ", ".join(map(name_of, needed)), "-c", str(pins), *needed)
    pip(VENV, "counterpoint", "--no-deps", "-e", ".")
    (VENV / f".ready-{want}").touch()


def torch_and_pins(venv: Path) -> Path:
    """Install a torch where `venv` has none; the file of pins for what else is installed there."""
    file = venv / "constraints.txt"
    if not runs(venv / "bin" / "python", USABLE):
        pins = read_pins()
        file.write_text("".join(f"{n}=={v}\n" for n, v in pins.items() if n != "triton"))
        what = f"torch {pins['torch']}, numpy {pins['numpy']} (a minute, or as your network has it)"
        pip(venv, what, "-c", str(file), "torch", "numpy")
    pins = read_pins() | installed(venv)
    file.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    return file


def make_venv() -> None:
    if runs(PYTHON, ""):
        return
    flags = ["--system-site-packages"] if runs(Path(sys.executable), USABLE) else []
    what = "that sees the torch installed here" if flags else "of its own"
    say(f"a .venv {what}, Python {sys.version.split()[0]}\n")
    command = [sys.executable, "-m", "venv", "--clear", *flags, str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        fix = "install the venv module of this Python (Debian, Ubuntu: apt install python3-venv)"
        fail(f"{made.stdout}{made.stderr}\n{' '.join(command)} failed; {fix}")


def runs(python: Path, code: str) -> bool:
    try:
        return not subprocess.run([python, "-c", code], capture_output=True).returncode
    except OSError:
        return False


def read_pins() -> dict[str, str]:
    lines = Path("constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def installed(venv: Path) -> dict[str, str]:
    """Version of each of KEPT that `venv` has."""
    code = f"""
from importlib.metadata import PackageNotFoundError, version
for name in {KEPT}:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
    command = [venv / "bin" / "python", "-c", code]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in text.splitlines())


def requirements(want: str) -> list[str]:
    import tomllib  # Python 3.11, which has been made sure of

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS[want]:
        lines += project["optional-dependencies"][extra]
    return [line for line in lines if name_of(line) != project["name"]]


def cuda_bindings() -> list[str]:
    """What the copy engines need beside a torch that was built for CUDA."""
    code = "import torch; print((torch.version.cuda or '').partition('.')[0])"
    text = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
    major = text.strip()
    return (
        [f"cuda-bindings=={major}.*"] if major and not runs(PYTHON, "import cuda.bindings") else []
    )


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9-]", requirement)[0]


def pip(venv: Path, what: str, *arguments: str) -> None:
    """Install, with a dot each second in place of pip's chatter, which goes to a log."""
    say(f"{what} ")
    start_s, said = time.monotonic(), venv / "setup.log"
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-input", *arguments]
    with said.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(1)
                print(".", end="", flush=True)
        finally:
            process.kill()
    print(f" {time.monotonic() - start_s:.0f} s", flush=True)
    if process.returncode:
        tail = [line for line in said.read_text().splitlines() if not line.startswith("WARNING")]
        text = "\n".join(tail[-15:])
        fail(f"{text}\npip failed; is the package index reached? All it said is in {said}")


def say(text: str) -> None:
    print(f"setting up: {text}", end="", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setting up: {text}")


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs before any version is certain)
        fail(f"needs Python 3.11 or newer, this is {sys.version.split()[0]}; "
             "have another? make PYTHON=python3.12")  # fmt: skip
    main(sys.argv[1])
