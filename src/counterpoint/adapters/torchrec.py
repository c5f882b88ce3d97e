"""TorchRec: bags of sharded tables and their all-to-all in one kernel, `embedding_bag_all_to_all`.

    bags = counterpoint.adapters.torchrec.overlap(model)  # a DistributedModelParallel, or a part
    print(bags.explain())

TorchRec shards, exchanges indices, pipelines, and saves as before. A table stays where TorchRec has
it, with the state of its optimizer: both are read and updated in place.
"""

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint.adapters.seams import taken
from counterpoint.embedding.embedding_bag_all_to_all import OP, called
from counterpoint.embedding.pooled_outputs import PooledOutputs
from counterpoint.embedding.updates import Steps, Update
from counterpoint.errors import InputError
from counterpoint.ops.agreement import captures, left
from counterpoint.ops.check import check_plan

__all__ = ["Overlapped", "overlap"]
TESTED = "1.9.2"
Bags: Any
Lookup: Any
Exchange: Any
Reduction: Any
NoWait: Any
Optimizer: Any
Tables: Any
Stashing: Any
comm_ops: Any
(Bags,) = taken("torchrec", TESTED, "torchrec.distributed.embeddingbag",
                "ShardedEmbeddingBagCollection")  # fmt: skip
(Lookup,) = taken("torchrec", TESTED, "torchrec.distributed.embedding_lookup",
                  "GroupedPooledEmbeddingsLookup")  # fmt: skip
(Exchange,) = taken("torchrec", TESTED, "torchrec.distributed.sharding.tw_sharding",
                    "TwPooledEmbeddingDist")  # fmt: skip
(Reduction,) = taken("torchrec", TESTED, "torchrec.distributed.sharding.rw_sharding",
                     "RwPooledEmbeddingDist")  # fmt: skip
(NoWait,) = taken("torchrec", TESTED, "torchrec.distributed.types", "NoWait")
(Stashing,) = taken("torchrec", TESTED, "torchrec.distributed.memory_stashing",
                    "MemoryStashingManager")  # fmt: skip
(comm_ops,) = taken("torchrec", TESTED, "torchrec.distributed", "comm_ops")
(Optimizer,) = taken("fbgemm-gpu", "1.8.0", "fbgemm_gpu.split_embedding_configs",
                     "EmbOptimType")  # fmt: skip
(Tables,) = taken("fbgemm-gpu", "1.8.0", "fbgemm_gpu.split_table_batched_embeddings_ops_training",
                  "SplitTableBatchedEmbeddingBagsCodegen")  # fmt: skip
MOST_FORWARDS = 16  # whose backwards may be to come: what of them is joined
# shardings whose pooled rows go to the ranks of their samples at once, and by what
EXCHANGED = {"table_wise": Exchange, "column_wise": Exchange, "table_column_wise": Exchange,
             "row_wise": Reduction}  # fmt: skip
KINDS = {"EXACT_SGD": "sgd", "EXACT_ROWWISE_ADAGRAD": "rowwise_adagrad"}
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
# what FBGEMM's lookups and updates may do that ours do not: left at its default
ASIDE = ("weight_decay", "weight_decay_mode", "gradient_clipping", "max_norm", "ensemble_mode",
         "emainplace_mode", "counter_based_regularization", "cowclip_regularization",
         "global_weight_decay", "extra_optimizer_config", "optimizer_state_dtypes",
         "embedding_table_index_type", "embedding_table_offset_type", "is_qr_tbe",
         "enable_raw_embedding_streaming")  # fmt: skip


