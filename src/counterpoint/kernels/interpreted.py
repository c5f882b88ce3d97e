"""Triton's interpreter, mended where numpy or Triton have become stricter than it is.

- Loops whose bounds are arrays of one element: Triton 3.6 makes a number of such a bound in a way
  that numpy 2.3 warns of and numpy 2.4 refuses.
- Masks that are one condition for all lanes: Triton 3.9 spreads such a condition as integers, and
  then takes no integers as a mask.

What is replaced is private; a Triton that has it no more does these things otherwise. Drop the
first with Triton 3.6, the second when a Triton interprets `tl.load(x_ptr + lanes, mask=y == 0)`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

PATCH = "_patch_lang_tensor"  # what it does to tensors while a kernel runs
BUILDER, SPLAT = "InterpreterBuilder", "create_splat"  # one value for all lanes


def install() -> None:
    """Have kernels that are interpreted in this process take such bounds and such masks."""
    patch_tensor: Callable[[Any, Any], None] | None = getattr(interpreter, PATCH, None)
    if patch_tensor is not None:

        def patched(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        setattr(interpreter, PATCH, patched)

    builder: Any = getattr(interpreter, BUILDER, None)
    spread: Callable[..., Any] | None = getattr(builder, SPLAT, None)
    if spread is not None:

        def create_splat(self: Any, to: Any, value: Any) -> Any:
            lanes = spread(self, to, value)
            if value.data.dtype == np.bool_:
                lanes.data = lanes.data.astype(np.bool_)
            return lanes

        setattr(builder, SPLAT, create_splat)
