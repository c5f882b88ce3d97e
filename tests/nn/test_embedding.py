"""ShardedEmbeddingBags on CPU ranks against torch's embedding bags with all tables on one."""

import copy
import importlib
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rankpool import RankPool
from refusals import Refusal, wrongly_refused
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn

TABLES = ((30, 8), (5, 3), (7, 16), (11, 8), (4, 1))
BAGS = 6  # of each rank


def batches(ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Indices and offsets of each table for the global batch, and tables; equal on all ranks."""
    draw = torch.Generator().manual_seed(3)
    counts = [torch.randint(0, 5, (BAGS * ranks,), generator=draw) for _ in TABLES]
    indices = [torch.randint(0, rows, (int(c.sum()),), generator=draw)
               for (rows, _), c in zip(TABLES, counts, strict=True)]  # fmt: skip
    offsets = [c.cumsum(0) - c for c in counts]
    tables = [torch.randn(size, generator=draw) for size in TABLES]
    return indices, offsets, tables


def given(bags: Any, indices: list[Tensor], offsets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What a rank passes: those of its own tables, one after the other."""
    empty = torch.empty(0, dtype=torch.int64)
    parts, shifted, first = [empty], [empty], 0
    for t in bags.own:
        parts.append(indices[t])
        shifted.append(offsets[t] + first)
        first += len(indices[t])
    return torch.cat(parts), torch.cat(shifted)


@pytest.mark.parametrize("owners", [None, (1, 0, 1, 1, 0), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(("mode", "sparse"), [("sum", False), ("mean", True)])
@on_ranks(2)
def test_training_steps_are_those_of_whole_tables(
    rank: int, ranks: int, owners: Any, mode: str, sparse: bool
):
    """Three steps of SGD on both; the same outputs and tables after each."""
    indices, offsets, tables = batches(ranks)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=owners, mode=mode, sparse=sparse)
    plain = [torch.nn.EmbeddingBag.from_pretrained(t.clone(), freeze=False, mode=mode)
             for t in tables]  # fmt: skip
    with torch.no_grad():
        for weight, t in zip(bags.weights, bags.own, strict=True):
            weight.copy_(tables[t])
    own_indices, own_offsets = given(bags, indices, offsets)
    found: list[bool] = []
    for _ in range(3):
        y = bags(own_indices, own_offsets, batch=[BAGS] * ranks)
        want = [p(i, o) for p, i, o in zip(plain, indices, offsets, strict=True)]
        mine = slice(rank * BAGS, (rank + 1) * BAGS)
        found += [torch.allclose(a, b[mine], atol=1e-5)
                  for a, b in zip(bags.split(y), want, strict=True)]  # fmt: skip
        y.square().sum().backward()
        torch.cat(want, 1).square().sum().backward()
        with torch.no_grad():
            for weight in [*bags.weights, *(p.weight for p in plain)]:
                assert weight.grad is not None
                weight -= 0.1 * (weight.grad.to_dense() if weight.grad.is_sparse else weight.grad)
                weight.grad = None
        found += [torch.allclose(weight, plain[t].weight, atol=1e-4)
                  for weight, t in zip(bags.weights, bags.own, strict=True)]  # fmt: skip
    assert all([all(found), str(list(bags.own)) in repr(bags)])


def drawn(rank: int, ranks: int, owners: Any) -> tuple[dict[str, Any], list[float]]:
    """The state_dict of this rank for one seed, as numbers, and what its generator draws next."""
    torch.manual_seed(7)
    state = cnn.ShardedEmbeddingBags(TABLES, owners=owners).state_dict()
    return {k: t.tolist() for k, t in state.items()}, torch.rand(3).tolist()


def test_tables_are_of_the_seed_and_their_number(pool: RankPool):
    """On 1, 2 and 3 ranks, one of them without tables; generators then go on alike."""
    (whole, following), *_ = pool.run(drawn, 1, None)
    assert list(whole) == [f"table_{t}" for t in range(len(TABLES))]
    firsts = [table[0][0] for table in whole.values()]
    assert len(set(firsts)) == len(TABLES), "some are equal"
    assert [(len(t), len(t[0])) for t in whole.values()] == list(TABLES)
    for ranks, owners in ((2, None), (3, None), (3, (2, 0, 0, 2, 2)), (2, (1, 0, 1, 1, 0))):
        found = pool.run(drawn, ranks, owners)
        assert sum(len(state) for state, _ in found) == len(TABLES)
        assert {k: t for state, _ in found for k, t in state.items()} == whole
        assert [after for _, after in found] == [following] * ranks


@on_ranks(2)
def test_each_module_draws_anew_and_one_on_meta_nothing(rank: int, ranks: int):
    torch.manual_seed(1)
    untouched = torch.rand(3)
    torch.manual_seed(1)
    cnn.ShardedEmbeddingBags(TABLES, device="meta")
    with torch.device("meta"):
        cnn.ShardedEmbeddingBags(TABLES, owners=(1,) * 5)
    same = [torch.equal(torch.rand(3), untouched)]
    first, second = (cnn.ShardedEmbeddingBags(TABLES) for _ in range(2))
    same.append(not any(map(torch.equal, first.weights, second.weights)))
    before = [weight.clone() for weight in first.weights]
    first.reset_parameters()
    assert all(same) and not any(map(torch.equal, first.weights, before))


def saved(rank: int, ranks: int) -> tuple[dict[str, Tensor], list[Any]]:
    """Steps of an optimizer on copies: all go the same way; the tables after them, and facts."""
    torch.manual_seed(2)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=(1, 0, 1, 1, 0))
    again = cnn.ShardedEmbeddingBags(TABLES, owners=(1, 0, 1, 1, 0))
    again.load_state_dict(bags.state_dict())
    several = [bags, copy.deepcopy(bags), pickle.loads(pickle.dumps(bags)), again]
    indices, offsets, _ = batches(ranks)
    for each in several:
        optimizer = torch.optim.Adagrad(each.parameters())
        each(*given(each, indices, offsets), batch=[BAGS] * ranks).square().sum().backward()
        optimizer.step()
    facts = [torch.equal(a, b) for each in several[1:]
             for a, b in zip(bags.weights, each.weights, strict=True)]  # fmt: skip
    names = [name for name, _ in bags.named_parameters()]
    assert all(a is b for a, b in zip(bags.weights, bags.parameters(), strict=True))
    with pytest.raises(TypeError):
        bags.weights[0] = bags.weights[0]  # pyright: ignore[reportIndexIssue]
    return {k: t.numpy() for k, t in bags.state_dict().items()}, [names, all(facts)]


def loaded(rank: int, ranks: int, whole: dict[str, Any]) -> bool:
    bags = cnn.ShardedEmbeddingBags(TABLES)
    missing, _ = bags.load_state_dict(
        {k: torch.from_numpy(t) for k, t in whole.items()}, strict=False
    )
    same = [torch.equal(w, torch.from_numpy(whole[f"table_{t}"]))
            for w, t in zip(bags.weights, bags.own, strict=True)]  # fmt: skip
    return all(same) and not missing


def test_checkpoints_of_all_ranks_are_the_whole_model(pool: RankPool):
    found = pool.run(saved, 2)
    assert [facts for _, facts in found] == [
        [["table_1", "table_4"], True], [["table_0", "table_2", "table_3"], True]
    ]  # fmt: skip
    whole = {k: t for state, _ in found for k, t in state.items()}
    assert pool.run(loaded, 3, whole) == [True] * 3


@on_ranks(2)
def test_a_rank_without_tables_follows_a_change_of_dtype(rank: int, ranks: int):
    indices, offsets, _ = batches(ranks)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=(1,) * 5).half()
    y = bags(*given(bags, indices, offsets), batch=[BAGS] * ranks)
    assert y.dtype == torch.float16


