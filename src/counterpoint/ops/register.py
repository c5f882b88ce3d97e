"""Our operators as torch has them: what the dispatcher, compilers and autograd call."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # pyright: ignore
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from counterpoint.errors import UnsupportedError
from counterpoint.group.notice_board import NoticeBoard
from counterpoint.group.workspace import workspaces
from counterpoint.operators import ALONE, IMPLEMENTED, WITHOUT_GRADIENT, Implementation
from counterpoint.ops.declare import refuse_forward_mode

F = TypeVar("F", bound=Callable[..., Any])

DOUBLE = (
    "counterpoint: double backward (a gradient of a gradient) is not supported; "
    "call backward without create_graph=True"
)


def register(
    op: str, run: Callable[..., Any], fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None, save: Callable[..., None] | None = None,
    *, flops: Callable[..., int] | None = None,
) -> None:  # fmt: skip
    """Say what an operator of `operators.py` does; a compiled graph holds it as one node.

    Of the transforms of torch.func, grad and vjp take it. Others are refused: what ranks do
    together has no batched form, a loop over the batch would meet as often as this rank's batch is
    long, and there is no forward-mode derivative.

    Where a graph holds the size of its group, or this rank, and the group has another by now, a
    call is refused: the graph would compute something else.

    Args:
        op: its name.
        run: what it does, on any device; the GPU of its first tensor is then the current one.
        fake: results of the same shapes, of tensors without values.
        backward: its gradients, from a context and those of the results; None: it has none.
        save: puts into the context what `backward` needs.
        flops: of the matmuls that this rank would do in torch, from shapes in place of tensors and
            `out_shape`; what FlopCounterMode counts. None: it multiplies nothing.
    """
    assert (backward is None) == (op in WITHOUT_GRADIENT), op
    keep = save
    if backward is not None and save is not None and op not in ALONE:
        save, backward = _of_one_forward(op, save, backward)
    transformed = _transformed(op, backward, save)
    IMPLEMENTED[op] = Implementation(run, fake, backward, save, transformed, keep)
    if flops is not None:
        of = getattr(torch.ops.counterpoint, op)
        register_flop_formula(of)(flops)
        # a counter copies all formulas when it is made, and this may be the first call within one
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
                counter.flop_registry[of] = flop_registry[of]


def as_a_constant(fn: F) -> F:
    """As torch.compiler.assume_constant_result, which imports torch._dynamo: 2 s of each start."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


Forward = tuple[NoticeBoard | None, int]  # of which group a call was, and its number


def forward_of(group_name: str, device: torch.device) -> Forward:
    """The last call of a group, for `its_backward`; while a graph is traced none."""
    if torch.compiler.is_compiling():
        return None, 0
    workspace = workspaces.get((group_name, device))
    return (None, 0) if workspace is None else (workspace.board, workspace.board.calls)


@contextmanager
def its_backward(forward: Forward) -> Generator[None]:
    """Around the calls of a backward: ranks compare whose they are, and make all or none."""
    board, number = forward
    if board is None:
        yield
    else:
        with board.whole(), board.backward_of(number):
            yield


def _of_one_forward(
    op: str, save: Callable[..., None], backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """The same, where the backward's calls are those of one forward call."""
    arguments = getattr(torch.ops.counterpoint, op).default._schema.arguments
    at = [a.name for a in arguments].index("group_name")

    def saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, output)
        given = (t for each in inputs for t in (each if isinstance(each, list) else (each,)))
        first = next(t for t in given if isinstance(t, Tensor))
        ctx.forward = forward_of(inputs[at], first.device)

    def called(ctx: Any, *grads: Any) -> Any:
        with its_backward(ctx.forward):
            return backward(ctx, *grads)

    return saved, called


class Eager(torch.autograd.Function):
    """An operator's call with its gradient, which autograd alone has to see.

    As `torch.library.register_autograd` has it; torch's dispatcher takes the host 100 us more.
    """

    @staticmethod
    def forward(ctx: Any, of: "WithGradient", tensors: Sequence[Tensor], *given: Any) -> Any:
        results: Any = of.ready(tensors)
        y: Any = tuple(results) if of.listed else results[0]
        of.keep(ctx, of.in_schema(given) if of.listed else given, y)
        ctx.of, ctx.forward = of, (of.ready.board, of.ready.board.calls)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of: WithGradient = ctx.of
        needs = ctx.needs_input_grad[2:]
        if not of.listed:
            return None, None, *of.backward(_Context(ctx, needs), *grads)
        first, _ = of.listed
        needs = of.in_schema(needs)
        given = [*of.backward(_Context(ctx, needs), [*grads])]
        found = [g if isinstance(g, Tensor) else None for g in given]
        found[first : first + 1] = _in_a_row(needs[first], given[first])
        return None, None, *found


