"""Islands on one host: network namespaces joined by links of a limited rate.

Each island is a namespace with one NIC, an end of a veth pair whose other end is on a bridge. Ranks
of an island share memory, as processes of one host do; to others they have TCP alone.

    unshare -rn python -m benchmarks.namespaces FILE       # what `run` starts; FILE is a Job

It needs user namespaces: `can_run` says whether they are there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

NIC, PORT = "nic", 29511
# what is measured on: islands and ranks of each, rates of their NICs, calls whose median counts
ISLANDS, RATES, CALLS = ((2, 2), (2, 3)), ("400mbit", "1gbit"), 5
BEGUN = "COUNTERPOINT_BEGUN"  # the file that says that a rank has
ROOT = Path(__file__).resolve().parent.parent
QUEUE = ("burst", "256kb", "latency", "50ms")


@dataclass(frozen=True)
class Job:
    """What runs on which islands.

    Args:
        body: "module:function", called as function(rank, ranks, *args) in a gloo group of all;
            what it returns is JSON.
        islands: how many.
        size: ranks of each.
        rate: of each NIC and direction, as `tc` takes it; "": not limited.
        args: of the function, as JSON.
        flat: ranks are told that each is an island of its own.
        env: of all ranks.
        timeout_s: of everything.
        fault: "kill", "stop" or "cut": what happens to the last island, `after_s` from when all
            ranks have begun; "": nothing.
        after_s: see `fault`.
        begins: ranks begin when the function says so, by `begin`; else before it is called.
    """

    body: str
    islands: int = 2
    size: int = 2
    rate: str = ""
    args: tuple[Any, ...] = ()
    flat: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 120.0
    fault: str = ""
    after_s: float = 0.0
    begins: bool = False


@cache
def can_run() -> str:
    """Why namespaces cannot be made here; "" where they can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    made = "ip link add port0 type veth peer name nic0"
    limited = f"tc qdisc add dev port0 root tbf rate 1gbit {' '.join(QUEUE)}"
    command = ["unshare", "-rn", "sh", "-c", f"{made} && {limited}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def run(job: Job) -> list[Any]:
    """What the function has returned on each rank; of one that did not return, None.

    Raises:
        RuntimeError: the network could not be made, or without a fault a rank has failed.
    """
    with tempfile.TemporaryDirectory(prefix="counterpoint-islands-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(asdict(job)))
        command = ["unshare", "-rn", sys.executable, "-m", "benchmarks.namespaces", str(path)]
        paths = [*map(str, (ROOT, ROOT / "src")), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        results = [path.with_name(f"rank{r}.json") for r in range(job.islands * job.size)]
        found = [json.loads(p.read_text()) if p.exists() else None for p in results]
        if done.returncode or (None in found and not job.fault):
            raise RuntimeError(f"{job.body}: {done.stdout}\n{done.stderr}")
        return found


def _sh(*words: object) -> None:
    subprocess.run([str(w) for w in words], check=True)


@contextmanager
def _network(job: Job) -> Iterator[list[int]]:
    """A process in the namespace of each island."""
    _sh("ip", "link", "set", "lo", "up")
    _sh("ip", "link", "add", "bridge", "type", "bridge")
    _sh("ip", "link", "set", "bridge", "up")
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "100000"]) for _ in range(job.islands)]
    try:
        ours = os.readlink("/proc/self/ns/net")
        for i, holder in enumerate(holders):
            while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
                time.sleep(0.01)
            inside = ("nsenter", "-t", holder.pid, "-n")
            _sh("ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", f"{NIC}{i}")
            _sh("ip", "link", "set", f"{NIC}{i}", "netns", holder.pid)
            _sh("ip", "link", "set", f"port{i}", "master", "bridge", "up")
            _sh(*inside, "ip", "link", "set", f"{NIC}{i}", "name", NIC)
            _sh(*inside, "ip", "link", "set", "lo", "up")
            _sh(*inside, "ip", "addr", "add", f"10.9.0.{i + 1}/24", "dev", NIC)
            _sh(*inside, "ip", "link", "set", NIC, "up")
            if job.rate:
                limit = ("root", "tbf", "rate", job.rate, *QUEUE)
                _sh("tc", "qdisc", "add", "dev", f"port{i}", *limit)
                _sh(*inside, "tc", "qdisc", "add", "dev", NIC, *limit)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()


