"""Programs of torch.distributed alone, of which one rank parts: whom `counterpoint.guard` names.

    python -m fault_trials --guard --trials 50      # with --gpu: NCCL, a rank for each GPU

A trial is right if each rank that lives has the victim named on its stderr, in time. Where as many
ranks have made one call as another, as of two ranks, both are named with what they called.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rankpool import RankPool
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import counterpoint as cp
from counterpoint.group import guard

BOUND_S, GRACE_S, HANG_S = 2.0, 0.5, 120.0
STEPS, WIDTH = 8, 24
PARTS = ("other", "size", "dtype", "root", "swap", "few", "more")
FAULTS = ("killed", "raises", "stops", "sleeps", "returns", *PARTS)
SAYS = {"killed": "is dead", "raises": "has ended by ValueError", "stops": "is stopped",
        "sleeps": "is alive", "returns": "has left the group"}  # fmt: skip
PROGRAMS = ("plain", "fsdp", "groups", "ddp", "fsdp2", "pipeline")


class Trial(NamedTuple):
    """What happens to whom, in which program, and when."""

    ranks: int
    victim: int
    fault: str
    program: str
    step: int
    seed: int


def trial_of(seed: int, gpus: int = 0) -> Trial:
    """The trial of that number: each fault, and each program, as often as others."""
    draw = random.Random(seed)
    ranks = gpus or draw.choice((2, 3, 4))
    fault, program = FAULTS[seed % len(FAULTS)], PROGRAMS[seed // 2 % len(PROGRAMS)]
    if program == "groups":
        ranks, program = (gpus, "plain") if gpus else (4, program)
    return Trial(ranks, draw.randrange(ranks), fault, program, draw.randrange(1, STEPS - 2), seed)


class Fault:
    """Befalls the victim at one call of one step.

    Args:
        trial: which.
        rank: this one.
    """

    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial, self.step, self.done = trial, 0, False
        self._victim = rank == trial.victim

    def is_now(self) -> bool:
        """Whether this rank parts in this step and has not yet."""
        return self._victim and self.step >= self.trial.step and not self.done

    def alone(self) -> None:
        """What ends or stops a rank, or a call too much, in the midst of a model."""
        if not self.is_now():
            return
        self.done = True
        match self.trial.fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("a bad batch")
            case "stops":
                pid = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep {BOUND_S + 6}; kill -9 {pid}"])
                os.kill(pid, signal.SIGSTOP)
            case "sleeps":
                time.sleep(HANG_S)
            case "returns":
                raise StopIteration
            case "few":
                pass
            case _:
                dist.all_reduce(torch.ones(7))

    def parts(self, calls: Sequence["Call"]) -> list["Call"]:
        """The calls of a step, as this rank makes them."""
        made = [*calls]
        if not self.is_now() or self.trial.fault not in PARTS:
            return made
        self.done = True
        at = random.Random(self.trial.seed).randrange(len(made) - 1)
        one = made[at]
        match self.trial.fault:
            case "other":
                made[at] = one._replace(kind="barrier" if one.kind != "barrier" else "all_reduce")
            case "size":
                made[at] = one._replace(kind="all_reduce", elements=one.elements + WIDTH)
            case "dtype":
                made[at] = one._replace(kind="all_reduce", dtype=torch.float64)
            case "root":
                made[at] = one._replace(kind="broadcast", root=1)
            case "swap":
                made[at : at + 2] = [made[at + 1], one]
            case "few":
                del made[at]
            case _:
                made.insert(at, one)
        return made


class Call(NamedTuple):
    """A collective."""

    kind: str
    elements: int = WIDTH
    dtype: torch.dtype = torch.float32
    root: int = 0
    group: Any = None

    def run(self) -> None:
        """Make it."""
        ranks = dist.get_world_size(self.group)
        x = torch.ones(self.elements * ranks, dtype=self.dtype)
        part = torch.empty(self.elements, dtype=self.dtype)
        match self.kind:
            case "barrier":
                dist.barrier(self.group)
            case "broadcast":
                dist.broadcast(x, group=self.group, group_src=self.root)
            case "all_gather":
                dist.all_gather_into_tensor(x, part, group=self.group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(part, x, group=self.group)
            case "all_to_all":
                dist.all_to_all_single(torch.empty_like(x), x, group=self.group)
            case "functional":
                functional.all_reduce(x, "sum", self.group or dist.group.WORLD).sum()
            case _:
                dist.all_reduce(x, group=self.group)


def wait() -> None:
    """As a loop reads its loss: the host of a GPU runs ahead of it."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def of_calls(fault: Fault, calls: Sequence[Call]) -> None:
    """Steps of such calls."""
    for step in range(STEPS):
        fault.step = step
        made = fault.parts(calls)
        for i, call in enumerate(made):
            if i == len(made) // 2 and fault.trial.fault not in PARTS:
                fault.alone()
            call.run()
        wait()


def plain(fault: Fault) -> None:
    """Collectives of several kinds, one after another."""
    kinds = ("all_reduce", "all_gather", "broadcast", "functional", "all_to_all", "barrier")
    of_calls(fault, [Call(kind, WIDTH + i) for i, kind in enumerate(kinds)])


def fsdp(fault: Fault) -> None:
    """As FSDP calls: layers are gathered twice, gradients scattered, their norm reduced."""
    sizes = [WIDTH + 2 * i for i in range(3)]
    gathers = [Call("all_gather", size) for size in sizes]
    scatters = [Call("reduce_scatter", size) for size in reversed(sizes)]
    of_calls(fault, [*gathers, *gathers[::-1], *scatters, Call("all_reduce", 1)])


