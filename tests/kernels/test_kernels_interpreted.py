"""The kernels under Triton's interpreter, between processes that share memory.

The ranks of the pool interpret: TRITON_INTERPRET is set before they import triton.
"""

import ctypes
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.runtime.interpreter as interpreter
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels.matmul import matmul_kernel
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.runtime.symmetric import allocate

LANES = 32


def product(rank: int, world_size: int, tile: tuple[int, int, int]) -> float:
    """The largest error of the tiled matmul against fp64, relative to the product's norm."""
    block_m, block_n, block_k = tile
    m, n, k = 3 * block_m, 5 * block_n, 2 * block_k
    generator = torch.Generator().manual_seed(rank)
    x, w = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    y = torch.full((m, n), torch.nan)
    launch: Any = matmul_kernel
    with warnings.catch_warnings():
        # the interpreter's own: it takes the bound of a loop from an array of one element
        warnings.simplefilter("ignore", DeprecationWarning)
        launch[(15,)](x, w, y, m, n, k, block_m, block_n, block_k, 2)
    want = x.double() @ w.double()
    return ((y.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tile", [(16, 16, 16), (32, 16, 64)])
def test_the_tiled_matmul(pool: RankPool, tile: tuple[int, int, int]):
    (error,) = pool.run(product, 1, tile)
    assert error < 1e-6


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
    """A barrier of all with all, 20 times; each time data goes round, which a signal covers."""
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
    for turn in range(20):
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
    assert pool.run(meet, ranks, 0) == [list(range(1, 21))] * ranks


@pytest.mark.parametrize("first_epoch", [2**31 - 5, -5], ids=["sign", "zero"])
def test_epochs_wrap(pool: RankPool, first_epoch: int):
    epochs = np.arange(first_epoch + 1, first_epoch + 21, dtype=np.int64).astype(np.int32)
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


def reduce_wrong(rank: int, world_size: int, cases: list[tuple[Any, ...]]) -> list[str]:
    """The sum kernel against the same sum by torch, bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        # triton 3.6 turns the end of a range into a number in a way that numpy no longer takes
        old = interpreter._patch_lang_tensor

        def patch_tensor(tensor: Any, scope: Any) -> None:
            old(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        return [problem for case in cases for problem in wrong_sum(*case)]


def wrong_sum(
    rows: int,
    cols: int,
    order: list[int],
    dtype: torch.dtype,
    has_bias: int,
) -> list[str]:
    slots = torch.randn(4, rows + 1, cols + 3).to(dtype)[:, :rows, :cols]
    own = torch.randn(rows, cols + 5).to(dtype)[:, :cols]
    bias = torch.randn(cols).to(dtype)
    out = torch.empty(rows, cols + 1, dtype=dtype)[:, :cols]
    order_words = torch.tensor([*order, 0], dtype=torch.int64)
    reduce_kernel[(rows, -(-cols // REDUCE_BLOCK))](
        slots, own, bias, out, order_words, len(order), rows, cols,
        slots.stride(0), slots.stride(1), own.stride(0), out.stride(0),
        HAS_BIAS=has_bias, BLOCK=REDUCE_BLOCK,
    )  # fmt: skip
    want = torch.zeros(rows, cols)
    for slot in order:
        want += (own if slot < 0 else slots[slot]).float()
    want += bias.float() if has_bias else 0
    # the interpreter truncates where a GPU rounds to the nearest bf16
    expected = truncated(want) if dtype == torch.bfloat16 else want.to(dtype)
    if torch.equal(out, expected):
        return []
    off = (out.float() - expected.float()).abs().max()
    return [f"{rows}x{cols}, {order}, {dtype}, {has_bias}: {off:.3g} off"]


def truncated(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def test_reduce(pool: RankPool):
    cases = [
        (rows, cols, order, dtype, has_bias)
        for rows, cols in [(1, 1), (3, 15), (2, 16), (5, 37)]
        for order in [[1], [3, 0, 2], [3, 0, -1], [0, -1, 2], [-1], []]
        for dtype in [torch.float32, torch.float16, torch.bfloat16]
        for has_bias in [0, 1]
    ]
    assert pool.run(reduce_wrong, 1, cases, group=False) == [[]]
