"""Plans of experts by routes that the device alone knows, on several islands: all go along rails.

What a NIC sends has a size that the host knows, and no host knows which tokens have experts where.
So each rank sends all of its tokens once to each other island, to the rank of its place: all ranks
have equally many. Then an island has the problem of one island, see fused_experts.py: the tokens of
a rank are those of its rail, in order of islands, and experts of other islands are none. A combine
is the mirror: of each token of its rail a rank makes the sum over the experts of its island, and
sends it to its owner, who sums those of all islands in fp32, its own first, then the others in
order, and rounds once. Where routes are an operand boxes are those of one expert for each token:

    x --keep, exchange--> rail --experts--> y      a dispatch
    x --experts--> rail    by island   --exchange--> got    a combine
    rail of this island, got --collect--> y

M is the most rows that a rank gets, or gets back. A token is one row of `rail` and of `got`, which
so have less memory than boxes: see extents.py.

Tokens go also where they have no expert. Of 8 experts that are drawn among 256 on 2 islands nearly
none are such; where a router keeps tokens on few of many islands most are, and plans whose counts
the host knows (routed_experts.py) send less, and wait.

The exchange is not beside the kernel: that takes an expert's rows of all islands together and reads
its weight once. One kernel for the tokens of this island and one for the others would read the
weights again, and leave the rows of an expert in two places.
"""

from counterpoint.plan import fused_experts
from counterpoint.plan.experts import rows_of
from counterpoint.plan.islands import NIC, Grid
from counterpoint.plan.names import COMPUTE, X, Y, routes_of
from counterpoint.plan.steps import ME, Buffer, Peer, Plan, Region, Step
from counterpoint.problem import Problem


def refusal(p: Problem) -> str:
    """What such a plan wants of a problem that it does not have, or ""."""
    return fused_experts.refusal(fused_experts.inside(p))


def dispatch(p: Problem, grid: Grid, users: tuple[Buffer, ...]) -> Plan:
    """All tokens along rails, then the kernel."""
    steps = [_exchange(p, grid, f"give_{d}", d, ("x", "rail"), ()) for d in grid.far]
    own = (Region(name, ME, _island(grid, 0)) for name in ("x", "rail"))
    source, target = own
    steps.append(Step("keep", "compute", "spread", (source, *routes_of(p)), (target,)))
    kernel, memory = fused_experts.one_kernel(p, Region("rail"), Y, (steps[-2].name,))
    rail = rows_of(p, "rail", p.k, "scratch", by_expert=False)
    return _plan(p, (*users, rail, *memory), [*steps, kernel])


def combine(p: Problem, grid: Grid, users: tuple[Buffer, ...]) -> Plan:
    """The kernel, then its sums back along rails to the owners of their tokens."""
    kernel, memory = fused_experts.one_kernel(p, X, Region("rail"))
    steps, after = [kernel], (kernel.name,)
    for d in grid.far:
        steps.append(_exchange(p, grid, f"return_{d}", d, ("rail", "got"), after))
        after = ()
    sources = [("rail", 0), *(("got", -d) for d in grid.far)]
    reads = (Region(name, ME, _island(grid, d)) for name, d in sources)
    writes = tuple(Region("y", ME, _island(grid, d)) for _, d in sources)
    steps.append(
        Step("collect", "compute", "fold", (*reads, *routes_of(p)), writes, (steps[-1].name,))
    )
    between = (rows_of(p, name, p.n, "scratch", by_expert=False) for name in ("rail", "got"))
    return _plan(p, (*users, *between, *memory), steps)


def _island(grid: Grid, d: int) -> tuple[Peer, ...]:
    """The ranks of the island d on."""
    return tuple((d, place) for place in range(grid.size))


def _exchange(
    p: Problem, grid: Grid, name: str, d: int, pair: tuple[str, str], after: tuple[str, ...]
) -> Step:
    """What is for the island d on, and what the one as many back has for this one."""
    source, target = Region(pair[0], ME, _island(grid, d)), Region(pair[1], ME, _island(grid, -d))
    args = (("to", d),)
    return Step(name, "nic", "exchange", (source, *routes_of(p)), (target,), after, args=args)


def _plan(p: Problem, buffers: tuple[Buffer, ...], steps: list[Step]) -> Plan:
    return Plan(p, "islands", "", "grid", buffers, (COMPUTE, NIC), tuple(steps))
