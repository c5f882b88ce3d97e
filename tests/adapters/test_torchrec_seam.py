"""The adapter of TorchRec without TorchRec: on stand-ins for what it takes, by 1.9.2's names."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor, nn

import counterpoint as cp

NAME = "counterpoint.adapters.torchrec"
SIZES = ((5, 3), (4, 2), (6, 1))  # rows and columns of tables; table t is of rank t % 2
SAMPLES, RATE, STEPS = 3, 0.5, 3

Type = Enum("Type", {name: name for name in ("FP32", "FP16", "SUM", "EXACT_SGD", "ADAM")})
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is not None, reason="TorchRec itself is tested"
)


class Tables:
    """FBGEMM's tables of one rank."""

    def __init__(
        self, weights: list[Tensor] | None = None, weight_decay: float = 0.0, eps: float = 1e-8
    ) -> None:
        self.weights, self.optimizer_args = weights or [], SimpleNamespace(eps=eps)
        self.weights_host, self.weights_dev = torch.empty(1), torch.empty(0)
        self.checked = 0

    def split_embedding_weights(self) -> list[Tensor]:
        return self.weights

    def get_learning_rate(self) -> float:
        return RATE

    def prepare_inputs(self, indices: Tensor, offsets: Tensor) -> None:
        assert offsets[-1] == len(indices)
        self.checked += 1


class Lookup(nn.Module):
    """Of TorchRec."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._emb_modules = [SimpleNamespace(emb_module=tables)]
        self._feature_splits = [len(tables.weights)]

    def forward(self, _: Any) -> str:
        return "TorchRec's"


class Exchange(nn.Module):
    """Of TorchRec."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._pg, self._codecs, self._callbacks = group, None, [torch.neg]


class Reduction(nn.Module):
    """Of TorchRec, of rows."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._pg, self._codecs = group, None


class Bags(nn.Module):
    """Of TorchRec: one sharding of all tables."""

    def __init__(self, kind: str, weights: list[Tensor], group: Any, **fused: Any) -> None:
        super().__init__()
        by_row = kind == "row_wise"
        of = [range(len(SIZES)) if by_row else range(r, len(SIZES), 2) for r in range(2)]
        self._sharding_types = [kind]
        tables = [SimpleNamespace(embedding_config=SimpleNamespace(name=f"t{t}"))
                  for t in range(len(SIZES))]  # fmt: skip
        self.sharding_type_to_sharding_infos = {kind: tables}
        self._lookups = nn.ModuleList([Lookup(Tables([weights[t] for t in of[group.rank()]]))])
        self._output_dists = nn.ModuleList([Reduction(group) if by_row else Exchange(group)])
        self._embedding_shardings = [
            SimpleNamespace(
                _grouped_embedding_configs_per_rank=[[self.grouped(own, fused)] for own in of]
            )
        ]

    @staticmethod
    def grouped(own: range, fused: dict[str, Any]) -> Any:
        tables = [
            SimpleNamespace(
                name=f"t{t}", num_features=lambda: 1, stash_weights=False, fused_params=fused,
                compute_kernel=SimpleNamespace(value="fused"),
            )
            for t in own
        ]  # fmt: skip
        return SimpleNamespace(
            embedding_tables=tables, data_type=Type.FP32, is_weighted=False,
            pooling=Type.SUM, has_feature_processor=False, enable_embedding_update=False,
            embedding_dims=lambda: [SIZES[t][1] for t in own],
        )  # fmt: skip

    def forward(self, features: Any) -> Tensor:
        context = SimpleNamespace(batch_size_per_rank=[SAMPLES] * 2)
        return self._output_dists[0](self._lookups[0](features), context)


class Features:
    """Of TorchRec: bags of one rank's tables for the samples of all."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def variable_stride_per_key(self) -> bool:
        return False

    def weights_or_none(self) -> None:
        return None

    def split(self, _: list[int]) -> list["Features"]:
        return [self]

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))


@contextmanager
def stand_ins() -> Iterator[Any]:
    """The adapter, imported with TorchRec's and FBGEMM's names."""
    names = {
        "torchrec.distributed.embeddingbag": {"ShardedEmbeddingBagCollection": Bags},
        "torchrec.distributed.embedding_lookup": {"GroupedPooledEmbeddingsLookup": Lookup},
        "torchrec.distributed.sharding.tw_sharding": {"TwPooledEmbeddingDist": Exchange},
        "torchrec.distributed.sharding.rw_sharding": {"RwPooledEmbeddingDist": Reduction},
        "torchrec.distributed.types": {"NoWait": lambda pooled: pooled},
        "torchrec.distributed.memory_stashing": {
            "MemoryStashingManager": SimpleNamespace(is_enabled=lambda: False)
        },
        "torchrec.distributed": {"comm_ops": SimpleNamespace(get_gradient_division=lambda: True)},
        "fbgemm_gpu.split_embedding_configs": {"EmbOptimType": Type},
        "fbgemm_gpu.split_table_batched_embeddings_ops_training": {
            "SplitTableBatchedEmbeddingBagsCodegen": Tables
        },
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchrec", "torchrec.distributed.sharding", "fbgemm_gpu", *names):
            module = ModuleType(name)
            vars(module).update(names.get(name, {}))
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, NAME, raising=False)
        yield import_module(NAME)
        sys.modules.pop(NAME, None)


