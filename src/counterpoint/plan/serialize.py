"""Plans to JSON and back. What is read is checked field by field; nothing is executed."""

import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from counterpoint.errors import CounterpointError, PlanError

if TYPE_CHECKING:
    from counterpoint.plan.steps import Plan

FORMAT = "counterpoint-plan-2"


def to_json(plan: "Plan") -> str:
    """The plan as JSON text, the same text for equal plans."""
    return json.dumps({"format": FORMAT, "plan": _encode(plan)}, indent=1)


def from_json(text: str, into: "type[Plan]") -> "Plan":
    """The plan, of class `into`, that `to_json` wrote. It has to be validated before it is run.

    Raises:
        PlanError: not JSON, another format, or a field that is missing, unknown or of a wrong type.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
        raise PlanError("plan file", f"not JSON: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        old = isinstance(found, str) and found.startswith(FORMAT.rstrip("0123456789"))
        hint = f", got {found!r}: build the plan again" if old else ""
        raise PlanError("plan file", f"the field 'format' must be {FORMAT!r}{hint}")
    try:
        return _decode(data.get("plan"), into, "plan")
    except PlanError:
        raise
    except CounterpointError as error:  # the Problem inside refuses its own sizes
        raise PlanError("plan file", str(error)) from error


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any, want: Any, where: str) -> Any:
    origin, args = get_origin(want), get_args(want)
    if origin in (Union, types.UnionType):
        # of a union, the dataclass or tuple takes structured values, the plain type the others
        for choice in args:
            if _fits(value, choice):
                return _decode(value, choice, where)
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple and isinstance(value, list):
        types_ = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(types_) == len(value):
            pairs = enumerate(zip(value, types_, strict=True))
            return tuple(_decode(v, t, f"{where}[{i}]") for i, (v, t) in pairs)
    elif isinstance(want, type) and is_dataclass(want) and isinstance(value, Mapping):
        hints = get_type_hints(want)
        if set(value) == set(hints):
            return want(**{k: _decode(value[k], hints[k], f"{where}.{k}") for k in hints})
    elif isinstance(want, type) and _fits(value, want):
        return value
    raise PlanError("plan file", f"{where} must be {_name(want)}, got {str(value)[:80]!r}")


def _fits(value: Any, want: Any) -> bool:
    if is_dataclass(want):
        return isinstance(value, Mapping)
    if get_origin(want) is tuple:
        return isinstance(value, list)
    if get_origin(want) is Literal:
        return value in get_args(want)
    if want is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, want)


def _name(want: Any) -> str:
    return getattr(want, "__name__", str(want)) if get_origin(want) is None else str(want)
