"""Declares every operator of `operators.py` to torch. Imports torch, and none of their code."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_flatten

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.operators import (
    ALONE,
    IMPLEMENTED,
    SCHEMAS,
    WITHOUT_GRADIENT,
    implementation,
)

LIBRARY = torch.library.Library("counterpoint", "FRAGMENT")


def _declare(op: str, schema: str) -> None:
    """An operator whose code is loaded at its first call, as `ops/register.py` describes it."""

    def fake(*given: Any) -> Any:
        return implementation(op).fake(*given)

    def transformed(*given: Any) -> Any:
        return implementation(op).transformed(*given)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if (found := implementation(op).save) is not None:
            found(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        found = implementation(op).backward
        assert found is not None, f"{op} is declared with a gradient"
        return found(ctx, *grads)

    LIBRARY.define(schema)
    LIBRARY.impl(op, _where_it_belongs(op), "CompositeExplicitAutograd")
    LIBRARY.impl(op, transformed, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"counterpoint::{op}", fake, lib=LIBRARY)
    if op not in ALONE:
        has_side_effect(getattr(torch.ops.counterpoint, op).default)
    if op not in WITHOUT_GRADIENT:
        torch.library.register_autograd(
            f"counterpoint::{op}", backward, setup_context=save, lib=LIBRARY
        )


def _where_it_belongs(op: str) -> Callable[..., Any]:
    """What an operator does, on the GPU of its first tensor that is on one: its kernels are there.

    Refused where the size of the group or this rank are not those of the arguments. For a compiler
    that measures operators, on one rank alone, results without values.
    """
    arguments = getattr(torch.ops.counterpoint, op).default._schema.arguments
    names = [a.name for a in arguments]
    at = names.index("group_name") if "group_name" in names else -1
    facts = [(names.index(name), name) for name in ("group_size", "rank") if name in names]
    differ = [i for i, a in enumerate(arguments)
              if a.name in ("rows", "batch") and str(a.type) == "List[int]"]  # fmt: skip

    def there(*given: Any) -> Any:
        found = IMPLEMENTED.get(op) or implementation(op)
        if TracingContext.try_get() is not None:
            return found.fake(*given)
        if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
            _refuse_tangents(op, given)
        if facts and at >= 0:
            alike = all(len({*given[i]}) < 2 for i in differ)  # sizes are those of any rank then
            of = [(name, given[i]) for i, name in facts if name != "rank" or not alike]
            _refuse_other_group(op, given[at], of)
        for each in given:
            for t in each if isinstance(each, list) else (each,):
                if isinstance(t, Tensor) and t.is_cuda:
                    if t.device.index == torch.cuda.current_device():
                        return found.run(*given)
                    with torch.cuda.device(t.device):
                        return found.run(*given)
        return found.run(*given)

    return there


def _refuse_other_group(op: str, name_of: str, facts: Sequence[tuple[str, int]]) -> None:
    """Refuse a graph that was made for a group of another size, or for another rank of it."""
    # not at the top: that module may be what imports torch, behind which this one is imported
    from counterpoint.group.ranks import group_of

    group = group_of(name_of)
    for name, given in facts:
        now = group.size() if name == "group_size" else group.rank()
        if given != now:
            want = f"{now}, as group {group.group_name} has it now"
            fix = "call torch.compiler.reset() after making groups anew"
            raise InputError(op, name, want=want, got=given, fix=fix)


def _refuse_tangents(op: str, given: Any) -> None:
    """Refuse operands of torch.autograd.forward_ad."""
    for t in tree_flatten(given)[0]:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            refuse_forward_mode(op)


def refuse_forward_mode(op: str) -> NoReturn:
    """A derivative by torch.func.jvp or torch.autograd.forward_ad.

    Raises:
        UnsupportedError: always.
    """
    what = f"{op}: forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not"
    raise UnsupportedError(f"{what} supported; take torch.func.vjp, or backward")


for _schemas in SCHEMAS.values():
    for _schema in _schemas:
        _declare(_schema.partition("(")[0], _schema)
