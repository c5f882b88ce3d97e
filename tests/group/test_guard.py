"""`counterpoint.guard`: what it sees, whom it names, and that it leaves nothing behind."""

import gc
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fault_trials import POOL_ENV
from guard_trials import Fault, Trial, ddp, fsdp2, problems_of
from on_ranks import on_ranks
from own_calls import own_calls
from rank_bodies import world
from rankpool import RankPool
from torch._C._distributed_c10d import TCPStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import counterpoint as cp
from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError, UnsupportedError
from counterpoint.group import notice_board
from counterpoint.group.guard import _guarded
from counterpoint.group.guard_board import Call, GuardBoard

REDUCE: Call = "all_reduce", 4, torch.float32, -1
GATHER: Call = "all_gather", 4, torch.float32, -1


def board_of(group: dist.ProcessGroup | None = None) -> GuardBoard:
    board = _guarded.known[id(world(group))]
    assert board
    return board


def coalesced(x: torch.Tensor) -> None:
    with dist._coalescing_manager():
        for _ in range(2):
            dist.all_reduce(x)


def calls_of(rank: int, ranks: int) -> dict[str, Callable[[], object]]:
    """One collective each; sizes and dtypes are the same on all ranks."""
    x, all_x = torch.ones(6, dtype=torch.float64), torch.ones(6 * ranks, dtype=torch.float64)
    parts = [torch.ones(6, dtype=torch.float64) for _ in range(ranks)]
    first = rank == 0
    return {
        "all_reduce of 6 float64": lambda: dist.all_reduce(x),
        "reduce of 6 float64 from or to rank 1": lambda: dist.reduce(x, 1),
        "broadcast of 6 float64 from or to rank 1": lambda: dist.broadcast(x, 1),
        "all_gather of 6 float64": lambda: dist.all_gather(parts, x),
        "gather of 6 float64 from or to rank 0": lambda: dist.gather(x, parts if first else None),
        "scatter of 6 float64 from or to rank 0": lambda: dist.scatter(x, parts if first else None),
        "all_gather_into_tensor of 12 float64": lambda: dist.all_gather_into_tensor(all_x, x),
        "reduce_scatter_tensor of 12 float64": lambda: dist.reduce_scatter_tensor(x, all_x),
        "reduce_scatter of 6 float64": lambda: dist.reduce_scatter(x, parts),
        "all_to_all_single of float64": lambda: dist.all_to_all_single(
            torch.ones(13 - 2 * rank, dtype=torch.float64),
            all_x,
            [7 - 2 * rank, 6],
            [7 - rank, 5 + rank],
        ),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        # functional ones, in the words of those that they end in
        "all_reduce of 12 float64": lambda: functional.all_reduce(all_x, "sum", world()).sum(),
        "all_gather_into_tensor of 24 float64": lambda: functional.all_gather_tensor(
            all_x, 0, world()
        ).sum(),
        "reduce_scatter_tensor of 24 float64": lambda: functional.reduce_scatter_tensor(
            all_x.repeat(2), "sum", 0, world()
        ).sum(),
        "broadcast of 12 float64 from or to rank 0": lambda: functional.broadcast(
            all_x, 0, world()
        ).sum(),
    }


