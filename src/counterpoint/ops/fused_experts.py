"""How fused steps of experts run: a dispatch and its matmul in one kernel, or a matmul and combine.

Beside its one large kernel a call has small ones: where rows lie is found on the GPU, from counts
that the host need not know, and what has come is copied out of symmetric memory, or summed.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.errors import InputError
from counterpoint.kernels.all_to_all_matmul import all_to_all_matmul_kernel, clear_kernel
from counterpoint.kernels.matmul_all_to_all import (
    arrival_kernel,
    collect_kernel,
    matmul_all_to_all_kernel,
)
from counterpoint.kernels.routes import num_words, routes_kernel
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.fused_experts import Tile, settings_in
from counterpoint.plan.fused_sum import padded
from counterpoint.plan.steps import COUNTS
from counterpoint.runtime import compute
from counterpoint.runtime.compute import Action
from counterpoint.runtime.counted import DISPATCH
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch import ALIGN, Grid, Launch, Site, register
from counterpoint.runtime.workspace import Operands, Places

COLLECT_COLS = 2048  # of a row that a program takes at a time
COLLECTORS = 8  # programs for each SM
ONE = Grid(1, reserve=False, each=True)
ANY = 2**31 - 1  # rows of x, where they are known to suffice
COMBINE = "matmul_all_to_all"


class _Experts:
    """What both directions share: routes, memory, and the small kernels."""

    def __init__(self, site: Site) -> None:
        p, workspace = site.places.plan.problem, site.places.workspace
        self.p, self.workspace, self.tag = p, workspace, site.tag
        self.combines = p.op == COMBINE
        self.tile, self.sending = settings_in(site.bound.step)
        self.memory, self.dtype = fused_memory(workspace), getattr(torch, p.dtype)
        self.device, self.experts = workspace.device, p.experts * p.ranks
        self.item_bytes = p.item_bytes
        # the odd half begins at a whole row
        row_bytes = sum(p.operation.moved(p)) * p.item_bytes
        self.rows, self.flags = self.memory.turns, self.memory.flags
        self.half_rows = -(-self.rows.half_bytes // row_bytes)
        self.half_bytes = self.rows.half_bytes if self.combines else self.half_rows * row_bytes
        self.route_words = num_words(self.experts, p.ranks)
        self.options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        self.table: Tensor | None = None
        if p.counts == "equal":
            count = p.m // max(self.experts, 1)
            shape = (p.ranks, self.experts)
            self.table = torch.full(shape, count, dtype=torch.int32, device=self.device)
        self.find_routes = {dtype: self._routes(dtype) for dtype in (torch.int32, torch.int64)}

    def launch(
        self, kernel: Any, given: tuple[str, ...], fixed: dict[str, Any], grid: Grid,
        options: dict[str, int],
    ) -> Launch:  # fmt: skip
        """One kernel of this step, not compiled yet."""
        return Launch(kernel, given, fixed, grid, self.device, self.p.op, options)

    def shared(self) -> dict[str, Any]:
        """The arguments that both large kernels have alike."""
        tile, p = self.tile, self.p
        return {
            "rows_ptr": self.rows.bases, "flags_ptr": self.flags.bases,
            "state_ptr": self.memory.state, "N": p.n, "K": p.k, "E": self.experts,
            "half_flags": self.flags.half_bytes // 4, "rank": self.workspace.rank,
            "WORLD": p.ranks, "EXPERTS": padded(p.experts),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m, "STAGES": tile.stages,
        }  # fmt: skip

    def waiting(self) -> dict[str, Any]:
        """The arguments of a kernel that waits."""
        timeout_ns = int(self.workspace.timeout_s * 1e9)
        return {"fault_ptr": self.memory.fault, "tag": self.tag, "timeout_ns": timeout_ns}

    def collect(self, columns: int, count: int, index: torch.dtype, weights: torch.dtype,
                top: int = 0) -> Launch:  # fmt: skip
        """Copy rows out of symmetric memory, or weighted sums of `top` rows for each token.

        Args:
            count: the word of routes that says how many rows there are.
        """
        fixed = {
            "rows_ptr": self.rows.bases, "state_ptr": self.memory.state, "count": count,
            "spoils": self.route_words - 1, "over_ptr": self.memory.over, "N": columns,
            "half_bytes": self.half_bytes,
            "rank": self.workspace.rank, "TOP": top, "BLOCK_N": _block(columns),
        }  # fmt: skip
        given = ("routes_ptr", "index_ptr", "weights_ptr", "y_ptr", "tokens", "limit", "clear")
        launch = self.launch(collect_kernel, given, fixed, self.collectors, {"num_warps": 4})
        return launch.compile(torch.int32, index, weights, self.dtype, 0, 0, 0)

    @property
    def collectors(self) -> Grid:
        """Programs that copy rows."""
        if self.device.type != "cuda":
            return Grid(COLLECTORS, reserve=False, each=True)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Grid(COLLECTORS * sms, reserve=False, each=True)

    def _routes(self, dtype: torch.dtype) -> Launch:
        fixed = {
            "over_ptr": self.memory.over, "E": self.experts, "rank": self.workspace.rank,
            "WORLD": self.p.ranks, "EXPERTS": padded(self.experts),
            "BLOCK_M": self.tile.block_m, "BACK": self.combines,
        }  # fmt: skip
        given = ("counts_ptr", "routes_ptr", "limit", "has")
        launch = self.launch(routes_kernel, given, fixed, ONE, {"num_warps": 8})
        return launch.compile(dtype, torch.int32, 0, 0)

    def start(self, operands: Operands) -> tuple[Tensor, Tensor, Tensor, int, int, Any]:
        """(x, w, routes, limit, has, the launch that finds the routes with its arguments).

        Raises:
            InputError: counts are on the host, and a graph is being captured.
        """
        x, w, p = operands["x"], operands["w"], self.p
        table = self.table if p.counts == "equal" else operands[COUNTS]
        assert table is not None
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if not table.is_cuda:
                fix, want = "they change from call to call", "on the GPU while a graph is captured"
                raise InputError(p.op, "counts", want=want, got="on the host", fix=fix)
            self.workspace.keep(self.table)
        if table.device != self.device:
            # a pinned table may be filled anew before an asynchronous copy has read it
            table = table.to(self.device, non_blocking=not table.is_pinned())
        # rows that a rank may take, and rows of x: of counts on the device alone nobody has said so
        on_device = p.counts == "device"
        limit, has = (len(operands["y"]), len(x)) if on_device else (p.m, ANY)
        if not len(x):
            x = x.new_zeros(1, p.k)  # TMA takes no tensor without rows
        fits = w.data_ptr() % ALIGN == 0 and not any(
            s * self.item_bytes % ALIGN for s in w.stride() if s != 1
        )
        if not fits:
            w = w.clone(memory_format=torch.contiguous_format)
        if x.data_ptr() % ALIGN or table.data_ptr() % ALIGN:
            x, table = _aligned(x), _aligned(table)
        routes = x.new_empty(self.route_words, dtype=torch.int32)
        find = self.find_routes[table.dtype], (table, routes, limit, has)
        return x, w, routes, limit, has, find


def dispatch(site: Site) -> Action:
    """The launches of a dispatch. All that a rank may need by itself is compiled here, by all.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = _Experts(site)
    p, tile, sending = each.p, each.tile, each.sending
    whole = _whole_rows(each)
    come = p.ranks * (2 * each.experts + 1) + each.experts  # the word that says so: see routes.py
    given = ("x_ptr", "w_desc", "y_ptr", "routes_ptr", "T", "limit")
    fixed = each.shared() | each.waiting() | {
        "received_desc": TensorDescriptor.from_tensor(whole, [tile.block_m, tile.block_k]),
        "words": p.k * p.item_bytes // 4, "half_rows": each.half_rows,
        "SENDERS": sending.senders, "PARTS": sending.parts, "CHUNK": sending.words,
    }  # fmt: skip
    # no reserve of SMs: see kernels/all_to_all_matmul.py
    grid = Grid(None, sending.senders, reserve=False)
    multiply: dict[bool, Launch] = {}
    blocks = _blocks(tile)
    for columns in (False, True):
        launch = each.launch(
            all_to_all_matmul_kernel, given, fixed | {"COLUMNS": columns}, grid, each.options
        )
        w = _sample(each, columns)
        multiply[columns] = launch.compile(each.dtype, w, each.dtype, torch.int32, 0, 0)
    clear = each.launch(
        clear_kernel, ("y_ptr", "routes_ptr", "rows"),
        {"count": come, "N": p.n, "BLOCK_N": _block(p.n)}, each.collectors, {"num_warps": 4},
    ).compile(each.dtype, torch.int32, 0)  # fmt: skip
    collect = each.collect(p.k, come, each.dtype, each.dtype)

    def run(operands: Operands) -> None:
        x, w, routes, limit, _, find = each.start(operands)
        y, rows = operands["y"], operands.get("rows")
        columns = w.stride(1) == 1
        w_desc = TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, blocks[columns])
        launches = [find, (multiply[columns], (x, w_desc, y, routes, len(operands["x"]), limit))]
        clears = "clear" in operands
        if clears:  # not before: who has few rows would send them late
            launches.append((clear, (y, routes, len(y))))
        if rows is not None:
            launches.append((collect, (routes, rows, rows, rows, len(rows), limit, int(clears))))
        Launch.in_a_row(launches)

    return run


