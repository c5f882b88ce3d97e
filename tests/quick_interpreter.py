"""Triton's interpreter, without what it does again at each call of a function inside a kernel.

For such a call it looks through all members of triton.language and patches those that are
built in, though the launch around it has done so. That is half the time of an interpreted kernel.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter

INTERPRETER: Any = interpreter


def install() -> None:
    """Have this process patch triton.language once a launch."""
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
