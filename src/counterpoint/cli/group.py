"""`counterpoint doctor --group`: who is where, under torchrun: hosts, GPUs, links, versions."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from counterpoint.cli.doctor import collect
from counterpoint.cli.shared.launch import under_torchrun
from counterpoint.errors import InputError
from counterpoint.group.islands import islands_of, name_of_mine
from counterpoint.group.ranks import describe_process
from counterpoint.group.store import gather_by_store
from counterpoint.group.workspace import bound_of

EXAMPLE = "torchrun --nproc-per-node=2 -m counterpoint doctor --group"


def group(*, as_json: bool) -> int:
    """Print what all ranks of this torchrun are; 0.

    Raises:
        InputError: not under torchrun.
        PeerTimeoutError: a rank did not come.
    """
    if not under_torchrun():
        want = "given under torchrun"
        raise InputError("doctor", "--group", want=want, got="no ranks", fix=f"run `{EXAMPLE}`")
    # gloo sets up nothing on GPUs: what is wrong with them is to be seen
    dist.init_process_group("gloo")
    try:
        world = dist.group.WORLD
        assert world is not None
        gather = gather_by_store(
            world, "counterpoint/doctor", bound_of(world, torch.device("cpu"))[0]
        )
        everyone = gather(_mine())
        islands = islands_of([facts["island"] for facts in everyone], dist.get_rank())
        for rank, facts in enumerate(everyone):
            facts["island"] = rank // islands.size
        found = {
            "ranks": everyone, "differ": differences(everyone),
            "islands": {"number": islands.number, "ranks of each": islands.size,
                        "each rank is one, as": islands.why or None},
        }  # fmt: skip
        if dist.get_rank() == 0 and as_json:
            print(json.dumps(found, indent=2))
        elif dist.get_rank() == 0:
            _print(Console(), found)
        gather(None)  # the store is rank 0's, so it goes last
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    return 0


def _mine() -> dict[str, Any]:
    """This rank's place, device and versions."""
    facts, local = collect(), int(os.environ.get("LOCAL_RANK", "0"))
    gpus: list[dict[str, Any]] = facts["gpus"]
    here = local if local < len(gpus) else None
    reaches = [] if here is None else facts["peer_access"][here]
    return {
        "rank": dist.get_rank(), "host": socket.gethostname(), "island": name_of_mine(),
        "process": describe_process(os.getpid()),
        "gpu": "none" if here is None else f"{here}: {gpus[here]['name']}",
        "reaches": [i for i, yes in enumerate(reaches) if yes and i != here],
        "driver": facts["driver"], **facts["versions"], **facts["environment"],
        "torch threads": torch.get_num_threads(),
    }  # fmt: skip


PLACES = ("rank", "host", "island", "process", "gpu", "reaches")
MAY_DIFFER = (*PLACES, "COUNTERPOINT_ISLAND")


def differences(everyone: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Facts that should be equal and are not: each value, and the ranks that have it."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in everyone[0]:
        if name in MAY_DIFFER:
            continue
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            by_value.setdefault(str(facts[name]), []).append(rank)
        if len(by_value) > 1:
            found[name] = by_value
    return found


def islands_in_words(islands: Mapping[str, Any]) -> str:
    """Which ranks reach each other's memory."""
    number, size, why = islands.values()
    if number == 1:
        return "One island: all ranks reach each other's memory."
    reason = f", as {why}" if why else ""
    return f"{number} islands of {size} ranks, with NICs alone between them{reason}."


def _print(console: Console, found: Mapping[str, Any]) -> None:
    table = Table(title=f"{len(found['ranks'])} ranks", title_justify="left")
    for column in PLACES:
        table.add_column(column, overflow="fold")
    for facts in found["ranks"]:
        table.add_row(*(str(facts[column]) for column in PLACES))
    console.print(table)
    console.print(islands_in_words(found["islands"]))
    for name, by_value in found["differ"].items():
        each = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        console.print(f"[bold]{name} differs[/bold]: {each}")
    if not found["differ"]:
        console.print("Versions and settings are equal on all ranks.")
