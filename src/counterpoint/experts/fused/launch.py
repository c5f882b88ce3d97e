"""How fused steps of experts run: a dispatch and its matmul in one kernel, or a matmul and combine.

Beside its one large kernel a call has small ones: where rows lie is found on the GPU, from counts
that the host need not know, and what has come is copied out of symmetric memory, or summed.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.experts import plan_operators, steps_routed
from counterpoint.experts.fused.kernel_combine import matmul_all_to_all_kernel
from counterpoint.experts.fused.kernel_dispatch import all_to_all_matmul_kernel, clear_kernel
from counterpoint.experts.fused.memory import (
    ANY,
    COMBINE,
    Behind,
    Experts,
    Launched,
    Launches,
    Started,
    aligned,
    block,
    block_of,
    on_island,
    sample,
    sums_of_tokens,
    whole_rows,
)
from counterpoint.experts.fused.plan_fused import inside
from counterpoint.experts.fused.sums import sum_of_rows
from counterpoint.experts.routes.lists import LISTS, NONE
from counterpoint.experts.routes.on_device import Sizes, on_host
from counterpoint.experts.steps_counted import DISPATCH
from counterpoint.group.workspace import Action, Operands, Places
from counterpoint.ops.activations import SWIGLU
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import COUNTS, ROUTES
from counterpoint.problem import Problem
from counterpoint.run import activated, compute
from counterpoint.run.launch import ALIGN, At, Grid, Launch, Site, at, register, temporaries
from counterpoint.tensor_parallel.plan_fused_sum import padded


def _temporaries(each: Experts, operands: Operands) -> Operands:
    """Memory for routes, and of tokens for the products that are summed, of a call to replay."""
    x = operands["x"]
    found = {"words": x.new_empty(each.words * (1 + each.of_tokens), dtype=torch.int32)}
    if each.combines and each.of_tokens:
        found["product"] = x.new_empty(x.shape[0], each.p.n)
    hidden = operands.get("hidden")
    if hidden is not None and not operands["y"].shape[1] and not each.gates(operands["w"]):
        found["products"] = x.new_empty(hidden.shape[0], each.p.n)
    return found


def _start(each: Experts, operands: Operands) -> Started:
    """What the launches of a call begin with.

    Raises:
        InputError: counts are on the host, and a graph is being captured.
    """
    x, w, p = operands["x"], operands["w"], each.p
    table = each.table if p.counts == "equal" else operands[COUNTS]
    assert table is not None
    if each.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if not table.is_cuda:
            fix, want = "they change from call to call", "on the GPU while a graph is captured"
            raise InputError(p.op, "counts", want=want, got="on the host", fix=fix)
        each.workspace.keep(each.table)
    if table.device != each.device:
        # a pinned table may be filled anew before an asynchronous copy has read it
        table = table.to(each.device, non_blocking=not table.is_pinned())
    # rows that a rank may take, and rows of x: of counts on the device alone nobody has said so
    limit, has = (operands["y"].shape[0], x.shape[0]) if p.counts == "device" else (p.m, ANY)
    taken = limit
    if each.of_tokens:  # tokens fit; rows by expert may not
        limit = len(x if each.combines else operands["y"])
        taken, has = (ANY, limit) if each.combines else (limit, ANY)
        if each.islands > 1:  # too many rows are looked for on all islands
            taken = has = ANY
    if not x.shape[0]:
        x = x.new_zeros(1, p.k)  # TMA takes no tensor without rows
    fits = w.data_ptr() % ALIGN == 0 and not any(
        s * each.item_bytes % ALIGN for s in w.stride() if s != 1
    )
    if not fits:
        w = w.clone(memory_format=torch.contiguous_format)
    if x.data_ptr() % ALIGN or table.data_ptr() % ALIGN:
        x, table = aligned(x), aligned(table)
    words, firsts, routes = each.words, table, operands.get("words")
    if routes is None:
        routes = x.new_empty(words * (1 + each.of_tokens), dtype=torch.int32)
    moves: At = routes
    lists = sizes = held = None
    if each.of_tokens:
        firsts, held, moves = aligned(operands[ROUTES]), aligned(operands[LISTS]), at(routes, words)
        sizes = each.sizes(operands, limit)
        lists = sizes.at(held)
    given = table, firsts, routes, taken, has, words
    launches: Launches = [(each.find_routes[table.dtype], given)]
    if each.spoil is not None:
        assert lists is not None, "of islands"
        over = lists.over
        over = over.view(torch.int64) if isinstance(over, Tensor) else over
        launches.append((each.spoil, (over, routes)))
    return Started(x, w, limit, routes, moves, launches, lists, sizes, held)


def dispatch(site: Site) -> Action:
    """The launches of a dispatch. All that a rank may need by itself is compiled here, by all.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = Experts(site)
    p, multiply, taken = each.p, _dispatches(each), _taken(each)
    blocks = {way: block_of(each.tile, *way) for way in multiply}

    def run(operands: Operands) -> None:
        if each.islands > 1:
            operands = each.on_island(operands)
        started = _start(each, operands)
        x, w, limit, routes, moves, launches, lists, sizes, _ = started
        y, hidden = operands["y"], operands.get("hidden")
        gated = hidden is not None and each.gates(w)
        if hidden is not None and not gated and not y.shape[1]:
            y = operands["products"] if "products" in operands else x.new_empty(limit, p.n)
        columns = w.stride(1) == 1
        stored = w.transpose(1, 2) if columns else w
        stored = stored.unflatten(1, (2, -1)) if gated else stored
        w_desc = TensorDescriptor.from_tensor(stored, blocks[columns, gated])
        given = routes, routes, operands["x"].shape[0], limit, limit
        if lists is not None and sizes is not None:
            given = lists.sent, lists.rows, sizes.back, limit, p.m
        written = y, y if hidden is None else hidden, routes, moves
        keeps = int(y.shape[1] > 0)
        launches.append((multiply[columns, gated], (x, w_desc, *written, *given, keeps)))
        Launch.in_a_row(launches + taken(started, operands, y))
        if hidden is not None and not gated:
            activated.into(SWIGLU, y, None, hidden, operands[COUNTS], each.rank)

    temporaries[run] = partial(_temporaries, each)
    return run


