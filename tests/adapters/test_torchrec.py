"""Sharded embedding bags of TorchRec by one kernel: on TorchRec itself. Skipped without it."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor, nn

import counterpoint as cp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed"
)
SIZES = ((50, 8), (30, 16), (40, 8), (20, 32), (10, 8))  # rows and columns of tables
SAMPLES = 4
ADAGRAD, SGD = "EXACT_ROWWISE_ADAGRAD", "EXACT_SGD"


class Kind(NamedTuple):
    """How tables are sharded (one after another in turn), pooled and updated."""

    sharding: str = "table_wise"
    optimizer: str = ADAGRAD
    weighted: bool = False
    pooling: str = "SUM"
    dtype: str = "FP32"
    output: str = "FP32"
    kernel: str = "fused"
    features: tuple[tuple[int, ...], ...] = tuple((i,) for i in range(len(SIZES)))
    fused: tuple[tuple[str, Any], ...] = ()
    zipf: bool = False  # indices: few rows are most of them


class Model(nn.Module):
    """Bags of all tables, and a layer over their columns."""

    def __init__(self, bags: Any, columns: int) -> None:
        super().__init__()
        self.bags, self.top = bags, nn.Linear(columns, 3)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        pooled = self.bags(features).values()
        return self.top(pooled.float()).square().mean(), pooled


def torchrec() -> Any:
    """The package; its import warns."""
    return import_module("torchrec")


def overlap(model: Any, **how: Any) -> Any:
    """The adapter's."""
    return import_module("counterpoint.adapters.torchrec").overlap(model, **how)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what TorchRec and torch warn of in their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


def sharder_of(kind: Kind) -> Any:
    sharders = import_module("torchrec.distributed.embeddingbag")
    configs = import_module("fbgemm_gpu.split_embedding_configs")
    fused = {"optimizer": configs.EmbOptimType[kind.optimizer], "learning_rate": 0.1, "eps": 1e-6,
             "output_dtype": configs.SparseType[kind.output]}  # fmt: skip
    return sharders.EmbeddingBagCollectionSharder(fused_params=fused | dict(kind.fused))


