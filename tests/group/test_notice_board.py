"""Ranks that call differently, or refuse alone, are an error on all, which says what differs."""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import by_reference, world

import counterpoint as cp
from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.group import notice_board
from counterpoint.group.notice_board import RING, Awaited, HeldUp, NoticeBoard, Refused
from counterpoint.group.workspace import workspace_of
from counterpoint.nn.replicated import copy_to_group

CPU = torch.device("cpu")
Call = Callable[[], object]


def gather(rows: int = 2, plan: str = "shard_p2p", dtype: torch.dtype = torch.float32) -> object:
    return cp.all_gather_matmul(torch.ones(rows, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype),
                                plan=plan)  # fmt: skip


def scatter(plan: str = "shard_p2p") -> object:
    ranks = dist.get_world_size()
    return cp.matmul_reduce_scatter(torch.ones(2 * ranks, 4), torch.ones(4, 3), plan=plan)


def told(call: Call) -> str:
    """The error of a call, "" if there is none."""
    try:
        call()
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# of rank 0 and the others, the last rank; the fact that differs; all have made both calls before
PAIRS: dict[str, tuple[Call, Call, str]] = {
    "shape": (gather, lambda: gather(3), r"x\.shape .* \(2, 4\) as on rank [01], got \(3, 4\)"),
    "plan": (
        gather,
        lambda: gather(plan="serial"),
        "plan .* shard_p2p as on rank [01], got serial",
    ),
    "serial": (lambda: gather(plan="serial"), lambda: gather(3, "serial"), r"x\.shape"),
    "dtype": (gather, lambda: gather(dtype=torch.bfloat16), r"x\.dtype .*float32 .*bfloat16"),
    "operator": (gather, scatter, "op .* all_gather_matmul as on rank [01], got matmul_reduce"),
}


@pytest.mark.parametrize("known", [True, False], ids=["known", "new to one"])
@pytest.mark.parametrize("name", PAIRS)
@on_ranks(2, 3)
def test_other_calls_are_told_on_all_ranks(rank: int, ranks: int, name: str, known: bool):
    one, other, fact = PAIRS[name]
    with by_reference():
        one()
        if known:
            other()
        errors = [told(other if rank == ranks - 1 else one) for _ in range(2)]
    assert len(set(errors)) == 1, "the group is unusable, and says why each time"
    assert errors[0].startswith("InputError: ") and "unusable" in errors[0]
    assert re.search(f"{fact}.* on rank {ranks - 1};", errors[0]), errors[0]


