"""The host side of a user's own fused kernel: its memory, its errors, waits that end."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from on_ranks import on_ranks
from peer_examples import SUM, example
from processes import python
from rankpool import RankPool

import counterpoint as cp
from counterpoint import device as own
from counterpoint.kernels import clock, peer

CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def gather_words_kernel(
    x_ptr, y_ptr,
    bases_ptr, half_bytes, words_at, state_ptr, fault_ptr, rank, tag, timeout_ns,
    WORLD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """y[r] = x of rank r, [WORLD, COUNT] of int32, by low-latency words."""
    epoch = own.next_epoch(tl.load(state_ptr))
    half = (epoch & 1).to(tl.int64) * half_bytes + words_at
    ranks, cols = tl.arange(0, WORLD), tl.arange(0, COUNT)[None, :]
    there = (ranks[:, None] >= 0) & (cols >= 0)
    x = tl.broadcast_to(tl.load(x_ptr + cols), (WORLD, COUNT))
    own.put_words(own.peer_ptr(bases_ptr, ranks, half, tl.int32)[:, None] + rank * COUNT + cols,
                  x, there)  # fmt: skip
    place = ranks[:, None] * COUNT + cols
    words, slow = own.take_words(own.peer_ptr(bases_ptr, rank, half, tl.int32) + place,
                                 state_ptr + 2, timeout_ns, there)  # fmt: skip
    tl.store(y_ptr + place, words)
    late = tl.max(slow.to(tl.int32), 1)
    own.end_of_call(late, ranks, tl.num_programs(0), state_ptr, fault_ptr, tag)


@on_ranks(2, 4)
def test_words_are_empty_at_first_and_after_each_call(rank: int, ranks: int):
    count = 16
    kernel = own.PeerKernel(gather_words_kernel, device=CPU, num_words=ranks * count)
    torch.manual_seed(rank)
    for call in range(4):
        x = torch.randint(0, 1 << 20, (count,), dtype=torch.int32)
        y = torch.empty(ranks, count, dtype=torch.int32)
        kernel(1, x_ptr=x, y_ptr=y, COUNT=count)
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, x)
        assert torch.equal(y, torch.stack(every)), call


def left_behind(rank: int, ranks: int) -> str:
    """Rank 0 calls alone, and its clock runs: what it raises."""
    fused = example(SUM).AllReduceAdd(64, torch.float32, CPU)
    x, said = torch.ones(64), ""
    assert torch.equal(fused(x, x), x * (ranks + 1))
    if rank == 0:
        seconds = itertools.count(step=10**12)  # a quarter of an hour at each look
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer, "LOOK_EVERY", tl.constexpr(2))
            patch.setattr(clock, "time", SimpleNamespace(monotonic_ns=seconds.__next__))
            with pytest.raises(cp.PeerTimeoutError) as info:
                fused(x, x)
        said = str(info.value)
        with pytest.raises(cp.PeerTimeoutError, match="the group is unusable"):
            fused(x, x)
        with pytest.raises(cp.PeerTimeoutError):
            cp.check()
    dist.barrier()
    return said


def test_a_rank_that_does_not_come_is_named(pool: RankPool):
    said, _ = pool.run(left_behind, 2)
    assert re.match(
        r"PeerKernel: ranks \[1\] did not signal step 'all_reduce_add_kernel' of plan fused to "
        r"rank 0 within 600 s \(.*alive\); the group is unusable",
        said,
    ), said


@triton.jit
def no_peer_kernel(x_ptr, bases_ptr):
    """It lacks most of what it must have."""
    tl.store(x_ptr, 0)


@on_ranks(2)
def test_what_is_wrong_is_said(rank: int, ranks: int):
    def refused(text: str, **changed: Any) -> None:
        given: dict[str, Any] = {"kernel": gather_words_kernel, "device": CPU, "num_words": 32}
        given |= changed
        with pytest.raises((cp.InputError, cp.UnsupportedError), match=text):
            own.PeerKernel(given.pop("kernel"), **given)

    refused("kernel must be a function with triton.jit, got function", kernel=lambda: 0)
    refused("got no_peer_kernel without half_bytes, state_ptr", kernel=no_peer_kernel)
    refused("num_flags must be an int >= 0, got -1", num_flags=-1)
    refused("payload_bytes must be an int >= 0, got 1.5", payload_bytes=1.5)
    refused("memory must be > 0 in one of its parts", num_words=0)
    refused("on cuda a kernel runs without TRITON_INTERPRET=1", device="cuda")
    refused("kernels run on cpu and cuda, not on meta", device="meta")
    want = r"sizes must be equal on all ranks, \('gather_words_kernel', 0, 0, 32\) as on rank 0"
    refused(want, num_words=32 + rank)

    kernel = own.PeerKernel(gather_words_kernel, device=CPU, num_words=32)
    x, y = torch.zeros(16, dtype=torch.int32), torch.empty(ranks, 16, dtype=torch.int32)
    for text, work, given in (
        ("work must be an int >= 1, got 0", 0, {}),
        ("work must be an int >= 1, got 1.0", 1.0, {}),
        (r"got \['COUNT', 'K', 'x_ptr', 'y_ptr'\]; see \['K'\]", 1, {"K": 1}),
        (r"see \['rank'\]", 1, {"rank": rank}),
        ("y_ptr must be on cpu, got meta", 1, {"y_ptr": y.to("meta")}),
    ):
        with pytest.raises(cp.InputError, match=text):
            kernel(work, **({"x_ptr": x, "y_ptr": y, "COUNT": 16} | given))
    kernel(1, x_ptr=x, y_ptr=y, COUNT=16)  # nothing had run: the group goes on
    assert not y.any()


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def alone_kernel(bases_ptr, half_bytes, state_ptr, fault_ptr, rank, tag, timeout_ns):
    """It waits for nobody."""
    nobody = tl.arange(0, 1)
    own.end_of_call(nobody, nobody, tl.num_programs(0), state_ptr, fault_ptr, tag)


@on_ranks(2)
def test_another_amount_of_work_is_told_on_all(rank: int, ranks: int):
    kernel = own.PeerKernel(alone_kernel, device=CPU, payload_bytes=4)
    kernel(3)
    if rank == 0:
        kernel(1)
    dist.barrier()
    text = (r"PeerKernel alone_kernel of 1 items as on rank 0, got PeerKernel alone_kernel of 2 "
            r"items on rank 1; the group is unusable")  # fmt: skip
    if rank == 1:
        with pytest.raises(cp.InputError, match=text):
            kernel(2)
    dist.barrier()
    with pytest.raises(cp.InputError, match=text):
        kernel(1)


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def grid_kernel(n_ptr, bases_ptr, half_bytes, state_ptr, fault_ptr, rank, tag, timeout_ns):
    """Says how many programs it has; it waits for nobody."""
    nobody = tl.arange(0, 1)
    tl.store(n_ptr, tl.num_programs(0))
    own.end_of_call(nobody, nobody, tl.num_programs(0), state_ptr, fault_ptr, tag)


@on_ranks(2)
def test_a_program_for_each_item_where_none_has_to_be_resident(rank: int, ranks: int):
    found = torch.zeros(1, dtype=torch.int32)
    kernel = own.PeerKernel(grid_kernel, device=CPU, payload_bytes=4)
    for launch, programs in ((kernel, 2), (kernel.for_each, 5), (kernel, 2)):
        launch(5, n_ptr=found)
        assert found.item() == programs
    with pytest.raises(cp.InputError, match="work must be an int >= 1, got 0"):
        kernel.for_each(0, n_ptr=found)


def test_without_the_interpreter_cpu_ranks_are_refused():
    with pytest.raises(cp.UnsupportedError, match="on cpu a kernel runs with TRITON_INTERPRET=1"):
        own.PeerKernel(gather_words_kernel, device=CPU, num_words=32)
    if not torch.cuda.is_available():
        with pytest.raises(cp.UnsupportedError, match="torch sees no GPU"):
            own.PeerKernel(gather_words_kernel, device="cuda", num_words=32)


def test_the_test_kit_says_what_it_needs():
    from counterpoint.testing.interleave import Interleaved

    with pytest.raises(cp.UnsupportedError, match="this process compiles kernels"):
        Interleaved(0)
    said = python("-c", (
        "import sys; sys.modules['greenlet'] = None\n"
        "import counterpoint as cp, counterpoint.testing.ptx as ptx\n"
        "for call in (lambda: __import__('counterpoint.testing.interleave'),\n"
        "             lambda: ptx.compiled(None, 90, {}, {}, num_warps=4)):\n"
        "    try: call()\n"
        "    except cp.UnsupportedError as error: print(error)\n"
    ), TRITON_INTERPRET="1")  # fmt: skip
    assert said.splitlines() == [
        "counterpoint.testing.interleave: greenlet is not installed; pip install greenlet",
        "ptx.compiled: this process interprets; unset TRITON_INTERPRET",
    ]
