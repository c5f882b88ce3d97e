"""What both directions of fused experts share: memory, routes, blocks, and the small launches.

How they follow one another: fused_experts.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from counterpoint.experts.fused.kernel_combine import (
    arrival_kernel,
    collect_kernel,
    send_sums_kernel,
)
from counterpoint.experts.fused.plan_fused import Tile, inside, settings_in
from counterpoint.experts.routes.kernel_rows import num_words, routes_kernel, spoil_kernel
from counterpoint.experts.routes.on_device import Lists, Sizes
from counterpoint.experts.steps_rails import Rails
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.steps import COUNTS, ROUTES
from counterpoint.run.fused import fused_memory
from counterpoint.run.launch import ALIGN, At, Grid, Launch, Site
from counterpoint.tensor_parallel.plan_fused_sum import padded

COLLECT_COLS = 2048  # of a row that a program takes at a time
COLLECTORS = 8  # programs for each SM
ONE = Grid(1, reserve=False, each=True)
COMBINE = "matmul_all_to_all"
ANY = 2**31 - 1  # rows of x, where they are known to suffice
Launched = tuple[Launch, tuple[object, ...]]  # with its arguments
Launches = list[Launched]


class Started(NamedTuple):
    """What the launches of a call begin with.

    Args:
        limit: rows by expert that a rank may take.
        routes: see experts/routes/kernel_rows.py.
        moves: where the same of rows that travel begin, which of tokens are fewer.
        launches: that find both, with their arguments.
        lists: where those of tokens begin, and `sizes` of them.
        held: what has to stay until all is launched.
    """

    x: Tensor
    w: Tensor
    limit: int
    routes: Tensor
    moves: At
    launches: Launches
    lists: Lists[At] | None
    sizes: Sizes | None
    held: Tensor | None


Behind = Callable[[Started, Operands, Tensor], Launches]  # what follows the products


class Experts:
    """What both directions share: routes, memory, and the small kernels.

    Attributes:
        p: as the ranks of this island see it.
        rank: this one among them.
    """

    def __init__(self, site: Site) -> None:
        whole, workspace = site.places.plan.problem, site.places.workspace
        p = inside(whole)
        self.p, self.workspace, self.tag = p, workspace, site.tag
        self.islands, self.top, self.rank = whole.islands, whole.top_k, workspace.rank % p.ranks
        self.mates = slice(workspace.rank - self.rank, workspace.rank - self.rank + p.ranks)
        self.on_island = on_island(site.places)
        self.combines, self.of_tokens = p.op == COMBINE, p.by_routes
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
        self.words = -(-self.route_words // ALIGN) * ALIGN
        self.halves = p.by_routes and p.n % (2 * ALIGN // p.item_bytes) == 0  # of gate and up
        self.options = {"num_warps": self.tile.num_warps, "num_stages": self.tile.stages}
        self.table: Tensor | None = None
        if p.counts == "equal":
            count = p.m // max(self.experts, 1)
            shape = (p.ranks, self.experts)
            self.table = torch.full(shape, count, dtype=torch.int32, device=self.device)
        self.find_routes = {dtype: self._routes(dtype) for dtype in (torch.int32, torch.int64)}
        self.spoil = self._spoils() if self.islands > 1 else None

    def gates(self, w: Tensor) -> bool:
        """Whether gate and up, which lie so, are activated where they are multiplied."""
        return self.halves and w.stride(1) == 1

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
            "rows_ptr": self.rows.bases[self.mates], "flags_ptr": self.flags.bases[self.mates],
            "state_ptr": self.memory.state, "N": p.n, "K": p.k, "E": self.experts,
            "half_flags": self.flags.half_bytes // 4, "rank": self.rank,
            "WORLD": p.ranks, "EXPERTS": padded(p.experts),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m, "STAGES": tile.stages,
        }  # fmt: skip

    def waiting(self) -> dict[str, Any]:
        """The arguments of a kernel that waits."""
        timeout_ns = int(self.workspace.timeout_s * 1e9)
        return {"fault_ptr": self.memory.fault, "tag": self.tag, "timeout_ns": timeout_ns}

    def collect(
        self, columns: int, count: int, index: torch.dtype, weights: torch.dtype, top: int = 0,
        some: bool = False, weighted: bool = False,
    ) -> Launch:  # fmt: skip
        """Copy rows out of symmetric memory, or weighted sums of `top` rows for each token.

        Args:
            count: the word of routes that says how many rows there are.
            some: of `top` some are none, and rows have no weights unless they are `weighted`.
        """
        fixed = {
            "rows_ptr": self.rows.bases[self.mates], "state_ptr": self.memory.state, "count": count,
            "spoils": self.route_words - 1, "over_ptr": self.memory.over, "N": columns,
            "half_bytes": self.half_bytes, "room": self.p.m,
            "rank": self.rank, "TOP": top, "SOME": some, "WEIGHTED": weighted,
            "BLOCK_N": block(columns),
        }  # fmt: skip
        given = ("routes_ptr", "index_ptr", "weights_ptr", "y_ptr", "tokens", "limit", "clear")
        launch = self.launch(collect_kernel, given, fixed, self.collectors, {"num_warps": 4})
        return launch.compile(torch.int32, index, weights, self.dtype, 0, 0, 0)

    def arrive(self) -> Launch:
        """The one program that waits for all ranks' flags."""
        waiting = {"flags_ptr", "state_ptr", "half_flags", "rank", "WORLD"}
        waits = {name: value for name, value in self.shared().items() if name in waiting}
        waits |= self.waiting()
        return self.launch(arrival_kernel, (), waits, ONE, {"num_warps": 1}).compile()

    @property
    def collectors(self) -> Grid:
        """Programs that copy rows."""
        if self.device.type != "cuda":
            return Grid(COLLECTORS, reserve=False, each=True)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Grid(COLLECTORS * sms, reserve=False, each=True)

    def _routes(self, dtype: torch.dtype) -> Launch:
        fixed = {
            "over_ptr": self.memory.over, "E": self.experts, "rank": self.rank,
            "WORLD": self.p.ranks, "EXPERTS": padded(self.experts),
            "BLOCK_M": self.tile.block_m, "BACK": self.combines,
        }  # fmt: skip
        given = ("counts_ptr", "moved_ptr", "routes_ptr", "limit", "has", "moves")
        grid = Grid(1 + self.of_tokens, reserve=False, each=True)
        launch = self.launch(routes_kernel, given, fixed, grid, {"num_warps": 8})
        return launch.compile(dtype, dtype, torch.int32, 0, 0, 0)

    def _spoils(self) -> Launch:
        """What looks whether there are too many rows, on any island."""
        fixed = {"over_ptr": self.memory.over, "spoils": self.route_words - 1,
                 "BACK": self.combines}  # fmt: skip
        launch = self.launch(spoil_kernel, ("word_ptr", "routes_ptr"), fixed, ONE, {"num_warps": 1})
        return launch.compile(torch.int64, torch.int32)

    def sizes(self, operands: Operands, limit: int) -> Sizes:
        """Those of a call, of the device's routes.

        Args:
            limit: rows by expert that a rank may take.
        """
        held = operands["y" if self.combines else "x"].shape[0]
        return Sizes(held // self.islands, self.top, self.p.ranks * self.islands, limit,
                     self.islands)  # fmt: skip


