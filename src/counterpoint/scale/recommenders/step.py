"""A training step of a DLRM on one rank: every rank does the same at the same time.

Ranks share out the tables and have the dense layers each. A step pools rows of own tables for the
samples of all ranks, sends them by an all-to-all (one operator of this library), runs the dense
layers on own samples, sends gradients of pooled rows back, updates the rows that were named, and
averages the dense gradients beside that. Kernels are counted by what they read and write.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from counterpoint.choose.by_model import parts_s
from counterpoint.embedding.plan_seconds import seconds
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.problem import Problem
from counterpoint.scale import constants
from counterpoint.scale.layout import Layout
from counterpoint.scale.network.fabric import Group, Network
from counterpoint.scale.operators import ITEM_BYTES, Overlap, Placed, between, pair_s, placed
from counterpoint.scale.parts import Both, Parts, Sent
from counterpoint.scale.pipeline import Stage, simulate
from counterpoint.scale.recommenders.counts import (
    ADAGRAD,
    BIAS,
    BUCKET,
    CAST,
    CONCAT,
    CROSS,
    ENTRY,
    LAST_BUCKET,
    LOSS,
    NUM_LOSS,
    NUM_SORTING,
    RELU,
    RELU_BACKWARD,
    UPDATE,
)
from counterpoint.scale.recommenders.dlrm import Dlrm
from counterpoint.scale.step import Hop, Stages

MAX_UNFOLDED = 64  # ranks whose tables are looked at one by one
LEAST_COLUMNS = 16  # of a cut table: 32 bytes, what memory is read by
# of a layout, what a DLRM has not, and what it may have
ABSENT = ("tp", "cp", "pp", "ep", "virtual_stages", "num_micro_batches", "sequence")
ALLOWED = {
    "schedule": ("1f1b",), "recompute": ("none",), "data_parallel_sharding": ("none", "zero1"),
}  # fmt: skip


class Pooled(NamedTuple):
    """What pooling and its all-to-all take, forward.

    Args:
        lookup_s: pooling alone.
        links_s: the all-to-all alone, at the rate of its fastest transport.
        serial_s: one after the other: the library's all-to-all, then a concat.
    """

    lookup_s: float
    links_s: float
    serial_s: float

    @property
    def hidden_s(self) -> float:
        """What hiding one behind the other saves at most: pooling, or the exposed all-to-all."""
        return min(self.lookup_s, self.links_s, self.bound_s)

    @property
    def bound_s(self) -> float:
        """What fusing saves at most: that, and what serial has beside the longer of both."""
        return self.serial_s - max(self.lookup_s, self.links_s)


@dataclass(frozen=True)
class DlrmStep:
    """One rank of a layout.

    Args:
        model: its sizes.
        layout: data-parallel ranks; `micro_batch` is the samples of each.
        network: of the GPUs.
        overlap: of pooling with its all-to-all: "none", "ours" or "ideal".

    Raises:
        InputError: the layout has another kind of parallelism, or what transformers have alone.
    """

    model: Dlrm
    layout: Layout
    network: Network
    overlap: Overlap

    def __post_init__(self) -> None:
        for field in ABSENT:
            value = getattr(self.layout, field)
            if value > 1:
                want = f"left out: of {self.model.name} every rank has tables and own samples (dp)"
                raise InputError("Layout", field, want=want, got=value)
        for field, only in ALLOWED.items():
            if (value := getattr(self.layout, field)) not in only:
                want = f"{' or '.join(only)} of {self.model.name}"
                raise InputError("Layout", field, want=want, got=repr(value))

    def run(self) -> tuple[dict[str, float], Stages]:
        """The parts, and what a rank does when: one stage, and one micro-batch."""
        dense, group = self.dense(), self.group
        exchanged = {Sent("all-to-all", "all_to_all", group): self._exchanged_bytes()}
        chunk = Both(
            self.embedding() + dense.forward + Parts(sent=exchanged),
            dense.backward + Parts({
                "all-to-all": self.exchange_s(),
                "table update": self.sort_s() + self.memory_s(self._updated_bytes()),
            }, exchanged),
        )  # fmt: skip
        replicas_s = self.all_reduce_s(dense.backward.seconds)
        optimizer_s = self.memory_s(ADAGRAD.value * self.model.dense_parameters)
        ran = simulate([Stage((chunk.forward.seconds,), (chunk.backward.seconds,))], 1, 0.0)
        found = chunk.forward + chunk.backward
        found += Parts({"data parallel": replicas_s, "optimizer": optimizer_s})
        replicas = {Sent("data parallel", "all_reduce", group): self._gradient_bytes()}
        return dict(found), Stages(
            ran, (replicas_s,), (optimizer_s,), ((chunk,),), (replicas,), Hop(0.0, {}, 0.0)
        )

    @property
    def samples(self) -> int:
        """Of one rank."""
        return self.layout.micro_batch

    @cached_property
    def group(self) -> Group:
        """All ranks."""
        return Group(self.layout.dp, 1)

    @cached_property
    def alone(self) -> Machine:
        """What one GPU costs at settled clocks."""
        return self.network.as_machine(Group(1, 1))

    @property
    def leaves(self) -> bool:
        """Whether ranks are on several islands."""
        return self.network.near(self.group) < self.group.size

    @property
    def whole(self) -> bool:
        """Whether ranks are told apart, and have whole tables."""
        return self.group.size <= min(MAX_UNFOLDED, len(self.model.rows))

    @cached_property
    def problem(self) -> Problem:
        """Pooling and its all-to-all, of as many ranks as are told apart.

        Up to 64 ranks, and not more than tables, have whole tables: the one with most to look up
        goes to the rank with least. Of more, all have as much, of tables cut by columns; where no
        plan is between their islands, 64 with the columns of all, for the samples of 64, do as
        each of more does.
        """
        model, ranks = self.model, self.group.size
        if self.whole:
            owned, work = [0] * ranks, [0] * ranks
            for each in sorted(model.pooling, reverse=True):
                rank = work.index(min(work))
                owned[rank] += 1
                work[rank] += each
            columns = [(model.dim,) * count for count in owned]
            indices = [each * self.samples * ranks for each in work]
        else:
            slices = min(ceil(ranks / len(model.rows)), max(model.dim // LEAST_COLUMNS, 1))
            if between(self.network, self.group) == 1:
                ranks = min(ranks, MAX_UNFOLDED)
            width = ceil(model.dim / slices)
            own = max(round(model.columns / width / ranks), 1)
            columns = [(ceil(model.columns / own / ranks),) * own] * ranks
            indices = [sum(model.pooling) * slices * self.samples] * ranks
        return Problem("embedding_bag_all_to_all", m=self.samples * ranks, ranks=ranks,
                       tables=tuple(columns), indices=tuple(indices), out=True)  # fmt: skip

    @cached_property
    def place(self) -> Placed:
        """Where `problem` runs."""
        return placed(self.problem, self.network, self.group)

    @cached_property
    def pooled(self) -> Pooled:
        """What pooling and its all-to-all take, each alone and one after the other."""
        serial_s, lookup_s = pair_s(self.place, "none")
        links_s = 0.0
        if self.group.size > 1:
            links_s = parts_s(self.place.problem, self.place.machine)[1]
        return Pooled(lookup_s, links_s, serial_s)

    @property
    def ours_s(self) -> float:
        """What both take by the plan that this library takes."""
        return pair_s(self.place, "ours")[0]

    def embedding(self) -> Parts:
        """Pooling and its all-to-all, forward."""
        found = self.pooled
        both_s = max(found.lookup_s, found.links_s)
        if self.overlap != "ideal":
            both_s = self.ours_s if self.overlap == "ours" else found.serial_s
        return Parts({"embedding": found.lookup_s, "all-to-all": both_s - found.lookup_s})

    def exchange_s(self) -> float:
        """Seconds in which gradients of pooled rows go back: put together, then sent."""
        if self.group.size == 1:
            return 0.0
        problem, machine, _, late_s = self.place
        copies_s = 2 * self.memory_s(CONCAT.value * self.samples * self.model.columns)
        return copies_s + seconds(problem, machine).sent_s + late_s

    def dense(self) -> Both:
        """All but the tables: two MLPs and what is between them."""
        bottom, top = self.model.mlps
        found = [self._layer(k, n, relu=True, first=i == 0) for i, (k, n) in enumerate(bottom)]
        found.append(self._interaction())
        found += [self._layer(k, n, relu=i < len(top) - 1) for i, (k, n) in enumerate(top)]
        loss = Parts({"memory": NUM_LOSS * self.memory_s(LOSS.value * self.samples)})
        found.append(Both(loss, loss))
        return sum(found, Both())

    def all_reduce_s(self, beside_s: float) -> float:
        """Exposed seconds of the dense gradients' average; but for the last of it beside that."""
        num_bytes = self._gradient_bytes()
        seconds = self.network.all_reduce_s(num_bytes, self.group)
        if not self.layout.asynchronous:
            return seconds
        last = min(num_bytes, LAST_BUCKET.value)
        return max(seconds - beside_s, self.network.all_reduce_s(last, self.group))

    def sort_s(self) -> float:
        """Seconds to put named rows into the order of their tables."""
        moved = ENTRY.value * max(self.problem.indices)
        return self.memory_s(moved) + (NUM_SORTING - 1) * self.alone.costs.kernel_s

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so much."""
        return self.alone.costs.memory_s(round(num_bytes))

    def matmul_s(self, rows: int, n: int, k: int, count: int = 1) -> float:
        """Seconds of `count` matmuls in one launch."""
        machine = self.alone
        return machine.costs.matmul_s(rows, n, k, ITEM_BYTES, machine.sms, count=count)

    def _gradient_bytes(self) -> float:
        """Of all dense parameters."""
        return constants.GRADIENT_BYTES.value * self.model.dense_parameters

    def _exchanged_bytes(self) -> float:
        """Of a rank's pooled rows, or their gradients: of own samples, and the columns of all."""
        return self.samples * self.model.columns * ITEM_BYTES

    def _updated_bytes(self) -> float:
        """Of a rank: gradients of named rows, each time that one is named; and the rows, once."""
        model, p = self.model, self.problem
        width = max(max(each, default=0) for each in p.tables)
        read = max(p.indices) * (ITEM_BYTES * width + 8)
        named = sum(model.named(self.samples * self.group.size)) * model.dim / self.group.size
        return read + UPDATE.value * named

    def _layer(self, k: int, n: int, *, relu: bool, first: bool = False) -> Both:
        """A linear layer, and what follows it."""
        rows = self.samples
        linear = self._linear(k, n, first=first)
        if not relu:
            return linear
        return linear + Both(
            Parts({"memory": self.memory_s(RELU.value * rows * n)}),
            Parts({"memory": self.memory_s(RELU_BACKWARD.value * rows * n)}),
        )

    def _linear(self, k: int, n: int, *, bias: bool = True, first: bool = False) -> Both:
        """A matmul and its gradients, its parameters in bf16; the first layer's input has none."""
        rows = self.samples
        parameters = (k * n, n) if bias else (k * n,)
        cast_s = sum(self.memory_s(CAST.value * count) for count in parameters)
        copies_s = sum(2 * self.memory_s(BUCKET.value / 2 * count) for count in parameters)
        sum_s = self.memory_s(BIAS.value * rows * n) if bias else 0.0
        gradients_s = self.matmul_s(n, k, rows) + (0.0 if first else self.matmul_s(rows, k, n))
        return Both(
            Parts({"matmuls": self.matmul_s(rows, n, k), "memory": cast_s}),
            Parts({"matmuls": gradients_s, "memory": cast_s + copies_s + sum_s}),
        )

    def _interaction(self) -> Both:
        """The concat of all vectors, and the cross network or dot products."""
        model, rows = self.model, self.samples
        numbers = rows * model.vectors * model.dim
        concat = Parts({"memory": self.memory_s(CONCAT.value * numbers)})
        if not model.cross[0]:
            v, pairs = model.vectors, rows * model.vectors**2 * ITEM_BYTES
            dots_s = self.matmul_s(v, v, model.dim, rows)
            taken = Parts({"memory": self.memory_s(1.5 * pairs)})  # one of each two
            back = Parts({"matmuls": 2 * self.matmul_s(v, model.dim, v, rows)})
            return Both(concat + taken + Parts({"matmuls": dots_s}), concat + taken + back)
        layers, rank = model.cross
        each_s = self.memory_s(CROSS.value * numbers)
        forward = concat + Parts({"memory": 2 * layers * each_s})
        backward = Parts({"memory": 4 * layers * each_s})
        for k, n in model.cross_weights:
            linear = self._linear(k, n, bias=k == rank)
            forward, backward = forward + linear.forward, backward + linear.backward
        return Both(forward, backward)
