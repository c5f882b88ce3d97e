"""Device functions by which a Triton kernel talks to the kernels of its peers.

Kernels of users import them from `counterpoint.device`.

Two ways to hand over data, both without a library and without a kernel of its own:

- **flags**: `put` stores a tile into the peer's memory, `post` releases a flag behind it, `wait`
  acquires flags. All flags of a block are posted, and polled, as one vector: one fence in all.
- **low-latency words**: `put_words` stores words of 4 bytes that are their own flags, and
  `take_words` polls the data itself: no fence and no flag. A word is EMPTY until it is written, so
  all of its bytes are data; who takes it empties it again.

Memory order. What a block has stored with `put` before `post` is seen by a block that has
returned from `wait` on that flag: the barrier in `post` gathers the stores of all threads, its
release pairs with the acquire of `wait`, whose barrier hands that order to all threads. Words need
none of it: nothing else is published by them.

Epochs. A flag holds the number of the call that wrote it and is compared by equality, so it is
never reset. `next_epoch` leaves out 0, which fresh memory holds, and its parity alternates: memory,
flags included, is used in two halves in turn, halves of the memory whatever a call's size. A rank
may then be in the next call while a late peer still reads this one's half, and not further, if in
every call each rank hears of all others before it ends. What once held words or flags must hold
nothing else, and each word that is put must be taken once.

Forward progress. A kernel that waits needs its whole grid resident on every rank, and what program
p waits for must come from programs <= p of its peers.
"""

import triton
import triton.language as tl

from counterpoint.kernels.clock import now_ns

LOOK_EVERY = tl.constexpr(256)  # turns of a wait, some tenths of a microsecond each
EMPTY = tl.constexpr(-(1 << 31))  # of a word: the bits of -0.0, for which 0.0 can stand


@triton.jit
def peer_ptr(bases_ptr, rank, byte_offset, DTYPE: tl.constexpr):
    """Where `byte_offset` of the symmetric memory of `rank` begins, as a pointer to DTYPE.

    Args:
        bases_ptr: [ranks] int64, address of each rank's symmetric memory in this process, a
            multiple of 16.
        rank: int, or a tensor of ranks.
        byte_offset: int64, or a tensor; a multiple of the size of DTYPE.
    """
    # bytes first: an address that is a number has no alignment that the compiler knows
    base = tl.multiple_of(tl.load(bases_ptr + rank).to(tl.pointer_type(tl.uint8)), 16)
    return (base + byte_offset).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def next_epoch(epoch):
    """The number of the next call: one more, but never 0, and odd after even.

    Args:
        epoch: int32, of the call before; of `PeerKernel`, `tl.load(state_ptr)`.
    """
    return tl.where(epoch == -1, 2, epoch + 1)


@triton.jit
def put(ptrs, values, mask=None):
    """Store a tile where peers will read it; they see it once a `post` behind it is waited for.

    Args:
        ptrs: tensor of pointers into any rank's memory, see `peer_ptr`.
        values: of their shape and dtype.
        mask: of their shape; None: all.
    """
    tl.store(ptrs, values, mask=mask)


@triton.jit
def post(flag_ptrs, epoch, mask=None):
    """Say that all that this block has stored so far is there.

    A barrier of the block, then a release of system scope, which pairs with the acquire of `wait`.

    Args:
        flag_ptrs: pointer or tensor of pointers to int32, one flag each, on any ranks.
        epoch: int32.
        mask: of `flag_ptrs`; None: all of them.
    """
    # the stores of all threads come before it; pairs with the acquire in `wait`
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def ended_by_host(address_ptr):
    """Whether the host has ended all waits of this rank, as another one has died.

    Args:
        address_ptr: two words of int32, together the address of an int32 of the host; 0: of none.
    """
    address = tl.load(address_ptr.to(tl.pointer_type(tl.int64), bitcast=True))
    # .cv: from memory each time
    word_ptr = address.to(tl.pointer_type(tl.int32))
    return tl.load(word_ptr, mask=address != 0, other=0, cache_modifier=".cv") != 0


