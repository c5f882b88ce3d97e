"""Which way an operator of experts runs: by the libraries, in one kernel, or by a plan."""

from dataclasses import replace

from counterpoint.choose.by_model import by_model
from counterpoint.errors import CounterpointError, UnsupportedError
from counterpoint.machine import Machine
from counterpoint.model.experts import predict
from counterpoint.ops import experts_plans
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.experts import Exchange, is_grouped, prepare, rows_by_rank
from counterpoint.ops.experts_fused import Fused
from counterpoint.ops.experts_plans import Planned
from counterpoint.ops.experts_serial import Serial
from counterpoint.plan import direct
from counterpoint.runtime.launch_experts import refusal
from counterpoint.runtime.ranks import group_of
from counterpoint.runtime.workspace import Workspace, workspace_of

FUSED, SERIAL = "fused", "serial"


def ready_for(
    given: Exchange, group_name: str, refused: CounterpointError | None = None
) -> tuple[Exchange, Serial | Fused | Planned]:
    """The call as it runs, its plan chosen, and what runs it, checked and agreed.

    Args:
        refused: what this rank has found wrong already.

    Raises:
        InputError, UnsupportedError, PeerTimeoutError: as the operators.
    """
    group = group_of(group_name)
    way, why = given.plan, ""
    if not is_grouped(way):
        way, why = way_of(given, workspace_of(group, given.x.device))
    if why:
        refused = refused or UnsupportedError(f"{given.op}: plan fused takes {why}; take serial")
    if is_grouped(way):
        given = replace(given, plan=way)
        refused = refused or experts_plans.refusal(given)
        return given, prepare(given, group, "by a plan", Planned, refused)
    fused = way == FUSED

    def make(workspace: Workspace) -> Serial | Fused:
        return Fused(workspace, given) if fused else Serial(workspace)

    alike: dict[str, str] = {}
    if fused and not given.host:
        # what comes, and what comes back in a backward, has as much room on every rank
        alike = {"max_rows": str(given.rows), "rows of x": str(given.x.shape[0])}
    key = "in one kernel" if fused else "by the libraries"
    return given, prepare(given, group, key, make, refused, alike)


def way_of(given: Exchange, workspace: Workspace) -> tuple[str, str]:
    """How a call runs that names no plan of copies; and what one kernel wants, asked for in vain.

    Device-known counts run in one kernel where they can: the libraries would wait for the host to
    read them. Host-known ones run as is predicted to be fastest.
    """
    if not given.x.is_cuda:
        return SERIAL, ""
    machine = knowledge_of(workspace).machine  # of all ranks, at their first call
    ranks = workspace.group.size()
    want = refusal(given.w, ranks)
    if given.plan == FUSED:
        return FUSED if not want else SERIAL, want
    if given.plan == SERIAL or ranks == 1:
        return SERIAL, ""
    if given.host and machine is not None:
        way = _predicted(given, workspace, machine)
    else:
        way = SERIAL if given.host else FUSED
    return SERIAL if way == FUSED and want else way, ""


def _predicted(given: Exchange, workspace: Workspace, machine: Machine) -> str:
    """What is predicted to be fastest; of equal counts, plans are weighed too."""
    ranks = workspace.group.size()
    rows = int(rows_by_rank(given.counts, out=True).max())
    if not rows or not given.w.numel():
        return SERIAL
    if experts_plans.refusal(given) is None:
        problem = experts_plans.problem_of(given, ranks)
        known: str | None = workspace.code.get(("auto", problem))
        if known is None:
            spec = by_model(problem, machine).spec
            known = FUSED if spec == direct.FUSED else spec
            workspace.remember(("auto", problem), known)
        return known
    local, k, n = given.w.shape
    dtype = str(given.w.dtype).removeprefix("torch.")
    guess = predict(rows, k, n, local, dtype, ranks, machine, back=not given.out,
                    equal=False)  # fmt: skip
    return FUSED if guess.fused else SERIAL
