"""Plans to JSON and back. What is read is checked field by field; nothing is executed."""

import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from counterpoint.errors import CounterpointError, PlanError
from counterpoint.plan.extents import refuse_vast
from counterpoint.ranges import Misfit, hints_of, misfit

if TYPE_CHECKING:
    from counterpoint.plan.steps import Plan

FORMAT = "counterpoint-plan-6"


def to_json(plan: "Plan") -> str:
    """The plan as JSON text, the same text for equal plans."""
    return json.dumps({"format": FORMAT, "plan": _encode(plan)}, indent=1)


def from_json(text: str, into: "type[Plan]") -> "Plan":
    """The plan, of class `into`, that `to_json` wrote. It has to be validated before it is run.

    Raises:
        PlanError: not JSON, another format, a field that is missing, unknown or of a wrong type, or
            more memory than any machine has.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:  # also numbers or lists too long
        got = f"{type(text).__name__}: {error}"
        raise PlanError("file", f"text must be JSON that to_json wrote, got {got}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        old = isinstance(found, str) and found.startswith(FORMAT.rstrip("0123456789"))
        hint = f", got {found!r}: build the plan again" if old else ""
        raise PlanError("file", f"the field 'format' must be {FORMAT!r}{hint}")
    try:
        plan = _decode(data.get("plan"), into, "plan")
    except PlanError:
        raise
    except CounterpointError as error:  # the Problem inside refuses its own sizes
        raise PlanError("file", str(error)) from error
    _refuse(misfit(plan, into, None, "plan"))
    refuse_vast(plan)
    return plan


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any, want: Any, where: str) -> Any:
    """JSON as the classes that stand there; whether values are right is for `ranges` to say."""
    args = get_args(want)
    if get_origin(want) in (Union, types.UnionType):
        # of a union, only a tuple takes a list
        want = next((a for a in args if get_origin(a) is tuple and isinstance(value, list)), None)
        args = get_args(want)
    if get_origin(want) is tuple and isinstance(value, list):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else (*args, *[None] * len(value))
        pairs = enumerate(zip(value, kinds, strict=False))
        return tuple(_decode(v, kind, f"{where}[{i}]") for i, (v, kind) in pairs)
    if isinstance(want, type) and is_dataclass(want) and isinstance(value, Mapping):
        hints = hints_of(want)
        if set(value) != set(hints):
            text = f"{where} must be a {want.__name__} of {', '.join(hints)}"
            raise PlanError("file", f"{text}, got {', '.join(map(str, value))[:200]}")
        return want(**{k: _decode(value[k], hints[k], f"{where}.{k}") for k in hints})
    return value


def _refuse(found: Misfit | None) -> None:
    if found is not None:
        raise PlanError("file", f"{found.where} must be {found.want}, got {found.got}")