@triton.jit
def expired(stop_ptr, start_ns, timeout_ns, spins):
    """Whether to stop waiting: the time is up, another wait of this rank has found it to be, or the
    host has ended all.

    The same answer for all threads, by an atomic of one of them and not by the clock, which each
    reads for itself; looked at now and then only.

    Args:
        spins: turns so far, counted up to LOOK_EVERY and from 0 again.
    """
    stop = spins < 0
    if spins == LOOK_EVERY - 1:
        late = now_ns() - start_ns > timeout_ns
        late = (late | ended_by_host(stop_ptr + 2)).to(tl.int32)
        stop = tl.atomic_or(stop_ptr, late, sem="relaxed", scope="gpu") > 0
    return stop


@triton.jit
def wait(flag_ptrs, epoch, stop_ptr, timeout_ns, mask=None):
    """Wait until each flag is `epoch`; what was stored before its `post` is seen then.

    Acquires of system scope, which pair with the release of `post`, then a barrier of the block.
    Load what peers have stored with cache_modifier=".cg".

    Args:
        flag_ptrs: tensor of pointers to int32, in own memory; for one flag a tensor of one.
        epoch: int32.
        stop_ptr: int32 of this rank, 0 at first; the first wait that gives up sets it to 1, and
            with it none waits any more. It is the third word of a kernel's state, see `PeerKernel`.
        timeout_ns: int64, how long to wait.
        mask: of `flag_ptrs`; None: all of them.

    Returns:
        Tensor of bool, the flags that are late: all False unless the time was up.
    """
    late = flag_ptrs.to(tl.int64) != 0 if mask is None else mask
    start_ns = now_ns()
    spins = 0
    waiting = tl.sum(late.to(tl.int32)) > 0
    while waiting:
        # pairs with the release in `post`
        seen = tl.atomic_add(flag_ptrs, 0, mask=late, sem="acquire", scope="sys")
        late = late & (seen != epoch)
        waiting = tl.sum(late.to(tl.int32)) > 0
        if waiting:
            waiting = not expired(stop_ptr, start_ns, timeout_ns, spins)
        spins = (spins + 1) % LOOK_EVERY
    tl.debug_barrier()
    return late


@triton.jit
def barrier(bases_ptr, byte_offset, rank, epoch, stop_ptr, timeout_ns, WORLD: tl.constexpr):
    """Meet the same block of every rank: what each has stored with `put` before is seen behind it.

    Args:
        bases_ptr: as for `peer_ptr`.
        byte_offset: int64, a multiple of 4, where WORLD flags of this block lie on each rank.
        rank: this one.
        epoch: as for `wait`.
        stop_ptr: as for `wait`.
        timeout_ns: as for `wait`.
        WORLD: ranks, a power of 2.

    Returns:
        Tensor of bool [WORLD], the ranks that are late.
    """
    ranks = tl.arange(0, WORLD)
    post(peer_ptr(bases_ptr, ranks, byte_offset + 4 * rank, tl.int32), epoch)
    own = peer_ptr(bases_ptr, rank, byte_offset + 4 * ranks, tl.int32)
    return wait(own, epoch, stop_ptr, timeout_ns)


@triton.jit
def put_words(word_ptrs, bits, mask=None):
    """Store words of 4 bytes where a peer polls them; this orders no other store.

    Args:
        word_ptrs: tensor of pointers to int32.
        bits: tensor of int32 of the same shape; see `pack` for two 16-bit values. EMPTY, which is
            -0.0 in fp32, is stored as 0.
        mask: of `word_ptrs`; None: all of them.
    """
    tl.store(word_ptrs, tl.where(bits == EMPTY, 0, bits), mask=mask)


