"""`counterpoint doctor`: what this machine has, what it lacks, and how to get that.

It reports and never fails: whoever asks may have no GPU at all.
"""

import json
import os
import platform
import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from counterpoint import __version__
from counterpoint.choose.known import cache_folder, load
from counterpoint.errors import CounterpointError
from counterpoint.lazy import INSTALLED_BY
from counterpoint.versions import passed, summaries, untried

torch: Any = import_module("torch") if find_spec("torch") else None  # a light install has none
PACKAGES = ("torch", "triton", "numpy", "matplotlib", "cuda-bindings")
NO_GPU = (
    "no NVIDIA GPU found; install its driver, or give this container its GPUs "
    "(docker run --gpus all), or unset CUDA_VISIBLE_DEVICES"
)
VARIABLES = {
    "NCCL_NVLS_ENABLE": "0: NCCL without NVLink multicast",
    "NCCL_P2P_NET_CHUNKSIZE": "524288: faster sends between hosts, over sockets",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: torch's symmetric memory without multicast",
    "COUNTERPOINT_TIMEOUT_S": "seconds to wait for a rank that is alive, as its group if not set",
    "COUNTERPOINT_CHECK": "1: each call compares its arguments over the ranks first",
    "COUNTERPOINT_CACHE": "folder of measured machines and tuned plans",
    "COUNTERPOINT_ISLAND": "name of the island of a rank, its host if not set",
    "COUNTERPOINT_NVTX": "1: an NVTX range around each call of an operator on the host",
    "COUNTERPOINT_REPLAY": "0: repeated eager calls run step by step",
    "COUNTERPOINT_VLLM": "1: vllm serve decodes by these operators",
}


def doctor(*, as_json: bool) -> int:
    """Print the facts of this machine, as tables or as JSON; 0."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(Console(), facts)
    return 0


def collect() -> dict[str, Any]:
    """Facts of this machine; each is there on every machine, empty where it has no meaning."""
    environment = _environment() if torch else {}
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch else []
    facts: dict[str, Any] = {
        "gpus": gpus,
        "driver": environment.get("driver", ""),
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(gpus))]
            for i in range(len(gpus))
        ],
        "topology": _topology() if gpus else "",
        "versions": _versions(environment),
        "symmetric_memory": _symmetric_memory() if gpus else "no GPU",
        "cpu_ranks": _cpu_ranks(),
        "known": _known(gpus),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }  # fmt: skip
    facts["passed"] = passed()
    facts["untried"] = untried(facts["versions"], on_gpus=bool(gpus))
    return facts | {"missing": _missing(facts)}


def _environment() -> dict[str, Any]:
    from counterpoint.measure import record

    return record.environment()


def _gpu(index: int) -> dict[str, Any]:
    from counterpoint.gpu import driver

    properties = torch.cuda.get_device_properties(index)
    try:
        engines = driver.num_copy_engines(index)
    except CounterpointError:
        engines = None
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "num_sms": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_copy_engines": engines,
    }


def _known(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What plans are chosen by on all GPUs together: see docs/choosing.md."""
    facts: dict[str, Any] = {
        "folder": str(cache_folder()), "machine": None, "measured": False, "tuned_plans": 0,
    }  # fmt: skip
    if len(gpus) > 1:
        from counterpoint.ops.place import place_of  # operators need Triton, which may be missing

        known = load(place_of(torch.device("cuda", 0), len(gpus)))
        facts["tuned_plans"] = len(known.tuned)
        if known.machine is not None:
            facts["machine"] = known.machine.source
            facts["measured"] = known.machine.measured is not None
    return facts


