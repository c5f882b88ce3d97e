"""Embedding tables of a model, each whole on one rank, by `embedding_bag_all_to_all`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from counterpoint.embedding.embedding_bag_all_to_all import OP, called
from counterpoint.embedding.pooled_outputs import PooledOutputs
from counterpoint.embedding.updates import (
    SGD,
    FusedOptimizer,
    RowWiseAdagrad,
    Steps,
    Update,
)
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.nn.grouped import Grouped
from counterpoint.ops.check import check_counts, check_dense, check_group, check_layer, check_plan
from counterpoint.plan.steps import Plan
from counterpoint.ranges import MAX_COUNT, Range, misfit, plain


class ShardedEmbeddingBags(Grouped):
    """Pooled rows of all tables for own bags; each rank pools its own tables for all ranks.

    Tables are numbered as they are given. A rank's input is that of `own`, its tables, for the
    global batch; the output has the columns of rank 0's tables first, `columns` says where each
    table's are.

    Initial values of a table are of torch's seed and the table's number alone: ranks of one seed
    hold the tables that any other number of ranks would, and their generators stay alike.

    Parameters: table_t [rows, D] of each own table t, by its number among all. So keys differ
    between ranks: the state_dict of each holds its own tables, all together are the whole model,
    and `load_state_dict(whole, strict=False)` takes from it those of this rank, however many ranks
    have saved it.

    Args:
        tables: rows and columns of each, the same on all ranks.
        owners: the rank of each; None: so that ranks have about as many columns.
        group: of the ranks; the default group if None.
        mode: "sum" or "mean".
        sparse: gradients of tables are sparse.
        plan: as for `embedding_bag_all_to_all`.
        device: of the parameters, as for torch.nn.EmbeddingBag; "meta" as well.
        dtype: of the parameters.

    Attributes:
        own: numbers of this rank's tables.
        weights: those tables' Parameters, [rows, D] each.
        dims: columns of each rank's tables.
        columns: of the output, for each table.
        fused_optimizer: see `fuse_optimizer`; None: tables have gradients.

    Raises:
        InputError: a size is < 1, an owner is no rank, or there is no group.

    Example:
        >>> bags = cnn.ShardedEmbeddingBags([(40_000_000, 128)] * 26)  # doctest: +SKIP
        >>> y = bags(indices, offsets)  # of bags.own, [own bags, 26 * 128]  # doctest: +SKIP
    """

    _like: Tensor
    _rates: Tensor

    def __init__(
        self, tables: Sequence[tuple[int, int]], *, owners: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None, mode: str = "sum", sparse: bool = False,
        plan: str | Path | Plan = "auto", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "ShardedEmbeddingBags"
        self.group = check_group(name, group)
        ranks, rank = self.group.size(), dist.get_rank(self.group)
        sizes: Any = plain(tables)
        if not sizes or misfit(sizes, tuple[tuple[int, int], ...], Range(1, MAX_COUNT), "tables"):
            raise InputError(name, "tables", want="(rows, columns) of each, >= 1", got=tables)
        if owners is None:
            owners = _balanced(sizes, ranks)
        want = f"one of {ranks} ranks for each of {len(sizes)} tables"
        owners = check_counts(name, "owners", owners, want, len(sizes))
        if max(owners) >= ranks:
            raise InputError(name, "owners", want=want, got=owners)
        if mode not in ("sum", "mean"):
            raise InputError(name, "mode", want="'sum' or 'mean'", got=repr(mode))
        check_layer(name, dtype, device, sparse=sparse)
        check_plan(name, plan, OP)
        self.mode, self.sparse, self.plan, self.owners = mode, sparse, plan, tuple(owners)
        self.order = sorted(range(len(sizes)), key=lambda t: owners[t])  # of the output's columns
        self.own = tuple(t for t in self.order if owners[t] == rank)
        self.dims = tuple(
            tuple(sizes[t][1] for t in self.order if owners[t] == r) for r in range(ranks)
        )
        places: dict[int, slice] = {}
        first = 0
        for t in self.order:
            places[t] = slice(first, first + sizes[t][1])
            first += sizes[t][1]
        self.columns = tuple(places[t] for t in range(len(sizes)))
        for t in self.own:
            weight = Parameter(torch.empty(sizes[t], device=device, dtype=dtype))
            self.register_parameter(f"table_{t}", weight)
        # of the dtype that tables have, also where there are none, and after bags.half()
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)
        self.fused_optimizer: FusedOptimizer | None = None
        self._steps = Steps()
        self.reset_parameters()

    @property
    def weights(self) -> tuple[Parameter, ...]:
        """Own tables, in the order of `own`."""
        return tuple(getattr(self, f"table_{t}") for t in self.own)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the tables anew: normal, as torch.nn.EmbeddingBag does; no state is left.

        One number of torch's generator of the CPU, on each rank, also on one without tables; what
        it and the table's number seed draws a table. On the meta device nothing is drawn.
        """
        if self._like.is_meta:
            return
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        for t, weight in zip(self.own, self.weights, strict=True):
            # seeds that follow one another differ in their low 32 bits, all that the CPU's takes
            weight.normal_(generator=torch.Generator(weight.device).manual_seed(seed + t))
        for state in self._sums():
            state.zero_()
        if self.fused_optimizer is not None:
            self._rates.copy_(torch.tensor(self.fused_optimizer.rates, dtype=torch.float32))

    def fuse_optimizer(self, optimizer: FusedOptimizer) -> Self:
        """Have the backward update the rows that were named, and make no gradients of tables.

        Each backward is then a step by the sum of all calls in it, eager: a compiled graph has one
        call. Gradients of several backwards are not added up, and a GradScaler is not
        taken into account. Tables ask for no gradient any more, and are for no other optimizer. The
        state of `RowWiseAdagrad`, zero at first, is buffers table_t_sum [rows], fp32, in the
        state_dict. On GPUs the exchange of gradients and the update run beside what autograd runs
        after them, until the backward ends; in a compiled model they run in its order.

        Args:
            optimizer: `SGD` or `RowWiseAdagrad`.

        Returns:
            This module.

        Raises:
            InputError: it is neither, the module has one, or its gradients are sparse.

        Example:
            >>> bags = cnn.ShardedEmbeddingBags(sizes).fuse_optimizer(  # doctest: +SKIP
            ...     cnn.RowWiseAdagrad(lr=0.01)
            ... )
        """
        name = "fuse_optimizer"
        if not isinstance(optimizer, FusedOptimizer):
            want, got = "SGD or RowWiseAdagrad of counterpoint.nn", type(optimizer).__name__
            fix = "give the parameters to an optimizer of torch's"
            raise InputError(name, "optimizer", want=want, got=got, fix=fix)
        if self.sparse or self.fused_optimizer is not None:
            got = "a module of sparse gradients" if self.sparse else "one that has an optimizer"
            raise InputError(name, "self", want="a module with dense gradients", got=got)
        self.fused_optimizer, device = optimizer, self._like.device
        rates = torch.tensor(optimizer.rates, device=device, dtype=torch.float32)
        self.register_buffer("_rates", rates, persistent=False)
        for t, weight in zip(self.own, self.weights, strict=True):
            weight.requires_grad_(False)
            if isinstance(optimizer, RowWiseAdagrad):
                state = torch.zeros(len(weight), device=device, dtype=torch.float32)
                self.register_buffer(f"table_{t}_sum", state)
        return self

    def set_learning_rate(self, lr: float) -> None:
        """The fused optimizer's from now on, also in captured graphs and compiled models.

        Raises:
            InputError: it is no number from 0 to 1e6, or there is no fused optimizer.
        """
        if self.fused_optimizer is None:
            want = "SGD or RowWiseAdagrad"
            raise InputError("set_learning_rate", "fused_optimizer", want=want, got=None)
        self.fused_optimizer = replace(self.fused_optimizer, lr=lr)
        self._rates[:1].fill_(lr)

    def _sums(self) -> list[Tensor]:
        """The state of own tables, where the optimizer has one."""
        if not isinstance(self.fused_optimizer, RowWiseAdagrad):
            return []
        return [getattr(self, f"table_{t}_sum") for t in self.own]

    def _update(self) -> Update | None:
        """What the backward does to the tables.

        Raises:
            InputError: tables have gradients as well, or the state is of another dtype.
        """
        optimizer, name = self.fused_optimizer, "ShardedEmbeddingBags"
        if optimizer is None:
            return None
        if self._rates.dtype != torch.float32:
            fix = "pass dtype= to the module in place of converting it"
            raise InputError(name, "state", want="torch.float32", got=self._rates.dtype, fix=fix)
        for t, weight in zip(self.own, self.weights, strict=True):
            if weight.requires_grad or weight.grad is not None:
                want = "without a gradient, as fused_optimizer updates it"
                fix = "give it to no other optimizer"
                got = "one that asks for it" if weight.grad is None else "one that has it"
                raise InputError(name, f"table_{t}", want=want, got=got, fix=fix)
        self._steps.join()  # one is under way if something else in its backward has raised
        kind = "sgd" if isinstance(optimizer, SGD) else "rowwise_adagrad"
        return Update(kind, self._rates, self._sums(), self._steps)

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, *,
        batch: Sequence[int] | None = None, include_last_offset: bool = False,
        out: PooledOutputs | None = None,
    ) -> Tensor:  # fmt: skip
        """[own bags, columns of all tables], from the input of own tables for the global batch.

        Args:
            indices: as for `embedding_bag_all_to_all`; so are the others.
            batch: a rank without tables passes it.

        Raises:
            InputError: an argument is wrong, or ranks differ; nothing was launched.
        """
        mode, last, dtype = self.mode, include_last_offset, self._like.dtype
        given = (list(self.weights), indices, offsets, per_sample_weights, mode, last, batch,
                 self.dims, dtype, out, self.plan)  # fmt: skip
        return called(given, self.sparse, self.group, self._update())

    def split(self, pooled: Tensor) -> list[Tensor]:
        """The columns of each table, as views of what `forward` returned.

        Raises:
            InputError: `pooled` is no such thing.
        """
        check_dense("split", pooled=pooled)
        if pooled.dim() != 2:
            raise InputError("split", "pooled", want="of 2 dims", got=f"{pooled.dim()}-D")
        return [pooled[:, columns] for columns in self.columns]

    def keyed(self, pooled: Tensor, keys: Sequence[str]) -> Any:
        """What `forward` returned as a KeyedTensor of torchrec, without a copy.

        Args:
            pooled: of `forward`.
            keys: the name of each table's feature.

        Raises:
            InputError: not one key for each table.
            UnsupportedError: torchrec is not installed.
        """
        named = isinstance(keys, list | tuple) and all(isinstance(key, str) for key in keys)
        if not named or len(keys) != len(self.columns):
            want = f"a name for each of {len(self.columns)} tables"
            raise InputError("keyed", "keys", want=want, got=keys)
        try:
            from torchrec.sparse.jagged_tensor import (  # pyright: ignore[reportMissingImports]
                KeyedTensor,
            )
        except ImportError as error:
            problem = f"keyed: torchrec is not there ({error}); split() needs none"
            raise UnsupportedError(problem) from error
        lengths = [self.columns[t].stop - self.columns[t].start for t in self.order]
        return KeyedTensor([keys[t] for t in self.order], lengths, pooled)

    def extra_repr(self) -> str:
        """What torch prints of it."""
        return f"tables={len(self.columns)}, own={list(self.own)}, mode={self.mode!r}"


def _balanced(sizes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Owners by which ranks have about as many columns: the widest first, to who has least."""
    owners, load = [0] * len(sizes), [0] * ranks
    for t in sorted(range(len(sizes)), key=lambda t: -sizes[t][1]):
        owners[t] = load.index(min(load))
        load[owners[t]] += sizes[t][1]
    return owners
