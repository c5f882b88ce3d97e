"""`plan="auto"`: what was tuned, else what the model predicts, equally on all ranks.

What is known of the machine is read once for each group, by rank 0, and told to the others; from
then on every rank decides by itself from equal facts.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from counterpoint.choose.by_model import by_model, candidates, part_rows
from counterpoint.choose.choice import Choice
from counterpoint.choose.known import Knowledge, load, problem_key, released
from counterpoint.choose.taken import Pick
from counterpoint.costs import NO_TILES, Tiles
from counterpoint.errors import CounterpointWarning, InputError
from counterpoint.gpu.device_limits import refused_in
from counterpoint.group.workspace import Workspace
from counterpoint.log import logger
from counterpoint.ops.place import place_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem


def choose_spec(problem: Problem, workspace: Workspace, tensors: Sequence[Tensor | None]) -> Pick:
    """The spec of the plan for `problem`; collective unless a graph is being captured."""
    known = knowledge_of(workspace)
    if problem.ranks == 1:
        return Pick("serial", "not weighed", "one rank")
    if why := refused_in(workspace):
        return Pick("serial", "not weighed", why)
    if why := not_weighed(known, problem):
        return Pick(problem.operation.untold(problem), "not weighed", why)
    if (tuned := _tuned(problem, known)) is not None:
        return tuned
    if known.machine is None:
        return Pick(problem.operation.untold(problem), "not weighed", "no machine is known")
    if not any(candidates(problem, known.machine)):
        return Pick("serial", "not weighed", "no other plan for it")
    on_gpu = workspace.device.type == "cuda"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    tiles: Tiles = NO_TILES
    if on_gpu and not capturing:
        tiles = known_tiles(problem, workspace.device, _columns(tensors))
    # memory for words cannot be made in a capture; what there is of it is equal on all ranks
    room = None
    if capturing:
        room = 2 * workspace.fused.words.half_bytes if workspace.fused else 0
    choice = by_model(problem, known.machine, tiles=tiles, words_limit=room)
    # the library's tiles are asked of each GPU by itself
    spec = choice.spec if capturing else workspace.gather(choice.spec)[0]
    return _estimated(replace(choice, spec=spec))


def _tuned(problem: Problem, known: Knowledge) -> Pick | None:
    """What was tuned for a problem, if anything was."""
    key = problem_key(problem)
    if (spec := known.tuned.get(key)) is None:
        return None
    try:
        build(problem, spec, known.machine)
    except InputError as error:  # a file that someone has written into
        what = f"the plan tuned for {problem} is ignored: {error}"
        logger.info(what)
        warnings.warn(what, CounterpointWarning, stacklevel=3)
        return None
    timed = known.times.get(key)
    if timed is None:
        return Pick(spec, "kept file")
    seconds, next_spec, next_s, here = timed
    source = "tuned" if here else "kept file"
    return Pick(spec, source, "", None, seconds, next_spec, next_s)


def _estimated(choice: Choice) -> Pick:
    """What the model has found; of a plan that rank 0 alone has weighed no times."""
    if not any(c.spec == choice.spec for c in choice.table):
        return Pick(choice.spec, "estimated")
    after = choice.runner_up
    others = (after.spec, after.seconds) if after else ("", None)
    return Pick(choice.spec, "estimated", "", choice.seconds, None, *others)


def not_weighed(known: Knowledge, problem: Problem) -> str:
    """Why "auto" weighs no plans of ranks on several islands, and what to run; "" where it does."""
    if problem.islands == 1 or (known.machine is not None and known.machine.nic is not None):
        return ""
    return (
        f"auto weighs no other plan between {problem.islands} islands until their NIC has been "
        "measured: run `counterpoint characterize` on these ranks"
    )


def knowledge_of(workspace: Workspace) -> Knowledge:
    """What is known of the machine of this group; collective at its first call."""
    if workspace.knowledge is None:
        on_gpu, ranks = workspace.device.type == "cuda", workspace.group.size()
        if not on_gpu and workspace.islands.number == 1:
            workspace.knowledge = Knowledge(None, {})
            return workspace.knowledge
        place = place_of(workspace.device, ranks, workspace.islands.number)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            # ranks cannot talk now: what the package has is equal on all of them
            return Knowledge(released(place.gpu, ranks), {})
        mine = load(place) if workspace.rank == 0 else None
        told = workspace.gather(mine and mine.to_json())[0]
        workspace.knowledge = Knowledge.from_json(str(told))
    return workspace.knowledge


def known_tiles(
    problem: Problem, device: torch.device, columns: bool = True
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """The matmul library's tile for each number of rows that a plan may multiply at a time.

    Args:
        columns: whether w is stored as a torch.nn.Linear has it, [N, K].
    """
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    shared = ((problem.m, problem.n, problem.k),)
    if problem.experts or problem.scales or problem.operation.matmuls(problem) != shared:
        return found  # plans of gradients differ little in how they cut matmuls
    dtype = getattr(torch, problem.dtype)
    for rows in part_rows(problem):
        tile = matmul_tile(rows, problem.n, problem.k, dtype, device, columns)
        if tile is not None:
            found[rows, problem.n, problem.k] = tile
    return found


def _columns(tensors: Sequence[Tensor | None]) -> bool:
    return any(t is not None and t.dim() == 2 and t.stride(0) == 1 for t in tensors[1:])


@cache
def matmul_tile(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, columns: bool
) -> tuple[int, int] | None:
    """Rows and columns of the tile of y[rows, n] = x[rows, k] w[k, n]; None where unknown."""
    from counterpoint.gpu.footprint import footprints, gemm_tile

    try:
        x = torch.empty(rows, k, dtype=dtype, device=device)
        w = torch.empty(n, k, dtype=dtype, device=device).t()
        w = w if columns else w.contiguous()
        y = torch.empty(rows, n, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        return None  # the model then takes the best of the tiles there may be
    torch.mm(x[:1], w, out=y[:1])  # this thread's handle of the library cannot be made in a capture
    kernels = [f for f in footprints(lambda: torch.mm(x, w, out=y)) if f.kind == "kernel"]
    tiles = [tile for kernel in kernels if (tile := gemm_tile(kernel)) is not None]
    # a matmul split along k has a kernel for its sum, and more blocks than tiles
    if len(tiles) != 1 or len(kernels) != 1:
        return None
    # the library computes the transpose of a row-major y: its first number is along columns
    return tiles[0][1], tiles[0][0]