@triton.jit
def take_words(word_ptrs, stop_ptr, timeout_ns, mask=None, NUM_WARPS: tl.constexpr = 4):
    """Wait for words, and return what they hold; they are EMPTY after that.

    Args:
        word_ptrs: tensor of pointers to int32, in own memory.
        stop_ptr: as for `wait`.
        timeout_ns: as for `wait`.
        mask: of `word_ptrs` and of its shape, None: all; the bits are 0 where it is False.
        NUM_WARPS: of the launch.

    Returns:
        Tensor of int32, and a tensor of bool: the words that are late.
    """
    wanted = word_ptrs.to(tl.int64) != 0 if mask is None else mask
    # fewer words than threads would be polled by several warps, of which one is heard: each thread
    # has a word of its own, some of them the same
    COPIES: tl.constexpr = max(1, NUM_WARPS * 32 // word_ptrs.numel)
    copy = tl.arange(0, COPIES)
    for _ in tl.static_range(len(word_ptrs.shape)):
        copy = tl.expand_dims(copy, -1)
    ptrs, some = word_ptrs[None], wanted[None]
    if COPIES > 1:
        ptrs, some = ptrs + copy * 0, some & (copy >= 0)
    words = tl.load(ptrs, mask=some, other=0, volatile=True)
    late = some & (words == EMPTY)
    start_ns = now_ns()
    spins = 0
    waiting = tl.sum(late.to(tl.int32)) > 0
    while waiting:
        words = tl.load(ptrs, mask=some, other=0, volatile=True)
        late = some & (words == EMPTY)
        waiting = tl.sum(late.to(tl.int32)) > 0
        if waiting:
            waiting = not expired(stop_ptr, start_ns, timeout_ns, spins)
        spins = (spins + 1) % LOOK_EVERY
    # for the call after the next: its peers have heard of this rank in the one between
    tl.store(ptrs, tl.full(ptrs.shape, EMPTY, tl.int32), mask=some)
    # copies hold the same once none is late
    return tl.max(words, 0), tl.max(late.to(tl.int32), 0) > 0


@triton.jit
def pack(low, high, DTYPE: tl.constexpr):
    """The bits of two tensors, rounded to a 16-bit DTYPE, as one of int32: LL words.

    Args:
        low: fp32.
        high: fp32, of the same shape.
        DTYPE: tl.bfloat16 or tl.float16.
    """
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def unpack(bits, DTYPE: tl.constexpr):
    """The two tensors of `pack`, in fp32.

    Args:
        bits: int32.
        DTYPE: as there.
    """
    low = bits.to(tl.int16).to(DTYPE, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def is_last(count_ptr, programs):
    """Count this program; whether it is the last, which sees and publishes what all have stored.

    Args:
        count_ptr: int32, 0 at first, and to be set to 0 by the last one.
        programs: of the grid.
    """
    # the stores of all threads come before it; pairs with the same of the other programs
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag):
    """What each program does last: say who was late, and count the call.

    Args:
        late: [ranks] int32, not 0 for those that this program has waited for in vain.
        state_ptr: [6] int32: epoch, programs that have ended, whether a wait has given up, and
            behind a word that is unused the address of the word by which the host ends waits.
        fault_ptr: [1] int64 of the host: 1 + `tag`, and above it the bits of the late ranks.
    """
    # the first block that has waited in vain says for whom; what others miss then follows from it
    if tl.max(late, 0) > 0:
        if tl.atomic_cas(state_ptr + 2, 1, 2, sem="relaxed", scope="gpu") == 1:
            # one store, so that the host sees both or neither
            bits = tl.sum(tl.where(late > 0, 1 << (ranks % 32), 0).to(tl.int64))
            tl.store(fault_ptr, (bits << 32) | (tag + 1))
    # the last program to end moves the epoch on: all have read it by then
    if tl.atomic_add(state_ptr + 1, 1, sem="relaxed", scope="gpu") == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, next_epoch(tl.load(state_ptr)))
