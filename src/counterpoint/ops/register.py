"""Our operators as torch has them: what the dispatcher, compilers and autograd call."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from counterpoint.errors import UnsupportedError

LIBRARY = torch.library.Library("counterpoint", "FRAGMENT")
DOUBLE = (
    "counterpoint: double backward (a gradient of a gradient) is not supported; "
    "call backward without create_graph=True"
)


def register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None, save: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Make an operator of torch's, which a compiled graph holds as one node.

    Args:
        schema: its name, arguments and results, as torch writes them.
        run: what it does, on any device.
        fake: results of the same shapes, of tensors without values.
        backward: its gradients, from a context and those of the results; None: it has none.
        save: puts into the context what `backward` needs.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    name = f"counterpoint::{name}"
    torch.library.register_fake(name, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=save, lib=LIBRARY)


def refuse_double(ctx: object, *grads: object) -> NoReturn:
    """The gradient of a gradient.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(DOUBLE)


def refuse_double_matmul(ctx: object, *grads: object) -> NoReturn:
    """The gradient of the gradient of a matmul, which torch has.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"{DOUBLE}, or take torch's own operators there")