def on_island(places: Places) -> Callable[[Operands], Operands]:
    """The operands of a call as the ranks of an island have them: tokens are those of rails."""
    p = places.plan.problem
    if p.islands == 1:
        return lambda operands: operands
    rails, rows = Rails(places), "y" if p.op == COMBINE else "x"

    def seen(operands: Operands) -> Operands:
        counts, firsts = operands[ROUTES]
        held = rails.blocks("rail", operands).flatten(0, 1)
        return operands | {rows: held, COUNTS: counts, ROUTES: firsts}

    return seen


def sums_of_tokens(each: Experts, arrive: Launched) -> Behind:
    """Behind the products: a token's sum over the experts here is sent, what comes is summed."""
    p, shared = each.p, {"rows_ptr", "flags_ptr", "state_ptr", "N", "E", "rank", "WORLD"}
    fixed = {name: value for name, value in each.shared().items() if name in shared} | {
        "half_bytes": each.half_bytes, "half_flags": each.flags.half_bytes // 4,
        "room": p.m, "PAIRS": padded(each.experts),
        "TOP": each.top, "BLOCK_N": block(p.n),
    }  # fmt: skip
    names = ("product_ptr", "index_ptr", "weights_ptr", "moves_ptr", "limit", "received")
    sums: dict[bool, Launch] = {}
    like = each.dtype, torch.int32, torch.float32, torch.int32, 0, 0
    for weighted in (False, True):
        given = send_sums_kernel, names, fixed | {"WEIGHTED": weighted}, each.collectors
        sums[weighted] = each.launch(*given, {"num_warps": 4}).compile(*like)
    most = min(each.top, p.ranks)
    collect = each.collect(p.n, 0, torch.int32, each.dtype, most, some=True)

    def behind(started: Started, operands: Operands, product: Tensor) -> Launches:
        lists, y, weights = started.lists, operands["y"], operands.get("weights")
        assert lists is not None and started.sizes is not None, "of tokens"
        by = product if weights is None else aligned(weights)
        sent = product, lists.sums, by, started.moves, started.limit, started.sizes.received
        come = started.routes, lists.y, y, y, y.shape[0], ANY, 1
        return [(sums[weights is not None], sent), arrive, (collect, come)]

    return behind


def whole_rows(each: Experts) -> Tensor:
    """The rows of both halves of this rank's memory, as one tensor."""
    memory, p = each.rows.memory, each.p
    assert memory is not None, "reserved"
    rows = each.half_rows + p.m
    return memory.local()[: rows * p.k * p.item_bytes].view(each.dtype).view(rows, p.k)


def block_of(tile: Tile, columns: bool, gated: bool) -> list[int]:
    """What is loaded at a time of weights that are stored by rows, or by columns.

    Args:
        gated: gate and up, by columns, as one tensor [E_local, 2, N / 2, K].
    """
    if gated:
        return [1, 2, tile.block_n // 2, tile.block_k]
    return [1, tile.block_n, tile.block_k] if columns else [1, tile.block_k, tile.block_n]


def sample(each: Experts, columns: bool, gated: bool = False) -> TensorDescriptor:
    """A descriptor like that of a weight, of none."""
    some = torch.empty(1, *([2] * gated), 8, 8, dtype=each.dtype, device=each.device)
    return TensorDescriptor.from_tensor(some, block_of(each.tile, columns, gated))


def aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ALIGN else tensor


def block(columns: int) -> int:
    return min(COLLECT_COLS, padded(columns))