def backward() -> object:
    """The exchange of the gradients of embedding bags: one table of 4 columns on each rank."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), world().group_name
    dims, batch, dy = [1, 4] * ranks, [1] * ranks, torch.ones(1, 4 * ranks)
    tables, nothing = [torch.ones(3, 4)], torch.empty(0, dtype=torch.int64)
    pooled = tables, nothing, nothing.new_zeros(ranks), None, False, False
    op = torch.ops.counterpoint.embedding_bag_gradients
    return op(dy, *pooled, dims, batch, rank, group, "dense", False)


def counts(each: int = 1) -> object:
    return cp.exchange_counts(torch.ones(each * dist.get_world_size(), dtype=torch.int64))


def summed(size: int = 4) -> object:
    w = torch.ones(size, requires_grad=True)
    return torch.autograd.grad(copy_to_group(w).sum(), w)


# as above, of calls of which ranks compare little; what is said
ALONE: dict[str, tuple[Call, Call, str]] = {
    "counts, sum": (
        counts, summed, "op .* exchange_counts as on rank [01], got copy_to_group on rank"
    ),
    "sum, bags": (summed, backward, "op .* copy_to_group as .* got embedding_bag_all_to_all back"),
    "counts, a new call": (counts, gather, "op .* exchange_counts as .* got all_gather_matmul"),
    "release, counts": (cp.release, counts, "op .* release as .* got exchange_counts"),
    "copies, counts": (gather, counts, "op .* all_gather_matmul as .* got exchange_counts"),
    "sizes of counts": (counts, lambda: counts(2), "counts must be equal .* got .* on rank"),
    "sizes of sums": (summed, lambda: summed(5), r"parameter must .*\[4\] as .* \[5\] on rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
@on_ranks(2, 3)
def test_calls_that_compare_little(rank: int, ranks: int, name: str):
    one, other, fact = ALONE[name]
    with by_reference():
        if "new" not in name:
            gather()
        errors = [told(other if rank == ranks - 1 else one) for _ in range(2)]
    assert errors[0].startswith("InputError: ") and re.search(fact, errors[0]), errors
    if "unusable" not in errors[0]:  # ranks had met, and nothing of it had run
        assert errors[1] == errors[0]
        gather()
    elif "release" not in name:
        assert told(cp.check) == errors[0] and errors[1]


@on_ranks(2, 3)
def test_new_calls_that_differ_leave_a_group_as_it_was(rank: int, ranks: int):
    """Nothing has been launched on any of them."""
    gather()
    for _ in range(3):
        error = told(lambda: gather(5 + (rank == 1)))
        assert "x.shape must be equal on all ranks, (5, 4) as on rank 0" in error, error
        gather()
    assert not told(cp.check)


@pytest.mark.parametrize("again", [1, 3])
@on_ranks(2, 3)
def test_a_rank_that_refuses_the_first_call_of_a_group(rank: int, ranks: int, again: int):
    """The others are about to make what they will share: they hear of it, and can begin anew."""
    rows = [2] * ranks
    x = torch.ones(3 if rank == 1 else 2, 4)
    groups: list[Any] = [None, dist.new_group(range(ranks))]
    for group in groups:
        for _ in range(again):
            error = told(lambda group=group: cp.all_gather_matmul(
                x, torch.ones(4, 3), rows=rows, plan="shard_p2p", group=group
            ))  # fmt: skip
            assert error.startswith("InputError: all_gather_matmul: x must be [2"), error
            assert ("rank 1 has refused the call" in error) == (rank != 1), error
        y = cp.all_gather_matmul(
            torch.ones(2, 4) * (rank + 1), torch.ones(4, 3), rows=rows, group=group
        )
        assert y[:, 0].tolist() == [4.0 * (r + 1) for r in range(ranks) for _ in range(2)]


@on_ranks(2, 3)
def test_what_all_ranks_refuse_at_first_is_nothing(rank: int, ranks: int):
    """Each at its own pace, with some that one rank alone has refused among them."""
    x, w = torch.ones(2, 4), torch.ones(4, 3)
    for turn in range(4):
        if rank == turn % ranks:
            time.sleep(0.05)
        assert told(lambda: cp.all_gather_matmul(x[0], w))
        if turn % 2:
            assert told(lambda: cp.all_gather_matmul(x if rank else x[0], w))
    assert not told(lambda: cp.all_gather_matmul(x, w))


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@on_ranks(2, 3)
def test_a_rank_that_refuses_alone(rank: int, ranks: int, known: bool):
    """Its rows do not fit; new to all, nothing has run, and the group goes on."""
    rows = [2] * ranks
    x = torch.ones(3 if rank == 1 else 2, 4)

    def run(x: torch.Tensor) -> object:
        return cp.all_gather_matmul(x, torch.ones(4, 3), rows=rows, plan="shard_p2p")

    gather(1)
    if known:
        run(x[:2])
    error = told(lambda: run(x))
    assert error.startswith("InputError: all_gather_matmul: x must be [2"), error
    assert ("rank 1 has refused the call" in error) == (rank != 1)
    dist.barrier()
    again = told(lambda: gather(1))
    # those that had begun are out of step with the one that had not; it hears of it
    assert bool(again) == known, again
    if not known:
        assert not told(lambda: run(x[:2]))


@on_ranks(2, 3)
def test_a_rank_that_refuses_its_counts_alone(rank: int, ranks: int):
    """The others are in the library's all-gather by then, or come to it."""
    counts()
    alone = torch.ones(ranks, dtype=torch.float32 if rank == 1 else torch.int64)
    error = told(lambda: cp.exchange_counts(alone))
    assert error.startswith("InputError: exchange_counts: counts must be int32 or int64"), error
    assert ("rank 1 has refused the call" in error) == (rank != 1)
    dist.barrier()
    assert told(counts), "the others have begun a call that this one has not"