def combine(site: Site) -> Action:
    """The launches of a combine, compiled as those of a dispatch.

    The sums of a call alone are compiled at its first call: no peer waits for them.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    each = _Experts(site)
    p, tile = each.p, each.tile
    names = ("x_desc", "w_desc", "add_ptr", "routes_ptr", "R", "limit")
    fixed = each.shared() | {"half_bytes": each.half_bytes}
    grid = Grid(None, reserve=False)  # nothing waits in it: see kernels/matmul_all_to_all.py
    multiply: dict[tuple[bool, bool], Launch] = {}
    blocks = _blocks(tile)
    block = [tile.block_m, tile.block_k]
    some = torch.empty(1, p.k, dtype=each.dtype, device=each.device)
    x_like = TensorDescriptor.from_tensor(some, block)
    for columns in (False, True):
        for adds in (False, True):
            kinds = {"COLUMNS": columns, "HAS_ADD": adds}
            launch = each.launch(matmul_all_to_all_kernel, names, fixed | kinds, grid, each.options)
            samples = (x_like, _sample(each, columns), each.dtype, torch.int32, 0, 0)
            multiply[columns, adds] = launch.compile(*samples)
    waiting = {"flags_ptr", "state_ptr", "half_flags", "rank", "WORLD"}
    waits = {name: value for name, value in each.shared().items() if name in waiting}
    waits |= each.waiting()
    arrive = each.launch(arrival_kernel, (), waits, ONE, {"num_warps": 1}).compile()
    count = each.workspace.rank * (each.experts + 1) + each.experts  # own rows: see routes.py
    collect = each.collect(p.n, count, each.dtype, each.dtype)
    summing: dict[object, Launch] = {}

    def run(operands: Operands) -> None:
        x, w, routes, limit, _, find = each.start(operands)
        y, add, columns = operands["y"], operands.get("add"), w.stride(1) == 1
        x_desc = TensorDescriptor.from_tensor(x, block)
        if add is not None and add.data_ptr() % ALIGN:
            add = add.clone()
        w_desc = TensorDescriptor.from_tensor(w.transpose(1, 2) if columns else w, blocks[columns])
        products = (x_desc, w_desc, x if add is None else add, routes, len(x), limit)
        launches = [find, (multiply[columns, add is not None], products), (arrive, ())]
        if y.shape[1]:  # else nobody wants the rows themselves
            clears = int("clear" in operands)
            launches.append((collect, (routes, y, y, y, len(y), limit, clears)))
        if "sums" in operands:
            index, weights, sums = (operands[name] for name in ("index", "weights", "sums"))
            if index.data_ptr() % ALIGN or weights.data_ptr() % ALIGN:
                index, weights = _aligned(index), _aligned(weights)
            top, kinds = index.shape[1], (index.dtype, weights.dtype)
            if not top:
                sums.zero_()
            else:
                key = (top, *kinds)
                if key not in summing:
                    summing[key] = each.collect(p.n, count, *kinds, top)
                given = (routes, index, weights, sums, len(sums), limit, 0)
                launches.append((summing[key], given))
        Launch.in_a_row(launches)

    return run


def _whole_rows(each: _Experts) -> Tensor:
    """The rows of both halves of this rank's memory, as one tensor."""
    memory, p = each.rows.memory, each.p
    assert memory is not None, "reserved"
    rows = each.half_rows + p.m
    return memory.local()[: rows * p.k * p.item_bytes].view(each.dtype).view(rows, p.k)


def _blocks(tile: Tile) -> tuple[list[int], list[int]]:
    """The block of a load of weights that are stored by rows, and of such by columns."""
    return [1, tile.block_k, tile.block_n], [1, tile.block_n, tile.block_k]


def _sample(each: _Experts, columns: bool) -> TensorDescriptor:
    """A descriptor like that of a weight, of none."""
    some = torch.empty(1, 8, 8, dtype=each.dtype, device=each.device)
    return TensorDescriptor.from_tensor(some, _blocks(each.tile)[columns])


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGN else tensor


def _block(columns: int) -> int:
    return min(COLLECT_COLS, padded(columns))


def reference(site: Site) -> Action:
    """What the kernels compute, by torch and gloo: the serial plan of the same problem."""
    p, workspace = site.places.plan.problem, site.places.workspace
    plan = build(p, "serial")
    workspace.reserve(plan)
    places = Places(workspace, plan)
    actions: list[Action] = []
    for bound in bind(plan, workspace.rank).steps:
        if bound.step.kind == "matmul":
            actions += compute.matmuls((bound,), places)
        else:
            actions.append(compute.collective(bound, bound.parts[0], places))

    def run(operands: Operands) -> None:
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
