"""Whose way the tokens of experts go in models of frameworks."""

from typing import NamedTuple

from torch import nn


class Noted(NamedTuple):
    """A module of experts: its framework, and why tokens go that one's way; "" if they do not."""

    framework: str
    why: str


def note(experts: nn.Module, framework: str, why: str) -> None:
    """For `explain_experts`."""
    experts.counterpoint_experts = Noted(framework, why)  # type: ignore[assignment]


def explain_experts(model: nn.Module) -> str:
    """A line for each module of experts: whose way its tokens go, and why.

    Example:
        >>> print(explain_experts(model))  # doctest: +SKIP
        model.layers.0.mlp.experts: counterpoint
        model.layers.1.mlp.experts: transformers, since biases
    """
    lines = list[str]()
    for name, module in model.named_modules():
        found = getattr(module, "counterpoint_experts", None)
        if isinstance(found, Noted):
            way = f"{found.framework}, since {found.why}" if found.why else "counterpoint"
            lines.append(f"{name}: {way}")
    return "\n".join(lines) or "no experts go by counterpoint"