def _versions(environment: dict[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "counterpoint": __version__,  # a source tree need not be an installed package
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["CUDA"] = torch.version.cuda if torch else None
    found["NCCL"] = environment.get("nccl")
    return found


def _symmetric_memory() -> str:
    """Why torch's symmetric memory is not to be had, or "yes" if it is."""
    from counterpoint.group import symmetric_cuda

    try:
        symmetric_cuda.torch_symmetric_memory()
    except CounterpointError as error:
        return str(error)
    return "yes"


def _cpu_ranks() -> str:
    """What CPU ranks lack here, or "yes" if nothing: a memfd that peers open through /proc."""
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no memfd; use Linux"
    try:
        fd = os.memfd_create("counterpoint-doctor")
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
        finally:
            os.close(fd)
    except OSError as error:
        return f"{error}; allow memfd_create and mount /proc"
    return "yes"


def _missing(facts: dict[str, Any]) -> dict[str, str]:
    """What is missing -> how to get it."""
    missing: dict[str, str] = {}
    gpus, versions = facts["gpus"], facts["versions"]
    if torch is None:
        missing["torch"] = f"{INSTALLED_BY['torch']}; plan, scale, advise and doctor need none"
    elif not gpus:
        why = no_gpu(versions["CUDA"])
        missing["GPUs"] = f"{why}. CPU ranks run every plan, to check it and not to be fast"
    elif len(gpus) == 1:
        missing["a second GPU"] = (
            "one GPU has no peer; take a node with two or more, or name more of them in "
            "CUDA_VISIBLE_DEVICES. CPU ranks run every plan"
        )
    if gpus and facts["symmetric_memory"] != "yes":
        missing["symmetric memory"] = facts["symmetric_memory"]
    if gpus and not all(map(all, facts["peer_access"])):
        missing["peer access"] = (
            "all GPUs of a group must reach each other; take those that "
            "`nvidia-smi topo -p2p n` shows as OK, by CUDA_VISIBLE_DEVICES"
        )
    if gpus and (fix := _cuda_bindings(str(versions["CUDA"]), versions["cuda-bindings"])):
        missing["cuda-bindings"] = fix
    if torch is not None:
        missing |= {p: INSTALLED_BY[p] for p in ("triton", "numpy") if versions[p] is None}
    if versions["matplotlib"] is None:
        missing["pictures"] = INSTALLED_BY["matplotlib"]
    if facts["cpu_ranks"] != "yes":
        missing["CPU ranks"] = facts["cpu_ranks"]
    return missing


def _cuda_bindings(cuda: str, bindings: str | None) -> str:
    """How to get those of the major version of torch's CUDA; "" where they are there."""
    major = cuda.split(".")[0]
    if bindings is not None and bindings.split(".")[0] == major:
        return ""
    found = f"torch is of CUDA {cuda}, cuda-bindings of {bindings}; " if bindings else ""
    return f"{found}pip install 'cuda-bindings=={major}.*'"


def no_gpu(cuda: str | None) -> str:
    """What to do about it, on a torch that was built for that CUDA."""
    if cuda or torch.version.hip:
        return NO_GPU
    return "torch is a CPU build; install a CUDA build of torch"


def _topology() -> str:
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _print(console: Console, facts: dict[str, Any]) -> None:
    table = Table(title="this machine", title_justify="left", title_style="bold", show_header=False)
    for i, gpu in enumerate(facts["gpus"]):
        engines = gpu["num_copy_engines"]
        copies = "unknown" if engines is None else engines
        table.add_row(f"GPU {i}", f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
                      f"{gpu['num_sms']} SMs, copy engines {copies}")  # fmt: skip
    table.add_row("GPUs", str(len(facts["gpus"])))
    table.add_row("driver", facts["driver"] or "-")
    table.add_row("peer access", _peers(facts["peer_access"]))
    table.add_row("symmetric memory", facts["symmetric_memory"])
    table.add_row("CPU ranks", facts["cpu_ranks"])
    table.add_row("plans are chosen by", _basis(facts["known"]), end_section=True)
    for name, number in facts["versions"].items():
        table.add_row(name, number or "-", end_section=name == "NCCL")
    for name, value in facts["environment"].items():
        table.add_row(name, f"{'not set' if value is None else value} [dim]({VARIABLES[name]})[/]")
    console.print(table)
    if facts["topology"]:
        console.print("links (nvidia-smi topo -m)", style="bold")
        console.print(facts["topology"], markup=False, highlight=False, soft_wrap=True)
    for line in summaries():
        console.print(line, soft_wrap=True)
    if facts["untried"]:
        console.print(f"[yellow]untried:[/] {facts['untried']}")
    for what, fix in facts["missing"].items():
        console.print(f"[yellow]missing:[/] {what}: {fix}", soft_wrap=True)
    if not facts["missing"]:
        console.print("[green]nothing is missing[/]")


def _basis(known: dict[str, Any]) -> str:
    """What `plan="auto"` goes by, and how to better it."""
    if known["machine"] is None:
        return "nothing: auto is serial here"
    rates = known["machine"] if known["measured"] else f"{known['machine']}, not measured"
    better = "" if known["measured"] else " (`counterpoint characterize` measures)"
    return f"{rates}{better}; tuned plans in {known['folder']}: {known['tuned_plans']}"


def _peers(matrix: list[list[bool]]) -> str:
    """A line for each GPU that lacks a peer."""
    if len(matrix) < 2:
        return "-"
    lacking = [
        f"GPU {i} does not reach {', '.join(str(j) for j, ok in enumerate(row) if not ok)}"
        for i, row in enumerate(matrix)
        if not all(row)
    ]
    return "\n".join(lacking) or "every GPU reaches every other"
