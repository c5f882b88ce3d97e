"""Whether ranks call the same thing: facts compared in words, before anything is launched."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, PlanError, UnsupportedError
from counterpoint.group.notice_board import Awaited, Facts, digest_of, is_told, refuse_first
from counterpoint.group.store import mark_told
from counterpoint.group.workspace import Workspace, workspace_if_any, workspaces_of

# private, and asked at each call: a feature test holds it
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore

COMPARE = "compare"  # the step at which ranks meet
T = TypeVar("T")


@dataclass(frozen=True)
class Input:
    """One tensor of an operator.

    Args:
        name: of the plan's buffer.
        form: "rows": [rows, ..., columns], flattened; "heads": all dims but the first are columns;
            "matrix": 2-D of any strides; "row": 1-D;
            "plain": without gaps; "given": as it is.
        own: a shard, so its dim 0 may differ between ranks where `rows=` is given.
        fact: what all ranks must have alike: its "shape", or but its rows, its "columns"; "" is
            nothing, not even whether it is there.
    """

    name: str
    form: Literal["rows", "heads", "matrix", "row", "plain", "given"]
    own: bool = False
    fact: Literal["shape", "columns", ""] = "shape"


def checking() -> bool:
    """Whether every call is to be compared over the ranks."""
    return os.environ.get("COUNTERPOINT_CHECK") == "1"


def words_of(
    inputs: Sequence[Input], tensors: Sequence[Tensor | None], plan: str, rows: Sequence[int]
) -> Facts:
    """The facts of a call in words."""
    here: Facts = {"rows": str(tuple(rows)), "plan": plan}
    for given, tensor in zip(inputs, tensors, strict=True):
        if given.form == "row":
            here[f"{given.name} is None"] = str(tensor is None)
        elif tensor is None:
            here[f"{given.name}.shape"] = "None"
        else:
            free = given.own and rows  # a shard then has a dim 0 of its own on each rank
            here[f"{given.name}.shape"] = str(tuple(tensor.shape[1 if free else 0 :]))
    first = next(t for t in tensors if t is not None)
    return here | {f"{inputs[0].name}.dtype": str(first.dtype)}


def agree(
    op: str, here: Facts, workspace: Workspace, refused: CounterpointError | None = None
) -> int:
    """Refuse a call on all ranks alike, where facts differ or a rank has refused it by itself.

    Not while a graph is captured: ranks cannot talk then.

    Args:
        here: the facts of this rank in words, "op" first.
        refused: what this rank alone can see to be wrong.

    Returns:
        The digest of the facts, equal on all ranks.

    Raises:
        InputError: `refused` of the first rank that has one, or the first fact that differs.
        PeerTimeoutError: a rank did not come.
    """
    if captures(workspace.device):
        if refused is not None:
            raise refused
        return digest_of(here)
    tell(op, here, workspace, None, refused)
    return digest_of(here)


def note(here: Facts, workspace: Workspace) -> None:
    """Say that a call begins; ranks compare its facts in words at the first like it, then digests.

    Args:
        here: see `agree`.

    Raises:
        InputError, PeerTimeoutError: see `agree`.
    """
    key = tuple(here.values())
    if key not in workspace.agreed:
        workspace.agreed[key] = agree(here["op"], here, workspace)
    workspace.board.note(workspace.agreed[key])


def note_known(key: Hashable, here: Callable[[], Facts], workspace: Workspace) -> None:
    """As `note`, of facts that a key stands for: in words at the first call alone.

    Args:
        key: equal on all ranks where the facts are.
    """
    digest = workspace.agreed.get(key)
    if digest is None:
        facts = here()
        note(facts, workspace)
        workspace.agreed[key] = workspace.agreed[tuple(facts.values())]
    else:
        workspace.board.note(digest)


def tell(
    op: str, here: Facts, workspace: Workspace, value: T, refused: CounterpointError | None = None
) -> list[T]:
    """What all ranks say of a call, on whose facts they agree; no device is waited for.

    Args:
        here, refused: see `agree`.
        value: what this rank says.

    Raises:
        InputError, PeerTimeoutError: see `agree`.
    """
    return _alike(meet(op, (_shown(here, workspace), refused, value), workspace, here))


def tell_number(op: str, here: Facts, workspace: Workspace, number: int) -> list[int]:
    """As `tell`; but where ranks have agreed on these facts before, each writes one word.

    Args:
        number: 0 to 2**63 - 1.
    """
    key, board = tuple(here.values()), workspace.board
    if key in workspace.agreed and board.shared and not checking():
        found = board.numbers(workspace.agreed[key], here, number, _meeting(op))
        if found is not None:
            return found
        return _alike(workspace.gather((_shown(here, workspace), None, number), _meeting(op)))
    found = tell(op, here, workspace, number)
    workspace.agreed[key] = digest_of(here)
    return found


def _meeting(op: str) -> Awaited:
    return Awaited(op, "come to compare its arguments", COMPARE)


def _shown(here: Facts, workspace: Workspace) -> Facts:
    """The facts, and in a backward whose it is."""
    forward = workspace.board.forward >> 1
    return here | ({"backward": f"of call {forward}"} if forward else {})


def _alike(answers: list[tuple[Facts, CounterpointError | None, T]]) -> list[T]:
    """What ranks say of a call, where their facts are equal and none has refused it."""
    everyone = [facts for facts, *_ in answers]
    # in the words of rank 0: all ranks say the same
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        want = everyone[0].get(name, "none")
        for rank, theirs in enumerate(everyone):
            got = theirs.get(name, "none")
            if got != want:
                fix = "pass rows= where shards differ" if name == "x.shape" else ""
                want = f"equal on all ranks, {want} as on rank 0"
                op, got = everyone[0]["op"], f"{got} on rank {rank}"
                raise mark_told(InputError(op, name, want=want, got=got, fix=fix))
    for _, wrong, _ in answers:
        if wrong is not None:
            raise mark_told(wrong)
    return [told for *_, told in answers]


def meet(op: str, here: T, workspace: Workspace, facts: Facts) -> list[T]:
    """What all ranks say of a call: no rank returns before each has come to it.

    Args:
        here: what this rank says.
        facts: of the call, in words.

    Raises:
        PeerTimeoutError: a rank did not come.
        InputError: a rank has called something that ranks had compared before, or refused to call.
    """
    workspace.board.note_new(digest_of(facts), facts)
    return workspace.gather(here, _meeting(op))


def captures(device: torch.device) -> bool:
    """Whether a graph is being captured there: ranks cannot talk then, nor the host read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refused(
    error: CounterpointError, group: dist.ProcessGroup | None, x: object, near: bool = False
) -> CounterpointError:  # fmt: skip
    """Tell the other ranks, which may have come to the call, that this one has refused it.

    Args:
        error: why; it is returned.
        group: of the call.
        x: a tensor of the call, if it is one.
        near: of ranks of one host alone; a refusal ends a group of several.
    """
    if torch.compiler.is_compiling():
        return error
    x = _tensor_of(x)
    if dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        if isinstance(group, dist.ProcessGroup):
            found = workspaces_of(group)
            if isinstance(x, Tensor):
                workspace = workspace_if_any(group, x.device)
                if workspace is None:
                    refuse_first(error, group, x.device.type)
                found = [workspace] if workspace is not None else []
            # of several nobody knows of which device the call would have been
            if len(found) == 1 and (found[0].board.shared or not near):
                found[0].board.refuse(error)
    return mark_told(error)


