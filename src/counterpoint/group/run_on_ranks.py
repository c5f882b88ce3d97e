"""One function on several ranks: those that torchrun has started, or new processes."""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from counterpoint.errors import InputError
from counterpoint.group.ranks import gather_object, spawn
from counterpoint.group.workspace import release_all
from counterpoint.ranges import Range, misfit, whole

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

OP = "run_on_ranks"
MAX_RANKS = 256  # processes of one host


def run_on_ranks(
    fn: Callable[[torch.device, *Ts], T], *args: *Ts, ranks: int = 2, timeout_s: float = 600.0
) -> list[T]:
    """Call `fn(device, *args)` on each of several ranks, which have a default process group.

    Under torchrun this process is one of them: on its GPU with NCCL, or on the CPU with gloo where
    there are no GPUs. Started in any other way, by `python script.py` or in a notebook, this
    process starts `ranks` CPU processes, and none outlives the call. Within a process group, it is
    the group's ranks that all call this.

    Args:
        fn: a function of a module, or of the script; of a notebook any. It gets its rank's
            torch.device, and asks torch.distributed for its rank.
        args: picklable; each rank has its own copy.
        ranks: how many CPU processes to start; under torchrun, its `--nproc-per-node` says it.
        timeout_s: of CPU processes, for everything, their start (seconds) included; under
            torchrun, of one wait of a collective.

    Returns:
        What `fn` returned on each rank, picklable; under torchrun on all ranks.

    Raises:
        InputError: an argument is of another kind, a script calls this while it is imported, or
            torchrun has started more ranks than there are GPUs.
        UnsupportedError: in a notebook that has used its GPU.
        CounterpointError: a rank raised or died; the message holds all tracebacks. Under torchrun
            such a rank ends, with its traceback on stderr, and torchrun ends the others.
        PeerTimeoutError: a rank did not return in time.

    Example:
        >>> def work(device):  # doctest: +SKIP
        ...     x = torch.full((2,), float(dist.get_rank()), device=device)
        ...     dist.all_reduce(x)
        ...     return x.tolist()
        >>> if __name__ == "__main__":  # doctest: +SKIP
        ...     print(cp.run_on_ranks(work, ranks=2))
        [[1.0, 1.0], [1.0, 1.0]]
    """
    if not callable(fn):
        raise InputError(OP, "fn", want="a function of a torch.device", got=type(fn).__name__)
    ranks = whole(OP, "ranks", ranks, 1, MAX_RANKS)
    if wrong := misfit(timeout_s, float, Range(0.001, 1e6, "pass seconds"), "timeout_s"):
        raise InputError(OP, wrong.where, want=wrong.want, got=wrong.got, fix=wrong.fix)
    if dist.is_initialized():
        cuda = dist.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else _CPU
        return _as_rank(fn, device, args)
    if "LOCAL_RANK" in os.environ:
        return _under_torchrun(fn, args, timeout_s)
    return spawn(_OnCpu(fn), ranks, *args, timeout_s=timeout_s, op=OP)


_CPU = torch.device("cpu")


class _OnCpu:
    """A function of a device, as `spawn` calls one."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        named = fn if hasattr(fn, "__qualname__") else type(fn)
        self.fn, self.__module__, self.__qualname__ = fn, named.__module__, named.__qualname__

    def __call__(self, rank: int, num_ranks: int, *args: Any) -> Any:
        return self.fn(_CPU, *args)


# each call has a group of its own: in one store, of one name, a second group would find the first
_calls = count()


@cache
def _store() -> tuple[Any, int, int]:
    """Torchrun's store, this rank and how many there are."""
    return next(rendezvous("env://"))


def _under_torchrun(fn: Callable[..., T], args: tuple[Any, ...], timeout_s: float) -> list[T]:
    """Be a rank of torchrun's, from its process group to that group's end."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus and local >= gpus:
        want = f"at most {gpus}, as there are GPUs"
        raise InputError(OP, "--nproc-per-node", want=want, got=f"{local + 1} or more")
    device = torch.device("cuda", local) if gpus else _CPU
    if gpus:
        torch.cuda.set_device(device)
    elif os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # all ranks are on this host, and its name need not resolve to an address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout_s)
    store, rank, world_size = _store()
    dist.init_process_group(
        "nccl" if gpus else "gloo", device_id=device if gpus else None, timeout=wait, rank=rank,
        world_size=world_size, store=PrefixStore(f"{OP}/{next(_calls)}", store),
    )  # fmt: skip
    try:
        found = _as_rank(fn, device, args)
    except Exception:
        # peers that still communicate, and graphs that the traceback holds, would keep this rank
        # from ending: it ends here, and torchrun ends the others
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    release_all()
    dist.destroy_process_group()
    return found


def _as_rank(fn: Callable[..., T], device: torch.device, args: tuple[Any, ...]) -> list[T]:
    group = dist.group.WORLD
    assert group is not None
    return gather_object(fn(device, *args), group)
