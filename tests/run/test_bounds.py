"""A user's kernel that leaves its part of the symmetric memory is told, and its peers go on."""

from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from on_ranks import on_ranks
from rankpool import RankPool

import counterpoint as cp
from counterpoint import device as own

CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns", "to"])
def pass_on_kernel(
    x_ptr, y_ptr, to, flag_of_program, at,
    bases_ptr, half_bytes, flags_at, words_at, state_ptr, fault_ptr, rank, tag, timeout_ns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y of rank `to` = x, by blocks of fp32; each program has a flag."""
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    epoch = own.next_epoch(tl.load(state_ptr))
    half = (epoch & 1).to(tl.int64) * half_bytes
    place = program * BLOCK + cols
    x = tl.load(x_ptr + place)
    own.put(own.peer_ptr(bases_ptr, to, half + 4 * at, tl.float32) + place, x, x == x)
    flag = half + flags_at + 4 * flag_of_program * program
    own.post(own.peer_ptr(bases_ptr, to, flag, tl.int32), epoch)
    mine = own.peer_ptr(bases_ptr, rank, flag, tl.int32) + tl.arange(0, 1)
    late = own.wait(mine, epoch, state_ptr + 2, timeout_ns).to(tl.int32)
    y = tl.load(own.peer_ptr(bases_ptr, rank, half + 4 * at, tl.float32) + place)
    tl.store(y_ptr + place, y)
    own.end_of_call(late, tl.arange(0, 1), tl.num_programs(0), state_ptr, fault_ptr, tag)


PROGRAMS, BLOCK = 2, 64
BYTES = 4 * PROGRAMS * BLOCK
RIGHT = {"payload_bytes": BYTES, "num_flags": PROGRAMS}
# what is wrong with it: the sizes, the arguments, and what is said
WRONG: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "flags": ({"num_flags": 1}, {}, (
        "the flags (num_flags=1) must be within their 4 bytes, got bytes 4 to 7 in half 1 of rank "
        "{to}: atomic by program (1, 0, 0); make the kernel with a larger num_flags, or mend the "
        "offset")),
    "payload": ({"payload_bytes": 4 * BLOCK}, {}, (
        "the payload (payload_bytes=256) must be within its 256 bytes, got bytes 256 to 259 in "
        "half 1 of rank {to}: store by program (1, 0, 0); make the kernel with a larger "
        "payload_bytes, or mend the offset")),
    "far": ({}, {"at": 1 << 24}, (
        "the payload (payload_bytes=512) must be within its 512 bytes, got bytes 67108864 to "
        "67108867 in half 1 of rank {to}: store by program (0, 0, 0)")),
    "before": ({}, {"at": -1}, (
        "the payload (payload_bytes=512) must be within its 512 bytes, got bytes -4 to -1 in half "
        "1 of rank {to}: store by program (0, 0, 0)")),
    "no words": ({}, {"at": 2 << 26}, "the words (num_words=0) must be within their 0 bytes, got"),
    "half": ({}, {"at": 1 << 28}, "the half must be 0 or 1, got half 2 of rank {to}: store"),
    "peer": ({}, {"to": 2}, "the peer must be 0 to 1, got 2: store by program (0, 0, 0)"),
    "negative": ({}, {"to": -1}, "the peer must be 0 to 1, got -1: store by program (0, 0, 0)"),
}  # fmt: skip


def called(rank: int, sizes: dict[str, int], wrong: dict[str, int]) -> torch.Tensor:
    """One call of a kernel of those sizes: y."""
    kernel = own.PeerKernel(pass_on_kernel, device=CPU, **sizes)
    x = torch.arange(PROGRAMS * BLOCK) + 1000.0 * rank
    y = torch.full_like(x, torch.nan)
    given: dict[str, Any] = {"to": 1 - rank, "flag_of_program": 1, "at": 0} | wrong
    kernel(PROGRAMS, x_ptr=x, y_ptr=y, BLOCK=BLOCK, **given)
    return y


@on_ranks(2)
def test_what_lies_within_is_reached(rank: int, ranks: int):
    want = torch.arange(PROGRAMS * BLOCK) + 1000.0 * (1 - rank)
    assert torch.equal(called(rank, RIGHT, {}), want)
    more = {"payload_bytes": BYTES + 12, "num_flags": 3}  # to their last bytes
    assert torch.equal(called(rank, more, {"at": 3, "flag_of_program": 2}), want)


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_what_lies_outside_is_told(rank: int, ranks: int, name: str) -> list[str]:
    """Where it is an argument, rank 0 alone is wrong: its peer waits, and hears of it."""
    sizes, wrong, text = WRONG[name]
    with pytest.raises(cp.InputError) as info:
        called(rank, RIGHT | sizes, {} if rank else wrong)
    with pytest.raises(cp.InputError, match="pass_on_kernel: the"):
        cp.check()
    own, other = (f"pass_on_kernel: {text.format(to=to)}" for to in (1 - rank, rank))
    said = str(info.value)
    return [] if own in said or (rank and other in said) else [said]


def in_turn(rank: int, processes: int, sizes: dict[str, int], wrong: dict[str, int]) -> str:
    """What is said where the kernels of two ranks run in one process."""
    from counterpoint.testing.interleave import Interleaved, local_peers

    peers = local_peers(pass_on_kernel, 2, **sizes)
    x = torch.randn(2, PROGRAMS * BLOCK)
    y = torch.full_like(x, torch.nan)

    def run(rank: int) -> None:
        given: dict[str, Any] = {"to": 1 - rank, "flag_of_program": 1, "at": 0} | wrong
        launch = pass_on_kernel[(PROGRAMS,)]
        launch(x_ptr=x[rank], y_ptr=y[rank], BLOCK=BLOCK, **given, **peers[rank])

    try:
        Interleaved(0).run([partial(run, rank) for rank in range(2)])
    except Exception as error:
        return repr(error)
    return "" if torch.equal(y, x.flip(0)) else "something else"


@pytest.mark.parametrize("name", ["flags", "payload", "far", "peer"])
def test_so_are_kernels_of_which_programs_run_in_turn(pool: RankPool, name: str):
    sizes, wrong, text = WRONG[name]
    (found,) = pool.run(in_turn, 1, RIGHT | sizes, wrong, group=False)
    assert any(f"pass_on_kernel: {text.format(to=to)}" in found for to in range(2)), found


def test_in_turn_what_lies_within_is_reached(pool: RankPool):
    assert pool.run(in_turn, 1, RIGHT, {}, group=False) == [""]