def _tensor_of(x: object) -> object:
    """The tensor of an argument that may be `Scaled`."""
    return x if isinstance(x, Tensor) else getattr(x, "data", x)


# what a wrong argument ends in, on all ranks alike, before any of them has begun a call
OF_ARGUMENTS = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError)


def left(
    op: str, error: BaseException, group: dist.ProcessGroup | None, x: object
) -> None:  # fmt: skip
    """Tell the other ranks that an error has ended this call on this rank, if they do not know it.

    They may have come to it, and would take this rank's next call for it.

    Args:
        error: what has ended it.
        group: of the call.
        x: a tensor of the call, if it is one.
    """
    if is_told(error) or num_dispatch_modes():
        return
    if isinstance(error, CounterpointError):
        if isinstance(error, InputError | PlanError):  # else all ranks raise it, or the group ends
            refused(error, group, x, near=True)
        return
    x = _tensor_of(x)
    if isinstance(x, Tensor) and not isinstance(error, OF_ARGUMENTS) and dist.is_initialized():
        workspace = workspace_if_any(group or dist.group.WORLD, x.device)  # type: ignore[arg-type]
        if workspace is not None:
            workspace.board.end(error, calls=-1, op=op)
            return
    refused(UnsupportedError(f"{op}: {type(error).__name__} has ended the call"), group, x)