@contextmanager
def watched() -> Iterator[list[str]]:
    """What a watchdog's thread finds wrong meanwhile, as often as it can look."""
    found, over, notes = list[str](), threading.Event(), workspace_of(world(), CPU).board

    def look() -> None:
        while not over.is_set():
            if (wrong := notes.wrong()) is not None:
                found.append(str(wrong))
            time.sleep(1e-4)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@on_ranks(2, 3)
def test_a_refusal_of_a_new_call_is_no_fault_to_a_watchdog(rank: int, ranks: int):
    """The ranks that wait for the one that refuses hear of it by themselves."""
    gather(1)
    for i in range(12):
        x = torch.ones(3 + i + (rank == 1), 4)
        with watched() as found:
            error = told(lambda x=x, i=i: cp.all_gather_matmul(
                x, torch.ones(4, 3), rows=[3 + i] * ranks, plan="shard_p2p"
            ))  # fmt: skip
        assert error and found == [], (error, found)
        gather(1)


@on_ranks(2, 4)
def test_any_ranks_may_refuse_any_new_call(rank: int, ranks: int):
    """One after another, at each rank's own pace: all ranks fail together or none does."""
    gather(1)
    draw, own = random.Random(ranks), random.Random(rank)
    for i in range(40):
        refuse = [draw.random() < 0.2 for _ in range(ranks)]
        if own.random() < 0.2:
            time.sleep(0.03)
        rows = 3 + i
        x = torch.ones(rows + refuse[rank], 4)
        error = told(lambda x=x, n=rows: cp.all_gather_matmul(
            x, torch.ones(4, 3), rows=[n] * ranks, plan="shard_p2p"
        ))  # fmt: skip
        assert bool(error) == any(refuse), (i, refuse, error)
        for _ in range(i % 4):
            gather(1)


@on_ranks(2, 3)
def test_a_rank_that_goes_back_from_a_meeting_is_heard(rank: int, ranks: int):
    """It was seen in the same one before, and comes to a known call in its place."""
    gather(1)
    notes, refusal = board(), InputError("meet", "x", want="right", got="wrong")
    notes.note_new(4, {"op": "meet"})
    dist.barrier()
    assert notes.look() is None
    dist.barrier()
    if rank == 1:
        notes._refused(Refused(refusal))  # as of a rank that the others have not looked at yet
        notes.note(2)
    dist.barrier()
    if rank != 1:
        with pytest.raises(Refused, match=r"x must be right, got wrong \(rank 1 has refused"):
            notes.look()
    dist.barrier()


@on_ranks(2)
def test_a_note_that_is_being_written_is_awaited(rank: int, ranks: int):
    place = board()._notes[0]
    if rank == 0:
        notice_board.write_note(place, InputError("op", "x", want="right", got="wrong"))
        half = place[20:40].copy()
        place[20:40] = 0
        dist.barrier()
        time.sleep(0.05)
        place[20:40] = half
    else:
        dist.barrier()
        assert "x must be right" in str(notice_board.read_note(place))
    dist.barrier()


@on_ranks(2, 3)
def test_a_rank_that_refuses_is_ahead_of_those_that_have_not_heard(rank: int, ranks: int):
    """It makes more calls before the others look; they neither fail for that nor does it."""
    gather(1)
    notes = board()
    for i in range(5):
        error = told(lambda i=i: cp.all_gather_matmul(
            torch.ones(3 + i + (rank == 1), 4), torch.ones(4, 3), rows=[3 + i] * ranks,
            plan="shard_p2p",
        ))  # fmt: skip
        assert error
        for _ in range(3):  # as calls on a GPU are noted: nobody waits
            notes.note(2)
        dist.barrier()
    assert notes.look() is None and not told(cp.check)


