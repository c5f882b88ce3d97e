"""What a kernel is compiled from is all in Triton's key: its source, its arguments, constants.

Triton's key has the source of every function that a kernel calls and the value of each global that
is a tl.constexpr. What else a module knows (its environment, a setting of the host) would be in a
kernel that is taken from a cache for another one.
"""

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import counterpoint

PACKAGE = Path(counterpoint.__file__).parent


def kernels_of(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if any(each.startswith("triton.jit") for each in decorators):
                yield node


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if any(kernels_of(path))]


def globals_of(function: ast.FunctionDef) -> set[str]:
    """Names that a function reads and nobody in it binds; annotations are not compiled."""
    body = [node for statement in function.body for node in ast.walk(statement)]
    names = [node for node in body if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    arguments = function.args
    bound |= {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return {node.id for node in names} - bound


def in_the_key(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] == "triton"
    # by the module's own choice a function of Python where kernels are interpreted
    called = isinstance(value, JITFunction | InterpretedFunction) or (
        triton.knobs.runtime.interpret and isinstance(value, types.FunctionType)
    )
    return called or isinstance(value, tl.constexpr | tl.dtype)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_read_no_global_that_is_not_in_their_key(path: Path):
    name = "counterpoint." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    module = importlib.import_module(name)
    known = dir(__builtins__) if not isinstance(__builtins__, dict) else list(__builtins__)
    for kernel in kernels_of(path):
        for each in globals_of(kernel):
            if each in known and not hasattr(module, each):
                continue
            value = getattr(module, each)
            assert in_the_key(value), f"{kernel.name} reads {each} = {value!r}"


def test_modules_of_kernels_read_no_environment():
    """At import they know one thing: whether kernels are compiled at all."""
    for path in FILES:
        text = path.read_text()
        assert "environ" not in text, path
        knobs = {line.strip() for line in text.splitlines() if "knobs" in line}
        assert knobs <= {"if triton.knobs.runtime.interpret:"}, path
