"""Which way an operator of experts runs: by the libraries, in one kernel, or by a plan."""

from counterpoint.choose.experts import predict
from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.ops import experts_plans
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.experts import Exchange, is_grouped, prepare, rows_by_rank
from counterpoint.ops.experts_fused import Fused
from counterpoint.ops.experts_plans import Planned
from counterpoint.ops.experts_serial import Serial
from counterpoint.runtime.launch_experts import refusal
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Workspace, workspace_of


def ready_for(
    given: Exchange, group_name: str, keep: bool, refused: CounterpointError | None = None
) -> Serial | Fused | Planned:
    """What runs this call, checked and agreed.

    Args:
        keep: also return the rows that come; of all_to_all_matmul.
        refused: what this rank has found wrong already.

    Raises:
        InputError, UnsupportedError, PeerTimeoutError: as the operators.
    """
    group = group_of(group_name)
    if is_grouped(given.plan):
        refused = refused or experts_plans.refusal(given)
        return prepare(given, group, keep, lambda workspace: Planned(workspace, keep), refused)
    fused, why = way_of(given, workspace_of(group, given.x.device))
    if why:
        refused = refused or UnsupportedError(f"{given.op}: plan fused takes {why}; take serial")

    def make(workspace: Workspace) -> Serial | Fused:
        return Fused(workspace, given, keep) if fused else Serial(workspace)

    alike: dict[str, str] = {}
    if fused and not given.host:
        # what comes, and what comes back in a backward, has as much room on every rank
        alike = {"max_rows": str(given.rows), "rows of x": str(given.x.shape[0])}
    key = (keep, "in one kernel" if fused else "by the libraries")
    return prepare(given, group, key, make, refused, alike)


def way_of(given: Exchange, workspace: Workspace) -> tuple[bool, str]:
    """Whether this call runs in one kernel; and what that wants, where it was asked for in vain.

    Device-known counts always do where they can: the libraries would wait for the host to read
    them. Host-known ones do where that is predicted to be faster.
    """
    ranks = workspace.group.size()
    if not given.x.is_cuda:
        return False, ""
    machine = knowledge_of(workspace).machine  # of all ranks, at their first call
    want = refusal(given.w, ranks)
    if given.plan == "fused":
        return not want, want
    if given.plan == "serial" or want or ranks == 1:
        return False, ""
    if not given.host or machine is None:
        return not given.host, ""
    local, k, n = given.w.shape
    rows = int(rows_by_rank(given.counts, out=True).max())
    dtype = str(given.w.dtype).removeprefix("torch.")
    return predict(rows, k, n, local, dtype, ranks, machine, back=not given.out).fused, ""
