"""How ranks tell each other their routes where only devices know them, and gradients of weights.

On GPUs by kernels alone, and as one launch where the addresses of a call repeat: see replay.py.
Else by torch and by the library's collectives, with the same result.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.experts.routes import launch as launch_routes
from counterpoint.experts.routes.capacity import drop_least
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import OP, Found, Sizes, aligned, found_by, known_starts
from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Workspace
from counterpoint.run.launch import aligned as on_words
from counterpoint.run.launch_collective import Run, collective_of, in_order, replayed

GATHERED = Awaited(OP, "gather lists of experts", OP)


def sizes_of(workspace: Workspace, experts: Tensor, max_rows: int) -> Sizes:
    """Of a call with these experts."""
    tokens, top = experts.shape
    return Sizes(tokens, top, workspace.group.size(), max_rows, workspace.islands.number)


@lru_cache(maxsize=1024)
def by_kernels(
    sizes: Sizes, num_experts: int, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> bool:  # fmt: skip
    """Whether kernels find such routes; else torch does, with the same result.

    They are compiled here, by a call on zeros that no peer sees: to be asked before ranks meet, as
    one that compiles later is late for all. Between islands what they would save is not worth it.

    Args:
        dtypes: of the experts, and of their weights.
    """
    if sizes.islands > 1 or not launch_routes.takes(device, num_experts, sizes.top):
        return False
    shape = sizes.tokens, sizes.top
    experts, weights = (torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes)
    try:
        told = torch.zeros(sizes.ranks, shape[0], 2 * shape[1], dtype=torch.int32, device=device)
        launch_routes.tell_into(told[0], experts, weights, num_experts)
        found_by_kernels(0, sizes, told.flatten(0, 1), num_experts)
    except UnsupportedError:
        return False
    return True


def find(
    workspace: Workspace, sizes: Sizes, experts: Tensor, weights: Tensor, num_experts: int,
    drops: bool, kernels: bool,
) -> tuple[Found, Tensor]:  # fmt: skip
    """Those of tokens that have these experts; a token with an expert that is none has NaN weights.

    Rows that are more than a rank can take are left out.

    Args:
        experts: int32 or int64 [tokens, top], tokens equally many on all ranks.
        weights: floating point, of that shape.
        drops: those of the least weights are dropped, and no rank has more.
        kernels: see `by_kernels`.

    Returns:
        Routes, and how many rows each rank has dropped, int64 [ranks]; empty where none may be.
    """
    # ranks take it all or none, also where kernels find routes on some of them alone
    gather = _gather(workspace, sizes) if sizes.islands == 1 else None
    if gather is not None and kernels and not drops:
        found = _in_one(workspace, sizes, experts, weights, num_experts)
        return found, experts.new_empty(0, dtype=torch.int64)
    told = experts.new_empty(sizes.tokens, 2 * sizes.top, dtype=torch.int32)
    (launch_routes.tell_into if kernels else tell_into)(told, experts, weights, num_experts)
    every = told.new_empty(sizes.ranks * sizes.tokens, 2 * sizes.top)
    if gather is None:
        library_of(workspace, GATHERED).all_gather(every.view(-1), told.view(-1))
    else:
        in_order(workspace)
        gather(every, told)
    dropped = every.new_empty(0, dtype=torch.int64)
    if drops:
        dropped = drop_least(every, sizes.ranks, num_experts, sizes.max_rows)
    if kernels:
        return found_by_kernels(workspace.rank, sizes, every, num_experts), dropped
    ids, each = every[:, : sizes.top].long(), every[:, sizes.top :].contiguous()
    each = each.view(torch.float32)
    return found_by(workspace.rank, sizes, ids, each, num_experts), dropped


def _in_one(
    workspace: Workspace, sizes: Sizes, experts: Tensor, weights: Tensor, num_experts: int
) -> Found:
    """By kernels alone; a call whose addresses repeat is one launch: see replay.py."""
    route = experts.contiguous(), weights.contiguous()
    found = _new(sizes, experts, num_experts)
    memory = found.lists.new_empty(words_of(sizes, num_experts, experts.device))

    def launch(_: object = None) -> None:
        enqueue(workspace, sizes, route, found, memory)

    pointers = map(Tensor.data_ptr, (*route, memory, *found))
    key = OP, sizes, num_experts, experts.dtype, weights.dtype, *pointers
    if not replayed(workspace, key, launch):
        launch()
    return found


def by_kernels_alone(
    workspace: Workspace, sizes: Sizes, num_experts: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> bool:
    """Whether `enqueue` finds such routes; see `by_kernels`."""
    if sizes.islands > 1 or not by_kernels(sizes, num_experts, dtypes, workspace.device):
        return False
    return _gather(workspace, sizes) is not None


def _gather(workspace: Workspace, sizes: Sizes) -> Run | None:
    return collective_of(workspace, "all_gather", sizes.tokens * 2 * sizes.top, GATHERED)


@lru_cache(maxsize=1024)
def _starts(sizes: Sizes, num_experts: int, device: torch.device) -> list[int]:
    """Where parts of the memory of `enqueue` begin, and its end: int32."""
    part, ranks, shapes = sizes.tokens * 2 * sizes.top, sizes.ranks, shapes_of(sizes, num_experts)
    shape = ranks, num_experts, sizes.top, sizes.tokens
    words = launch_routes.words_of(shape, shapes[3][0][0], sizes.max_rows, device)
    return [*accumulate((aligned(part), aligned(ranks * part), aligned(words)), initial=0)]


def words_of(sizes: Sizes, num_experts: int, device: torch.device) -> int:
    """Of the memory that `enqueue` needs."""
    return _starts(sizes, num_experts, device)[-1]


def enqueue(
    workspace: Workspace, sizes: Sizes, route: Sequence[Tensor], found: Found, memory: Tensor
) -> None:
    """Launch what finds routes, of one island, where nothing is dropped: see `by_kernels_alone`.

    Args:
        route: experts and weights, without gaps.
        found: what is written.
        memory: int32 [`words_of`].
    """
    experts, weights = route
    num_experts, (first, second, third, _) = (
        found.counts.shape[1], _starts(sizes, found.counts.shape[1], experts.device)
    )  # fmt: skip
    part = sizes.tokens * 2 * sizes.top
    told = memory[first : first + part].view(-1, 2 * sizes.top)
    every = memory[second : second + sizes.ranks * part].view(-1, 2 * sizes.top)
    launch_routes.tell_into(told, experts, weights, num_experts)
    gather = _gather(workspace, sizes)
    assert gather is not None
    gather(every, told)
    given = launch_routes.Given(*found, sizes.at(found.lists)[:5], every)
    launch_routes.routes_into(given, workspace.rank, sizes.received, memory[third:])


def shapes_of(sizes: Sizes, num_experts: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of the parts of `Found` on one island."""
    table = (sizes.ranks, num_experts), torch.int64
    lists = (known_starts(sizes)[-1],), torch.int32
    return [((sizes.max_rows,), torch.float32), table, table, lists]