class WithGradient(NamedTuple):
    """A call whose facts are known, and of whose operands a gradient is asked for.

    Args:
        function: an `Eager`, named as the operator.
        ready: the call, and the board of its group.
        keep: puts into a context what `backward` needs.
        backward: gradients, from a context and those of the results.
        given: arguments of the operator as in its schema, lists of tensors in a row, and without
            tensors.
        at: where those stand.
        listed: those that are one list in the schema, from and to; None: its result is none.
    """

    function: type[Eager]
    ready: Any
    keep: Callable[..., None]
    backward: Callable[..., Any]
    given: tuple[Any, ...]
    at: Sequence[int]
    listed: tuple[int, int] | None

    def __call__(self, tensors: Sequence[Tensor | None], room: int = 0) -> list[Tensor]:
        given = [*self.given]
        for i, t in zip(self.at, tensors, strict=True):
            given[i] = t
        y: Any = self.function.apply(self, tensors, *given)
        return [*y] if self.listed else [y]

    def in_schema(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What stands in a row, with the list that the operator takes."""
        assert self.listed is not None
        first, last = self.listed
        return (*given[:first], [*given[first:last]], *given[last:])


@cache
def _named(op: str) -> type[Eager]:
    """What a profiler shows, and a result's grad_fn."""
    return type(op, (Eager,), {})


def with_gradient(ready: Any, op: str, given: tuple[Any, ...]) -> Any:
    """A known call of an operator of one result, or of one list of tensors and a list of results.

    With its gradient where one is asked for.
    """
    if not torch.is_grad_enabled():
        return ready
    arguments = getattr(torch.ops.counterpoint, op).default._schema.arguments
    listed, at, row = None, list[int](), list[Any]()
    for a, each in zip(arguments, given, strict=False):
        if "Tensor" in str(a.type):
            together = isinstance(each, list)
            tensors: list[Any] = each if together else [each]  # pyright: ignore[reportUnknownVariableType]
            listed = (len(row), len(row) + len(tensors)) if together else listed
            at += range(len(row), len(row) + len(tensors))
            row += tensors
        else:
            row.append(each)
    if not any(row[i] is not None and row[i].requires_grad for i in at):
        return ready
    found, others = IMPLEMENTED[op], (None if i in at else each for i, each in enumerate(row))
    assert found.keep is not None and found.backward is not None, f"{op} has a gradient"
    return WithGradient(_named(op), ready, found.keep, found.backward, tuple(others), at, listed)


def _transformed(
    op: str, backward: Callable[..., Any] | None, save: Callable[..., None] | None
) -> Callable[..., Any]:
    """The operator under transforms of torch.func."""

    class Transformed(torch.autograd.Function):
        """Of all arguments and results in one row: torch looks for tensors in no list."""

        @staticmethod
        def forward(spec: TreeSpec, *flat: Any) -> Any:
            found = getattr(torch.ops.counterpoint, op)(*tree_unflatten([*flat], spec))
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            spec, *flat = inputs
            ctx.spec, results = spec, output if isinstance(output, tuple) else (output,)
            if save is not None:
                save(ctx, tuple(tree_unflatten(flat, spec)), output)
            else:
                ctx.mark_non_differentiable(*(y for y in results if not y.is_floating_point()))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if backward is None:
                raise UnsupportedError(f"{op}: it has no gradient")
            _, *needs = ctx.needs_input_grad
            needs = tree_unflatten(needs, ctx.spec)
            own = _Context(ctx, needs)
            found = backward(own, grads) if lists() else backward(own, *grads)
            each = zip(needs, found, strict=True)
            return None, *(g for need, given in each for g in _in_a_row(need, given))

        @staticmethod
        def vmap(*_: object) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
            refuse_vmap(op)

        @staticmethod
        def jvp(*_: object) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
            refuse_forward_mode(op)

    def call(*given: Any) -> Any:
        given += tuple(a.default_value for a in schema().arguments[len(given) :])
        flat, spec = tree_flatten(given)
        found: Any = Transformed.apply(spec, *flat)
        return [*found] if lists() else found

    def schema() -> Any:
        return getattr(torch.ops.counterpoint, op).default._schema

    def lists() -> bool:
        return str(schema().returns[0].type) == "List[Tensor]"

    return call


class _Context:
    """A context of autograd's, for a backward that takes arguments as they are in the schema."""

    def __init__(self, ctx: Any, needs_input_grad: Any) -> None:
        self._ctx, self.needs_input_grad = ctx, needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _in_a_row(need: Any, given: Any) -> list[Any]:
    """Gradients of one argument; `need` has its structure."""
    if isinstance(need, list):
        return [*given] if given else [None] * len(need)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return [given]


def refuse_vmap(op: str) -> NoReturn:
    """What ranks do together has no batched form.

    Raises:
        UnsupportedError: always.
    """
    what = f"{op}: torch.func.vmap over an operator of several ranks is not supported"
    raise UnsupportedError(f"{what}; call it on the whole batch")


def refuse_double(ctx: object, *grads: object) -> NoReturn:
    """The gradient of a gradient.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(DOUBLE)


class Once(torch.autograd.Function):
    """A gradient, whose own would be a sum over the ranks."""

    @staticmethod
    def forward(dy: Tensor) -> Tensor:
        return dy.view_as(dy)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *grads: object) -> NoReturn:
        refuse_double_matmul(ctx)


def once(dy: Tensor) -> Tensor:
    """A gradient that refuses its own, where one may be asked for."""
    watched = torch.is_grad_enabled() and dy.requires_grad
    return Once.apply(dy) if watched else dy  # pyright: ignore[reportReturnType]


def refuse_double_matmul(ctx: object, *grads: object) -> NoReturn:
    """The gradient of the gradient of a matmul, which torch has.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"{DOUBLE}, or take torch's own operators there")
