"""The kernels under Triton's interpreter, between processes that share memory.

The ranks of the pool interpret: TRITON_INTERPRET is set before they import triton.
"""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.runtime.interpreter as interpreter
from on_ranks import on_ranks
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

from benchmarks.kernel_matmul import matmul_kernel
from counterpoint.group.symmetric import allocate
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel

LANES = 32
TURNS = 8  # so that epochs wrap on the way


@contextmanager
def interpreted() -> Iterator[None]:
    """What the interpreter does of itself is no error: it takes the bound of a loop from an array.

    And Triton 3.6 turns the end of a range into a number in a way that numpy no longer takes.
    """
    old = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        old(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


@pytest.mark.drawn(4)
@pytest.mark.parametrize("group_m", [1, 2, 8])
@pytest.mark.parametrize("tile", [(16, 16, 16), (16, 32, 16), (32, 16, 64)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 2), (5, 2, 3)])
@on_ranks(1)
def test_the_tiled_matmul(
    rank: int, ranks: int, sizes: tuple[int, ...], tile: tuple[int, ...], group_m: int
):
    """Errors against fp64 of the kernel and of torch, over shapes that groups do not divide."""
    m, n, k = (count * size for count, size in zip(sizes, tile, strict=True))
    x, w, y = torch.randn(m, k), torch.randn(k, n), torch.full((m, n), torch.nan)
    launch: Any = matmul_kernel
    with interpreted():
        launch[(sizes[0] * sizes[1],)](x, w, y, m, n, k, *tile, group_m)
    want = x.double() @ w.double()
    error, plain = ((got.double() - want).norm() / want.norm() for got in (y, x @ w))
    assert error <= 2 * plain


WAIT_NS = 60_000_000_000  # longer than any rank is late


def table(words: list[int]) -> Tensor:
    return torch.tensor(words + [0] * (LANES - len(words)), dtype=torch.int64)


def signal(
    posts: list[int], waits: list[int], epoch: Tensor, *, advance: bool, launch: Any = None
) -> None:
    """One launch: write the words at `posts`, wait for those at `waits`."""
    fault = torch.zeros(1, dtype=torch.int64)
    signal_kernel[(1,)](
        table(posts), len(posts), table(waits), len(waits), epoch, fault, 0, WAIT_NS,
        ADVANCE=advance, LANES=LANES, num_warps=1,
    )  # fmt: skip
    assert not fault.any()


def meet(rank: int, world_size: int, first_epoch: int) -> list[int]:
    """A barrier of all with all, again and again; data goes round, which a signal covers."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    pads = allocate(4 * 64, world(), "cpu")
    data = allocate(8 * world_size, world(), "cpu")
    pads.local().view(torch.int32).fill_(first_epoch)
    epoch = torch.tensor([first_epoch, 0, 0, 0], dtype=torch.int32)
    dist.barrier()
    others = [peer for peer in range(world_size) if peer != rank]
    # slot r is what rank r posts; a second row of slots for the second barrier of a turn
    opened = [pads.buffer_ptrs[peer] + 4 * rank for peer in others]
    open_words = [pads.buffer_ptrs[rank] + 4 * peer for peer in others]
    sent = [word + 4 * world_size for word in opened]
    sent_words = [word + 4 * world_size for word in open_words]
    seen: list[int] = []
    for turn in range(TURNS):
        # all have read the data of the turn before
        signal(opened, open_words, epoch, advance=True)
        for peer in range(world_size):
            data.peer(peer).view(torch.int64)[rank] = 100 * turn + rank
        # a post, and then a wait, in launches of their own, as a copy and its reader have them
        signal(sent, [], epoch, advance=False)
        signal([], sent_words, epoch, advance=False)
        want = [100 * turn + peer for peer in range(world_size)]
        assert data.local().view(torch.int64).tolist() == want, turn
        seen.append(int(epoch[0]))
    dist.barrier()
    return seen


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_signals_are_a_barrier(pool: RankPool, ranks: int):
    assert pool.run(meet, ranks, 0) == [list(range(1, TURNS + 1))] * ranks


@pytest.mark.parametrize("first_epoch", [2**31 - 5, -5], ids=["sign", "zero"])
def test_epochs_wrap(pool: RankPool, first_epoch: int):
    epochs = np.arange(first_epoch + 1, first_epoch + 1 + TURNS, dtype=np.int64).astype(np.int32)
    assert pool.run(meet, 3, first_epoch) == [epochs.tolist()] * 3


def look_at_one_word(rank: int, world_size: int) -> list[int]:
    """What a post writes, and where: lanes beyond the number of posts write nothing."""
    pad = torch.full((LANES,), 7, dtype=torch.int32)
    epoch = torch.tensor([41, 0, 0, 0], dtype=torch.int32)
    signal([pad.data_ptr() + 4 * i for i in (0, 2)], [], epoch, advance=True)
    # a wait for less than what is there returns
    signal([], [pad.data_ptr()], epoch, advance=False)
    assert ctypes.c_int32.from_address(pad.data_ptr()).value == 42
    return pad[:4].tolist()


def test_only_the_listed_words_are_written(pool: RankPool):
    assert pool.run(look_at_one_word, 1, group=False) == [[42, 7, 42, 7]]


REDUCE_BLOCK = 16


@pytest.mark.drawn(12)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [[1], [3, 0, 2], [3, 0, -1], [0, -1, 2], [-1], []], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 15), (2, 16), (5, 37)])
@on_ranks(1)
def test_reduce(
    rank: int, ranks: int, rows: int, cols: int, order: list[int], dtype: torch.dtype,
    has_bias: bool,
):  # fmt: skip
    """The sum kernel against the same sum by torch, bit for bit."""
    slots = torch.randn(4, rows + 1, cols + 3).to(dtype)[:, :rows, :cols]
    own = torch.randn(rows, cols + 5).to(dtype)[:, :cols]
    bias = torch.randn(cols).to(dtype)
    whole = torch.full((rows, cols + 1), 7.0).to(dtype)
    out = whole[:, :cols]
    order_words = torch.tensor([*order, 0], dtype=torch.int64)
    with interpreted():
        reduce_kernel[(rows, -(-cols // REDUCE_BLOCK))](
            slots, own, bias, out, order_words, len(order), rows, cols,
            slots.stride(0), slots.stride(1), own.stride(0), out.stride(0),
            HAS_BIAS=int(has_bias), BLOCK=REDUCE_BLOCK,
        )  # fmt: skip
    want = torch.zeros(rows, cols)
    for slot in order:
        want += (own if slot < 0 else slots[slot]).float()
    want += bias.float() if has_bias else 0
    # the interpreter truncates where a GPU rounds to the nearest bf16
    expected = truncated(want) if dtype == torch.bfloat16 else want.to(dtype)
    assert torch.equal(out, expected), (out.float() - expected.float()).abs().max()
    assert (whole[:, cols] == 7).all(), "it wrote behind its end"


def truncated(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
