"""What was done with each collective of a compiled model, and why."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from typing import Any, cast

from torch import fx, nn
from torch._inductor import config as inductor

from counterpoint.adapters.graph.find import Collective
from counterpoint.errors import InputError
from counterpoint.group.workspace import Workspace, workspaces
from counterpoint.ops.auto import not_weighed
from counterpoint.problem import Problem
from counterpoint.schedules.invariant import WORD

SEAM = "joint_custom_pre_pass"
# torch's expressions for the module behind a forward that a framework has put another one around:
# a bound one, or one of `*args`, whose first is the module
BOUND_FORWARD = r"\.forward\.__closure__\[\d+\]\.cell_contents\.__self__|^L\['args'\]\[0\]"


@dataclass(frozen=True)
class Explained:
    """One collective of a compiled graph.

    Args:
        kind: "all-gather", "reduce-scatter", "all-reduce", or torch's name of another.
        module: where it stands in the model; "": torch does not say.
        backward: whether it is one of the gradient's.
        shape: what one rank gives; text for sizes that differ from call to call.
        dtype: of it, in torch's word.
        ranks: of its group; 0: of a group that was not looked at.
        operator: what has replaced it; "": nothing.
        matmuls: where the matmuls beside it stand in the model.
        reason: why it was left; "": it was not.
        problems: of the operators, where all sizes are known.
        group: name of its group.
        apart: an activation that the operator does not apply, and why.
    """

    kind: str
    module: str
    backward: bool
    shape: tuple[int | str, ...]
    dtype: str
    ranks: int
    operator: str
    matmuls: tuple[str, ...]
    reason: str
    problems: tuple[Problem, ...]
    group: str
    apart: str

    @property
    def plans(self) -> tuple[str, ...]:
        """The plans that the operators have run by; none before their first call."""
        return tuple(f"{spec} {WORD}" if own.invariant else spec for _, own, spec in self._ran())

    def _ran(self) -> Iterator[tuple[Workspace, Problem, str]]:
        for problem in self.problems:
            for (name, _), workspace in workspaces.items():
                for own, spec in workspace.plans if name == self.group else ():
                    if _is_for(own, problem):
                        yield workspace, own, spec

    @property
    def not_weighed(self) -> str:
        """Why the operators ran by the only plan that "auto" has there; "" where it has others."""
        return next(filter(None, starmap(_not_weighed, self._ran())), "")

    def __str__(self) -> str:
        phase = "backward" if self.backward else "forward"
        sizes = "x".join(map(str, self.shape))
        where = f", {self.module}" if self.module else ""
        what = f"{phase:8}  {self.kind} of {sizes} {self.dtype}{where}"
        if not self.operator:
            return f"{what}: left to torch, {self.reason}"
        beside = f" ({', '.join(self.matmuls)})" if self.matmuls else ""
        plans = ", ".join(dict.fromkeys(self.plans)) or "chosen when it runs"
        more = "".join(f"; {text}" for text in (self.not_weighed, self.apart) if text)
        return f"{what}: {self.operator}{beside}, plan {plans}{more}"


@dataclass(frozen=True)
class Report:
    """The collectives of one graph, or of all of a model.

    Args:
        found: them, in the order of the graph.
    """

    found: tuple[Explained, ...]

    @staticmethod
    def of(collectives: Iterable[Collective]) -> "Report":
        """What a rewrite has made of them."""
        return Report(tuple(map(_explained, collectives)))

    def to_json(self) -> str:
        """It as text, by which torch's cache keeps it."""
        return json.dumps([asdict(one) for one in self.found])

    @staticmethod
    def from_json(text: str) -> "Report":
        """What `to_json` wrote."""
        found: list[Explained] = []
        for one in json.loads(text):
            values: dict[str, Any] = {name: _tuples(each) for name, each in one.items()}
            problems = ({name: _tuples(each) for name, each in p.items()} for p in one["problems"])
            values["problems"] = tuple(Problem(**each) for each in problems)
            found.append(Explained(**values))
        return Report(tuple(found))

    @property
    def matched(self) -> int:
        """How many have become operators."""
        return sum(bool(one.operator) for one in self.found)

    def nearest_miss(self) -> str:
        """Where none has: one that stands beside a matmul, else the first, and why."""
        near = [one for one in self.found if "no matmul" not in one.reason]
        return f"none of {len(self.found)} collectives is replaced; {(near or self.found)[0]}"

    def __str__(self) -> str:
        if not self.found:
            return "\n".join([NOTHING, *_plans()])
        total = f"{self.matched} of {len(self.found)} collectives are parts of operators"
        return "\n".join([total, *map(str, self.found)])


