"""Bounds of the memory of a `PeerKernel`, checked where Triton's interpreter runs the kernel.

In place of addresses the kernel gets numbers that no memory has. Such a number says which memory,
which rank, and which byte. In these numbers the parts of a memory lie far apart, so an index that
is too large comes to no other part. Each load, store and atomic finds the address that a number
stands for, or raises. All other addresses stay as they are.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray
from torch import Tensor

from counterpoint.errors import InputError

INTERPRETER: Any = interpreter  # most of what it is asked for is private
PARTS = ("payload", "flags", "words")
ACCESSES = {  # which argument is the pointer, which is the mask
    "create_masked_load": ("load", 0, 1), "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3), "create_atomic_cas": ("atomic", 0, None),
}  # fmt: skip

# bits of a number: 62 says that it is one, then memory, rank and byte; no address has bit 62
NUMBERED, MEMORY_AT, RANK_AT = 1 << 62, 49, 37
MEMORIES, RANKS, BYTES = 1 << 13, 1 << 12, 1 << RANK_AT
FIRST_RANK, FIRST_BYTE = RANKS // 4, BYTES // 2  # those of 0: some are negative
APART = 1 << 28  # bytes between parts; with it the offsets that kernels are given fit an int32


class Bounded(NamedTuple):
    """One memory that kernels reach by numbers.

    Args:
        kernel: its name.
        sizes: what the parts were made with, by argument: payload_bytes, num_flags, num_words.
        num_bytes: of each part.
        starts: [ranks, 2 halves x parts], their addresses.
        apart: bytes between the beginnings of parts.
        buffers: of all ranks; it keeps them.
    """

    kernel: str
    sizes: dict[str, int]
    num_bytes: NDArray[np.int64]
    starts: NDArray[np.int64]
    apart: int
    buffers: Sequence[Tensor]

    def addresses(self, numbers: NDArray[np.int64], width: int, access: str) -> NDArray[np.int64]:
        """What numbers of this memory stand for.

        Args:
            width: bytes of an element.
            access: for the error.

        Raises:
            InputError: one of them stands for nothing.
        """
        ranks = ((numbers >> RANK_AT) & (RANKS - 1)) - FIRST_RANK
        offsets = (numbers & (BYTES - 1)) - FIRST_BYTE
        places = (offsets + self.apart // 2) // self.apart
        at = offsets - places * self.apart
        there = (ranks >= 0) & (ranks < len(self.starts))
        there &= (places >= 0) & (places < self.starts.shape[1])
        there &= (at >= 0) & (at + width <= self.num_bytes[places % len(PARTS)])
        if not there.all():
            first = np.flatnonzero(~there)[0]
            rank, place, begin = (int(each[first]) for each in (ranks, places, at))
            raise self._breach(rank, place, begin, width, access)
        return self.starts[ranks, places] + at

    def _breach(self, rank: int, place: int, at: int, width: int, access: str) -> InputError:
        program = f"by program {INTERPRETER.interpreter_builder.grid_idx}"
        half, part = divmod(place, len(PARTS))
        if not 0 <= rank < len(self.starts):
            want, got = f"0 to {len(self.starts) - 1}", f"{rank}: {access} {program}"
            return InputError(self.kernel, "the peer", want=want, got=got)
        if half not in (0, 1):
            got = f"half {half} of rank {rank}: {access} {program}"
            return InputError(self.kernel, "the half", want="0 or 1", got=got)
        size, num_bytes = list(self.sizes)[part], self.num_bytes[part]
        want = f"within their {num_bytes} bytes" if part else f"within its {num_bytes} bytes"
        got = f"bytes {at} to {at + width - 1} in half {half} of rank {rank}: {access} {program}"
        fix = f"make the kernel with a larger {size}, or mend the offset"
        arg = f"the {PARTS[part]} ({size}={self.sizes[size]})"
        return InputError(self.kernel, arg, want=want, got=got, fix=fix)


_memories: dict[int, Bounded] = {}
_numbers = itertools.count()


def bounded(
    kernel: str, sizes: dict[str, int], buffers: Sequence[Tensor], parts: Sequence[int],
    num_bytes: Sequence[int],
) -> tuple[Tensor, int]:  # fmt: skip
    """Have this process check what kernels do with a memory.

    Args:
        kernel: for errors.
        sizes: see `Bounded`.
        buffers: of all ranks.
        parts: where those of both halves begin, in bytes.
        num_bytes: of each part.

    Returns:
        int64 [ranks], what the kernel is given in place of addresses, as long as it lives; and the
        bytes between parts.

    Raises:
        InputError: the memory is too large for such numbers.
    """
    apart = max(APART, 1 << (2 * max(num_bytes) - 1).bit_length())
    if 2 * len(PARTS) * apart > FIRST_BYTE or len(buffers) > RANKS // 2:
        want = f"at most {FIRST_BYTE >> 4} bytes of {RANKS // 2} ranks, where it is interpreted"
        raise InputError(kernel, "memory", want=want, got=f"{max(num_bytes)} of {len(buffers)}")
    number = next(_numbers) % MEMORIES
    _check_accesses()
    # also of ranks that there are not: a kernel that looks one up meets the check
    every = NUMBERED + (number << MEMORY_AT) + (torch.arange(RANKS) << RANK_AT) + FIRST_BYTE
    bases = every[FIRST_RANK : FIRST_RANK + len(buffers)]
    starts = np.array([[each.data_ptr() + part for part in parts] for each in buffers])
    known = Bounded(kernel, sizes, np.array(num_bytes), starts, apart, buffers)
    _memories[number] = known
    weakref.finalize(bases, _memories.pop, number)
    return bases, apart


def breach_of(error: BaseException) -> InputError | None:
    """What `resolved` has raised, from the error that the interpreter makes of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, InputError):
        cause = cause.__cause__
    return cause


def resolved(ptrs: Any, mask: Any, access: str) -> Any:
    """Pointers of the interpreter, with addresses in place of numbers.

    Args:
        ptrs: a handle of pointers.
        mask: a handle of which are used; None: all.
        access: for the error.

    Raises:
        InputError: one of them stands for nothing.
    """
    numbers = ptrs.data.astype(np.int64)
    bounded = numbers >= NUMBERED
    if not bounded.any():
        return ptrs
    if mask is not None:
        bounded &= mask.data.astype(bool)
    width = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
    while bounded.any():
        memory = numbers[bounded][0] >> MEMORY_AT
        here = bounded & (numbers >> MEMORY_AT == memory)
        known = _memories[int(memory) % MEMORIES]
        numbers[here] = known.addresses(numbers[here], width, access)
        bounded &= ~here
    return INTERPRETER.TensorHandle(numbers.astype(ptrs.data.dtype), ptrs.dtype)


@cache
def _check_accesses() -> None:
    """Have the interpreter look up what it is about to touch."""
    builder = INTERPRETER.InterpreterBuilder
    for name, how in ACCESSES.items():
        setattr(builder, name, _checked(getattr(builder, name), *how))


def _checked(plain: Callable[..., Any], access: str, at: int, mask_at: int | None) -> Any:
    def checked(builder: Any, *given: Any, **named: Any) -> Any:
        mask = None if mask_at is None else given[mask_at]
        ptrs = resolved(given[at], mask, access)
        return plain(builder, *given[:at], ptrs, *given[at + 1 :], **named)

    return checked
