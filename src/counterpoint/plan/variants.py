"""Specs worth trying for an op on a group: what is timed, and what a chooser may choose from."""

from counterpoint.plan.finer import FINER
from counterpoint.problem import EXPERTS, Op

MAX_VARIANTS = 30

GATHER_GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "1/3", "2/2", "1/1/2", "1/2/1"),
    8: ("8", "2/6", "1/7", "1/2/5", "1/3/4", "1/1/6", "1/1/2/4", "2/2/4", "1/1/1/2/3"),
}
SCATTER_GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "3/1", "2/2", "2/1/1", "1/2/1"),
    8: ("8", "6/2", "4/4", "4/3/1", "4/2/1/1", "3/2/2/1", "2/2/2/1/1", "2/2/2/2", "3/2/1/1/1"),
}


def variants(op: Op, ranks: int) -> tuple[str, ...]:
    """Specs of at most MAX_VARIANTS plans of `op` for a group of `ranks`, serial first.

    Groups are listed for 2, 4 and 8 ranks; for others graded chooses its own.
    """
    powers = ranks & (ranks - 1) == 0
    peers = ("ring", "xor") if powers else ("ring",)
    found = ["serial"]
    if op == "all_gather_matmul":
        groups = GATHER_GROUPS.get(ranks, ())
        found += [f"shard_p2p {p} {d}" for p in peers for d in ("push", "pull")]
        found += [f"graded {g} ring push" for g in groups] or ["graded ring push"]
        # ring groups wrap on some ranks, xor groups are contiguous on all
        finest = sorted(groups, key=lambda g: -g.count("/"))[:4]
        found += [f"graded {g} xor push" for g in finest if powers and "/" in g]
        found += [f"graded {g} ring pull" for g in groups[1:3]]
        found += ["shard_p2p ring push pieces=2", "shard_p2p xor push pieces=4"][: len(peers)]
        found += [f"{family} ring" for family in FINER]
    elif op == "matmul_reduce_scatter":
        groups = SCATTER_GROUPS.get(ranks, ())
        found += [f"shard_p2p {p}" for p in peers]
        found += [f"graded {g} ring" for g in groups] or ["graded ring"]
        found += [f"graded {g} xor" for g in groups if "/" in g][2:6]
        found += [f"shard_p2p ring pieces={n}" for n in (2, 4)]
        found += [f"graded {g} ring pieces=2" for g in groups if g.startswith("1/")]
        found += [f"{family} ring" for family in FINER]
    elif op == "all_gather_matmul_wgrad":
        found += [f"sliced ring pieces={n}" for n in (2, 3, 4)]
        found += [f"sliced {p} pieces=2" for p in peers[1:]]
    elif op == "all_gather_matmul_backward":
        found += [f"side_by_side {p}{tail}" for p in peers for tail in ("", " pieces=2")]
    elif op in EXPERTS:
        found += [f"grouped {p}" for p in peers]
    else:
        groups = GATHER_GROUPS.get(ranks, ())
        found += [f"shard_p2p {p}" for p in peers]
        found += [f"graded {g} ring" for g in groups if "/" in g][-4:] or ["graded ring"]
        found += ["shard_p2p ring pieces=2"]
    assert len(found) <= MAX_VARIANTS, f"{op} on {ranks} ranks: {len(found)} variants"
    return tuple(found)
