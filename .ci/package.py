"""`make package`: build sdist and wheel, install the wheel away from the checkout, try it there.

In an empty environment of its own it runs .ci/smoke.py and the notebook, whose printed outputs must
be those that are committed. Standard library only.
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
TOOLS, ENV, AWAY = OUT / "tools", OUT / "env", OUT / "away"
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
    venv.create(ENV, with_pip=True)
    pins = setup.torch_and_pins(ENV)
    setup.pip(ENV, "the wheel, and what runs notebooks", "-c", str(pins), f"{wheel}[notebook]")
    print("smoke test, away from the checkout", flush=True)
    run(ENV / "bin" / "python", "-I", Path(".ci/smoke.py").absolute())
    run_notebook()
    for folder in (TOOLS, ENV):  # two gigabytes
        shutil.rmtree(folder)
    print(f"{wheel.relative_to(Path.cwd())} works without a checkout")


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


def run(*command: str | Path) -> None:
    """Run something of the new environment in an empty folder; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment = kept | {
        "PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(OUT / "cache"), "IPYTHONDIR": str(OUT / "ipython"),
    }  # fmt: skip
    done = subprocess.run(command, cwd=AWAY, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}{' '.join(map(str, command))} failed in {AWAY}")


def run_notebook() -> None:
    """Each cell runs, and prints what is committed. Pictures are not compared."""
    print(f"{NOTEBOOK}", flush=True)
    copy = AWAY / NOTEBOOK.name
    shutil.copy(NOTEBOOK, copy)
    run(ENV / "bin" / "python", "-c", EXECUTE, copy.name)
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