class Overlapped:
    """The embedding bags of a model that go by one kernel, and those that stay TorchRec's.

    Attributes:
        taken: names of modules, the sharding of their tables, and these tables' names.
        left: the same, with why TorchRec keeps them.
        fused: what `end` ends.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, list[str]]] = []
        self.left: list[tuple[str, str, list[str], str]] = []
        self.fused: list[_Fused] = []

    def explain(self) -> str:
        """A line for each module and sharding: whose way its bags go, and why."""
        lines = [f"{name}, {sharding}, {_listed(tables)}: counterpoint"
                 for name, sharding, tables in self.taken]  # fmt: skip
        lines += [f"{name}, {sharding}, {_listed(tables)}: TorchRec, since {why}"
                  for name, sharding, tables, why in self.left]  # fmt: skip
        return "\n".join(lines) or "the model has no sharded embedding bags"

    def end(self) -> None:
        """Give all bags back to TorchRec."""
        for fused in self.fused:
            fused.end()
        self.left += [(*each, "it was ended") for each in self.taken]
        self.fused, self.taken = [], []


def overlap(model: nn.Module, *, plan: str = "auto") -> Overlapped:
    """Have a model's table-, column-, and row-wise sharded bags pooled and exchanged in one kernel.

    In backward, gradients are exchanged and applied to the rows that were looked up, by the
    optimizer that FBGEMM has for the table: SGD or row-wise Adagrad, with TorchRec's learning rate
    and division by the number of ranks. Bags of variable batches go TorchRec's way in each call
    that has them. All ranks call this, on equal models.

    Args:
        model: a DistributedModelParallel, or any module with ShardedEmbeddingBagCollections.
        plan: as for `embedding_bag_all_to_all`.

    Returns:
        What was taken, and why the rest was left.

    Raises:
        InputError: `model` is no module, has such bags overlapped already, or there is no such
            plan.
        UnsupportedError: torchrec or fbgemm-gpu is missing, or not the version that this needs.
    """
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise InputError("overlap", "model", want="a torch.nn.Module", got=got)
    check_plan("overlap", plan, OP)
    every: list[tuple[str, Any]] = [*model.named_modules()]
    found = [(name or "model", module) for name, module in every if isinstance(module, Bags)]
    again = [name for name, m in found if any("counterpoint" in vars(each) for each in m._lookups)]
    if again:
        want, fix = "a model whose bags are TorchRec's", "call end() of what overlap returned"
        raise InputError("overlap", "model", want=want, got=f"{again[0]}, overlapped", fix=fix)
    done = Overlapped()
    for name, module in found:
        parts = zip(module._sharding_types, module._embedding_shardings, module._lookups,
                    module._output_dists, strict=True)  # fmt: skip
        for kind, sharding, lookup, exchange in parts:
            infos = module.sharding_type_to_sharding_infos[kind]
            tables = [info.embedding_config.name for info in infos]
            if why := _why_not(module, kind, sharding, lookup, exchange):
                done.left.append((name, kind, tables, why))
                continue
            done.fused.append(_Fused(module, kind, sharding, lookup, exchange, plan))
            done.taken.append((name, kind, tables))
    return done


def _listed(tables: Sequence[str], most: int = 4) -> str:
    more = f" and {len(tables) - most} more" if len(tables) > most else ""
    return f"{', '.join(tables[:most])}{more}" or "its tables"


def _why_not(module: Any, kind: str, sharding: Any, lookup: Any, exchange: Any) -> str:
    """Why TorchRec keeps one sharding of a module, by facts that all ranks share; "" if none."""
    if kind not in EXCHANGED:
        return f"{kind.replace('_', '-')} bags are not exchanged by an all-to-all"
    for each, known in (exchange, EXCHANGED[kind]), (lookup, Lookup):
        if type(each) is not known:
            return f"it has a {type(each).__name__}"
    if exchange._codecs is not None:
        return "its exchange is quantized"
    if exchange._pg.size() < 2:
        return "its ranks are one"
    if getattr(sharding, "_is_2D_parallel", False):
        return "its tables have replicas"
    if _tracked(module, lookup):
        return "something tracks its lookups"
    if Stashing.is_enabled():
        return "memory is stashed"
    groups = [*chain.from_iterable(sharding._grouped_embedding_configs_per_rank)]
    each = (_why_not_group(kind, group) for group in groups)
    return next(filter(None, each), "") or _differ(kind, groups)


def _tracked(module: Any, lookup: Any) -> bool:
    """Whether something is told of each lookup, or of its optimizer's state."""
    told = (getattr(module, "post_lookup_tracker_fn", None),
            getattr(lookup, "optim_state_tracker_fn", None))  # fmt: skip
    return any(each is not None for each in told)


def _given(group: Any) -> dict[str, Any]:
    """What FBGEMM is told of a group: of its tables, since a group's owner writes into its own."""
    return group.embedding_tables[0].fused_params or {}


