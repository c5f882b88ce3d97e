"""Which expert gets which token: what a router knows of its own tokens, told to who needs it.

The lists of a token's experts and weights go the way of its row: to another island once, to the
rank of the same place, and inside it to the ranks that have some of them.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.ops.agreement import agree, refused
from counterpoint.ops.check import check_dense, check_group, check_place
from counterpoint.ops.register import refuse_double, register
from counterpoint.ranges import whole
from counterpoint.runtime.find_routes import find_routes, weights_back
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.routes import routes_in
from counterpoint.runtime.workspace import workspace_of

OP = "exchange_routes"


class Routes(NamedTuple):
    """Where the tokens of all ranks go, as far as this rank takes part: of `exchange_routes`.

    Attributes:
        counts: int64 [ranks, E], rows of each rank for each expert.
        numbers: which of them, for the operators.
        weights: fp32 [R], of each row that comes to this rank's experts, by expert.
        tokens: of this rank.
    """

    counts: Tensor
    numbers: Tensor
    weights: Tensor
    tokens: int


def exchange_routes(
    experts: Tensor, weights: Tensor, *, num_experts: int, group: dist.ProcessGroup | None = None
) -> Routes:
    """Tell all ranks which experts its tokens go to: `counts=` of both operators of experts.

    Then x of `all_to_all_matmul` is tokens, not a row for each of their experts, and a token goes
    once to each island that has some of them; `matmul_all_to_all` returns their weighted sums. On
    CPU ranks so far. Differentiable in weights.

    Args:
        experts: int32 or int64 [tokens, top_k], 0 to num_experts - 1; tokens may differ by rank.
        weights: floating point [tokens, top_k].
        num_experts: on all ranks together; a multiple of the ranks.
        group: whose ranks take part, 2 or more; the default group if None.

    Returns:
        Where rows go; weights as fp32, of the rows as they come to this rank.

    Raises:
        InputError: an argument is wrong; nothing was launched.
        PeerTimeoutError: a rank did not come.

    Example:
        >>> routes = cp.exchange_routes(experts, weights, num_experts=64)  # doctest: +SKIP
        >>> h = cp.all_to_all_matmul(tokens, w_up, counts=routes)  # doctest: +SKIP
        >>> y = cp.matmul_all_to_all(F.silu(h), w_down, counts=routes)  # doctest: +SKIP
    """
    try:
        group = _checked(experts, weights, num_experts, group)
    except CounterpointError as error:
        raise refused(error, group, experts) from None
    each, counts, numbers = torch.ops.counterpoint.exchange_routes(
        experts, weights.float(), num_experts, group.group_name, group.size()
    )
    return Routes(counts, numbers, each, experts.shape[0])


def _checked(
    experts: Tensor, weights: Tensor, num_experts: int, group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    group = check_group(OP, group)
    check_dense(OP, experts=experts)
    check_dense(OP, weights=weights)
    if experts.dtype not in (torch.int32, torch.int64) or experts.dim() != 2:
        got = f"{experts.dtype} {list(experts.shape)}"
        raise InputError(OP, "experts", want="int32 or int64 [tokens, top_k]", got=got)
    if not weights.is_floating_point() or weights.shape != experts.shape:
        got = f"{weights.dtype} {list(weights.shape)}"
        want = f"floating point {list(experts.shape)} as experts"
        raise InputError(OP, "weights", want=want, got=got)
    for name, tensor in (("experts", experts), ("weights", weights)):
        if tensor.device.type != "cpu":
            raise InputError(OP, name, want="on the CPU, as its ranks", got=tensor.device)
    check_place(OP, weights=weights)
    whole(OP, "num_experts", num_experts, 1)
    if group.size() == 1 or num_experts % group.size():
        want = f"a multiple of the {group.size()} ranks, which are 2 or more"
        raise InputError(OP, "num_experts", want=want, got=num_experts)
    return group


def _run(
    experts: Tensor, weights: Tensor, num_experts: int, group_name: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    workspace = workspace_of(group_of(group_name), experts.device)
    facts = {"op": OP, "num_experts": str(num_experts), "top_k": str(experts.shape[1])}
    key = (OP, *facts.values())
    if key not in workspace.agreed:
        workspace.agreed[key] = agree(OP, facts, workspace)
    workspace.board.note(workspace.agreed[key])
    return find_routes(workspace, experts, weights, num_experts)


def _fake(
    experts: Tensor, weights: Tensor, num_experts: int, group_name: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    numbers, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    counts = experts.new_empty(group_size, num_experts, dtype=torch.int64)
    return weights.new_empty(rows), counts, experts.new_empty(numbers, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weights, _, *ctx.where = inputs
    _, counts, numbers = output
    ctx.save_for_backward(numbers)
    ctx.shape = weights.shape
    ctx.mark_non_differentiable(counts, numbers)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (numbers,), (tokens, top) = ctx.saved_tensors, ctx.shape
    each = grads[0].contiguous()
    each = torch.ops.counterpoint.weights_back(each, numbers, tokens, top, *ctx.where)
    return None, each, None, None, None


def _run_back(
    each: Tensor, numbers: Tensor, tokens: int, top: int, group_name: str, group_size: int
) -> Tensor:
    workspace = workspace_of(group_of(group_name), each.device)
    workspace.board.note_op(f"{OP} backward")
    return weights_back(workspace, routes_in(numbers, group_size), each)


def _fake_back(
    each: Tensor, numbers: Tensor, tokens: int, top: int, group_name: str, group_size: int
) -> Tensor:
    return each.new_empty(tokens, top)


register(
    f"{OP}(Tensor experts, Tensor weights, int num_experts, str group_name, int group_size) -> "
    "(Tensor, Tensor, Tensor)",
    _run, _fake, _backward, _save,
)  # fmt: skip
register(
    "weights_back(Tensor each, Tensor numbers, SymInt tokens, SymInt top, str group_name, "
    "int group_size) -> Tensor",
    _run_back, _fake_back, refuse_double,
)  # fmt: skip