def _dispatches(each: Experts) -> dict[tuple[bool, bool], Launch]:
    """The large kernel: of weights by columns or by rows, and of such of gate and up."""
    p, tile, sending = each.p, each.tile, each.sending
    given = ("x_ptr", "w_desc", "y_ptr", "hidden_ptr", "routes_ptr", "moves_ptr", "sent_ptr",
             "index_ptr", "T", "limit", "room", "keeps")  # fmt: skip
    words, block_of_rows = p.k * p.item_bytes // 4, [tile.block_m, tile.block_k]
    fixed = each.shared() | each.waiting() | {
        "received_desc": TensorDescriptor.from_tensor(whole_rows(each), block_of_rows),
        "words": words, "half_rows": each.half_rows,
        "SENDERS": sending.senders, "PARTS": sending.parts, "CHUNK": sending.words,
        "TOKEN_WORDS": min(padded(words), sending.words) if p.by_routes else 0,
    }  # fmt: skip
    # no reserve of SMs: see experts/fused/kernel_dispatch.py
    grid = Grid(None, sending.senders, reserve=False)
    ways = [(False, False), (True, False)]
    if each.halves:
        ways.append((True, True))
    found: dict[tuple[bool, bool], Launch] = {}
    for columns, gated in ways:
        kinds = {"COLUMNS": columns, "GATED": gated}
        launch = each.launch(all_to_all_matmul_kernel, given, fixed | kinds, grid, each.options)
        like = each.dtype, sample(each, columns, gated), *(each.dtype,) * 2, *(torch.int32,) * 4
        try:
            found[columns, gated] = launch.compile(*like, 0, 0, 0, 0)
        except UnsupportedError:
            if not gated:
                raise
            each.halves = False  # they are activated behind it
    return found


