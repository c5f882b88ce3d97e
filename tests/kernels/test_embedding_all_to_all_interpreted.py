"""Embedding bags and their all-to-all in one kernel: interpreted on ranks that share memory."""

import warnings
from typing import Any

import pytest
import torch
from embedding_cases import expected, facts_of, in_programs, pooled, random_bags
from late import GIVES_UP, TIMEOUT_S, looks_of
from rank_bodies import world
from rankpool import RankPool

from counterpoint.runtime.embedding_layout import Layout, Way
from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.launch_embedding import Lookup, Sender, place_of
from counterpoint.runtime.workspace import workspace_of

DIMS = ((32, 16), (), (48, 20, 16), (10,))  # of each rank; vectors of 4 divide not all
BATCH = (5, 9, 0, 3)
CASES: dict[str, dict[str, Any]] = {
    "sum": {}, "mean": {"mean": True}, "weights": {"weighted": True},
    "int32": {"index": torch.int32}, "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16, "weighted": True}, "long": {"longest": 11},
    "one": {"unroll": 1}, "empty": {"unroll": 1, "longest": 0}, "four": {"unroll": 4, "longest": 9},
}  # fmt: skip


def close(y: torch.Tensor, want: torch.Tensor) -> bool:
    """fp32 sums of a few numbers, rounded once."""
    eps = torch.finfo(y.dtype).eps
    bound = 8 * 1.2e-7 * 12 + eps * want.abs()
    return y.shape == want.shape and bool(((y.double() - want).abs() <= bound).all())


def wrong_calls(rank: int, ranks: int, cases: list[str], epoch: int = 0) -> list[str]:
    """Calls that are off, of several in a row on one memory; offsets with and without the last."""
    memory = FusedMemory(workspace_of(world(), torch.device("cpu")))
    memory.state[0] = epoch
    found: list[str] = []
    for name in cases:
        case = dict(CASES[name])
        mean, unroll = case.pop("mean", False), case.pop("unroll", 2)
        dtype = case.get("dtype", torch.float32)
        layout = Layout(DIMS[:ranks], BATCH[:ranks], dtype)
        for call in range(3):
            everyone = [
                random_bags(d, layout.num_bags, seed=10 * call + r, **case)
                for r, d in enumerate(layout.dims)
            ]
            bags = everyone[rank]
            place = place_of(memory, layout)
            sender = Sender(facts_of(layout, bags, mean=mean), memory, place, 0, Way(256, unroll))
            offsets = bags.offsets if call else bags.offsets[:-1]
            y = torch.full((layout.batch[rank], layout.columns), torch.nan, dtype=dtype)
            with warnings.catch_warnings():
                # the interpreter's own: it takes the bound of a loop from an array of one element
                warnings.simplefilter("ignore", DeprecationWarning)
                call = sender.launch_of(bags.tables, bags.indices, offsets, bags.weights, None)
                in_programs(3, call, sender.way)
                sender.copy_out(y)
            if not close(y, expected(everyone, layout, rank, mean=mean)):
                found.append(f"{name}, call {call}")
    assert not memory.fault.any() and memory.state.tolist()[1:] == [0, 0]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_come_to_their_owners(pool: RankPool, ranks: int):
    """Each case on few ranks and, as they share the cores, on 3 or on 4."""
    cases = list(CASES) if ranks < 3 else list(CASES)[ranks % 2 :: 2]
    assert pool.run(wrong_calls, ranks, cases) == [[]] * ranks


@pytest.mark.parametrize("epoch", [-2, 2**31 - 2])
def test_epochs_wrap(pool: RankPool, epoch: int):
    assert pool.run(wrong_calls, 2, ["sum"], epoch) == [[]] * 2


def looked_up(rank: int, ranks: int) -> list[bool]:
    """The kernel without communication, of three tables that start at odd addresses too."""
    found: list[bool] = []
    for dims, mean, shift in [((32, 64), False, 0), ((20, 7, 16), True, 0), ((16, 16), False, 1)]:
        layout = Layout((dims,), (13,), torch.float32)
        bags = random_bags(dims, 13, longest=9)
        bags.tables = [
            torch.cat([torch.zeros(shift), t.flatten()])[shift:].view(t.shape) for t in bags.tables
        ]
        out = torch.full((13, sum(dims)), torch.nan)
        lookup = Lookup(facts_of(layout, bags, mean=mean), 0, torch.device("cpu"), Way(256, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            lookup(bags.tables, bags.indices, bags.offsets, bags.weights, out)
        found.append(close(out, pooled(bags, 13, mean=mean)))
        found.append(lookup.chunks(bags.tables).vec_in == (1 if shift or 7 in dims else 4))
    return found


def test_a_lookup_by_itself(pool: RankPool):
    assert pool.run(looked_up, 1) == [[True] * 6]


def late_by_a_call(rank: int, ranks: int) -> list[int]:
    """Rank 0 gives up on rank 1 and says so; later calls wait no more and store nothing."""
    workspace = workspace_of(world(), torch.device("cpu"))
    workspace.timeout_s = TIMEOUT_S
    memory = FusedMemory(workspace)
    layout = Layout(((16,), (16,)), (4, 4), torch.float32)
    bags = random_bags((16,), 8)
    place = place_of(memory, layout)
    sender = Sender(facts_of(layout, bags, mean=False), memory, place, 6, Way(256, 2))

    def twice() -> None:
        for _ in range(2):
            sender(bags.tables, bags.indices, bags.offsets, None)

    looks = looks_of(rank, twice)
    return [memory.state.tolist()[2], int(memory.fault[0]), looks]


def test_a_rank_that_gives_up_names_the_other(pool: RankPool):
    first, second = pool.run(late_by_a_call, 2)
    assert first == [2, 2 << 32 | 7, GIVES_UP + 1]
    assert second == [2, 1 << 32 | 7, 1 + GIVES_UP]  # rank 0 had posted the first call only


def of_no_bags(rank: int, ranks: int) -> list[bool]:
    """There is no row to store, but every rank's memory has an address."""
    layout = Layout(((16,),) * ranks, (0,) * ranks, torch.float32)
    place = place_of(FusedMemory(workspace_of(world(), torch.device("cpu"))), layout)
    return [place.outputs.numel() == ranks, bool(place.outputs.all())]


def test_memory_of_no_bags(pool: RankPool):
    assert pool.run(of_no_bags, 2) == [[True] * 2] * 2