def _fault(job: Job, ranks: list[subprocess.Popen[bytes]]) -> None:
    last = ranks[-job.size :]
    if job.fault == "cut":
        _sh("ip", "link", "set", f"port{job.islands - 1}", "down")
    for process in last if job.fault != "cut" else ():
        process.send_signal(signal.SIGKILL if job.fault == "kill" else signal.SIGSTOP)


def _host(path: Path) -> None:
    """In a user namespace of its own: make the network, run the ranks, end them all."""
    job = Job(**json.loads(path.read_text()))
    ranks: list[subprocess.Popen[bytes]] = []
    with _network(job) as pids:
        try:
            for r in range(job.islands * job.size):
                island = r // job.size
                env = os.environ | {
                    "COUNTERPOINT_ISLAND": f"rank{r}" if job.flat else f"island{island}",
                    "GLOO_SOCKET_IFNAME": NIC,
                    "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1",
                    BEGUN: str(path.with_name(f"begun{r}")),
                } | dict(job.env)  # fmt: skip
                command = ["nsenter", "-t", str(pids[island]), "-n", sys.executable, "-m",
                           "benchmarks.namespaces", str(path), str(r)]  # fmt: skip
                ranks.append(subprocess.Popen(command, env=env))
            deadline_s = time.monotonic() + job.timeout_s
            begun = [path.with_name(f"begun{r}") for r in range(len(ranks))]
            _until(lambda: all(b.exists() for b in begun), ranks, deadline_s)
            if job.fault:
                time.sleep(job.after_s)
                _fault(job, ranks)
            kept = ranks[: -job.size] if job.fault in ("kill", "stop") else ranks
            _until(lambda: all(p.poll() is not None for p in kept), kept, deadline_s)
        finally:
            for process in ranks:
                process.kill()


def _until(
    done: Callable[[], bool], ranks: list[subprocess.Popen[bytes]], deadline_s: float
) -> None:  # fmt: skip
    while not done() and time.monotonic() < deadline_s:
        if any(p.poll() for p in ranks):  # one has failed
            deadline_s = min(deadline_s, time.monotonic() + 5)
        time.sleep(0.01)


def _rank(path: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    job = Job(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    ranks = job.islands * job.size
    module, _, name = job.body.partition(":")
    body = getattr(import_module(module), name)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    dist.barrier()
    if not job.begins:
        begin()
    result = path.with_name(f"rank{rank}.json")
    result.with_suffix(".tmp").write_text(json.dumps(body(rank, ranks, *job.args)))
    result.with_suffix(".tmp").rename(result)
    sys.stdout.flush()
    os._exit(0)  # a group whose peers are gone ends no better


def begin() -> None:
    """This rank has begun: see `Job`."""
    Path(os.environ[BEGUN]).touch()


def nic_bytes() -> int:
    """Bytes that this rank's island has sent over its NIC by now."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == NIC:
            return int(counts.split()[8])
    raise RuntimeError(f"no interface {NIC}: not a rank of namespaces.run")


def timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median seconds of a call, the slowest rank's, and bytes that this rank's island sent."""
    import torch
    import torch.distributed as dist

    call()
    seconds: list[float] = []
    dist.barrier()
    before = nic_bytes()
    for _ in range(calls):
        dist.barrier()
        start_s = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - start_s])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        seconds.append(float(took))
    dist.barrier()
    return median(seconds), (nic_bytes() - before) / calls


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _rank(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        _host(Path(sys.argv[1]))
