"""Which expert gets which token: what a router knows of its own tokens, told to who needs it.

The lists of a token's experts and weights go the way of its row: to another island once, to the
rank of the same place, and inside it to the ranks that have some of them. Where no host is to
wait, all ranks gather all lists, and all rows go to all islands.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.experts.routes import tell as tell_routes
from counterpoint.experts.routes.find import ends_of, find_routes, weights_back
from counterpoint.experts.routes.lists import Routes as Found
from counterpoint.experts.routes.lists import blocks_in
from counterpoint.experts.routes.on_device import Found as Told
from counterpoint.experts.routes.on_device import Sizes
from counterpoint.experts.steps_counted import rows_by_rank
from counterpoint.group.notice_board import Facts
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import Workspace, workspace_of
from counterpoint.ops.agreement import agree, checking, left, note, note_known, refused
from counterpoint.ops.check import asked_of, check_dense, check_group, check_place, is_fake
from counterpoint.ops.register import as_a_constant, refuse_double, register
from counterpoint.ranges import whole

OP = "exchange_routes"


class Routes(NamedTuple):
    """Where the tokens of all ranks go, as far as this rank takes part: of `exchange_routes`.

    Between islands max_rows costs bytes and memory, because no host knows which tokens have experts
    where: each goes once to each other island, also where it has none, and a row of each comes
    back. With 8 of 256 experts on 2 islands that is hardly more than without max_rows. Where a
    router keeps tokens on few of many islands it is much more; leave max_rows out there. A rank may
    get back islands * tokens * r rows, where r is the lesser of top_k and the ranks of an island.
    Memory is 2 + 2 / r times that, or times max_rows if that is more. The kernel starts when all
    tokens are there, so nothing of these operators hides the exchange.

    Attributes:
        counts: int64 [ranks, E], on the host, or with max_rows on the tokens' device: rows of each
            rank for each expert.
        numbers: int64, there, for the operators: how many rows go where. With max_rows on several
            islands, of this one.
        lists: int32, on the tokens' device, for the operators: which ones.
        weights: fp32 [R], of each row that comes to this rank's experts: by expert, then by source
            rank; of one source by the token's first expert here, then by token. R is max_rows where
            that is given, and the last ones are 0.
        tokens: of this rank.
        top_k: experts of a token, where max_rows is given; else 0.
        dropped: int64 [ranks], there: rows that were dropped on their way to each rank's experts;
            None: without capacity="drop".
    """

    counts: Tensor
    numbers: Tensor
    lists: Tensor
    weights: Tensor
    tokens: int
    top_k: int = 0
    dropped: Tensor | None = None


def exchange_routes(
    experts: Tensor, weights: Tensor, *, num_experts: int, group: dist.ProcessGroup | None = None,
    max_rows: int | None = None, capacity: str = "error",
) -> Routes:  # fmt: skip
    """Tell all ranks which experts its tokens go to: `counts=` of both operators of experts.

    Then x of `all_to_all_matmul` is tokens, not a row for each of their experts, and a token goes
    once to each island that has some of them, and there once to each rank that has;
    `matmul_all_to_all` returns their weighted sums, which come back likewise. Differentiable in
    weights. On GPUs the host waits for all earlier work, to learn how many rows go where.

    With max_rows it does not wait, and a CUDA graph can be captured: results of `all_to_all_matmul`
    have max_rows rows, of which the last ones are not written. Where more come to a rank, all
    results on all ranks are NaN, and a later call raises InputError, which says how many more. With
    capacity="drop" the rank keeps the rows of the greatest weights instead, and of equal ones those
    that come first: by rank, by token, by the token's order of experts. A row that is dropped adds
    nothing to its token's sum, and the other weights stay as they are; its gradients are 0.
    The operators do not wait either where plan "fused" takes them, or "islands" on several: 16-bit
    numbers, K and N multiples of 8, and islands of a power of 2 of ranks. Elsewhere they wait, in
    no graph.

    Args:
        experts: int32 or int64 [tokens, top_k], 0 to num_experts - 1; tokens may differ by rank,
            but not with max_rows. 2**31 - 1 is no expert: of a token that has fewer than others, or
            of one that makes up the number. On the CPU or a GPU as the group serves. With max_rows
            a GPU's are looked at under COUNTERPOINT_CHECK=1 alone; else sums of tokens with others
            are NaN.
        weights: floating point [tokens, top_k], there, too.
        num_experts: on all ranks together; a multiple of the ranks.
        group: whose ranks take part, 2 or more; the default group if None.
        max_rows: rows that the experts of a rank may get at most; the same on all ranks. None: as
            many as come.
        capacity: "error" where more come, or "drop"; with max_rows.

    Returns:
        Where rows go; weights as fp32, of the rows as they come to this rank.

    Raises:
        InputError: an argument is wrong; nothing was launched. Or a CUDA graph is being captured,
            without max_rows. Or, on CPU ranks, more than max_rows come to a rank.
        PeerTimeoutError: a rank did not come.

    Example:
        >>> routes = cp.exchange_routes(experts, weights, num_experts=64)  # doctest: +SKIP
        >>> h = cp.all_to_all_matmul(tokens, w_up, counts=routes)  # doctest: +SKIP
        >>> y = cp.matmul_all_to_all(F.silu(h), w_down, counts=routes)  # doctest: +SKIP
    """
    try:
        return _routes(experts, weights, num_experts, group, max_rows, capacity)
    except BaseException as error:
        left(OP, error, group, experts)
        raise


def _routes(
    experts: Tensor, weights: Tensor, num_experts: int, group: dist.ProcessGroup | None,
    max_rows: int | None, capacity: str,
) -> Routes:  # fmt: skip
    try:
        group = _checked(experts, weights, num_experts, group, max_rows)
        check_capacity(OP, capacity, max_rows)
    except CounterpointError as error:
        raise refused(error, group, experts) from None
    drops = capacity == "drop"
    traced = not torch.compiler.is_compiling() and is_fake(experts)
    place = group.group_name, str(experts.device)
    each, counts, numbers, lists, dropped = torch.ops.counterpoint.exchange_routes(
        experts, weights.float(), num_experts, max_rows,
        1 if max_rows is None or traced else num_islands(*place), drops,
        group.group_name, group.size(), asked_of(weights=weights),
    )  # fmt: skip
    top_k, lost = 0 if max_rows is None else experts.shape[1], dropped if drops else None
    return Routes(counts, numbers, lists, each, experts.shape[0], top_k, lost)


def check_capacity(op: str, capacity: object, max_rows: int | None) -> None:
    """Refuse an unknown capacity, and dropping rows where max_rows is not given.

    Raises:
        InputError: it is one of these.
    """
    if capacity not in ("error", "drop"):
        raise InputError(op, "capacity", want="error or drop", got=repr(capacity))
    if capacity == "drop" and max_rows is None:
        raise InputError(op, "max_rows", want='given with capacity="drop"', got=None)


@as_a_constant
def num_islands(group_name: str, device: str) -> int:
    """How many islands ranks are on; collective at their first call."""
    return workspace_of(group_of(group_name), torch.device(device)).islands.number


def _checked(
    experts: Tensor, weights: Tensor, num_experts: int, group: dist.ProcessGroup | None,
    max_rows: int | None,
) -> dist.ProcessGroup:  # fmt: skip
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
    check_place(OP, experts=experts)
    if weights.device != experts.device:
        want = f"on {experts.device} as experts"
        raise InputError(OP, "weights", want=want, got=weights.device)
    whole(OP, "num_experts", num_experts, 1)
    if group.size() == 1 or num_experts % group.size():
        want = f"a multiple of the {group.size()} ranks, which are 2 or more"
        raise InputError(OP, "num_experts", want=want, got=num_experts)
    if max_rows is not None:
        whole(OP, "max_rows", max_rows, 1)
        if not 1 <= experts.shape[1] <= num_experts:
            want = f"[tokens, 1 to {num_experts}, all experts] with max_rows"
            raise InputError(OP, "experts", want=want, got=list(experts.shape))
    return group


def _run(
    experts: Tensor, weights: Tensor, num_experts: int, max_rows: int | None, islands: int,
    drops: bool, group_name: str, *where: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _, asks = (*where, "")[:2]
    if max_rows is None and experts.is_cuda and torch.cuda.is_current_stream_capturing():
        want, got = "of a call that waits for the host", "a CUDA graph in capture, which cannot"
        raise InputError(OP, "experts", want=want, got=got)
    workspace = workspace_of(group_of(group_name), experts.device)
    if max_rows is not None:
        room = Room(num_experts, max_rows, drops)
        found, dropped = on_device(workspace, experts, weights, room, asks)
        return found.weights, found.counts, found.firsts, found.lists, dropped
    facts = _facts(experts.shape[1], num_experts, None, asks)
    with workspace.board.whole():
        note(facts, workspace)
        known = find_routes(workspace, experts, weights, num_experts)
    return *known, experts.new_empty(0, dtype=torch.int64)


def _facts(top_k: int, num_experts: int, max_rows: int | None, asks: str) -> Facts:
    facts = {"op": OP, "num_experts": str(num_experts), "top_k": str(top_k)}
    return facts | {"max_rows": str(max_rows), "requires_grad": asks or "nothing"}


class Room(NamedTuple):
    """What routes that the device alone knows have room for."""

    num_experts: int  # of all ranks
    max_rows: int
    drops: bool  # what is too much; else it is an error


def on_device(
    workspace: Workspace, experts: Tensor, weights: Tensor, room: Room, asks: str
) -> tuple[Told, Tensor]:
    """Routes that no host reads, and the rows that each rank has dropped, empty where none may be.

    Args:
        experts: int32 or int64 [tokens, top_k].
        weights: floating point, of that shape.
        asks: see `asked_of`.

    Raises:
        InputError: on CPU ranks, experts are none, or rows are more than there is room for.
    """
    num_experts, max_rows, drops = room
    sizes = tell_routes.sizes_of(workspace, experts, max_rows)
    dtypes = experts.dtype, weights.dtype
    kernels = tell_routes.by_kernels(sizes, num_experts, dtypes, experts.device)
    with workspace.board.whole():
        begin(workspace, experts, room, asks)
        found = tell_routes.find(
            workspace, sizes, experts, weights, num_experts, drops, kernels
        )  # fmt: skip
        if experts.is_cpu or checking():
            _look(experts, found[0].counts, num_experts, max_rows, workspace)
    return found


def begin(workspace: Workspace, experts: Tensor, room: Room, asks: str) -> None:
    """Say that such a call of `on_device` begins."""
    (num_experts, max_rows, drops), (tokens, top_k) = room, experts.shape

    def facts() -> Facts:
        more = {"tokens": str(tokens), "capacity": "drop" if drops else "error"}
        return _facts(top_k, num_experts, max_rows, asks) | more

    note_known((OP, tokens, top_k, room, asks), facts, workspace)


def _look(
    experts: Tensor, counts: Tensor, num_experts: int, max_rows: int, workspace: Workspace
) -> None:
    """Refuse what the host has to read, on all ranks alike.

    Raises:
        InputError: experts are none, or rows are more than max_rows.
    """
    if experts.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong, each = None, rows_by_rank(counts, True).tolist()
    low, high = (int(n) for n in ends_of(experts))
    if low < 0 or high >= num_experts:
        got = f"{low} to {high} on rank {workspace.rank}"
        wrong = InputError(OP, "experts", want=f"0 to {num_experts - 1}", got=got)
    elif max(each) > max_rows:
        want = f">= {max(each)}, what rank {each.index(max(each))} gets"
        got = f"{max_rows}, {max(each) - max_rows} fewer"
        wrong = InputError(OP, "max_rows", want=want, got=got)
    agree(OP, {"op": OP}, workspace, wrong)


def _fake(
    experts: Tensor, weights: Tensor, num_experts: int, max_rows: int | None, islands: int,
    drops: bool, group_name: str, *where: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    group_size: int = where[0]
    dropped = experts.new_empty(group_size if drops else 0, dtype=torch.int64)
    if max_rows is not None:
        tokens, top = experts.shape
        sizes = Sizes(tokens, top, group_size, max_rows, islands)
        table = experts.new_empty(group_size, num_experts, dtype=torch.int64)
        firsts = table.new_empty(sizes.firsts_shape(num_experts))
        lists = experts.new_empty(sizes.starts[-1], dtype=torch.int32)
        return weights.new_empty(max_rows), table, firsts, lists, dropped
    numbers, lists, rows = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    counts = torch.empty(group_size, num_experts, dtype=torch.int64)
    table = torch.empty(numbers, dtype=torch.int64)
    found = weights.new_empty(lists, dtype=torch.int32)
    return weights.new_empty(rows), counts, table, found, dropped


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, _, max_rows, _, _, *ctx.where, _ = inputs
    _, counts, numbers, lists, dropped = output
    ctx.save_for_backward(numbers, lists)
    ctx.given = *weights.shape, max_rows is not None
    ctx.mark_non_differentiable(counts, numbers, lists, dropped)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    each = torch.ops.counterpoint.weights_back(
        grads[0].contiguous(), *ctx.saved_tensors, *ctx.given, *ctx.where
    )
    return None, each, *(None,) * 7


def _run_back(
    each: Tensor, numbers: Tensor, lists: Tensor, tokens: int, top: int, on_device: bool,
    group_name: str, group_size: int,
) -> Tensor:  # fmt: skip
    workspace = workspace_of(group_of(group_name), each.device)
    if on_device:
        sizes = Sizes(tokens, top, group_size, len(each), workspace.islands.number)
        return back_on_device(workspace, lists, each, sizes)
    with workspace.board.whole():
        workspace.board.note_op(f"{OP} backward")
        return weights_back(workspace, Found(blocks_in(numbers), lists), each)


def back_on_device(workspace: Workspace, lists: Tensor, each: Tensor, sizes: Sizes) -> Tensor:
    """Gradients of the weights of rows by expert, fp32 [max_rows], as those of tokens."""
    with workspace.board.whole():
        workspace.board.note_op(f"{OP} backward")
        return tell_routes.weights_back(workspace, lists, each, sizes)


def _fake_back(
    each: Tensor, numbers: Tensor, lists: Tensor, tokens: int, top: int, on_device: bool,
    group_name: str, group_size: int,
) -> Tensor:  # fmt: skip
    return each.new_empty(tokens, top)


register(OP, _run, _fake, _backward, _save)
register("weights_back", _run_back, _fake_back, refuse_double)
