"""The plans that are tested on GPUs and timed: at most 24 for each op and number of ranks."""

GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "1/3", "2/2", "1/1/2", "1/2/1"),
    8: ("8", "2/6", "1/7", "1/2/5", "1/3/4", "1/1/6", "1/1/2/4", "2/2/4"),
}
SCATTER_GROUPS: dict[int, tuple[str, ...]] = {
    2: ("2",),
    4: ("4", "3/1", "2/2", "2/1/1", "1/2/1"),
    8: ("8", "6/2", "4/4", "4/3/1", "4/2/1/1", "3/2/2/1", "2/2/2/1/1", "2/2/2/2"),
}
REDUCES: dict[int, str] = {4: "reduce=2/1", 8: "reduce=4/3"}


def specs(op: str, ranks: int) -> list[str]:
    """Specs of the plans of `op` for a group of 2, 4 or 8 ranks, serial first."""
    found = ["serial"]
    if op == "all_gather_matmul":
        found += [f"shard_p2p {p} {d}" for p in ("ring", "xor") for d in ("push", "pull")]
        found += [f"graded {g} ring push" for g in GROUPS[ranks]]
        xor = [g for g in GROUPS[ranks] if g.count("/") > 1 or ranks < 8][:3]
        found += [f"graded {g} xor push" for g in xor]
        found += [f"graded {g} ring pull" for g in GROUPS[ranks][1:4]]
        found += ["uniform_fused_2d ring", "uniform_fused_1d ring"]
    else:
        found += [f"shard_p2p {p}" for p in ("ring", "xor")]
        found += [f"graded {g} ring" for g in SCATTER_GROUPS[ranks]]
        found += [f"graded {g} xor" for g in SCATTER_GROUPS[ranks][1:4]]
        if ranks in REDUCES:
            staged = ["shard_p2p ring", *(f"graded {g} ring" for g in SCATTER_GROUPS[ranks][2:7])]
            found += [f"{spec} {REDUCES[ranks]}" for spec in staged]
    assert len(found) <= 24, f"{op} on {ranks} ranks: {len(found)} plans"
    return found
