"""How fused steps of experts run: a dispatch and its matmul in one kernel, or a matmul and combine.

Beside its one large kernel a call has small ones: where rows lie is found on the GPU, from counts
that the host need not know, and what has come is copied out of symmetric memory, or summed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.kernels.all_to_all_matmul import all_to_all_matmul_kernel, clear_kernel
from counterpoint.kernels.matmul_all_to_all import matmul_all_to_all_kernel, send_sums_kernel
from counterpoint.ops.expert_launches import (
    ANY,
    COMBINE,
    Experts,
    Launches,
    Started,
    aligned,
    block,
    blocks_of,
    sample,
    whole_rows,
)
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.fused_sum import padded
from counterpoint.plan.steps import COUNTS, ROUTES
from counterpoint.problem import Problem
from counterpoint.runtime import compute, routed
from counterpoint.runtime.compute import Action
from counterpoint.runtime.counted import DISPATCH
from counterpoint.runtime.device_routes import Sizes, on_host
from counterpoint.runtime.launch import Grid, Launch, Site, register
from counterpoint.runtime.routes import LISTS
from counterpoint.runtime.workspace import Operands, Places


def dispatch(site: Site) -> Action:
    """The launches of a dispatch. All that a rank may need by itself is compiled here, by all.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = Experts(site)
    p, tile, sending = each.p, each.tile, each.sending
    whole, words = whole_rows(each), p.k * p.item_bytes // 4
    come = p.ranks * (2 * each.experts + 1) + each.experts  # the word that says so: see routes.py
    given = ("x_ptr", "w_desc", "y_ptr", "routes_ptr", "moves_ptr", "sent_ptr", "index_ptr", "T",
             "limit", "room")  # fmt: skip
    fixed = each.shared() | each.waiting() | {
        "received_desc": TensorDescriptor.from_tensor(whole, [tile.block_m, tile.block_k]),
        "words": words, "half_rows": each.half_rows,
        "SENDERS": sending.senders, "PARTS": sending.parts, "CHUNK": sending.words,
        "TOKEN_WORDS": min(padded(words), sending.words) if p.by_routes else 0,
    }  # fmt: skip
    # no reserve of SMs: see kernels/all_to_all_matmul.py
    grid = Grid(None, sending.senders, reserve=False)
    multiply: dict[bool, Launch] = {}
    blocks = blocks_of(tile)
    for columns in (False, True):
        launch = each.launch(
            all_to_all_matmul_kernel, given, fixed | {"COLUMNS": columns}, grid, each.options
        )
        like = each.dtype, sample(each, columns), each.dtype, *(torch.int32,) * 4, 0, 0, 0
        multiply[columns] = launch.compile(*like)
    clear = each.launch(
        clear_kernel, ("y_ptr", "routes_ptr", "rows"),
        {"count": come, "N": p.n, "BLOCK_N": block(p.n)}, each.collectors, {"num_warps": 4},
    ).compile(each.dtype, torch.int32, 0)  # fmt: skip
    index = torch.int32 if p.by_routes else each.dtype
    collect = each.collect(p.k, come, index, each.dtype, int(p.by_routes), some=p.by_routes)

    def run(operands: Operands) -> None:
        x, w, limit, routes, moves, launches, lists = each.start(operands)
        y, rows = operands["y"], operands.get("rows")
        columns = w.stride(1) == 1
        w_desc = TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, blocks[columns])
        given = routes, routes, len(operands["x"]), limit, limit
        if lists is not None:
            given = lists.sent, lists.rows, len(lists.sent), limit, p.m
        launches.append((multiply[columns], (x, w_desc, y, routes, moves, *given)))
        clears = "clear" in operands
        if clears:  # not before: who has few rows would send them late
            launches.append((clear, (y, routes, len(y))))
        if rows is not None:
            which = rows if lists is None else lists.rows
            launches.append((collect, (routes, which, rows, rows, len(rows), limit, int(clears))))
        Launch.in_a_row(launches)

    return run