def _why_not_group(kind: str, group: Any) -> str:
    """Why TorchRec keeps tables that FBGEMM has in one group."""
    # of tables: a group's is "fused" also where tables are in memory of the host
    kernels = [table.compute_kernel.value for table in group.embedding_tables]
    kernel = next((each for each in kernels if each != "fused"), "fused")
    dtype, given = group.data_type.name, _given(group)
    optimizer = given.get("optimizer", Optimizer.EXACT_SGD)
    precision = getattr(given.get("output_dtype"), "name", "FP32")
    if kernel != "fused":
        return f"its kernel is {kernel}"
    if dtype not in DTYPES or precision != dtype:
        return f"its tables are {dtype}, its bags {precision}"
    if dtype != "FP32" and given.get("stochastic_rounding", True):
        return f"updates of its {dtype} tables are rounded at random"
    if optimizer.name not in KINDS:
        return f"its optimizer is {optimizer.name}"
    known = signature(Tables.__init__).parameters
    for name in ASIDE:
        if name in given and given[name] not in (None, known[name].default):
            return f"it has {name}"
    if group.enable_embedding_update:
        return "its tables are written by others"
    if group.has_feature_processor:
        return "it has a feature processor"
    if group.is_weighted and _pooled(kind, group) != "sum":
        return "its means are weighted"
    if any(table.stash_weights for table in group.embedding_tables):
        return "its weights are stashed"
    if shared := [table.name for table in group.embedding_tables if table.num_features() != 1]:
        return f"{shared[0]} has {_features(group, shared[0])} features"
    return ""


def _features(group: Any, name: str) -> int:
    return next(t.num_features() for t in group.embedding_tables if t.name == name)


def _pooled(kind: str, group: Any) -> str:
    """How a rank pools a group. Of rows of a table, TorchRec divides sums of all ranks itself."""
    return "sum" if kind == "row_wise" else group.pooling.value.lower()


def _differ(kind: str, groups: Sequence[Any]) -> str:
    """In what tables differ that one call has alike; "" if in nothing."""

    def optimizer(group: Any) -> tuple[Any, ...]:
        given = _given(group)
        return given.get("optimizer", Optimizer.EXACT_SGD), given.get("eps")

    facts = {
        "dtypes": {group.data_type for group in groups},
        "ways to pool": {_pooled(kind, group) for group in groups},
        "weights of indices": {group.is_weighted for group in groups},
        "optimizers": set(map(optimizer, groups)),
        "learning rates": {_given(group).get("learning_rate") for group in groups},
    }
    return next((f"its tables have several {what}" for what, seen in facts.items()
                 if len(seen) > 1), "")  # fmt: skip


