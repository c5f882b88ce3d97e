import errno
import gc
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.group import symmetric_cpu
from counterpoint.group.ranks import gather_object
from counterpoint.group.symmetric import SymmetricMemory, allocate

NUM_BYTES = 4099  # one page and a bit, prime


def payload(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


def assert_peers_see_each_other(memory: SymmetricMemory, group: dist.ProcessGroup) -> None:
    rank, world_size = memory.rank, memory.world_size
    assert memory.num_bytes == NUM_BYTES
    assert memory.local().dtype == torch.uint8
    assert not any(memory.peer(peer).any() for peer in range(world_size)), "not zero-filled"
    dist.barrier(group)

    memory.peer((rank + 1) % world_size).copy_(payload(rank))
    dist.barrier(group)

    assert torch.equal(memory.local(), payload((rank - 1) % world_size))
    for peer in range(world_size):
        assert torch.equal(memory.peer(peer), payload((peer - 1) % world_size))
        assert memory.peer(peer).data_ptr() == memory.buffer_ptrs[peer]
    assert memory.local().data_ptr() == memory.buffer_ptrs[rank]
    assert len(set(memory.buffer_ptrs)) == world_size
    dist.barrier(group)


def write_to_peers(rank: int, world_size: int) -> int:
    memory = symmetric_cpu.allocate_cpu(
        NUM_BYTES, world(), partial(gather_object, group=world()), range(world_size)
    )
    assert (memory.rank, memory.world_size) == (rank, world_size)
    assert_peers_see_each_other(memory, world())
    assert memory.peer_pids[rank] == os.getpid()
    return hash(memory.peer_pids)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_peers_see_what_a_rank_writes(pool: RankPool, world_size: int):
    assert len(set(pool.run(write_to_peers, world_size))) == 1


@on_ranks(4)
def test_ranks_are_those_of_the_subgroup(rank: int, world_size: int):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        memory = allocate(NUM_BYTES, group, "cpu")
        assert (memory.rank, memory.world_size) == (rank // 2, 2)
        assert_peers_see_each_other(memory, group)
    else:
        with pytest.raises(InputError, match="group must be a group of this rank"):
            allocate(NUM_BYTES, group, "cpu")


@on_ranks(2)
def test_allocations_do_not_alias(rank: int, world_size: int):
    first = allocate(NUM_BYTES, world(), "cpu")
    second = allocate(NUM_BYTES, world(), "cpu")
    first.local().fill_(7)
    assert_peers_see_each_other(second, world())
    assert all((first.peer(peer) == 7).all() for peer in range(world_size))


def num_open_fds() -> int:
    # one of them is that of the listing itself, closed by now
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return sum("memfd:counterpoint" in link for link in links)


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:counterpoint")


@on_ranks(2)
def test_nothing_is_left_behind(rank: int, world_size: int):
    gc.collect()  # the workspaces of earlier tests, which are cycles
    before = num_mappings()
    memory = allocate(NUM_BYTES, world(), "cpu")
    assert num_open_fds() == 0
    assert num_mappings() == before + world_size

    peer = memory.peer(1 - rank)
    del memory
    assert num_mappings() == before + 1, "a tensor alone keeps its memory"
    assert not peer.any()
    del peer
    assert num_mappings() == before


@on_ranks(3)
def test_ranks_on_two_hosts_are_refused_on_both(rank: int, world_size: int):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(symmetric_cpu, "host", lambda: "pid:[1] of boot 2")
        with pytest.raises(UnsupportedError, match=r"within one host .*pid:\[1\] of boot 2"):
            allocate(NUM_BYTES, world(), "cpu")
    dist.barrier()  # the group is as usable as before


@on_ranks(3)
def test_lack_of_memory_on_one_rank_raises_on_all(rank: int, world_size: int):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def lack() -> int:
        return world_size * NUM_BYTES - 1

    for module, name, fake, number in [
        (os, "posix_fallocate", refuse, errno.ENOSPC),
        (symmetric_cpu, "_available_bytes", lack, errno.ENOMEM),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, name, fake)
            with pytest.raises(OSError, match=f"rank 1 cannot make {NUM_BYTES} bytes") as info:
                allocate(NUM_BYTES, world(), "cpu")
        assert info.value.errno == number
    assert num_open_fds() == 0
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_may_not_open_its_peers_is_refused_on_all(rank: int, world_size: int):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def refuse(path: str, **_: object) -> Tensor:
                raise RuntimeError(f"unable to open file <{path}>: Permission denied (13)")

            patch.setattr(torch, "from_file", refuse)
        with pytest.raises(UnsupportedError, match=r"rank 1 cannot open .*Permission denied"):
            allocate(NUM_BYTES, world(), "cpu")
    assert num_open_fds() == 0
    dist.barrier()


@on_ranks(2)
def test_wrong_sizes_and_devices_are_refused_on_all(rank: int, world_size: int):
    for sizes in ([0, 0], [0, 8], [-1, -1], [8, 9]):
        with pytest.raises(InputError, match="must be >= 1 and equal on all ranks") as info:
            allocate(sizes[rank], world(), "cpu")
        assert str(sizes) in str(info.value)
    with pytest.raises(UnsupportedError, match="on cpu and cuda, not on meta"):
        allocate(8, world(), "meta")
