"""`make mutants`: faults that are put into src one by one, and whether tests see them.

`draw` lists faults by seed, over all folders: mutants.json, which is committed. `run` puts each
into a copy of the checkout and runs the tests that reach its line, the quickest first, until one
fails or two minutes are over. Which tests reach a line is what `-p reached` noted of a run before.

A fault is kept by its function and statement, so that it outlives moves of both.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypedDict

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".json")
LIMIT_S = 120  # of the tests of one mutant, their start included
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+", "//": "*",
    "%": "//", "&": "|", "|": "&", "<<": ">>", ">>": "<<", "and": "or", "or": "and",
}  # fmt: skip


class Reached(TypedDict):
    """What `reached.py` writes."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Sequence[int]]


class Mutant(NamedTuple):
    """One fault: lines of a function, without their indentation, and what stands there instead."""

    folder: str
    function: str
    before: str
    after: str


def sites(path: Path, folder: str) -> Iterator[Mutant]:
    """All faults that a file may have."""
    source = path.read_text()
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)):
        for statement in ast.walk(function):
            if isinstance(statement, ast.stmt) and statement is not function:
                yield from _of_statement(lines, folder, name, statement)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods by their names, each without those inside of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def _of_statement(
    lines: Sequence[str], folder: str, name: str, statement: ast.stmt
) -> Iterator[Mutant]:
    """Faults of a statement; of one with a body those of its head."""
    parts = ("body", "orelse", "finalbody", "handlers", "items", "cases", "decorator_list")
    inner = {each for part in parts for each in getattr(statement, part, ())}
    kind = getattr(statement, "annotation", None)
    heads = [h for h in ast.iter_child_nodes(statement) if h not in inner and h is not kind]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef) or not heads:
        return
    first = statement.lineno
    last = max(getattr(h, "end_lineno", first) for h in heads) if inner else statement.end_lineno
    text = lines[first - 1 : last]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield Mutant(folder, name, _bare(text), "pass")
    for head in heads:
        for node in ast.walk(head):
            for at, end, new in _changes(lines, node):
                row, column = at
                changed = list(text)
                line, until = changed[row - first], end[1] if end[0] == row else None
                if until is not None:
                    changed[row - first] = line[:column] + new + line[until:]
                    yield Mutant(folder, name, _bare(text), _bare(changed))


Place = tuple[int, int]


def _changes(lines: Sequence[str], node: ast.AST) -> Iterator[tuple[Place, Place, str]]:
    """Where an expression would change, and to what."""
    if isinstance(node, ast.BinOp):
        yield from _between(lines, node.left, node.right)
    elif isinstance(node, ast.Compare):
        yield from _between(lines, node.left, node.comparators[0])
    elif isinstance(node, ast.BoolOp):
        yield from _between(lines, node.values[0], node.values[1])
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        start, end = (
            (node.lineno, node.col_offset),
            (node.end_lineno or 0, node.end_col_offset or 0),
        )
        yield start, end, str(node.value + 1)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        start, end = (
            (node.lineno, node.col_offset),
            (node.end_lineno or 0, node.end_col_offset or 0),
        )
        yield start, end, {"min": "max", "max": "min"}[node.id]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start = (node.lineno, node.col_offset)
        yield start, (node.lineno, node.col_offset + len("not ")), ""


def _between(
    lines: Sequence[str], left: ast.expr, right: ast.expr
) -> Iterator[tuple[Place, Place, str]]:
    """The operator between two operands of one line."""
    row, column = left.end_lineno or 0, left.end_col_offset or 0
    if row != right.lineno:
        return
    between = lines[row - 1][column : right.col_offset]
    found = re.search(r"is not|not in|<<|>>|//|[<>=!]=|[-<>+*%&|]|\b(?:is|in|and|or)\b", between)
    if found and found[0] in SWAPS:
        start, end = column + found.start(), column + found.end()
        yield (row, start), (row, end), SWAPS[found[0]]


def _bare(lines: Sequence[str]) -> str:
    return "\n".join(line.strip() for line in lines)


def draw(count: int, seed: int) -> list[Mutant]:
    """Faults in turn from each folder of the package."""
    package, pick = ROOT / "src" / "counterpoint", random.Random(seed)
    by_folder: defaultdict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parts[0].removesuffix(".py")
        folder = folder if (package / folder).is_dir() else "."
        by_folder[folder] += sites(path, folder)
    weights = {folder: len(found) ** 0.5 for folder, found in by_folder.items()}
    names = pick.choices(list(weights), list(weights.values()), k=count)
    return sorted({pick.choice(by_folder[name]) for name in names})