class _Fused:
    """One sharding of one module: its lookups hand on their features, its exchange does both.

    Each forward's backward is an update of its own, by the learning rate of the forward, as FBGEMM
    has it.

    Args:
        module: TorchRec's, of bags.
        kind, sharding: of some of its tables.
        lookup, exchange: modules whose forwards are replaced; `end` brings them back.
        plan: of the call.
    """

    def __init__(
        self, module: Any, kind: str, sharding: Any, lookup: Any, exchange: Any, plan: str
    ) -> None:  # fmt: skip
        per_rank = sharding._grouped_embedding_configs_per_rank
        first = next(chain.from_iterable(per_rank))
        self.module, self.lookup, self.exchange, self.plan = module, lookup, exchange, plan
        self.dims = tuple(tuple(chain.from_iterable(g.embedding_dims() for g in groups))
                          for groups in per_rank)  # fmt: skip
        self.mode, self.by_row = _pooled(kind, first), kind == "row_wise"
        self.sums_of: PooledOutputs | None = None  # what ranks' rows add to own samples
        self.dtype = DTYPES[first.data_type.name]
        self.kind = KINDS[_given(first).get("optimizer", Optimizer.EXACT_SGD).name]
        self.modules = [each.emb_module for each in lookup._emb_modules]
        self.steps, self.rates = list[Steps](), torch.empty(0)
        self.rate, self.places = (0.0, 0.0, 0.0), tuple[int, ...]()
        self.tables, self.sums = list[Tensor](), list[Tensor]()
        self.theirs = lookup.forward, exchange.forward
        lookup.forward, exchange.forward = self.features_of, self.pooled
        lookup.counterpoint = exchange.counterpoint = True

    def end(self) -> None:
        """Give both modules their own forwards again."""
        self._join()
        for module in (self.lookup, self.exchange):
            del module.forward, module.counterpoint

    def features_of(self, features: Any) -> Any:
        """In place of looking up: the exchange pools them, too."""
        weighted = features.weights_or_none() is not None
        if (
            features.variable_stride_per_key() or torch.compiler.is_compiling()
            or (weighted and self.mode != "sum") or _tracked(self.module, self.lookup)
        ):  # fmt: skip
            return self.theirs[0](features)
        return features

    def pooled(self, features: Any, context: Any = None) -> Any:
        """[own samples, columns of all ranks' tables], in TorchRec's order."""
        if isinstance(features, Tensor):  # looked up, as by TorchRec
            return self.theirs[1](features, context)
        group: dist.ProcessGroup = self.exchange._pg
        batch = context.batch_size_per_rank if context is not None else None
        if not batch:
            batch = [features.stride() // group.size()] * group.size()
        self.check_bounds(features)
        values = features.values().long()
        try:
            tables, update = self.of_tables(values.device)
        except InputError as error:
            left(OP, error, group, values)
            raise
        weights = features.weights_or_none()
        weights = weights.float() if weights is not None else None
        given = (tables, values, features.offsets().long(), weights, self.mode, True, batch,
                 self.dims, self.dtype, self.room(batch, values.device), self.plan)  # fmt: skip
        found = called(given, False, group, update)
        if self.by_row:  # of each rank: what its rows add to all columns
            found = found.unflatten(1, (group.size(), -1)).sum(1)
        for callback in self.callbacks():
            found = callback(found)
        return NoWait(found)

    def room(self, batch: Sequence[int], device: torch.device) -> PooledOutputs | None:
        """Where peers store sums of their rows, which are added up at once; no copy of them."""
        if not self.by_row or captures(device):
            return None
        if self.sums_of is None:
            columns = sum(chain.from_iterable(self.dims))
            self.sums_of = PooledOutputs(columns, self.dtype, [*batch], group=self.exchange._pg,
                                         device=device)  # fmt: skip
        return self.sums_of if self.sums_of.batch == (*batch,) else None

    def check_bounds(self, features: Any) -> None:
        """Mend indices outside of their table, or refuse them, as FBGEMM is told to."""
        parts = features.split(self.lookup._feature_splits) if self.modules else []
        for module, part in zip(self.modules, parts, strict=True):
            module.prepare_inputs(part.values(), part.offsets())

    def callbacks(self) -> Iterable[Any]:
        """What TorchRec does with what has arrived: columns of one table are put side by side."""
        return getattr(self.exchange, "_callbacks", None) or ()

    @torch.inference_mode(False)
    def of_tables(self, device: torch.device) -> tuple[list[Tensor], Update]:
        """Own tables where FBGEMM has them now, and how their optimizer updates them.

        Raises:
            InputError: FBGEMM's learning rates differ.
        """
        places = (*self._places(),)
        if places != self.places or self.rates.device != device:
            self.places = places
            self.tables = [w for m in self.modules for w in m.split_embedding_weights()]
            self.sums = []
            if self.kind == "rowwise_adagrad":
                self.sums = [s[0] for m in self.modules for s in m.split_optimizer_states()]
            self.rates, self.rate = torch.zeros(3, device=device), (0.0, 0.0, 0.0)
        ranks = self.exchange._pg.size() if comm_ops.get_gradient_division() else 1
        rates = {(m.get_learning_rate(), m.optimizer_args.eps) for m in self.modules}
        if len(rates) > 1:
            raise InputError(OP, "learning rate", want="equal in tables of one sharding",
                             got=", ".join(f"{lr:g}" for lr, _ in sorted(rates)))  # fmt: skip
        rate = (*rates.pop(), 1 / ranks) if rates else self.rate
        if rate != self.rate:  # forwards whose backward has not come keep theirs
            self.rate, self.rates = rate, torch.tensor(rate, device=device, dtype=torch.float32)
        steps = Steps()
        if self.steps:
            steps.tables = self.steps[-1].tables
        self._join()
        self.steps = [*[s for s in self.steps if s.uses][-MOST_FORWARDS:], steps]
        return self.tables, Update(self.kind, self.rates, self.sums, steps)

    def _join(self) -> None:
        for steps in self.steps:
            steps.join()

    def _places(self) -> Iterator[int]:
        for module in self.modules:
            yield from (module.weights_host.data_ptr(), module.weights_dev.data_ptr())
            for name in ("momentum1_host", "momentum1_dev"):
                state = getattr(module, name, None)
                yield 0 if state is None else state.data_ptr()
