"""What a light install does: everything that is arithmetic, and errors that say what to install.

The packages that it lacks are hidden from a process of its own; `make package` leaves them out.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from processes import python, python_of

from counterpoint.lazy import INSTALLED_BY

ROOT = Path(__file__).parent.parent
HIDDEN = f"import sys; sys.modules.update(dict.fromkeys({sorted(INSTALLED_BY)}))\n"
TORCH, PICTURES = INSTALLED_BY["torch"], INSTALLED_BY["matplotlib"]
COMMAND = f"{HIDDEN}sys.argv[0] = 'counterpoint'\nfrom counterpoint.__main__ import main; main()"
PLAN = "plan all_gather_matmul --shape 64,64,64 --machine h200-4"
STEP = "--gpus 8 --tp 8"


def test_lines_that_install_are_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line, extra in ((TORCH, "torch"), (PICTURES, "pictures")):
        assert shlex.split(line)[2:] == [each.partition(";")[0] for each in extras[extra]]
    packages = {re.split("[>;]", each)[0] for extra in ("torch", "pictures")
                for each in extras[extra]}  # fmt: skip
    assert packages == INSTALLED_BY.keys()
    light = {re.split("[>;]", each)[0] for each in project["dependencies"]}
    assert not light & INSTALLED_BY.keys()


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (PLAN, "chosen"),
        (f"scale llama3-8b {STEP}", "tokens"),
        (f"advise --model llama3-8b {STEP} --tokens 4096", "Largest loss"),
        ("occupancy --threads 128 --registers 64 --shared 16384", "blocks"),
        ("doctor", f"missing: torch: {TORCH}; plan, scale, advise and doctor need none"),
    ],
)
def test_a_command_that_is_arithmetic_runs(words: str, said: str):
    assert said in python("-c", COMMAND, *words.split(), COLUMNS="120")


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("demo", "torch"), ("bench", "torch"), ("evaluate", "torch"), ("tune", "torch"),
        ("characterize", "torch"), ("warmup --layers 8,8", "torch"), ("doctor --group", "torch"),
        ("doctor --kernels", "torch"), (f"{PLAN} --out x.png", "matplotlib"),
        (f"scale llama3-8b {STEP} --picture x.svg", "matplotlib"),
        (f"advise --model llama3-8b {STEP} --picture x.pdf", "matplotlib"),
    ],
)  # fmt: skip
def test_any_other_says_in_one_line_what_to_install(words: str, package: str, tmp_path: Path):
    code = f"{COMMAND.replace('main()', f'import os; os.chdir({str(tmp_path)!r}); main()')}"
    done = python_of(2, "-c", code, *words.split())
    name = words.split()[0]
    fix = f"{package} must be installed, got none; {INSTALLED_BY[package]}"
    assert (done.stdout, done.stderr) == ("", f"{name}: {fix}\n")
    assert not any(tmp_path.iterdir())


def test_every_public_name_is_there_or_says_what_to_install():
    code = f"""{HIDDEN}
from importlib import import_module
import counterpoint as cp

def here(name, get):
    try:
        get()
    except cp.UnsupportedError as error:
        assert {TORCH!r} in str(error), error
        assert name in str(error) or name in ("compile_options", "explain"), error
        return False
    return True

found = {{name for name in cp.__all__ if here(name, lambda: getattr(cp, name))}}
for package in (cp.scale, cp.resources):
    for name in package.__all__:
        if here(name, lambda: getattr(package, name)):
            found.add(name)
for name in ("nn", "device", "testing.ranks", "adapters.transformers", "adapters.vllm"):
    door = name.removesuffix(".ranks").partition(".transformers")[0].partition(".vllm")[0]
    assert not here(door, lambda: import_module(f"counterpoint.{{name}}"))
choice = cp.choose(cp.Problem("all_gather_matmul", m=64, n=64, k=64, ranks=4), "h200-4")
for draws in (choice.timeline, cp.scale.predict("llama3-8b", cp.scale.Layout(tp=8))):
    try:
        draws.save("x.png")
    except cp.UnsupportedError as error:
        found.add(str(error).partition(": ")[2])
print(*sorted(found), sep="\\n")
"""
    found = python("-c", code).splitlines()
    assert f"matplotlib must be installed, got none; {PICTURES}" in found
    pure = {"Problem", "Timeline", "advise", "bind", "choose", "estimate", "predict", "validate"}
    assert pure <= {*found}
    assert not {"all_gather_matmul", "nn", "overlap", "Pipeline", "run_on_ranks"} & {*found}