def _new(sizes: Sizes, like: Tensor, num_experts: int) -> Found:
    shapes = shapes_of(sizes, num_experts)
    return Found(*(like.new_empty(shape, dtype=dtype) for shape, dtype in shapes))


def tell_into(told: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> None:
    """What a rank tells all, by torch: see launch_routes.py."""
    none = experts == NONE
    wrong = ((experts < 0) | (experts >= num_experts) & ~none).any(1, keepdim=True)
    ids, bits = told.split(experts.shape[1], 1)
    ids.copy_(experts.clamp(0, num_experts - 1).masked_fill_(none, NONE))
    bits.copy_(weights.float().masked_fill(wrong, torch.nan).view(torch.int32))


def found_by_kernels(rank: int, sizes: Sizes, every: Tensor, num_experts: int) -> Found:
    """As `found_by` on one island, from what all ranks have told."""
    found = _new(sizes, every, num_experts)
    shape = sizes.ranks, num_experts, sizes.top, sizes.tokens
    words = launch_routes.words_of(shape, found.lists.shape[0], sizes.max_rows, every.device)
    given = launch_routes.Given(*found, sizes.at(found.lists)[:5], every)
    memory = every.new_empty(words)
    launch_routes.routes_into(given, rank, sizes.received, memory)
    return found


def weights_back(workspace: Workspace, lists: Tensor, each: Tensor, sizes: Sizes) -> Tensor:
    """What rows by expert have for their weights goes back to their tokens, fp32 [tokens, top].

    Args:
        each: fp32 [max_rows].
    """
    tokens, top, ranks, *_ = sizes
    awaited, part = Awaited(OP, "send gradients of weights", OP), tokens * top
    scatter = None
    if sizes.islands == 1:
        scatter = collective_of(workspace, "reduce_scatter", part, awaited)
    if scatter is not None:
        return _scattered(workspace, lists, each, sizes, scatter)
    sent = each.new_zeros(ranks * part + 1)
    entries = sizes.lists(lists).entries
    sent[entries.clamp(max=len(sent) - 1).long()] = each
    found = each.new_empty(ranks, part)
    library_of(workspace, awaited).all_to_all(found.view(-1), sent[:-1])
    return found.sum(0).view(tokens, top)  # each is zero but on one rank


def _scattered(
    workspace: Workspace, lists: Tensor, each: Tensor, sizes: Sizes, scatter: Run
) -> Tensor:
    """As `weights_back`, by kernels."""
    each = each if on_words(each) else each.clone()
    sent = each.new_empty(sizes.ranks * sizes.tokens * sizes.top)
    found = each.new_empty(sizes.tokens, sizes.top)

    def enqueue(stream: object = None) -> None:
        sent.zero_()
        launch_routes.name_entries(sent, sizes.at(lists).entries, each)
        scatter(found, sent)

    pointers = map(Tensor.data_ptr, (lists, each, sent, found))
    if not replayed(workspace, (f"{OP} backward", sizes, *pointers), enqueue):
        enqueue()
    return found