@on_ranks(2, 3)
def test_what_a_rank_tells_is_not_of_a_call_that_it_has_refused(rank: int, ranks: int):
    """It goes on at once to an equal one; the others hear of it first, at any pace."""
    gather(1)
    notes = board()

    def tell(number: int) -> list[int] | None:
        return notes.numbers(4, {"op": "tell"}, number, Awaited("tell", "tell", "tell"))

    assert tell(rank) == [*range(ranks)]
    for i in range(1, 12):
        if rank == 1:
            notes.refuse(InputError("tell", "x", want="right", got="wrong"))
        else:
            error = told(lambda: tell(-1))
            assert re.search("x must be right, got wrong .*rank 1 has refused", error), error
        if rank == i % (ranks + 1):
            time.sleep(0.03)
        assert tell(100 * i + rank) == [100 * i + r for r in range(ranks)]
    assert notes.look() is None and not told(cp.check)


@on_ranks(2, 3)
def test_a_known_call_that_a_rank_has_refused_is_not_its_next_one(rank: int, ranks: int):
    """Which is equal: what one of them has begun would pair with what it has not."""
    rows = [2] * ranks

    def run(more: int, value: float) -> object:
        x = torch.full((2 + more, 4), value)
        return cp.all_gather_matmul(x, torch.ones(4, 3), rows=rows, plan="shard_p2p")

    for _ in range(2):
        run(0, 0.0)
    errors = [told(lambda: run(int(rank == 1), 1.0)), told(lambda: run(0, 2.0))]
    text = "x must be .*rank 1 has refused the call.*the group is unusable"
    assert errors[0] and re.search(text, errors[1]), errors
    assert rank == 1 or re.search(text, errors[0]), errors


