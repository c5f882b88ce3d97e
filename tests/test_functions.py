"""How long a function may be, and how many arguments it may take."""

import ast
from functools import cache
from pathlib import Path

import counterpoint

PACKAGE = Path(counterpoint.__file__).parent
MOST_LINES = 60  # docstring included
MOST_ARGUMENTS = 8  # self and cls are none


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Each function of the package, as "ops/call.py run"; but those of Triton's."""
    found: list[tuple[str, ast.FunctionDef]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("kernels/") and "/kernel_" not in file:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found.append((f"{file} {node.name}", node))
    return found


def num_arguments(node: ast.FunctionDef) -> int:
    """Of one call; what gathers some counts as one."""
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    gathering = (given.vararg is not None) + (given.kwarg is not None)
    return len(named) - (named[:1] in (["self"], ["cls"])) + gathering


def test_no_function_is_long():
    found = {
        name for name, node in functions()
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }  # fmt: skip
    assert not found


def test_no_function_takes_many_arguments():
    """But public ones, whose arguments have names and defaults, and what a command line calls.

    Layers are public, too.
    """
    found = {
        name for name, node in functions()
        if num_arguments(node) > MOST_ARGUMENTS
        and not name.startswith("cli/") and node.name not in counterpoint.__all__
        and not (name.startswith("nn/") and node.name == "__init__")
    }  # fmt: skip
    assert not found
