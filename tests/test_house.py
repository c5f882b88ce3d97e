"""The size and the shape of the house: ceilings that fall with the code, and are raised by nobody.

What is counted: lines of code, which hold a token other than a docstring or a comment; files of a
folder; circles of imports, those of annotations and of functions included; and modules of the
library that nothing in it reaches.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

from counterpoint.operators import ELSEWHERE, FAMILIES, INNER, STEPS

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "src" / "counterpoint"
# lines of code of each folder, as they are: a change that needs more says why, and edits this table
CODE = {
    ".": 1701, "adapters": 2827, "advice": 1547, "attention": 878, "choose": 630, "cli": 2471,
    "embedding": 2334, "experts": 5525, "fsdp": 2025, "gpu": 1005, "group": 2875,
    "kernels": 629, "measure": 2098, "model": 666, "nn": 1000, "norms": 931, "ops": 1657,
    "plan": 2069, "resources": 1429, "run": 2060, "scale": 3530, "schedules": 1003,
    "tensor_parallel": 2030, "testing": 350,
}  # fmt: skip
CODE_OF_BENCHMARKS = 13830
SLACK = 30  # lines by which a folder may be smaller than its ceiling before that is lowered
MOST_FILES, MOST_LINES = 20, 400  # of a folder, and of a file
# longer files: as they are, until they fall
LONG = {
    "fsdp/torch_parts.py": 625, "group/notice_board.py": 876, "group/ranks.py": 494,
    "group/workspace.py": 513, "measure/draw.py": 415, "nn/linear.py": 441, "ops/call.py": 600,
    "tensor_parallel/all_gather_matmul.py": 562,
}  # fmt: skip
# the first file of each circle, and how many it has
CIRCLES = {"measure/draw.py": 2, "measure/draw_step.py": 2, "plan/attended.py": 11}
# what knows no family of operators
CORE = ("choose/", "gpu/", "group/", "kernels/", "model/", "ops/", "plan/", "run/", "schedules/")
# what users and frameworks name, where no file of the library does
DOORS = ("adapters/", "cli/", "testing/", "device.py", "__main__.py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def code_lines(path: Path) -> int:
    """Lines that hold a token other than a docstring or a comment."""
    text = path.read_text()
    docs, code = set[int](), set[int]()
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first and ast.get_docstring(node, clean=False) is not None:
                docs |= {*range(first.lineno, (first.end_lineno or 0) + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
             tokenize.ENDMARKER}  # fmt: skip
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


@cache
def files(of: Path = HOUSE) -> dict[str, Path]:
    return {path.relative_to(of).as_posix(): path for path in sorted(of.rglob("*.py"))}


@cache
def imports(of: Path = HOUSE) -> dict[str, set[str]]:
    """By file: the files of the package that it imports, wherever it does; the root names all."""
    modules = {f"{of.name}.{f[:-3].replace('/', '.')}".removesuffix(".__init__"): f
               for f in files(of)}  # fmt: skip
    found: dict[str, set[str]] = {}
    for file, path in files(of).items():
        named = set[str]()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                each = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in modules else name.rpartition(".")[0] for name in each}
        if file.endswith("__init__.py"):  # names of what is imported where it is touched
            for word in re.findall(r'"([\w.]+)"', path.read_text()):
                named |= {word, f"{of.name}.{word}"}
        found[file] = {modules[name] for name in named if name in modules} - {file, "__init__.py"}
    return found


def reached(start: set[str], of: Path = HOUSE) -> set[str]:
    found, ahead = set[str](), [*start]
    while ahead:
        if (file := ahead.pop()) not in found:
            found.add(file)
            ahead += imports(of)[file]
    return found


def circles(of: Path) -> dict[str, int]:
    """The first file of each circle of imports, and how many it has."""
    ahead = {file: reached({*named}, of) for file, named in imports(of).items()}
    return {
        min(circle := {other for other in ahead[file] if file in ahead[other]}): len(circle)
        for file in ahead if file in ahead[file]
    }  # fmt: skip


def test_no_folder_has_more_code_than_it_had():
    counted = Counter[str]()
    for file, path in files().items():
        counted[file.partition("/")[0] if "/" in file else "."] += code_lines(path)
    above = {folder: n for folder, n in counted.items() if n > CODE.get(folder, 0)}
    assert not above, f"more than {CODE}"
    slack = {folder: counted[folder] for folder in CODE if counted[folder] < CODE[folder] - SLACK}
    assert not slack, f"lower the ceilings: {CODE}"
    benchmarks = sum(code_lines(path) for path in (ROOT / "benchmarks").rglob("*.py"))
    assert benchmarks <= CODE_OF_BENCHMARKS


def test_a_folder_has_few_files_and_a_file_few_lines():
    counted = Counter(str(Path(file).parent) for file in files())
    assert not {f: n for f, n in counted.items() if n > MOST_FILES}
    lines = {file: len(path.read_text().splitlines()) for file, path in files().items()}
    long = {file: n for file, n in lines.items() if n > MOST_LINES}
    assert {file: n for file, n in long.items() if n > LONG.get(file, 0)} == {}
    assert long.keys() == LONG.keys(), "a file that is short by now leaves the list"


def test_circles_of_imports_do_not_grow():
    assert circles(HOUSE) == CIRCLES
    assert circles(ROOT / "benchmarks") == {}


def test_the_core_knows_no_family():
    families = set(FAMILIES.values())
    found = {
        file: known for file, named in imports(HOUSE).items() if file.startswith(CORE)
        if (known := {each for each in named if each.partition("/")[0] in families})
    }  # fmt: skip
    assert not found


def test_the_library_has_nothing_that_nobody_reaches():
    start = {f for f in files() if f.endswith("__init__.py") or f.startswith(DOORS)}
    start |= {
        f"{family}/{ELSEWHERE.get(op, (f'plan_{op}',))[0]}.py"
        for op, family in (FAMILIES | INNER).items()
    } | {f"{module.replace('.', '/')}.py" for module in STEPS.values()}
    assert files().keys() - reached(start) == set()
