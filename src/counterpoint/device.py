"""Write your own fused kernel: device functions for Triton, and the host side of such a kernel.

Call the device functions from a `triton.jit` kernel. `PeerKernel` gives that kernel its symmetric
memory and launches it; docs/kernels.md goes through one step by step. There are two ways to hand
data to a peer:

- **Flags**: `put` stores a tile into the peer's memory, `post` releases a flag behind it. The peer
  calls `wait` on the flag, then loads the tile with `cache_modifier=".cg"`.
- **Low-latency (LL) words**: `put_words` stores words of 4 bytes, `take_words` polls the data
  itself. There is no flag and no fence, so it is faster for a few KiB and slower for more.

Which release pairs with which acquire:

| what publishes | what sees it |
|---|---|
| `post`: a barrier of the block, then a release of system scope | `wait`: an acquire of system scope, then a barrier of the block |
| `barrier`: `post` to all ranks | `barrier`: `wait` for all ranks |
| `is_last`: a release of GPU scope | `is_last` that returns True: an acquire of GPU scope |
| `put_words`: nothing but the words themselves | `take_words`: nothing but the words themselves |

Importing this module imports torch and triton. Set TRITON_INTERPRET=1 before that on CPU ranks.
"""  # noqa: E501 (a row of a table is a line)

from counterpoint.lazy import needing

with needing("counterpoint.device"):
    from counterpoint.kernels.peer import (
        EMPTY,
        barrier,
        end_of_call,
        is_last,
        next_epoch,
        pack,
        peer_ptr,
        post,
        put,
        put_words,
        take_words,
        unpack,
        wait,
    )
    from counterpoint.run.peer_kernel import PeerKernel

__all__ = [
    "EMPTY",
    "PeerKernel",
    "barrier",
    "end_of_call",
    "is_last",
    "next_epoch",
    "pack",
    "peer_ptr",
    "post",
    "put",
    "put_words",
    "take_words",
    "unpack",
    "wait",
]