def place(mutant: Mutant, package: Path) -> tuple[Path, int, int, str] | None:
    """The file that has the statement, its first line and the line behind it, and indentation."""
    wanted = mutant.before.split("\n")
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for name, function in functions(ast.parse(source)):
            if name.split(".")[-1] != mutant.function.split(".")[-1]:
                continue
            for i in range(function.lineno, function.end_lineno - len(wanted) + 1):
                if [line.strip() for line in lines[i : i + len(wanted)]] == wanted:
                    return path, i, i + len(wanted), re.match(r"\s*", lines[i])[0]  # type: ignore[index]
    return None


def put(mutant: Mutant, package: Path) -> tuple[Path, range]:
    """Write the fault into a copy of the package; the file and the lines that it is in."""
    found = place(mutant, package)
    assert found is not None, f"no such statement any more: {mutant}"
    path, first, behind, indent = found
    lines = path.read_text().splitlines()
    lines[first:behind] = [indent + line for line in mutant.after.split("\n")]
    path.write_text("\n".join(lines) + "\n")
    return path.relative_to(package), range(first + 1, behind + 1)


def collected(root: Path) -> set[str]:
    """The tests of a checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    path = {"PYTHONPATH": f"{root}/src:{root}/tests:{root}"}
    said = subprocess.run(command, cwd=root, env=os.environ | path, text=True, capture_output=True)
    return set(said.stdout.splitlines())


def tried(mutant: Mutant, root: Path, reached: Reached, gone: Set[str]) -> str:
    """The test that fails; "survived", "unreached", or "late": none had failed in time."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml",
                     "README.md", "Makefile", ".ci", "constraints.txt"):  # fmt: skip
            if (root / name).is_dir():
                shutil.copytree(
                    root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif (root / name).exists():
                shutil.copy(root / name, copy / name)
        path, rows = put(mutant, copy / "src" / "counterpoint")
        tests = {i for row in rows for i in reached["lines"].get(f"{path}:{row}", ())}
        every = [*reached["seconds"]]  # the quickest first
        names = [every[i] for i in sorted(tests) if every[i] not in gone]
        return _run(copy, names) if names else "unreached"


def _run(copy: Path, names: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    environment = os.environ | {
        "PYTHONPATH": f"{copy}/src:{copy}/tests:{copy}", "TRITON_CACHE_DIR": f"{copy}/triton",
    }  # fmt: skip
    process = subprocess.Popen(
        [*command, *names], cwd=copy, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    if process.returncode == 0:
        return "survived"
    return failed[1] if failed else said.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("draw", "run"))
    parser.add_argument("--count", type=int, default=60, help="of faults that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of faults that are drawn")
    parser.add_argument("--reached", type=Path, default=ROOT / "out" / "reached.json")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that is tried")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults; all without it")
    args = parser.parse_args()
    if args.what == "draw":
        found = draw(args.count, args.seed)
        LIST.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")
        print(f"{len(found)} faults in {LIST}")
        return 0
    mutants = [Mutant(**each) for each in json.loads(LIST.read_text())]
    reached = json.loads(args.reached.read_text())
    gone = set(reached["seconds"]) - collected(args.root)
    print(f"{len(gone)} of {len(reached['seconds'])} tests are not there any more", flush=True)
    numbers = list(range(len(mutants))) if args.only is None else args.only
    with ThreadPoolExecutor(2) as lanes:
        said = lanes.map(lambda i: tried(mutants[i], args.root, reached, gone), numbers)
        outcomes = dict(zip(numbers, _shown(mutants, numbers, said), strict=True))
    missed = ("survived", "unreached", "late")
    caught = sum(outcome not in missed for outcome in outcomes.values())
    print(f"{caught} of {len(outcomes)} faults are seen")
    return 0


def _shown(mutants: Sequence[Mutant], numbers: Sequence[int], said: Iterator[str]) -> Iterator[str]:
    for number, outcome in zip(numbers, said, strict=True):
        mutant = mutants[number]
        print(f"{number:3} {mutant.folder:10} {mutant.function:30} {outcome}", flush=True)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
