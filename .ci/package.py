"""`make package`: build sdist and wheel, install the wheel away from the checkout, try it there.

In an empty environment for each of light, pictures and torch it runs .ci/smoke.py, and says how
large that is. The extras of the notebook come to torch's, and its printed outputs must be those
that are committed. The extra cuda is only resolved. Standard library only.
"""

from __future__ import annotations  # an old Python is to reach the line that says so

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import setup

OUT = Path("out/package").absolute()
TOOLS, AWAY = OUT / "tools", OUT / "away"
NOTEBOOK = Path("examples/first_five_minutes.ipynb")
# nothing of the checkout, of the caller's Python, or of what was measured here
UNSET = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "COUNTERPOINT_CACHE", "TRITON_INTERPRET")

EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, record_timing=False).execute()
notebook.metadata.language_info = {"name": "python"}
nbformat.write(notebook, sys.argv[1])
"""


def main() -> None:
    """Build, install, try; ends with an error at the first thing that is wrong."""
    shutil.rmtree(OUT, ignore_errors=True)
    AWAY.mkdir(parents=True)
    wheel = build()
    check_files(wheel)
    for extras in ((), ("pictures",), ("torch",)):
        env = try_environment(wheel, extras)
    resolve_cuda(env, wheel)
    setup.pip(env, "what runs notebooks", "-c", str(env / "constraints.txt"), f"{wheel}[notebook]")
    smoke(env, "torch", "pictures")
    run_notebook(env)
    for folder in (TOOLS, *OUT.glob("env-*")):  # two gigabytes
        shutil.rmtree(folder)
    print(f"{wheel.relative_to(Path.cwd())} works without a checkout")


def try_environment(wheel: Path, extras: tuple[str, ...]) -> Path:
    """A new environment with the wheel and these extras, in which the smoke test succeeds."""
    name = "-".join(extras) or "light"
    env = OUT / f"env-{name}"
    venv.create(env, with_pip=True)
    empty_mb = megabytes(env)
    pins = setup.torch_and_pins(env) if "torch" in extras else Path("constraints.txt")
    target = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    setup.pip(env, f"the wheel, {name}", "-c", str(pins), target)
    print(f"{name}: {megabytes(env) - empty_mb:.0f} MB", flush=True)
    smoke(env, *extras)
    return env


def megabytes(folder: Path) -> float:
    files = (each for each in folder.rglob("*") if each.is_file() and not each.is_symlink())
    return sum(each.stat().st_size for each in files) / 1e6


def smoke(env: Path, *extras: str) -> None:
    print("smoke test, away from the checkout", flush=True)
    run(env / "bin" / "python", "-I", Path(".ci/smoke.py").absolute(), *extras)


def resolve_cuda(env: Path, wheel: Path) -> None:
    """What the extra cuda would add to torch's; nothing is installed, since here is no GPU."""
    python = env / "bin" / "python"
    command = (python, "-m", "pip", "install", "-q", "--dry-run", "--report", "-", "-c",
               env / "constraints.txt", f"{wheel}[cuda]")  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nthe extra cuda cannot be resolved")
    found = (each["metadata"] for each in json.loads(done.stdout)["install"])
    said = ", ".join(f"{each['name']} {each['version']}" for each in found)
    print(f"cuda, resolved and not installed: {said}", flush=True)


def build() -> Path:
    """The sdist, and the wheel that is built of it alone."""
    venv.create(TOOLS, with_pip=True)
    setup.pip(TOOLS, "build", "-c", "constraints.txt", "build")
    print("sdist and wheel", flush=True)
    shutil.rmtree("dist", ignore_errors=True)
    command = [TOOLS / "bin" / "python", "-m", "build", "--outdir", "dist", "."]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"{built.stdout}{built.stderr}\nbuild failed")
    return next(Path("dist").absolute().glob("*.whl"))


def check_files(wheel: Path) -> None:
    """The wheel has every file of the package, and nothing else."""
    src = Path("src")
    files = (f for f in (src / "counterpoint").rglob("*") if f.is_file())
    want = {str(f.relative_to(src)) for f in files if "__pycache__" not in f.parts}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if want != found:
        sys.exit(f"{wheel}: lacks {sorted(want - found)}, and has {sorted(found - want)}")


def run(program: Path, *arguments: str | Path) -> None:
    """Run something of a new environment in an empty folder; it must succeed."""
    command = (program, *arguments)
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment = kept | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(OUT / "cache"), "IPYTHONDIR": str(OUT / "ipython"),
    }  # fmt: skip
    done = subprocess.run(command, cwd=AWAY, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}{' '.join(map(str, command))} failed in {AWAY}")


def run_notebook(env: Path) -> None:
    """Each cell runs, and prints what is committed. Pictures are not compared."""
    print(f"{NOTEBOOK}", flush=True)
    copy = AWAY / NOTEBOOK.name
    shutil.copy(NOTEBOOK, copy)
    run(env / "bin" / "python", "-c", EXECUTE, copy.name)
    for i, (want, found) in enumerate(zip(cells(NOTEBOOK), cells(copy), strict=True)):
        if printed(want) != printed(found):
            sys.exit(
                f"{NOTEBOOK}, cell {i} prints\n{printed(found)}\nand, as committed,\n"
                f"{printed(want)}\nIf the first is right: cp {copy} {NOTEBOOK}"
            )


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text())["cells"]


def printed(cell: dict[str, Any]) -> str:
    """Text that a cell shows, of print or as its value; of a picture, only that it is one."""
    texts: list[str] = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        picture = any(kind.startswith("image/") for kind in data)
        shown = "a picture" if picture else output.get("text", data.get("text/plain", ""))
        texts.append("".join(shown))
    return "\n".join(texts)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs before any version is certain)
        sys.exit(f"needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    main()