def combine(site: Site) -> Action:
    """The launches of a combine, compiled as those of a dispatch.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = Experts(site)
    p, tile = each.p, each.tile
    names = ("x_desc", "w_desc", "add_ptr", "product_ptr", "routes_ptr", "R", "limit")
    fixed = each.shared() | {"half_bytes": each.half_bytes, "LOCAL": p.by_routes}
    grid = Grid(None, reserve=False)  # nothing waits in it: see kernels/matmul_all_to_all.py
    multiply: dict[tuple[bool, bool], Launch] = {}
    blocks = blocks_of(tile)
    tall = [tile.block_m, tile.block_k]
    some = torch.empty(1, p.k, dtype=each.dtype, device=each.device)
    x_like = TensorDescriptor.from_tensor(some, tall)
    for columns in (False, True):
        for adds in (False, True):
            kinds = {"COLUMNS": columns, "HAS_ADD": adds}
            launch = each.launch(matmul_all_to_all_kernel, names, fixed | kinds, grid, each.options)
            samples = (x_like, sample(each, columns), each.dtype, each.dtype, torch.int32, 0, 0)
            multiply[columns, adds] = launch.compile(*samples)
    arrive = each.arrive(), ()
    send, take = _of_tokens(each) if p.by_routes else _of_rows(each)

    def run(operands: Operands) -> None:
        started = each.start(operands)
        x, w, limit, routes, *_ = started
        y, add, columns = operands["y"], operands.get("add"), w.stride(1) == 1
        product = x.new_empty(limit, p.n) if p.by_routes else y
        x_desc = TensorDescriptor.from_tensor(x, tall)
        w_desc = TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, blocks[columns])
        added = x if add is None else aligned(add)
        products = multiply[columns, add is not None], (
            x_desc, w_desc, added, product, routes, len(x), limit
        )  # fmt: skip
        sends, takes = send(started, operands, product), take(started, operands)
        Launch.in_a_row([*started.launches, products, *sends, arrive, *takes])

    return run


def _of_rows(
    each: Experts,
) -> tuple[Callable[..., Launches], Callable[[Started, Operands], Launches]]:
    """What a combine launches behind the matmul, and behind the rows that have come: to take them.

    Sums of rows that a call names are compiled at its first call: no peer waits for them.
    """
    p = each.p
    count = each.workspace.rank * (each.experts + 1) + each.experts  # own rows: see routes.py
    collect = each.collect(p.n, count, each.dtype, each.dtype)
    summing: dict[object, Launch] = {}

    def send(*_: object) -> Launches:  # the matmul has
        return []

    def take(started: Started, operands: Operands) -> Launches:
        routes, limit, y = started.routes, started.limit, operands["y"]
        launches: Launches = []
        if y.shape[1]:  # else nobody wants the rows themselves
            clears = int("clear" in operands)
            launches.append((collect, (routes, y, y, y, len(y), limit, clears)))
        if "sums" in operands:
            index, weights = aligned(operands["index"]), aligned(operands["weights"])
            sums, top = operands["sums"], index.shape[1]
            kinds = index.dtype, weights.dtype
            if not top:
                sums.zero_()
                return launches
            if (top, *kinds) not in summing:
                summing[top, *kinds] = each.collect(p.n, count, *kinds, top)
            given = routes, index, weights, sums, len(sums), limit, 0
            launches.append((summing[top, *kinds], given))
        return launches

    return send, take


def _of_tokens(
    each: Experts,
) -> tuple[Callable[..., Launches], Callable[[Started, Operands], Launches]]:
    """As `_of_rows`: a token's sum over the experts here is sent, and what comes is summed."""
    p = each.p
    shared = {"rows_ptr", "flags_ptr", "state_ptr", "N", "E", "half_flags", "rank", "WORLD"}
    fixed = {name: value for name, value in each.shared().items() if name in shared} | {
        "half_bytes": each.half_bytes, "room": p.m, "PAIRS": padded(each.experts),
        "TOP": p.top_k, "BLOCK_N": block(p.n),
    }  # fmt: skip
    names = ("product_ptr", "index_ptr", "weights_ptr", "moves_ptr", "limit")
    sums: dict[bool, Launch] = {}
    for weighted in (False, True):
        given = fixed | {"WEIGHTED": weighted}
        launch = each.launch(send_sums_kernel, names, given, each.collectors, {"num_warps": 4})
        like = each.dtype, torch.int32, torch.float32, torch.int32, 0
        sums[weighted] = launch.compile(*like)
    most = min(p.top_k, p.ranks)
    collect = each.collect(p.n, 0, torch.int32, each.dtype, most, some=True)

    def send(started: Started, operands: Operands, product: Tensor) -> Launches:
        assert started.lists is not None, "of tokens"
        weights = operands.get("weights")
        by = product if weights is None else aligned(weights)
        given = product, started.lists.sums, by, started.moves, started.limit
        return [(sums[weights is not None], given)]

    def take(started: Started, operands: Operands) -> Launches:
        assert started.lists is not None, "of tokens"
        y = operands["y"]
        return [(collect, (started.routes, started.lists.y, y, y, len(y), ANY, 1))]

    return send, take


