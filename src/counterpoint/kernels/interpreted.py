"""Triton's interpreter under numpy 2.4: bounds of loops that are arrays of one element.

Triton 3.6 makes a number of it in a way that numpy 2.3 warns of and numpy 2.4 refuses. What is
replaced is private; a Triton that has it no more makes its numbers otherwise. Drop with triton 3.6.
"""

from collections.abc import Callable
from typing import Any

import triton.runtime.interpreter as interpreter

PATCH = "_patch_lang_tensor"  # what it does to tensors while a kernel runs


def install() -> None:
    """Have kernels that are interpreted in this process take such bounds from any numpy."""
    patch_tensor: Callable[[Any, Any], None] | None = getattr(interpreter, PATCH, None)
    if patch_tensor is None:
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    setattr(interpreter, PATCH, patched)