NOTHING = "no collectives were compiled: the model has not run yet, or has none"


def _tuples(value: Any) -> Any:
    """Lists of JSON, as the tuples that they were."""
    return tuple(map(_tuples, cast(list[Any], value))) if isinstance(value, list) else value


def _is_for(own: Problem, problem: Problem) -> bool:
    """Whether a plan of `own` has that problem, or in `batch_invariant` what is left of it."""
    bias = problem.bias if own.invariant else own.bias
    return replace(own, invariant=False, bias=bias, islands=1) == problem


def _not_weighed(workspace: Workspace, own: Problem, spec: str) -> str:
    """See `not_weighed`, of a plan that has run; "" where no other could have."""
    others = own.operation.candidates(own)
    if workspace.knowledge is None or spec.startswith("islands") or len(others) < 2:
        return ""
    return not_weighed(workspace.knowledge, own)


def _plans() -> Iterator[str]:
    """What has run in this process."""
    for (name, _), workspace in workspaces.items():
        for problem, spec in workspace.plans:
            why = _not_weighed(workspace, problem, spec)
            yield f"has run in group {name}: {problem}, plan {spec}{why and f'; {why}'}"


def explain(model: Any) -> Report:
    """Say what was done with each collective of a model that torch has compiled.

    Args:
        model: what `torch.compile(model, options=compile_options())` returned, or a module that
            is compiled in place, or has parts that are. Call it once before: torch compiles then.
            Where torch's own configuration has the pass, all that was compiled is shown.

    Returns:
        A Report; `print` shows a line for each collective: what has replaced it, by which plan, or
        why it was left. `found` has the same as values.

    Raises:
        InputError: the model was not compiled with `compile_options`.

    Example:
        >>> print(counterpoint.explain(model))  # doctest: +SKIP
    """
    reports = [report for each in _passes(model) for report in each.reports]
    return Report(tuple(one for report in reports for one in report.found))


def _passes(model: Any) -> list[Any]:
    """The passes by which a model, or its parts, were compiled."""
    modules = model.modules() if isinstance(model, nn.Module) else [model]
    found: dict[int, Any] = {}
    for module in modules:
        for compiled in (module, getattr(module, "_compiled_call_impl", None)):
            one = _options(compiled).get(SEAM)
            if hasattr(one, "reports"):
                found[id(one)] = one
    everywhere = getattr(inductor, SEAM, None)
    if not found and hasattr(everywhere, "reports"):
        return [everywhere]
    if not found:
        fix = "compile it by torch.compile(model, options=counterpoint.compile_options())"
        want = "compiled with compile_options"
        raise InputError("explain", "model", want=want, got=type(model).__name__, fix=fix)
    return list(found.values())


def _options(compiled: Any) -> dict[str, Any]:
    """Torch's options of a compiled function; none of another."""
    asked = getattr(compiled, "get_compiler_config", None)
    options = asked() if asked else {}
    if options is None:  # of fullgraph=True torch says nothing: its backend has them, in private
        own: Any = asked
        context = getattr(compiled, "dynamo_ctx", None) or own.__closure__[0].cell_contents
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        options = getattr(backend, "config", {})
    return options


def _explained(one: Collective) -> Explained:
    given: Any = one.given.meta.get("val")
    if isinstance(given, list | tuple):  # of a coalesced one
        given = given[0]
    return Explained(
        one.kind, module_of(one.node), one.backward,
        tuple(n if isinstance(n, int) else str(n) for n in getattr(given, "shape", ())),
        str(getattr(given, "dtype", "")).removeprefix("torch."), one.ranks, one.operator,
        tuple(dict.fromkeys(filter(None, map(module_of, one.matmuls)))), one.reason,
        tuple(one.problems), one.group, one.apart,
    )  # fmt: skip


def module_of(node: fx.Node) -> str:
    """Where a node stands in the model: "layers.0.attention.wq"."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if stack:
            path = str([*stack.values()][-1][0])
            return ".".join(_words(re.sub(BOUND_FORWARD, "", path)))
    return ""


def _words(path: str) -> Iterator[str]:
    """The names in torch's expression for a module: L['self'].layers[0]._modules['up']."""
    for word in (
        path.replace("[", ".").replace("]", "").replace("'", "").replace('"', "").split(".")
    ):
        if word and word not in ("L", "self", "_modules", "_orig_mod", "_fsdp_wrapped_module"):
            yield word
