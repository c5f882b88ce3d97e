"""Updates of embedding tables in the backward: each row that was named takes its optimizer's step.

No gradient of a table is made, neither dense nor sparse: the sum of a row is applied where it is
summed. On GPUs the exchange of gradients and the update run on a stream of their own, which the
backward joins at its end: what autograd runs in between, such as the backward of other layers, runs
beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import increment_version

from counterpoint.embedding.exchange import Sent, Slice, exchange
from counterpoint.embedding.gradients import (
    Lookups,
    first_rows,
    sorted_by_row,
    sum_slices,
    sums_by_torch,
    weight_gradient,
)
from counterpoint.embedding.launch_gradient import Tables, tables_of
from counterpoint.embedding.plan_embedding_bag_all_to_all import OP
from counterpoint.errors import InputError
from counterpoint.group.workspace import refuse_capture
from counterpoint.ops.register import register
from counterpoint.ranges import check


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent of embedding tables, as part of the backward.

    row -= lr * scale * gradient, in fp32, rounded once to the dtype of the table.

    Args:
        lr: learning rate, 0 to 1e6, at first: see `ShardedEmbeddingBags.set_learning_rate`.
        scale: factor of gradients, which are sums over the samples of all ranks. Beside
            DistributedDataParallel, which averages, pass one over the number of ranks.

    Raises:
        InputError: a number is none, or out of its range.
    """

    lr: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        check("SGD", self)

    @property
    def rates(self) -> tuple[float, float, float]:
        """As an update takes them: learning rate, epsilon, scale."""
        return float(self.lr), 0.0, float(self.scale)


@dataclass(frozen=True)
class RowWiseAdagrad:
    """Adagrad with one number of state for each row, as part of the backward.

    With g = scale * gradient: state += mean of g * g over the columns, then
    row -= lr * g / (sqrt(state) + eps), in fp32, rounded once to the dtype of the table. It is the
    rule of FBGEMM's and torchrec's row-wise Adagrad.

    Args:
        lr: see `SGD`.
        eps: epsilon, 0 to 1e6.
        scale: see `SGD`.

    Raises:
        InputError: a number is none, or out of its range.
    """

    lr: float
    eps: float = 1e-8
    scale: float = 1.0

    def __post_init__(self) -> None:
        check("RowWiseAdagrad", self)

    @property
    def rates(self) -> tuple[float, float, float]:
        """As an update takes them: learning rate, epsilon, scale."""
        return float(self.lr), float(self.eps), float(self.scale)


FusedOptimizer = SGD | RowWiseAdagrad


class Use:
    """A forward of a module, as of how many updates its tables were."""

    def __init__(self, steps: "Steps") -> None:
        self.count = steps.count
        steps.uses.add(self)


class Steps:
    """Updates of the tables of one module: how many there were, and one that may be under way.

    Attributes:
        count: of updates that have begun.
        uses: forwards whose backward has not come, while somebody may still ask for it.
        waiting: uses that the backward of number `backward` updates for when it ends.
        beside: the stream of an update that nobody has waited for; None: there is none.
        tables: as kernels take them, by where and how they lie.
    """

    def __init__(self) -> None:
        self.count = 0
        self.uses: WeakSet[Use] = WeakSet()
        self.waiting: list[tuple[Sequence[Slice], Lookups]] = []
        self.backward = -1
        self.beside: torch.cuda.Stream | None = None
        self.tables: dict[tuple[object, ...], Tables] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, whose tables lie elsewhere."""
        self.join()
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be that copy."""
        self.__init__()
        self.count = state["count"]

    def join(self) -> None:
        """Have the current stream wait for an update that is under way."""
        if self.beside is not None:
            torch.cuda.current_stream(self.beside.device).wait_stream(self.beside)
            self.beside = None

    def placed(self, tables: Sequence[Tensor], sums: Sequence[Tensor]) -> Tables:
        """The tables as kernels take them; copied to the GPU when they lie elsewhere than before.

        Raises:
            InputError: they have to be copied while a graph is captured.
        """
        key = (*map(Tensor.data_ptr, tables), *map(Tensor.size, tables), tables[0].dtype,
               *map(Tensor.stride, tables), *map(Tensor.data_ptr, sums))  # fmt: skip
        found = self.tables.get(key)
        if found is None:
            if tables[0].is_cuda:
                refuse_capture("tables that lie where none did in an earlier backward")
            found = tables_of(tables, first_rows(tables)[:-1], tables[0], sums)
            self.tables = {key: found}
        return found