def _taken(each: Experts) -> Behind:
    """Behind the products: rows that are none are zeroed; rows or tokens that came are taken."""
    p = each.p
    come = p.ranks * (2 * each.experts + 1) + each.experts  # the word that says so: see routes.py
    clear = each.launch(
        clear_kernel, ("y_ptr", "routes_ptr", "rows"),
        {"count": come, "N": p.n, "BLOCK_N": block(p.n)}, each.collectors, {"num_warps": 4},
    ).compile(each.dtype, torch.int32, 0)  # fmt: skip
    index = torch.int32 if p.by_routes else each.dtype
    collect = each.collect(p.k, come, index, each.dtype, int(p.by_routes), some=p.by_routes)
    keep = weigh = collect
    if p.by_routes:
        keep = each.collect(p.k, come, each.dtype, each.dtype)
        weigh = each.collect(p.k, come, index, torch.float32, 1, some=True, weighted=True)

    def behind(started: Started, operands: Operands, y: Tensor) -> Launches:
        routes, lists, launches = started.routes, started.lists, Launches()
        clears = "clear" in operands
        if clears:  # not before: who has few rows would send them late
            launches.append((clear, (y, routes, y.shape[0])))
        rows, weights = operands.get("rows"), operands.get("row_weights")
        if rows is not None:
            which, by = rows if lists is None else lists.rows, rows
            if weights is not None:
                by = aligned(weights)
            given = routes, which, by, rows, rows.shape[0], started.limit, int(clears)
            launches.append((collect if weights is None else weigh, given))
        received = operands.get("received")
        if received is not None:
            given = started.moves, received, received, received, received.shape[0], ANY, 0
            launches.append((keep, given))
        return launches

    return behind


