"""Which way embedding bags take: asked for, or predicted once from what all ranks have told.

Ranks meet at the first call of a layout, mode and kind of output, and tell how many indices they
have. What is decided then stays for all later calls of it, whatever they pool: a rank that decided
anew by its own indices would decide alone.
"""

from typing import cast

from counterpoint.embedding_problem import EmbeddingProblem
from counterpoint.errors import InputError
from counterpoint.model.embedding import predict
from counterpoint.ops import agreement
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.embedding_call import AUTO, FUSED, SERIAL, Given, How
from counterpoint.ops.embedding_check import OP
from counterpoint.problem import DType
from counterpoint.runtime.workspace import Workspace


def way_of(given: Given, how: How, workspace: Workspace, *, into: bool) -> str:
    """ "fused" or "serial", equal on all ranks; collective at the first call of such a layout.

    Args:
        into: peers write to an output of the caller, from which nothing is copied.

    Raises:
        InputError: ranks have not met for it, and a graph is captured; or a rank calls another op.
        PeerTimeoutError: a rank did not come.
    """
    if workspace.device.type == "cpu" or len(how.layout.batch) == 1:
        return SERIAL
    if how.plan != AUTO:
        return how.plan
    key = (OP, AUTO, how.layout, how.mean, into)
    found: str | None = workspace.agreed.get(key)
    if found is None:
        workspace.refuse_growth("none: this is the first call of such bags")
        found = workspace.agreed[key] = _decided(given, how, workspace, into=into)
    return found


def _decided(given: Given, how: How, workspace: Workspace, *, into: bool) -> str:
    machine = knowledge_of(workspace).machine  # of all ranks, at their first call
    said = {"op": OP, "indices": str(given.indices.numel())}
    words = [theirs for theirs, _ in agreement.meet(OP, (said, None), workspace)]
    for rank, theirs in enumerate(words):
        if "indices" not in theirs:
            want = f"{OP} with plan='auto' as on rank {workspace.rank}"
            raise InputError(OP, "op", want=want, got=f"another call on rank {rank}")
    if machine is None:
        return SERIAL
    layout = how.layout
    problem = EmbeddingProblem(
        layout.dims, layout.batch, tuple(int(theirs["indices"]) for theirs in words),
        dtype=cast(DType, str(layout.dtype).removeprefix("torch.")), out=into,
    )  # fmt: skip
    return FUSED if predict(problem, machine).fused else SERIAL