class Update(NamedTuple):
    """What the backward of a call does to its tables.

    Args:
        kind: "sgd" or "rowwise_adagrad".
        rates: fp32 [3], on the device of the tables: learning rate, epsilon, scale.
        sums: fp32 [rows] of each table, the state of "rowwise_adagrad"; none for "sgd".
        steps: of the module.
    """

    kind: str
    rates: Tensor
    sums: Sequence[Tensor]
    steps: Steps


def apply_use(
    use: Use, update: Update, dy: Tensor, pooled: Lookups, sent: Sent, *, of_weights: bool
) -> Tensor | None:  # fmt: skip
    """Update the tables by what a use asks for: now, or together with other uses.

    Others may follow in this backward while their forwards have not seen theirs. It ends with one
    update by the sum.

    Returns:
        The gradient of weights, of tables as they were before; None where it is not asked for.

    Raises:
        InputError: tables have been updated since the forward.
    """
    steps = update.steps
    if steps.count != use.count:
        got = f"tables that {steps.count - use.count} updates have changed since the forward"
        fix = "a fused optimizer adds up gradients of several calls in one backward alone"
        raise InputError(OP, "backward", want="one for all forwards since the last", got=got,
                         fix=fix)  # fmt: skip
    steps.uses.discard(use)
    task = _backward_under_way()
    if steps.uses or (steps.waiting and steps.backward == task):
        return _wait(task, update, dy, pooled, sent, of_weights=of_weights)
    steps.count += 1
    if of_weights:
        return update_in_order(update, dy, pooled, sent, of_weights=True)
    update_beside(update, dy, pooled, sent)
    return None


def _wait(
    task: int, update: Update, dy: Tensor, pooled: Lookups, sent: Sent, *, of_weights: bool
) -> Tensor | None:  # fmt: skip
    steps = update.steps
    if dy.is_cuda:
        refuse_capture("one update for several calls of a module")
    slices = exchange(dy, sent)
    dw = weight_gradient(slices, pooled) if of_weights else None
    if steps.backward != task or not steps.waiting:
        steps.backward, steps.waiting = task, []  # what another backward has left, which raised
        engine: Any = Variable._execution_engine  # pyright: ignore
        engine.queue_callback(lambda: _apply_waiting(update))
    steps.waiting.append((slices, pooled))
    return dw


def _apply_waiting(update: Update) -> None:
    steps = update.steps
    waiting, steps.waiting = steps.waiting, []
    steps.count += 1
    steps.join()
    _update_by_torch(update, waiting)
    increment_version([*waiting[0][1].tables, *update.sums])


def apply_update(update: Update, slices: Sequence[Slice], pooled: Lookups) -> None:
    """Update all rows that were named, each once: those of a slice of tables when it has come."""
    kind, rates, sums, steps = update
    tables = pooled.tables
    if pooled.indices.is_cuda and pooled.indices.numel():
        placed = steps.placed(tables, sums)
        entries = sorted_by_row(pooled, placed, len(slices[0].dy))
        sum_slices(placed, slices, entries, kind, rates)
    else:
        _update_by_torch(update, [(slices, pooled)])
    increment_version([*tables, *sums])  # what autograd has saved of them is another now