def model_of(kind: Kind, rank: int, ranks: int) -> Any:
    """The same model on all ranks, sharded."""
    package, ways = torchrec(), import_module("torchrec.distributed.sharding_plan")
    distributed = import_module("torchrec.distributed")
    # asked of all ranks once a process, and processes here have seen other groups
    import_module("torchrec.distributed.collective_utils")._INITIALIZED = False
    types = import_module("torchrec.distributed.types")
    tables = [
        package.EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=d,
            feature_names=[f"f{f}" for f in kind.features[i]],
            pooling=package.PoolingType[kind.pooling], data_type=package.DataType[kind.dtype],
        )
        for i, (rows, d) in enumerate(SIZES)
    ]  # fmt: skip
    torch.manual_seed(0)
    bags = package.EmbeddingBagCollection(
        device=torch.device("meta"), tables=tables, is_weighted=kind.weighted
    )
    model = Model(bags, sum(d * len(f) for (_, d), f in zip(SIZES, kind.features, strict=True)))
    way: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda i: ways.table_wise(rank=(i + 1) % ranks, compute_kernel=kind.kernel),
        "column_wise": lambda i: ways.column_wise(
            ranks=[(i + j) % ranks for j in range(SIZES[i][1] // 8)], compute_kernel=kind.kernel
        ),
        "row_wise": lambda i: ways.row_wise(compute_kernel=kind.kernel),
        "data_parallel": lambda _: ways.data_parallel(),
        "one rank": lambda _: ways.table_wise(rank=ranks - 1, compute_kernel=kind.kernel),
    }  # fmt: skip
    turns = kind.sharding.split("+")  # of tables
    sharder = sharder_of(kind)
    plan = ways.construct_module_sharding_plan(
        bags, {f"t{i}": way[turns[i % len(turns)]](i) for i in range(len(SIZES))}, sharder=sharder,
        local_size=ranks, world_size=ranks, device_type="cpu",
    )  # fmt: skip
    return distributed.DistributedModelParallel(
        model, env=types.ShardingEnv.from_process_group(world()), device=torch.device("cpu"),
        plan=types.ShardingPlan({"bags": plan}), sharders=[sharder],
    )  # fmt: skip


def rows_drawn(rows: int, n: int, draw: torch.Generator, *, zipf: bool) -> Tensor:
    """All rows alike, or row r as often as 1 / (r + 1)."""
    if not zipf:
        return torch.randint(rows, (n,), generator=draw)
    return ((rows + 1) ** torch.rand(n, generator=draw)).long() - 1


def features_of(kind: Kind, draw: torch.Generator, samples: int = SAMPLES) -> Any:
    """Bags of 0 to 3 rows of each feature."""
    rows_of = {f: SIZES[t][0] for t, own in enumerate(kind.features) for f in own}
    names = sorted(rows_of)
    lengths = torch.randint(4, (len(names), samples), generator=draw)
    values = [rows_drawn(rows_of[name], int(n), draw, zipf=kind.zipf)
              for name, n in zip(names, lengths.sum(1), strict=True)]  # fmt: skip
    weights = torch.rand(int(lengths.sum()), generator=draw) if kind.weighted else None
    return torchrec().KeyedJaggedTensor(
        [f"f{name}" for name in names], torch.cat(values), weights, lengths=lengths.flatten()
    )


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a state_dict on this rank, in its order."""
    if isinstance(state, dict):
        return [t for each in state.values() for t in tensors_of(each)]
    if hasattr(state, "local_shards"):
        return [shard.tensor for shard in state.local_shards()]
    return [state] if isinstance(state, Tensor) else []


def step(model: Any, features: Any) -> tuple[Tensor, Tensor]:
    """One step of all that is updated: the loss, and the bags."""
    model.zero_grad()
    loss, pooled = model(features)
    loss.backward()
    model.fused_optimizer.step()
    with torch.no_grad():
        for p in model.module.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return loss.detach(), pooled.detach()


def trained(rank: int, ranks: int, kind: Kind, *, steps: int = 5, halved: int = 3) -> str:
    """Steps of a model of TorchRec's and of one that is overlapped are the same; what is told."""
    near = 1e-5 if kind.dtype == "FP32" else 2e-3
    with quiet():
        theirs, ours = (model_of(kind, rank, ranks) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        bags = overlap(ours)
        draw = torch.Generator().manual_seed(rank)
        for i in range(steps):
            if i == halved:
                for model in (theirs, ours):
                    for group in model.fused_optimizer.param_groups:
                        group["lr"] /= 2
            # sizes of batches differ from step to step, and by rank where gloo can have it
            uneven = i > 2 and "row_wise" not in kind.sharding
            features = features_of(kind, draw, SAMPLES + (i + rank * uneven) % 2)
            want, got = step(theirs, features), step(ours, features)
            torch.testing.assert_close(got, want, rtol=near, atol=near)
        for state in "state_dict", "fused_optimizer":
            every = [m.state_dict() if state == "state_dict" else m.fused_optimizer.state_dict()
                     for m in (ours, theirs)]  # fmt: skip
            for got, want in zip(*map(tensors_of, every), strict=True):
                torch.testing.assert_close(got, want, rtol=near, atol=near)
        told = bags.explain()
        bags.end()
        assert "counterpoint" not in bags.explain()
        features = features_of(kind, draw)
        torch.testing.assert_close(step(ours, features), step(theirs, features), rtol=near,
                                   atol=near)  # fmt: skip
        cp.check()
    return told


@pytest.mark.parametrize("kind", [
    Kind(), Kind("column_wise", SGD), Kind("table_wise", SGD, weighted=True),
    Kind("column_wise", weighted=True), Kind(pooling="MEAN"), Kind("one rank", weighted=True),
    Kind(dtype="FP16", output="FP16", fused=(("stochastic_rounding", False),)),
    Kind("row_wise", SGD), Kind("row_wise", weighted=True), Kind("row_wise", pooling="MEAN"),
    Kind("row_wise", weighted=True, pooling="MEAN"), Kind("row_wise+table_wise", pooling="MEAN"),
], ids=str)  # fmt: skip
@on_ranks(2, 3)
def test_steps_are_torchrecs(rank: int, ranks: int, kind: Kind):
    told = trained(rank, ranks, kind)
    assert told.endswith(": counterpoint") and "TorchRec" not in told, told


@pytest.mark.parametrize("optimizer", [ADAGRAD, SGD])
@on_ranks(2, 3)
def test_50_steps_of_frequent_rows_are_torchrecs(rank: int, ranks: int, optimizer: str):
    kind = Kind("table_wise+column_wise+row_wise", optimizer, zipf=True)
    told = trained(rank, ranks, kind, steps=50)
    assert told.count(": counterpoint") == 3 and "TorchRec" not in told, told


TWO = ((0, 5), (1,), (2,), (3,), (4,))
LEFT = [
    (Kind("data_parallel"), "data-parallel bags are not exchanged by an all-to-all"),
    (Kind(features=TWO), "t0 has 2 features"),
    (Kind(dtype="FP16"), "its tables are FP16, its bags FP32"),
    (Kind(dtype="FP16", output="FP16"), "updates of its FP16 tables are rounded at random"),
    (Kind(fused=(("max_norm", 0.5),)), "it has max_norm"),
    (Kind(kernel="fused_uvm_caching"), "its kernel is fused_uvm_caching"),
    (Kind(weighted=True, pooling="MEAN"), "its means are weighted"),
]


@pytest.mark.parametrize(("kind", "why"), LEFT, ids=[why for _, why in LEFT])
@on_ranks(2)
def test_what_is_left_is_torchrecs_and_said(rank: int, ranks: int, kind: Kind, why: str):
    with quiet():
        told = overlap(model_of(kind, rank, ranks)).explain()
    assert told.endswith(f": TorchRec, since {why}"), told


@on_ranks(2)
def test_some_tables_are_taken_and_some_left(rank: int, ranks: int):
    kind = Kind("table_wise+data_parallel")
    first, second = sorted(trained(rank, ranks, kind).splitlines())
    assert "data_parallel, t1, t3: TorchRec, since" in first + second
    assert "table_wise, t0, t2, t4: counterpoint" in first + second


@pytest.mark.parametrize("optimizer", [ADAGRAD, SGD])
@on_ranks(2)
def test_each_forward_is_an_update_of_its_own(rank: int, ranks: int, optimizer: str):
    with quiet():
        kind = Kind(optimizer=optimizer)
        theirs, ours = (model_of(kind, rank, ranks) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        overlap(ours)
        for together in (True, False):
            for model in (theirs, ours):
                draw = torch.Generator().manual_seed(rank)
                first, second = (model(features_of(kind, draw))[0] for _ in range(2))
                for loss in (first + second,) if together else (first, second):
                    loss.backward()
            for got, want in zip(*(tensors_of(m.state_dict()) for m in (ours, theirs)),
                                 strict=True):  # fmt: skip
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_weights_of_indices_count_where_they_are_given(rank: int, ranks: int):
    """As FBGEMM takes them, whatever the bags were made for."""
    with quiet():
        theirs, ours = (model_of(Kind(), rank, ranks) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        overlap(ours)
        given = features_of(Kind(weighted=True), torch.Generator().manual_seed(rank))
        torch.testing.assert_close(step(ours, given), step(theirs, given))


@on_ranks(2)
def test_gradients_are_divided_as_torchrec_is_told(rank: int, ranks: int):
    with quiet():
        comm_ops = import_module("torchrec.distributed.comm_ops")
    comm_ops.set_gradient_division(False)
    try:
        trained(rank, ranks, Kind())
    finally:
        comm_ops.set_gradient_division(True)


@on_ranks(2)
def test_an_index_outside_of_its_table_is_row_0_as_torchrec_has_it(rank: int, ranks: int):
    with quiet():
        theirs, ours = (model_of(Kind(), rank, ranks) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        overlap(ours)
        values = torch.tensor([1, 70, 29, -2, 10**9, 3, 9])

        def features() -> Any:  # they are mended in place
            lengths = torch.tensor([2, 1, 1, 0, 0, 1, 0, 1, 1, 0])
            return torchrec().KeyedJaggedTensor(
                [f"f{i}" for i in range(5)], values.clone(), lengths=lengths
            )

        torch.testing.assert_close(step(ours, features()), step(theirs, features()))


@on_ranks(2)
def test_index_minus_1_is_refused_as_by_fbgemm(rank: int, ranks: int):
    """Its check of bounds lets -1 pass, and its lookup on CPUs refuses it."""
    with quiet():
        theirs, ours = (model_of(Kind(), rank, ranks) for _ in range(2))
        given = features_of(Kind(), torch.Generator().manual_seed(0), 6)
        given.values()[:] = -1
        with pytest.raises(RuntimeError, match="out of bounds: -1"):
            theirs(given)
        overlap(ours)
        with pytest.raises(cp.InputError, match=r"indices.*-1"):
            ours(given)


@on_ranks(2)
def test_batches_that_vary_by_feature_go_torchrecs_way(rank: int, ranks: int):
    with quiet():
        theirs, ours = (model_of(Kind(), rank, ranks) for _ in range(2))
        ours.load_state_dict(theirs.state_dict())
        assert "counterpoint" in overlap(ours).explain()
        draw = torch.Generator().manual_seed(rank)
        strides = [[3], [1], [2], [3], [1]]
        lengths = torch.randint(1, 4, (sum(s for (s,) in strides),), generator=draw)
        features = torchrec().KeyedJaggedTensor(
            [f"f{i}" for i in range(5)], torch.randint(10, (int(lengths.sum()),), generator=draw),
            lengths=lengths, stride_per_key_per_rank=strides,
            inverse_indices=([f"f{i}" for i in range(5)],
                             torch.stack([torch.arange(3) % s for (s,) in strides])),
        )  # fmt: skip
        torch.testing.assert_close(step(ours, features), step(theirs, features))


@on_ranks(2)
def test_torchrecs_pipeline_trains_it(rank: int, ranks: int):
    def losses(*, overlapped: bool) -> list[float]:
        model = model_of(Kind(), rank, ranks)
        if overlapped:
            overlap(model)
        pipelines = import_module("torchrec.distributed.train_pipeline")
        optimizer = torch.optim.SGD(model.module.top.parameters(), lr=0.1)
        pipeline = pipelines.TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        draw = torch.Generator().manual_seed(rank)
        batches = iter([features_of(Kind(), draw) for _ in range(5)])
        found: list[float] = []
        for _ in range(5):
            pooled = pipeline.progress(batches)
            found.append(float(pooled.square().mean()))
        return found

    with quiet():
        assert losses(overlapped=True) == pytest.approx(losses(overlapped=False), rel=1e-5)


@on_ranks(2)
def test_resharded_bags_are_taken_again(rank: int, ranks: int):
    with quiet():
        kinds = Kind(), Kind(), Kind("one rank")
        theirs, ours, moved = (model_of(kind, rank, ranks) for kind in kinds)
        ours.load_state_dict(theirs.state_dict())
        overlap(ours)
        draw = torch.Generator().manual_seed(rank)
        features = features_of(Kind(), draw)
        torch.testing.assert_close(step(ours, features), step(theirs, features))
        whole = moved.module.bags.module_sharding_plan
        plan = type(whole)({name: whole[name] for name in ("t1", "t3")})  # others are there
        for model in (ours, theirs):
            sharder_of(Kind()).reshard(model.module.bags, plan, model._env, torch.device("cpu"))
        assert overlap(ours).explain().endswith(": counterpoint")
        for _ in range(2):
            features = features_of(Kind(), draw)
            torch.testing.assert_close(step(ours, features), step(theirs, features))


@on_ranks(2)
def test_wrong_models_are_refused(rank: int, ranks: int):
    with quiet():
        model: Any = model_of(Kind(), rank, ranks)
        overlap(model)
        with pytest.raises(cp.InputError, match=r"bags.*overlapped; call end\(\)"):
            overlap(model)
        wrong: Any = 3
        with pytest.raises(cp.InputError, match=r"model must be a torch.nn.Module, got int"):
            overlap(wrong)
        with pytest.raises(cp.InputError, match="plan"):
            overlap(model, plan="fastest")
        assert overlap(nn.Linear(2, 2)).explain() == "the model has no sharded embedding bags"