X, W = torch.ones(2, 4), torch.ones(4, 3)
# what a rank alone gives wrong, where it is looked at by itself; calls that all have made before
LATE: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, Any]]] = {
    "second weight": (cp.all_gather_matmul, {"x": X, "w": [W, W]}, {"w": [W, torch.ones(5, 3)]}),
    "inner dimension": (
        lambda w: cp.all_gather_matmul(X, w, gather_dim=-1), {"w": torch.ones(8, 3)}, {"w": W},
    ),
    "columns": (
        lambda w: cp.matmul_reduce_scatter(X, w, scatter_dim=-1), {"w": torch.ones(4, 6)},
        {"w": torch.ones(5, 6)},
    ),
    "no tensor": (cp.all_gather_matmul, {"x": X, "w": W}, {"x": None}),
    "rows": (
        lambda return_rows: cp.all_to_all_matmul(
            X, torch.ones(1, 4, 3), counts=[[1, 1], [1, 1]], return_rows=return_rows
        ), {"return_rows": False}, {"return_rows": 3},
    ),
    "sums": (
        lambda sum_of: cp.matmul_all_to_all(
            X, torch.ones(1, 4, 3), counts=[[1, 1], [1, 1]], sum_of=sum_of
        ), {"sum_of": (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))}, {"sum_of": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
@on_ranks(2)
def test_whatever_a_rank_refuses_alone_is_heard(rank: int, ranks: int, name: str):
    """Where the call is known, others have begun it: no rank's next call is taken for it."""
    call, good, bad = LATE[name]
    for _ in range(3):
        call(**good)
    first = told(lambda: call(**good | (bad if rank else {})))
    second = told(lambda: call(**good))
    assert first and "rank 1 has refused the call" in second, (first, second)


@on_ranks(2, 3)
def test_what_all_ranks_refuse_is_nothing(rank: int, ranks: int, tmp_path: Path):
    """Again and again, each rank at its own pace: nobody takes a refusal for one of the next."""
    gather()
    for i in range(3):
        for _ in range(i + 1):
            assert told(lambda: gather(plan="nonsense"))
        if rank == i % ranks:  # the others have waited and looked by then
            time.sleep(0.1)
        gather(2 + i)
    assert not told(cp.check)


def board() -> NoticeBoard:
    found = workspace_of(world(), CPU).board
    assert found.shared
    return found


@on_ranks(2, 4)
def test_ranks_may_be_far_apart(rank: int, ranks: int):
    """A line holds the last calls only: one who is far ahead has not made other calls."""
    notes = board()
    for lap in range(3):
        dist.barrier()
        if rank != lap % ranks:
            time.sleep(0.05)
        for call in range(2 * RING + 5 * rank):
            notes.note(2 * (call % 7))
        for call in range(2 * RING + 5 * rank, 2 * RING + 5 * ranks):
            notes.note(2 * (call % 7))
        assert notes.look() is None
    dist.barrier()
    found = told(lambda: notes.note(2 + 2 * (rank == 1)))
    dist.barrier()
    assert found or told(notes.raise_what_is_wrong)


@on_ranks(2, 3)
def test_what_ranks_say_to_each_other(rank: int, ranks: int):
    """Of any length, a page at a time; again and again without a meeting between."""
    here = Awaited("op", "come", "step")
    for i, size in enumerate((0, 1, 300_000, 3, 1 << 20, 0)):
        own = bytes([rank, i]) * (size + 1000 * rank)
        found = board().gather(own, here)
        assert found == [bytes([r, i]) * (size + 1000 * r) for r in range(ranks)]


@on_ranks(2)
def test_rows_that_ranks_see_otherwise_are_an_error(rank: int, ranks: int):
    """Counts differ between ranks that know calls of such sizes: no wrong rows, and no hang."""
    x, w = torch.ones(4, 4), torch.ones(1, 4, 3)
    counts = torch.full((2, 2), 2)

    def run(counts: torch.Tensor) -> object:
        return cp.all_to_all_matmul(x, w, counts=counts, plan="serial")

    with by_reference():
        run(counts)
        run(torch.tensor([[1, 3], [3, 1]]))
        mine = torch.tensor([[1, 3], [3, 1]]) if rank else torch.tensor([[3, 1], [1, 3]])
        error = told(lambda: run(mine))
    assert error.startswith("InputError: all_to_all_matmul: ") and "unusable" in error, error


@on_ranks(2, 3)
def test_who_has_given_up_shows_no_page(rank: int, ranks: int):
    """A rank that wakes up later would take it for one of its own meeting."""

    def meets(*_: object) -> None:
        pytest.fail("it meets")

    gather(1)
    last = ranks - 1
    if rank != last:
        board().fail(PeerTimeoutError("given up", rank=last, step="call"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(notice_board.Late, "wait", meets)
            assert "given up" in told(lambda: workspace_of(world(), CPU).gather(None))
            assert "given up" in told(cp.release)
    dist.barrier()
    if rank == last:
        assert "given up" in told(lambda: gather(7))


@on_ranks(2)
def test_a_refusal_names_its_own_error(rank: int, ranks: int):
    gather()
    with pytest.raises(InputError, match="plan must be") as info:
        gather(plan="nonsense" if rank else "graded")
    assert "nonsense" in str(info.value)


@pytest.mark.parametrize("dead", [False, True], ids=["late", "dead"])
@on_ranks(2, 3)
def test_a_host_does_not_wait_for_ever_for_its_gpu(rank: int, ranks: int, dead: bool):
    """Work there may wait in the library. Who lives and has made as many calls is not blamed."""
    notes, last, clock = board(), ranks - 1, SimpleNamespace(now_s=0.0)
    if dead:
        notes.pids = (*notes.pids[:last], 2**22 + 1)  # the number of no process
    held_up = HeldUp(notes)

    bound_s = notice_board.DEAD_S if dead else notes.timeout_s

    def later(bounds: float) -> str:
        clock.now_s += bounds * bound_s
        return "" if rank == last else told(held_up.look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice_board, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
        if rank != last:
            notes.note(2)
        dist.barrier()
        assert [later(0), later(0.9)] == ["", ""]
        dist.barrier()
        if rank == last:  # it comes, so its time starts anew
            notes.note(2)
        dist.barrier()
        assert [later(0.2), later(0.9)] == ["", ""]
        assert bool(later(0.2)) == (dead and rank != last)
        if not dead:
            if rank != last:
                notes.note(4)
            dist.barrier()
            assert later(9) == ""
            assert bool(later(1.1)) == (rank != last)
    dist.barrier()
    if rank != last:
        state = f"pid {notes.pids[last]} is {'dead' if dead else 'alive'}"
        text = rf"rank {last} did not make its calls within .* the GPU is not done \({state}\)"
        assert re.search(text, told(cp.check))