@torch.no_grad()
def _update_by_torch(update: Update, uses: Sequence[tuple[Sequence[Slice], Lookups]]) -> None:
    found = [list(sums_by_torch(*use)) for use in uses]
    if not any(pooled.indices.numel() for _, pooled in uses):
        return
    lr, eps, scale = update.rates.tolist()
    tables = uses[0][1].tables
    sums = update.sums or [None] * len(tables)
    for table, state, *parts in zip(tables, sums, *found, strict=True):
        rows, g = _added_up(parts)
        step = g.mul_(scale) * lr
        if state is not None:
            state[rows] += g.square().mean(1)
            step = step / (state[rows].sqrt() + eps)[:, None]
        table[rows] = (table[rows].float() - step).to(table.dtype)


def _added_up(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows that are named by any of the parts, and the sum of each."""
    if len(parts) == 1:
        return parts[0]
    names, values = (torch.cat(each) for each in zip(*parts, strict=True))
    rows, places = torch.unique(names, return_inverse=True)
    return rows, values.new_zeros(len(rows), values.shape[1]).index_add_(0, places, values)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def update_beside(update: Update, dy: Tensor, pooled: Lookups, sent: Sent) -> None:
    """Exchange and update on a stream of their own, until the end of this backward.

    Args:
        dy: of own bags.
    """
    steps = update.steps
    if not dy.is_cuda:
        apply_update(update, exchange(dy, sent), pooled)
        return
    steps.join()
    stream, here = _stream_of(dy.device), torch.cuda.current_stream(dy.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        apply_update(update, exchange(dy, sent), pooled)
    steps.beside = stream
    # until the join nobody may have the memory that is read there
    kept = [dy, pooled]

    def join() -> None:
        steps.join()
        kept.clear()

    engine: Any = Variable._execution_engine  # pyright: ignore
    engine.queue_callback(join)


def update_in_order(
    update: Update, dy: Tensor, pooled: Lookups, sent: Sent, *, of_weights: bool
) -> Tensor | None:
    """Exchange and update on the current stream.

    Returns:
        The gradient of weights, of tables as they were before; None where it is not asked for.
    """
    slices = exchange(dy, sent)
    dw = weight_gradient(slices, pooled) if of_weights else None
    apply_update(update, slices, pooled)
    return dw


# of the backward that is traced: its number, and whose tables it updates
_under_way: tuple[int, list[Tensor]] = -1, []


def _backward_under_way() -> int:
    """The number of the backward that runs; -1 outside of any."""
    torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return torch_c._current_graph_task_id()


def refuse_second(rates: Tensor) -> None:
    """Refuse a second update of one module in a backward that is traced.

    Nodes of a graph cannot wait for one another's sums. Of two graphs it is torch that refuses: the
    tables that the second has saved were changed by the first.

    Raises:
        InputError: this backward has an update by the same `rates`.
    """
    global _under_way
    task = _backward_under_way()
    if task == -1:
        return
    updated = _under_way[1] if _under_way[0] == task else []
    if any(each is rates for each in updated):
        want, got = "of one call of a module with a fused optimizer", "one of two calls"
        fix = "call it once with all bags, or leave it out of torch.compile"
        raise InputError(OP, "backward", want=want, got=got, fix=fix)
    _under_way = task, [*updated, rates]


def _update(*given: Any) -> tuple[Tensor, Tensor]:
    dy, tables, sums, rates, *rest, kind, dims, batch, rank, group_name, of_weights = given
    pooled, sent = Lookups(tables, *rest), Sent(dims, batch, rank, group_name)
    update = Update(kind, rates, sums, Steps())
    dw = update_in_order(update, dy, pooled, sent, of_weights=of_weights)
    return dy.new_empty(0), dy.new_empty(0) if dw is None else dw


def _fake_update(*given: Any) -> tuple[Tensor, Tensor]:
    dy, weights, of_weights = given[0], given[6], given[-1]
    dw = weights.new_empty(weights.shape) if of_weights else dy.new_empty(0)
    return dy.new_empty(0), dw


# an operator, so that a compiled backward holds it as one node; its first result is empty
register("embedding_bag_update", _update, _fake_update)