def groups(fault: Fault) -> None:
    """Two axes of a mesh, as of FSDP with tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    calls = [Call("all_gather", group=dp), Call("functional", group=tp), Call("all_reduce"),
             Call("functional", WIDTH + 1, group=tp), Call("reduce_scatter", group=dp)]  # fmt: skip
    of_calls(fault, calls)


def model_of(fault: Fault) -> torch.nn.Sequential:
    """Three layers; the fault befalls in the middle one."""
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[1].register_forward_hook(lambda *_: fault.alone())
    return model


def train(model: torch.nn.Module, fault: Fault) -> None:
    """Steps of a model; who makes a call too few has taken another branch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        fault.step = step
        skips = fault.is_now() and fault.trial.fault == "few"
        loss: Tensor = model(torch.ones(2, WIDTH)).sum()
        if not skips:
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach())
        wait()


def ddp(fault: Fault) -> None:
    """A model of DDP, whose calls are C++'s."""
    train(DistributedDataParallel(model_of(fault)), fault)


def fsdp2(fault: Fault) -> None:
    """A model of FSDP2."""
    model = model_of(fault)
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh), fault)


def pipeline(fault: Fault) -> None:
    """Messages from each rank to the next, and a collective now and then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    for step in range(STEPS):
        fault.step = step
        skips = fault.is_now() and fault.trial.fault == "few"
        fault.alone()
        x = torch.ones(WIDTH)
        if rank:
            dist.recv(x, rank - 1)
        if rank + 1 < ranks:
            dist.send(x, rank + 1)
        if not skips:
            dist.all_reduce(x)
        wait()


RUNS: dict[str, Callable[[Fault], None]] = {
    "plain": plain, "fsdp": fsdp, "groups": groups, "ddp": ddp, "fsdp2": fsdp2,
    "pipeline": pipeline,
}  # fmt: skip


def part(rank: int, ranks: int, trial: Trial, folder: str, port: int, on_gpus: bool) -> None:
    """One rank of a trial; it ends, and leaves what it has said."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["COUNTERPOINT_TIMEOUT_S"] = str(BOUND_S)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    guard.GRACE_S = GRACE_S
    warnings.simplefilter("ignore")  # of names that torch gives up
    store = PrefixStore(folder, TCPStore("127.0.0.1", port, is_master=False))
    device = torch.device("cuda", rank) if on_gpus else None
    if device is not None:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=ranks, device_id=device
    )
    torch.manual_seed(0)
    try:
        with cp.guard(), suppress(StopIteration):
            RUNS[trial.program](Fault(trial, rank))
        if rank == trial.victim and trial.fault == "returns":
            time.sleep(BOUND_S + 4)  # its process goes on
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def problems_of(trial: Trial, pool: RankPool, port: int, on_gpus: bool = False) -> list[str]:
    """What is wrong with what ranks of a trial have said."""
    with tempfile.TemporaryDirectory(prefix="counterpoint-guard-") as folder:
        pool.run(part, trial.ranks, trial, folder, port, on_gpus,
                 group=False, timeout_s=HANG_S, expect_dead=range(trial.ranks))  # fmt: skip
        said = [(Path(folder) / str(rank)).read_text() for rank in range(trial.ranks)]
    problems: list[str] = []
    for rank, text in enumerate(said):
        if rank != trial.victim and (problem := problem_of(trial, text)):
            problems.append(f"{trial}: rank {rank} {problem}: {text[:1500]}")
    return problems


def problem_of(trial: Trial, text: str) -> str:
    """What is wrong with what a rank has said; "" where nothing is."""
    lines = [line for line in text.splitlines() if line.startswith("counterpoint: guard: ")]
    found = next((line for line in lines if "waits in vain" not in line), None)
    if found is None:
        return "said nothing"
    if SAYS.get(trial.fault, "") not in found:
        return f"does not say {SAYS[trial.fault]}"
    if crossed := re.match(r"counterpoint: guard: ranks (\d+) and (\d+) wait for each", found):
        named, even = {int(each) for each in crossed.groups()}, True
    elif (match := re.match(r"counterpoint: guard: rank (\d+) ", found)) is not None:
        waits = re.search(r"it waits for a message from or to rank (\d+)", found)
        even = trial.ranks == 2 and waits is not None
        named = {int(each[1]) for each in (match, waits) if each is match or even}
    else:
        wanted, got = re.findall(r"as on ranks? ([\d, ]+), got", found), found.partition(", got")[2]
        named = {int(rank) for rank in re.findall(r" on rank (\d+)", got)}
        even = bool(wanted) and len(wanted[0].split(",")) == len(named)
        if even:  # nobody can say which ones have parted
            named |= {int(rank) for rank in wanted[0].split(",")}
    if trial.victim not in named or (len(named) > 1 and not even):
        return f"names {sorted(named)}"
    return ""


def run_trials(numbers: Sequence[int], pool: RankPool, gpus: int = 0) -> int:
    """1 if any of the trials of those numbers was wrong; under NCCL if there are GPUs."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrong = 0
    for done, number in enumerate(numbers, 1):
        problems = problems_of(trial_of(number, gpus), pool, store.port, gpus > 0)
        wrong += bool(problems)
        print("".join(f"\n{problem}\n" for problem in problems), end="")
        print(f"\r{done}/{len(numbers)} trials of guard, {wrong} wrong", end="", flush=True)
    print()
    return 1 if wrong else 0