@on_ranks(2)
def test_bags_are_those_of_all_ranks_and_updated_in_place(rank: int, ranks: int):
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(rows, columns, generator=draw) for rows, columns in SIZES]
    own = [w.clone() for w in whole]
    with stand_ins() as adapter:
        model = nn.Sequential(Bags("table_wise", own, world()))
        told = adapter.overlap(model)
        assert told.explain() == "0, table_wise, t0, t1, t2: counterpoint"
        for _ in range(STEPS):
            lengths = torch.randint(3, (len(SIZES), ranks * SAMPLES), generator=draw)
            every = [torch.randint(rows, (int(n),), generator=draw)
                     for (rows, _), n in zip(SIZES, lengths.sum(1), strict=True)]  # fmt: skip
            mine = range(rank, len(SIZES), 2)
            got = model(Features(torch.cat([every[t] for t in mine]), lengths[[*mine]].flatten()))
            want = []
            for t in (0, 2, 1):
                starts = lengths[t].cumsum(0) - lengths[t]
                bags = nn.functional.embedding_bag(every[t], whole[t], starts, mode="sum")
                want.append(bags[rank * SAMPLES :][:SAMPLES])
            torch.testing.assert_close(got, -torch.cat(want, 1), msg="in TorchRec's order")
            (got * (rank + 1)).sum().backward()
            for t, rows in enumerate(every):
                of = torch.arange(ranks * SAMPLES).repeat_interleave(lengths[t]) // SAMPLES + 1
                grad = -of[:, None].expand(-1, SIZES[t][1]).float() / ranks
                whole[t].index_add_(0, rows, grad, alpha=-RATE)
            for t in mine:
                torch.testing.assert_close(own[t], whole[t])
        lookup: Any = model[0]._lookups[0]
        assert lookup._emb_modules[0].emb_module.checked == STEPS
        told.end()
        assert lookup(None) == "TorchRec's"
        cp.check()
    dist.barrier()


@on_ranks(2)
def test_bags_of_row_wise_tables_are_sums_of_all_ranks_rows(rank: int, ranks: int):
    draw = torch.Generator().manual_seed(5)
    whole = [torch.randn(ranks, rows, columns, generator=draw) for rows, columns in SIZES]
    lengths = torch.randint(3, (ranks, len(SIZES), ranks * SAMPLES), generator=draw)
    every = [
        [torch.randint(SIZES[t][0], (int(n),), generator=draw) for t, n in enumerate(of.sum(1))]
        for of in lengths
    ]
    with stand_ins() as adapter:
        own = [w[rank].clone() for w in whole]
        model = nn.Sequential(Bags("row_wise", own, world()))
        assert adapter.overlap(model).explain() == "0, row_wise, t0, t1, t2: counterpoint"
        got = model(Features(torch.cat(every[rank]), lengths[rank].flatten()))
        want = []
        for t, w in enumerate(whole):
            starts = lengths[:, t].cumsum(1) - lengths[:, t]
            bags = [nn.functional.embedding_bag(every[r][t], w[r], starts[r], mode="sum")
                    for r in range(ranks)]  # fmt: skip
            want.append(sum(bags)[rank * SAMPLES :][:SAMPLES])
        torch.testing.assert_close(got, torch.cat(want, 1))
        (got * (rank + 1)).sum().backward()
        for t, w in enumerate(own):
            of = torch.arange(ranks * SAMPLES).repeat_interleave(lengths[rank, t]) // SAMPLES + 1
            grad = of[:, None].expand(-1, SIZES[t][1]).float() / ranks
            want = whole[t][rank].index_add(0, every[rank][t], grad, alpha=-RATE)
            torch.testing.assert_close(w, want)
        cp.check()


@on_ranks(2)
def test_what_is_left_is_said(rank: int, ranks: int):
    with stand_ins() as adapter:
        for kind, fused, why in (
            ("data_parallel", {}, "data-parallel bags are not exchanged by an all-to-all"),
            ("table_wise", {"optimizer": Type.ADAM}, "its optimizer is ADAM"),
            ("table_wise", {"weight_decay": 0.1}, "it has weight_decay"),
            ("column_wise", {"output_dtype": Type.FP16},
             "its tables are FP32, its bags FP16"),
        ):  # fmt: skip
            weights = [torch.zeros(size) for size in SIZES]
            told = adapter.overlap(Bags(kind, weights, world(), **fused)).explain()
            assert told == f"model, {kind}, t0, t1, t2: TorchRec, since {why}"


def test_what_is_missing_is_named():
    seam = "torchrec.distributed.embeddingbag: ShardedEmbeddingBagCollection, as in torchrec 1.9.2"
    with pytest.raises(cp.UnsupportedError, match=f"torchrec is not installed: .*{seam}"):
        import_module(NAME)