def reference(site: Site) -> Action:
    """What the kernels compute, by torch and gloo: the serial plan of the same problem."""
    p, workspace = site.places.plan.problem, site.places.workspace
    known = replace(p, counts="routed") if p.by_routes else p
    plan = build(known, "serial")
    workspace.reserve(plan)
    places = Places(workspace, plan)
    actions: list[Action] = []
    for bound in bind(plan, workspace.rank).steps:
        if bound.step.routed and bound.step.kind in routed.ACTIONS:
            actions.append(routed.ACTIONS[bound.step.kind](bound, places))
        elif bound.step.kind == "matmul":
            actions += compute.matmuls((bound,), places)
        else:
            actions.append(compute.collective(bound, bound.parts[0], places))

    def run(operands: Operands) -> None:
        if p.by_routes:
            operands |= _as_host_reads(p, site, operands)
        y = operands["y"]
        if not y.shape[1]:  # nobody wants the rows themselves
            operands = operands | {"y": y.new_empty(len(y), p.n)}
        for action in actions:
            action(operands)
        if p.ranks == 1 and "rows" in operands:
            copy_own(operands)
        if p.op == COMBINE:
            finish(workspace.rank, operands)

    return run


def _as_host_reads(p: Problem, site: Site, operands: Operands) -> Operands:
    """Routes of the device, as plans that the host lays out have them."""
    workspace, x, y = site.places.workspace, operands["x"], operands["y"]
    tokens, limit = (y, x) if p.op == COMBINE else (x, y)
    sizes = Sizes(len(tokens), p.top_k, p.ranks, len(limit))
    size = workspace.islands.size
    found = on_host(workspace.rank, size, operands[ROUTES], operands[LISTS], sizes)
    return {ROUTES: found.blocks.packed(), LISTS: found.lists}


def finish(rank: int, operands: Operands) -> None:
    """What is left of a combine when all rows are back: rows that are none, and sums."""
    if "clear" in operands and COUNTS in operands:
        operands["y"][int(operands[COUNTS][rank].sum()) :].zero_()
    if "sums" in operands:
        sums = sum_of_rows(operands["y"], operands["index"], operands["weights"])
        operands["sums"].copy_(sums)


def copy_own(operands: Operands) -> None:
    """The rows that come to the experts of a group of one rank."""
    x, rows = operands["x"], operands["rows"]
    rows[: len(x)] = x[: len(rows)]


def sum_of_rows(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over j of weights[t, j] y[index[t, j]], in fp32 and in order, rounded once."""
    total = torch.zeros(index.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(index.shape[1]):
        total += weights[:, j, None].float() * y.index_select(0, index[:, j])
    return total.to(y.dtype)


register(DISPATCH, dispatch, reference)
register(COMBINE, combine, reference)
