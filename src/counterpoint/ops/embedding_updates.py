"""Updates of embedding tables in the backward: each row that was named takes its optimizer's step.

No gradient of a table is made, neither dense nor sparse: the sum of a row is applied where it is
summed. On GPUs the exchange of gradients and the update run on a stream of their own, which the
backward joins at its end: what autograd runs in between, such as the backward of other layers, runs
beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import increment_version

from counterpoint.ops.embedding_gradients import (
    Lookups,
    at_once,
    first_rows,
    sorted_by_row,
    sums_on_cpu,
)
from counterpoint.ops.register import register
from counterpoint.ranges import check
from counterpoint.runtime.launch_embedding_gradient import Tables, sum_rows, tables_of
from counterpoint.runtime.workspace import refuse_capture


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


class Steps:
    """Updates of the tables of one module: how many there were, and one that may be under way.

    Attributes:
        count: of updates that have begun.
        beside: the stream of an update that nobody has waited for; None: there is none.
        tables: as kernels take them, by where they lie.
    """

    def __init__(self) -> None:
        self.count = 0
        self.beside: torch.cuda.Stream | None = None
        self.tables: dict[tuple[int, ...], Tables] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, whose tables lie elsewhere."""
        self.join()
        return {"count": self.count, "beside": None, "tables": {}}

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
        key = (*map(Tensor.data_ptr, tables), *map(Tensor.data_ptr, sums))
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


def apply_update(
    update: Update, dy: Tensor, pooled: Lookups, wait: Callable[[], object] = at_once
) -> None:
    """Update all rows that were named, each once.

    Args:
        dy: [bags of all ranks, columns of own tables].
        wait: for dy; what it is not needed for comes before.
    """
    kind, rates, sums, steps = update
    tables = pooled.tables
    runs = bool(tables) and pooled.indices.numel() > 0
    if runs and dy.is_cuda:
        placed = steps.placed(tables, sums)
        entries = sorted_by_row(pooled, placed, len(dy))
        wait()
        sum_rows(placed, dy, entries, kind, rates)
    else:
        wait()
        if runs:
            _update_on_cpu(update, dy, pooled)
    increment_version([*tables, *sums])  # what autograd has saved of them is another now


@torch.no_grad()
def _update_on_cpu(update: Update, dy: Tensor, pooled: Lookups) -> None:
    lr, eps, scale = update.rates.tolist()
    sums = update.sums or [None] * len(pooled.tables)
    for table, state, (rows, g) in zip(pooled.tables, sums, sums_on_cpu(dy, pooled), strict=True):
        step = g.mul_(scale) * lr
        if state is not None:
            state[rows] += g.square().mean(1)
            step = step / (state[rows].sqrt() + eps)[:, None]
        table[rows] = (table[rows].float() - step).to(table.dtype)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def update_beside(
    update: Update, dy: Tensor, pooled: Lookups,
    exchange: Callable[[Tensor], tuple[Tensor, Callable[[], object]]],
) -> None:  # fmt: skip
    """Exchange and update on a stream of their own, until the end of this backward.

    Args:
        dy: of own bags.
        exchange: begins to send it; returns the gradient of own tables' columns, and a wait for it.
    """
    steps = update.steps
    if not dy.is_cuda:
        got, wait = exchange(dy)
        apply_update(update, got, pooled, wait)
        return
    steps.join()
    stream, here = _stream_of(dy.device), torch.cuda.current_stream(dy.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        got, wait = exchange(dy)
        apply_update(update, got, pooled, wait)
    steps.beside = stream
    # until the join nobody may have the memory that is read there
    kept = [dy, pooled]

    def join() -> None:
        steps.join()
        kept.clear()

    engine: Any = Variable._execution_engine  # pyright: ignore
    engine.queue_callback(join)


def _update(*given: Any) -> None:
    dy, tables, sums, rates, indices, offsets, weights, last, mean, kind = given
    pooled = Lookups(tables, indices, offsets, weights, last, mean)
    apply_update(Update(kind, rates, sums, Steps()), dy, pooled)


def _fake_update(*_: object) -> None:
    """Nothing is returned."""


# an operator, so that a compiled backward holds it as one node
register(
    "embedding_bag_update(Tensor dy, Tensor(a!)[] tables, Tensor(b!)[] sums, Tensor rates, "
    "Tensor indices, Tensor offsets, Tensor? weights, bool last, bool mean, str kind) -> ()",
    _update, _fake_update, meets=False,
)  # fmt: skip
