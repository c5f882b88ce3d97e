"""The mode in which the bits of a row do not depend on the rows beside it: on, or off."""

from types import TracebackType

from counterpoint.group.workspace import Action, Operands
from counterpoint.run.execute import Code

# how many contexts are open, of the process, as torch's own modes that change bits: compilers guard
# on it, and each call looks at it
depth = 0


class batch_invariant:
    """A context in which a row's bits do not depend on how many rows are beside it.

    Of `all_gather_matmul`, `matmul_reduce_scatter`, `matmul_all_reduce`, `all_reduce_rms_norm`,
    `matmul_all_reduce_rms_norm`, both LayerNorms, and the layers that call them. Every row is
    multiplied over the whole of K in one order, by a matmul of our own; partial results are rounded
    to the dtype of x at any number of rows, and summed in fp32 in the order of ranks. So the plan
    does not matter either: "auto" chooses among those that keep to this, and others are refused. A
    bias is added as in `all_gather_matmul`; to a sum over ranks it is added once that has been
    rounded. A norm adds up the columns of a row in one order. Other operators of several ranks are
    refused.

    Same bits need the same kind of GPU, versions of Triton and of this library, number of ranks,
    weights and dtype; a sum that rounds to zero may have either sign. Gradients are computed as
    always: their bits may depend on the batch. On CPU ranks the mode is slow.

    It is a mode of the process, all its threads, and all ranks have to be in it alike. For one call
    or layer put the word behind its `plan`: `plan="auto invariant"`. What `compile_options()` puts
    into a model's forward is in it where the model is called in it; matmuls that it leaves are
    torch's, and their bits may depend on the batch.

    Example:
        >>> with counterpoint.batch_invariant():
        ...     y = counterpoint.matmul_all_reduce(x, w, group=tp)  # doctest: +SKIP
    """

    def __enter__(self) -> None:
        global depth
        depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        global depth
        depth -= 1


def in_mode() -> bool:
    """Whether the context is on."""
    return depth > 0


def add_bias(code: Code | None) -> Action | None:
    """What remains of a sum over ranks: plans round it before or after they add a bias.

    So in this mode none has one, and it is added to what has been rounded.
    """
    if code is None or not code.program.plan.problem.invariant:
        return None

    def add(operands: Operands) -> None:
        if (bias := operands.get("bias")) is not None:
            operands["y"] += bias

    return add
