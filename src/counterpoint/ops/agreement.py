"""Whether ranks call the same thing: facts compared in words, before anything is launched."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError
from counterpoint.runtime import pads_cpu
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import Workspace

COMPARE = "compare"  # the step at which ranks meet
T = TypeVar("T")


@dataclass(frozen=True)
class Input:
    """One tensor of an operator.

    Args:
        name: of the plan's buffer.
        form: "rows": [rows, ..., columns], flattened; "matrix": 2-D of any strides; "row": 1-D;
            "plain": without gaps; "given": as it is.
        own: a shard, so its dim 0 may differ between ranks where `rows=` is given.
        fact: what all ranks must have alike: its "shape", or but its rows, its "columns"; "" is
            nothing, not even whether it is there.
    """

    name: str
    form: Literal["rows", "matrix", "row", "plain", "given"]
    own: bool = False
    fact: Literal["shape", "columns", ""] = "shape"


def checking() -> bool:
    """Whether every call is to be compared over the ranks."""
    return os.environ.get("COUNTERPOINT_CHECK") == "1"


def compare(
    op: str,
    inputs: Sequence[Input],
    tensors: Sequence[Tensor | None],
    plan: str,
    rows: Sequence[int],
    workspace: Workspace,
) -> None:
    """Refuse a call whose facts differ between ranks, naming the first that differs.

    Not while a graph is captured: ranks cannot talk then.

    Raises:
        InputError: the facts differ.
        PeerTimeoutError: a rank did not come.
    """
    here: dict[str, str] = {"op": op}
    for given, tensor in zip(inputs, tensors, strict=True):
        if given.form == "row":
            here[f"{given.name} is None"] = str(tensor is None)
        elif tensor is not None:
            free = given.own and rows  # a shard then has a dim 0 of its own on each rank
            here[f"{given.name}.shape"] = str(tuple(tensor.shape[1 if free else 0 :]))
    first = next(t for t in tensors if t is not None)
    here |= {f"{inputs[0].name}.dtype": str(first.dtype), "plan": plan}
    here["rows"] = str(tuple(rows))
    agree(op, here, workspace)


def agree(
    op: str, here: dict[str, str], workspace: Workspace, refused: CounterpointError | None = None
) -> None:
    """Refuse a call on all ranks alike, where facts differ or a rank has refused it by itself.

    Args:
        here: the facts of this rank in words, "op" first.
        refused: what this rank alone can see to be wrong.

    Raises:
        InputError: `refused` of the first rank that has one, or the first fact that differs.
        PeerTimeoutError: a rank did not come.
    """
    if workspace.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if refused is not None:
            raise refused
        return
    answers = meet(op, (here, refused), workspace)
    everyone = [facts for facts, _ in answers]
    # in the words of rank 0: all ranks say the same
    for name, want in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            got = theirs.get(name, f"op {theirs['op']}")
            if got != want:
                fix = "pass rows= where shards differ" if name == "x.shape" else ""
                raise InputError(
                    everyone[0]["op"],
                    name,
                    want=f"equal on all ranks, {want} as on rank 0",
                    got=f"{got} on rank {rank}",
                    fix=fix,
                )
    for _, wrong in answers:
        if wrong is not None:
            raise wrong


def meet(op: str, here: T, workspace: Workspace) -> list[T]:
    """What all ranks say of a call: no rank returns before each has come to it.

    CPU ranks wait as long as COUNTERPOINT_TIMEOUT_S says, GPUs' as long as the group does.

    Raises:
        PeerTimeoutError: a rank did not come.
    """
    group = workspace.group
    try:
        if workspace.device.type == "cpu" and workspace.has_pads:
            pads_cpu.meet(workspace, pads_cpu.Awaited(op, "come to compare its arguments", COMPARE))
        elif workspace.device.type == "cpu" and dist.get_backend(group) == "gloo":
            # of ranks that are there, only rank 0 hears in time who is not
            bound = timedelta(seconds=workspace.timeout_s)
            dist.monitored_barrier(group, timeout=bound, wait_all_ranks=True)
        return gather_object(here, group)
    except RuntimeError as error:
        gone = workspace.gone()
        # gloo tells rank 0 who has not come, and the others that rank 0 knows
        text = str(error).partition(" Original exception")[0]
        late = re.search(r"Ranks? ([\d, ]+) failed", text)
        who = ", ".join(f"rank {r} ({state})" for r, state in gone)
        who = who or (f"rank {late[1].strip(' ,')}" if late else "a rank")
        first = gone[0][0] if gone else int(late[1].split(",")[0]) if late else None
        fault = workspace.fault = PeerTimeoutError(
            f"{op}: {who} did not come to compare its arguments ({text}); the group is "
            "unusable, restart its ranks",
            rank=first,
            step=COMPARE,
        )
        raise fault from error