@on_ranks(2)
def test_a_rank_without_tables_is_told_what_forward_takes(rank: int, ranks: int):
    """And only that: the module knows dims and dtype."""
    indices, offsets, _ = batches(ranks)
    bags = cnn.ShardedEmbeddingBags(TABLES, owners=(1,) * 5)
    text = "tables must be some, or described, got none; pass batch=$"
    with pytest.raises(cp.InputError, match=text):
        bags(*given(bags, indices, offsets))


@on_ranks(3)
def test_tables_are_spread_by_columns(rank: int, ranks: int):
    bags = cnn.ShardedEmbeddingBags(TABLES, device="meta", dtype=torch.bfloat16)
    assert [sum(d) for d in bags.dims] == [16, 11, 9]
    assert [w.shape for w in bags.weights] == [torch.Size(TABLES[t]) for t in bags.own]
    assert bags.own == tuple(t for t in range(5) if bags.owners[t] == rank)
    ends = sorted((c.start, c.stop) for c in bags.columns)
    assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


def has_torchrec() -> bool:
    """Whether it is there; what its own import warns of is no error of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchrec")
        except ImportError:
            return False
    return True


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    tables = "tables must be (rows, columns) of each"
    owners = "owners must be one of 2 ranks for each of 5 tables"
    cases: list[Refusal] = [
        ({"tables": ()}, tables), ({"tables": ((0, 4),)}, tables),
        ({"owners": (0,)}, owners),
        ({"owners": (0, 1, 2, 0, 0)}, owners),
        ({"mode": "max"}, "mode must be 'sum' or 'mean'"),
        ({"plan": "graded"},
         "plan must be one of auto, serial, fused, fused_after_barrier, islands, got 'graded'"),
    ]  # fmt: skip
    found = wrongly_refused(cnn.ShardedEmbeddingBags, {"tables": TABLES}, cases)
    bags = cnn.ShardedEmbeddingBags(TABLES)
    with pytest.raises(cp.InputError, match="keys must be a name for each of 5 tables"):
        bags.keyed(torch.zeros(1, 36), ["a"])
    if not has_torchrec():
        with pytest.raises(cp.UnsupportedError, match="torchrec is not there"):
            bags.keyed(torch.zeros(1, 36), list("abcde"))
    return found


@pytest.mark.skipif(not has_torchrec(), reason="torchrec is not there")
@on_ranks(2)
def test_a_keyed_tensor_of_torchrec(rank: int, ranks: int):
    indices, offsets, _ = batches(ranks)
    bags = cnn.ShardedEmbeddingBags(TABLES)
    y = bags(*given(bags, indices, offsets), batch=[BAGS] * ranks)
    found = bags.keyed(y, list("abcde"))
    parts = zip("abcde", bags.split(y), strict=True)
    assert all(torch.equal(found[k], part) for k, part in parts)
    dist.barrier()
    assert found.values().data_ptr() == y.data_ptr()
