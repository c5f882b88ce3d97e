"""Triton's interpreter, without what it does again and again.

At each call of a function inside a kernel it looks through all members of triton.language and
patches those that are built in, though the launch around it has done so: half the time of an
interpreted kernel. It computes whether integers overflow, for an assertion that it then leaves out:
a fifth. And it makes the same shapes and types for each intermediate result.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter

INTERPRETER: Any = interpreter


def install() -> None:
    """Have this process interpret kernels so."""
    _patch_once()
    _remember_types()
    builder = INTERPRETER.interpreter_builder
    assert not builder.options.debug  # then it would assert that nothing overflows
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once() -> None:
    """Patch triton.language once a launch."""
    patch_all: Callable[[Any], Any] = INTERPRETER._patch_lang
    patched = set[str]()  # modules, by the launch that is under way

    def patch_lang(fn: Any) -> Any:
        names = {v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core}
        if patched and names <= patched:
            return INTERPRETER._LangPatchScope()  # nothing to restore
        scope, outermost = patch_all(fn), not patched
        patched.update(names)
        if outermost:
            restore = scope.restore

            def last() -> None:
                patched.clear()
                restore()

            scope.restore = last
        return scope

    @cache  # asked first when nothing is patched
    def built_in(package: Any) -> list[str]:
        names = (name for name in dir(package) if hasattr(package, name))
        return [name for name in names if tl.core.is_builtin(getattr(package, name))]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in built_in(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                INTERPRETER._patch_attr(package, name, member, builder, scope)

    INTERPRETER._patch_lang, INTERPRETER._patch_builtin = patch_lang, patch_builtin


def _remember_types() -> None:
    """Make the type and the shape of an intermediate result once each."""
    core: Any = tl.core
    make_block: Callable[..., None] = core.block_type.__init__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        known = types.get((element_ty.name, sizes))
        if known is None:
            make_block(self, element_ty, shape)
            types[element_ty.name, sizes] = dict(vars(self))
        else:
            self.__dict__.update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:  # as it is called
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.tuple([*map(core.constexpr, sizes)]), core.constexpr(prod(sizes))
        self.shape, self.numel = shapes[sizes]

    numpy_type: Callable[[Any], Any] = INTERPRETER._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def np_dtype(of: Any) -> Any:
        found = numpy_types.get(of.name)
        if found is None:
            found = numpy_types[of.name] = numpy_type(of)
        return found

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    INTERPRETER._get_np_dtype = np_dtype