@on_ranks(2)
def test_each_collective_is_seen_once(rank: int, ranks: int) -> None:
    calls = calls_of(rank, ranks)
    with cp.guard(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that torch gives up
        board = board_of()
        for number, (words, call) in enumerate(calls.items(), 1):
            call()
            assert board.calls == number, words
            at = "" if call is dist.monitored_barrier else f"{__file__}:"  # torch does not log it
            assert board._described(rank, number).startswith(f"{words} at {at}"), words
        other = (rank + 1) % ranks
        sent = dist.isend(torch.ones(3), other)
        dist.recv(torch.ones(3), other)
        assert sent is not None
        sent.wait()
        with FlopCounterMode(display=False):  # a mode that one rank might have alone
            functional.all_reduce(torch.ones(2), "sum", world()).sum()
        assert board.calls == len(calls) + 1
        if rank == 0:
            with FakeTensorMode():
                functional.all_reduce(torch.ones(2), "sum", world())
        assert board.calls == len(calls) + 1
        dist.all_gather_object([None] * ranks, "any")
        assert board.calls > len(calls) + 1 and board.wrong() is None


@pytest.mark.parametrize("program", [ddp, fsdp2], ids=lambda each: each.__name__)
@on_ranks(2)
def test_models_are_seen_and_have_the_same_gradients(
    rank: int, ranks: int, program: Callable[[Fault], None]
) -> None:
    fault = Fault(Trial(ranks, -1, "", program.__name__, 0, 0), rank)
    with cp.guard():
        program(fault)
        calls = board_of().calls
    assert calls > 20 and world().size() == ranks


@on_ranks(2)
def test_what_one_rank_compiles_pairs_with_what_another_calls(rank: int, ranks: int) -> None:
    x = torch.ones(5)
    compiled = torch.compile(
        lambda x: functional.all_reduce(x, "sum", world()) + 1, backend="aot_eager"
    )
    with cp.guard(world()):
        for _ in range(3):
            if rank:
                assert torch.equal(compiled(x), x * ranks + 1)
            else:
                dist.all_reduce(x.clone())
        assert board_of().calls == 3
        time.sleep(0.2)
        assert board_of().wrong() is None


@on_ranks(2)
def test_nothing_stays_behind(rank: int, ranks: int) -> None:
    def there() -> list[Any]:
        functional_ops = torch.ops._c10d_functional.all_reduce
        return [vars(dist.ProcessGroup)["allreduce"], dist.Reducer, functional_ops._op,
                functional_ops.default._op, sys.excepthook]  # fmt: skip

    before = there()
    hashed = hash(torch.ops._c10d_functional.all_reduce.default)
    for _ in range(2):
        with cp.guard(), cp.guard(world()):
            assert hash(torch.ops._c10d_functional.all_reduce.default) == hashed
            assert all(a is not b for a, b in zip(before, there(), strict=True))
            group = dist.new_group()
            dist.all_reduce(torch.ones(2), group=group)  # met there
            assert board_of(group).calls == 1
            dist.destroy_process_group(group)
            assert len(_guarded.live()) == 2
            del group
            assert len(_guarded.live()) == 1
            dist.all_reduce(torch.ones(2))
        assert all(a is b for a, b in zip(before, there(), strict=True))
        assert not _guarded.known and not _guarded.held
    dist.all_reduce(torch.ones(2))


def guarded_to_its_end(rank: int, ranks: int, folder: str) -> None:
    for number in range(2):
        store = dist.FileStore(f"{folder}/{number}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        cp.guard()
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        gc.collect()
        assert not _guarded.all and not _guarded.known


def test_it_ends_with_the_default_group(pool: RankPool, tmp_path: Path):
    pool.run(guarded_to_its_end, 2, str(tmp_path), group=False)


@on_ranks(2)
def test_a_known_collective_makes_few_calls_of_ours(rank: int, ranks: int) -> None:
    x = torch.ones(4)
    with cp.guard():
        found: list[str] = []
        for _ in range(3):  # at one place
            found = own_calls(lambda: dist.all_reduce(x))
    assert found == [
        "group/guard_seams.py method", "group/guard_seams.py read", "group/guard_board.py jot"
    ]  # fmt: skip


def fault_of(board: GuardBoard) -> CounterpointError:
    """What comes to be wrong within a minute."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        board.publish("")
        if (fault := board.fault or board.wrong()) is not None:
            return fault
        time.sleep(0.02)
    raise AssertionError("nothing is wrong")


@on_ranks(3)
def test_who_calls_something_else_is_named_and_all_raise(rank: int, ranks: int) -> None:
    board = GuardBoard(world(), 60.0, "a test")
    board.jot(REDUCE)
    board.jot(GATHER if rank == 1 else REDUCE)
    found = board.fail(fault_of(board))
    with pytest.raises(InputError, match="unusable") as info:
        board.jot(REDUCE)
    assert str(info.value) == str(found)
    assert "collective 2 must be all_reduce of 4 float32 at " in str(found)
    assert ", as on ranks 0, 2, got all_gather of 4 float32 at " in str(found)
    assert " on rank 1; the group" in str(found)
    dist.barrier()
    board.leave()


@on_ranks(2)
def test_who_leaves_too_early_is_named(rank: int, ranks: int) -> None:
    board = GuardBoard(world(), 60.0, "a test")
    board.jot(REDUCE)
    if rank:
        board.leave()
    else:
        board.jot(GATHER)
        found = fault_of(board)
        assert isinstance(found, PeerTimeoutError) and found.rank == 1
        assert "rank 1 did not make collective 2: all_gather of 4 float32" in str(found)
        assert "(it has left the group); its last was collective 1, all_reduce" in str(found)
    dist.barrier()


@on_ranks(2)
def test_ranks_without_memory_in_common_compare_by_the_store(rank: int, ranks: int) -> None:
    def refused(*_: object) -> None:
        raise UnsupportedError("on two hosts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice_board, "allocate_cpu", refused)
        board = GuardBoard(world(), 60.0, "a test")
    assert not board.shared
    board.jot(GATHER if rank == 1 else REDUCE)
    found = str(board.fail(fault_of(board)))
    assert "got all_gather of 4 float32" in found and "on rank 1" in found
    dist.barrier()
    board.leave()


def test_without_a_group():
    with pytest.raises(InputError, match="guard: group must be an initialised process group"):
        cp.guard()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "trial",
    [
        Trial(3, 1, "killed", "fsdp", 2, 0), Trial(3, 0, "other", "plain", 1, 1),
        Trial(3, 2, "raises", "ddp", 1, 2), Trial(4, 3, "few", "groups", 2, 3),
        Trial(3, 1, "sleeps", "fsdp2", 2, 4), Trial(3, 2, "stops", "pipeline", 2, 5),
    ],
    ids=lambda trial: f"{trial.fault} {trial.program}",
)  # fmt: skip
def test_every_rank_that_is_left_names_who_parted(trial: Trial):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(env=POOL_ENV) as pool:
        assert problems_of(trial, pool, store.port) == []