def combine(site: Site) -> Action:
    """The launches of a combine, compiled as those of a dispatch.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = Experts(site)
    p, tile = each.p, each.tile
    names = ("x_desc", "w_desc", "add_ptr", "product_ptr", "routes_ptr", "R", "limit")
    fixed = each.shared() | {"half_bytes": each.half_bytes, "LOCAL": p.by_routes}
    grid = Grid(None, reserve=False)  # nothing waits in it: see experts/fused/kernel_combine.py
    multiply: dict[tuple[bool, bool], Launch] = {}
    blocks = [block_of(tile, columns, False) for columns in (False, True)]
    tall = [tile.block_m, tile.block_k]
    some = torch.empty(1, p.k, dtype=each.dtype, device=each.device)
    x_like = TensorDescriptor.from_tensor(some, tall)
    for columns in (False, True):
        for adds in (False, True):
            kinds = {"COLUMNS": columns, "HAS_ADD": adds}
            launch = each.launch(matmul_all_to_all_kernel, names, fixed | kinds, grid, each.options)
            samples = (x_like, sample(each, columns), each.dtype, each.dtype, torch.int32, 0, 0)
            multiply[columns, adds] = launch.compile(*samples)
    behind = (sums_of_tokens if each.of_tokens else _of_rows)(each, (each.arrive(), ()))

    def run(operands: Operands) -> None:
        if each.islands > 1:
            operands = each.on_island(operands)
        started = _start(each, operands)
        x, w, limit, routes, _, launches, *_ = started
        y, add, columns = operands["y"], operands.get("add"), w.stride(1) == 1
        x_desc = TensorDescriptor.from_tensor(x, tall)
        if add is not None and add.data_ptr() % ALIGN:
            add = add.clone()
        w_desc = TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, blocks[columns])
        product = operands.get("product") if each.of_tokens else y
        if product is None:
            product = x.new_empty(limit, p.n)
        products = (x_desc, w_desc, x if add is None else add, product, routes, x.shape[0], limit)
        launches.append((multiply[columns, add is not None], products))
        Launch.in_a_row(launches + behind(started, operands, product))

    temporaries[run] = partial(_temporaries, each)
    return run


def _of_rows(each: Experts, arrive: Launched) -> Behind:
    """Behind the products, which are on their way: rows are taken as they have come, or summed.

    Sums of rows that a call names are compiled at its first call: no peer waits for them.
    """
    n, rank = each.p.n, each.workspace.rank
    count = rank * (each.experts + 1) + each.experts  # own rows: see routes.py
    collect = each.collect(n, count, each.dtype, each.dtype)
    summing: dict[object, Launch] = {}

    def behind(started: Started, operands: Operands, y: Tensor) -> Launches:
        routes, limit, launches = started.routes, started.limit, [arrive]
        if y.shape[1]:  # else nobody wants the rows themselves
            clears = int("clear" in operands)
            launches.append((collect, (routes, y, y, y, y.shape[0], limit, clears)))
        if "sums" in operands:
            index, weights, sums = (operands[name] for name in ("index", "weights", "sums"))
            if index.data_ptr() % ALIGN or weights.data_ptr() % ALIGN:
                index, weights = aligned(index), aligned(weights)
            top, kinds = index.shape[1], (index.dtype, weights.dtype)
            if not top:
                sums.zero_()
                return launches
            key = (top, *kinds)
            if key not in summing:
                summing[key] = each.collect(n, count, *kinds, top)
            given = (routes, index, weights, sums, sums.shape[0], limit, 0)
            launches.append((summing[key], given))
        return launches

    return behind


def reference(site: Site) -> Action:
    """What the kernels compute, by torch and gloo: the serial plan of the same problem.

    Of several islands that of one, whose scratch may lie where this plan has its own.
    """
    whole, workspace = site.places.plan.problem, site.places.workspace
    p, seen = inside(whole), on_island(site.places)
    combines = p.op == COMBINE
    serial = plan_operators.combine_serial if combines else plan_operators.dispatch_serial
    # routes are those of tokens on one rank, too, where `build` has plain matmuls
    plan = serial(replace(p, counts="routed")) if p.by_routes else build(p, "serial")
    workspace.reserve(plan)
    places = Places(workspace, plan, workspace.rank % p.ranks)
    actions: list[Action] = []
    for bound in bind(plan, places.rank).steps:
        if bound.step.routed and bound.step.kind in steps_routed.ACTIONS:
            actions.append(steps_routed.ACTIONS[bound.step.kind](bound, places))
        elif bound.step.kind == "matmul":
            actions += compute.matmuls((bound,), places)
        else:
            actions.append(compute.collective(bound, bound.parts[0], places))

    rows = "y" if p.op == COMBINE else "x"

    def run(operands: Operands) -> None:
        operands = seen(operands)
        held = operands[rows]
        if whole.islands > 1:
            operands[rows] = held.clone()
        _run(operands)
        if whole.islands > 1 and p.op == COMBINE:
            held.copy_(operands[rows])

    def _run(operands: Operands) -> None:
        lists = operands.get(LISTS)
        if "received" in operands:
            operands["rows"] = operands["x"].new_empty(operands["y"].shape[0], p.k)
        if p.by_routes:
            operands |= _as_host_reads(whole, places, operands)
        y = operands["y"]
        if not y.shape[1]:  # nobody wants the rows themselves
            operands = operands | {"y": y.new_empty(y.shape[0], p.n)}
        for action in actions:
            action(operands)
        if p.ranks == 1 and "rows" in operands and not p.by_routes:
            copy_own(operands)
        if p.op == COMBINE:
            finish(places.rank, operands)
        _beside(operands, lists, whole.top_k, places)

    return run


def _beside(operands: Operands, lists: Tensor | None, top: int, places: Places) -> None:
    """What a dispatch of tokens is asked for beside rows, by torch: see `dispatch`."""
    rows = operands.get("rows")
    if rows is not None and "row_weights" in operands:
        rows.copy_((rows.float() * operands["row_weights"][:, None]).to(rows.dtype))
    if "received" in operands:
        assert lists is not None and rows is not None, "of tokens"
        sizes = Sizes(len(operands["x"]), top, places.plan.problem.ranks, len(rows))
        index = sizes.lists(lists).rows
        there = index != NONE
        operands["received"][index[there].long()] = rows[there]
    if "hidden" in operands:
        counts = operands[COUNTS]
        activated.into(SWIGLU, operands["y"], None, operands["hidden"], counts, places.rank)


def _as_host_reads(p: Problem, places: Places, operands: Operands) -> Operands:
    """Routes of the device, as plans that the host lays out have them.

    Args:
        p: of all islands.
    """
    x, y = operands["x"], operands["y"]
    held, limit = (y.shape[0], x.shape[0]) if p.op == COMBINE else (x.shape[0], y.shape[0])
    sizes = Sizes(held // p.islands, p.top_k, p.ranks, limit, p.islands)
    found = on_host(places.rank, operands[ROUTES], operands[LISTS], sizes)
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
    rows[: x.shape[0]] = x[: rows.shape[0]]


register(DISPATCH, dispatch, reference)
register(COMBINE, combine, reference)
