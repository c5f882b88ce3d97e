"""What rows of `bench ficco` say: who picks the fastest plan on a mesh, and what losses follow.

Two rules of static sizes are scored beside the model. One is put together from what is known of
the paper's: M against K, and the operations of a matmul, which are its op-to-byte ratio times its
traffic. Its two thresholds were found at the scenarios that may be fitted to. The paper is about
gathers; that scatters follow the same rule is ours. The other rule is `by="rule"` of the library.

Rules, model and replay price copies and collectives alike, so scores say how well compute is
predicted; `other_links` is what they are worth where links are not as assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import correlation, fmean, geometric_mean, median

from benchmarks.declare import Benchmark, Section
from benchmarks.ficco import CHUNKS, COPIES, LOSSES, MATMULS, PARTS, cases, mesh, replayed
from benchmarks.ficco import rows as measure
from benchmarks.mesh_scenarios import GATHER, SCATTER
from benchmarks.pictures import dots
from benchmarks.rows import Row
from benchmarks.score import RIGHT, SERIAL, Measured, at_random, constants, score
from benchmarks.tables import grid, of_most, source
from counterpoint.choose.by_model import by_model
from counterpoint.choose.by_rule import by_rule
from counterpoint.costs import NO_TILES, Tiles
from counterpoint.machine import Machine
from counterpoint.problem import Problem
from counterpoint.schedules import finer

FITTED_TO, UNSEEN = PARTS
UNIFORM_MOST, HETERO_MOST = 4.3e9, 1.37e12  # operations of a rank, found at scenarios fitted to
FINER = tuple(f"{name} ring" for name in finer.NAMES)
THEIRS = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
SHARD_LEVEL = ("shard_p2p", "graded")
DRAWN = 9  # scenarios of the picture
OUR_RULE, MODEL, BEST = "our rule", "the model", "best possible"
SLOW, FAST = 0.85, 1.15  # of the rate of copies, where links are not as assumed
COLLECTIVES = (0.6, 0.8, 0.9)  # of the links' rate, in place of 0.7
Pick = Callable[[Measured], str]


def scenarios_of(
    rows: Sequence[Row], part: str, where: Machine | None = None, contention: float = 1.0
) -> tuple[list[Measured], dict[Problem, Tiles]]:
    """Of one half, as `replayed` on a mesh; and the library's tiles, where it tells them."""
    found: list[Measured] = []
    tiles: dict[Problem, Tiles] = {}
    for row in (row for row in rows if row["question"] == part):
        p = Problem(row["op"], row["m"], row["n"], row["k"], row["of_ranks"])
        found.append(Measured(f"{row['kind']}: {row['scenario']}", p,
                              replayed(row, where, contention=contention)))  # fmt: skip
        tiles[p] = {(m, n, k): (height, width) for m, n, k, height, width in row["tiles"]}
    return found, tiles


def reconstructed(measured: Measured) -> str:
    """The paper's rule as far as it is known; it never takes serial."""
    p = measured.problem
    if p.m < p.k:
        return "uniform_fused_2d ring"
    operations = 2 * p.m * p.n * p.k
    if operations < UNIFORM_MOST:
        return "uniform_fused_1d ring"
    return "hetero_fused_1d ring" if operations < HETERO_MOST else "hetero_unfused_1d ring"


def ways(measured: Sequence[Measured], tiles: Mapping[Problem, Tiles]) -> dict[str, Pick]:
    """How is chosen -> the pick of a scenario; the best constant, and the best possible, last."""

    def by(level: Callable[..., str], known: bool) -> Pick:
        return lambda m: level(m.problem, tiles[m.problem] if known else NO_TILES)

    always = max(constants(measured), key=lambda s: s.speedup).way
    return {
        "the paper's rule, reconstructed": reconstructed,
        OUR_RULE: by(_by_rule, known=True),
        f"{OUR_RULE}, tiles not known": by(_by_rule, known=False),
        MODEL: by(_by_model, known=True),
        f"{MODEL}, tiles not known": by(_by_model, known=False),
        always: lambda m: _had(always.removeprefix("always "), m),
        BEST: lambda m: min(m.times, key=m.times.__getitem__),
    }


def _by_rule(problem: Problem, tiles: Tiles) -> str:
    return _ring(by_rule(problem, mesh(), tiles=tiles).spec)


def _by_model(problem: Problem, tiles: Tiles) -> str:
    return _ring(by_model(problem, mesh(), tiles=tiles).spec)


def _ring(spec: str) -> str:
    """Of orders of peers one was replayed."""
    return f"{spec.removesuffix(' xor')} ring" if spec.endswith(" xor") else spec


def _had(spec: str, m: Measured) -> str:
    return spec if spec in m.times else SERIAL


def shard_s(m: Measured) -> float:
    """Seconds of the fastest plan whose chunks are shards."""
    return min(t for spec, t in m.times.items() if spec.split()[0] in SHARD_LEVEL)


def score_table(rows: Sequence[Row], part: str) -> str:
    """A line for each way to choose: how often right, what a wrong pick costs, and speedups."""
    measured, tiles = scenarios_of(rows, part)
    found = ways(measured, tiles)
    always = next(name for name in found if name.startswith("always "))
    shards_s = [shard_s(m) for m in measured]
    always_s = [m.times[found[always](m)] for m in measured]
    lines: list[list[str]] = []
    for name, pick in found.items():
        specs = [pick(m) for m in measured]
        picks = dict(zip((m.name for m in measured), specs, strict=True))
        s = score(name, lambda m, picks=picks: picks[m.name], measured)
        times = [m.times[spec] for m, spec in zip(measured, specs, strict=True)]
        wrong = [t / m.best_s - 1 for m, t in zip(measured, times, strict=True)
                 if t > RIGHT * m.best_s]  # fmt: skip
        over = [geometric_mean(a / b for a, b in zip(those, times, strict=True))
                for those in (shards_s, always_s)]  # fmt: skip
        lines.append([_code(name), f"{s.right:.0%}", f"{fmean(wrong):.0%}" if wrong else "-",
                      f"{s.worst_regret:.0%}", f"{s.speedup:.2f}", f"{s.least_speedup:.2f}",
                      *(f"{ratio:.2f}" for ratio in over)])  # fmt: skip
    luck = at_random(measured)
    lines.append(["at random", f"{luck.right:.0%}", "-", f"{luck.worst_regret:.0%}",
                  f"{luck.speedup:.2f}", f"{luck.least_speedup:.2f}", "-", "-"])  # fmt: skip
    head = [
        f"{len(measured)} scenarios", "within 2 % of the best", "a wrong pick costs", "at most",
        "speedup over serial", "least", "over the best of shards", f"over {_code(always)}",
    ]  # fmt: skip
    return grid(head, lines)


def _code(always: str) -> str:
    word, _, spec = always.partition(" ")
    return f"{word} `{spec.split()[0]}`" if word == "always" else always


def scores(rows: list[Row]) -> str:
    """Of what is held out, then of what was fitted to."""
    some = [row for row in rows if row["question"] in PARTS]
    text = [f"**{title}**\n\n{score_table(rows, part)}" for part, title in
            ((UNSEEN, "Held out, scored once"), (FITTED_TO, "Fitted to"))]  # fmt: skip
    text.append("**Held out, where links are not as the rule, the model and the replay above all "
                f"assume**\n\n{other_links(rows, UNSEEN)}")  # fmt: skip
    return "\n\n".join([*text, source(some, "Compute measured, links modelled.")])


def among_finer(measured: Sequence[Measured]) -> tuple[float, float]:
    """Of the reconstructed rule, among the finer plans alone: share right, and a wrong pick's cost.

    So the paper counts: neither serial nor kernels in a row are among its plans.
    """
    ratios = [m.times[reconstructed(m)] / finest_s(m) for m in measured]
    wrong = [ratio - 1 for ratio in ratios if ratio > RIGHT]
    return fmean(ratio <= RIGHT for ratio in ratios), fmean(wrong) if wrong else 0.0


def finest_s(m: Measured) -> float:
    """Seconds of the fastest plan that is finer than shards."""
    return min(m.times[spec] for spec in FINER)


# ---- other links than rule and model are told of


def meshes() -> dict[str, tuple[Machine, float]]:
    """What is not as assumed -> the mesh, and the factor on what copies cost a step."""
    where, costs = mesh(), mesh().costs
    links = where.link.bytes_per_s

    def other(**changed: float) -> tuple[Machine, float]:
        return replace(where, measured=replace(costs, **changed)), 1.0

    return {
        "nothing": (where, 1.0),
        "copies 15 % slower": other(copy_bytes_per_s=SLOW * costs.copy_bytes_per_s),
        "copies 15 % faster": other(copy_bytes_per_s=FAST * costs.copy_bytes_per_s),
        "copies start in twice the time": other(copy_overhead_s=2 * costs.copy_overhead_s),
        **{
            f"collectives reach {share:.0%} of the links": other(
                collective_bytes_per_s=share * links, direct_bytes_per_s=share * links
            )
            for share in COLLECTIVES
        },
        "half of the contention": (where, 0.5),
        "no contention": (other(copy_beside_matmul=1.0)[0], 0.0),
    }


def other_links(rows: Sequence[Row], part: str) -> str:
    """A line for each mesh: how often picks are right that were made for the one assumed."""
    known, tiles = scenarios_of(rows, part)
    found = ways(known, tiles)
    picks = {name: {m.name: found[name](m) for m in known} for name in (OUR_RULE, MODEL)}
    lines: list[list[str]] = []
    for what, (where, contention) in meshes().items():
        measured, _ = scenarios_of(rows, part, where, contention)
        rule, model = (score(name, lambda m, of=of: of[m.name], measured)
                       for name, of in picks.items())  # fmt: skip
        constant = max(each.right for each in constants(measured))
        serial = sum(m.times[SERIAL] < finest_s(m) for m in measured)
        lines.append([what, f"{rule.right:.0%}", f"{model.right:.0%}", f"{constant:.0%}",
                      f"{rule.speedup:.2f}", f"{serial} of {len(measured)}"])  # fmt: skip
    head = ["not as assumed", OUR_RULE, MODEL, "best constant", "our rule over serial",
            "serial beats finer plans"]  # fmt: skip
    return grid(head, lines)


# ---- losses

CHANCE = 0.59  # a rank correlation of 12 that chance exceeds once in 20
QUANTITIES: dict[str, Callable[[float, float, float], float]] = {
    "operations (op-to-byte x traffic)": lambda m, n, k: m * n * k,
    "op-to-byte": lambda m, n, k: m * n * k / (m * k + n * k + m * n),
    "traffic": lambda m, n, k: m * k + n * k + m * n,
    "M / K": lambda m, n, k: m / k,
}
Shape = tuple[int, int, int]


def ranked(values: Sequence[float]) -> list[float]:
    """The rank of each among all; those that are equal share the mean of theirs."""
    return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def losses_of(rows: Sequence[Row]) -> dict[str, dict[Shape, float]]:
    """What is lost -> matmul -> its loss: time / that of the whole, or / that by itself."""
    found: dict[str, dict[Shape, float]] = {}
    by_shape: dict[Shape, list[Row]] = {}
    for row in (row for row in rows if row["question"] == LOSSES):
        by_shape.setdefault((row["m"], row["n"], row["k"]), []).append(row)
    for shape, some in by_shape.items():
        whole = next(row["median_s"] for row in some if row.get("chunks") == 1)
        for row in some:
            if row.get("chunks", 1) > 1:
                name = f"{row['chunks']} chunks of {row['along']}"
                found.setdefault(name, {})[shape] = row["median_s"] / whole
            elif "copy_s" in row:
                size = f"{row['copy_bytes'] >> 10} KiB"
                slower = row["beside_s"] / row["median_s"], row["copy_beside_s"] / row["copy_s"]
                for name, loss in zip(_beside(size), slower, strict=True):
                    found.setdefault(name, {})[shape] = loss
    return found


def _beside(size: str) -> tuple[str, str]:
    return f"matmul beside copies of {size}", f"copies of {size} beside matmul"


def loss_table(rows: list[Row]) -> str:
    """A line for each loss: least, median and most over matmuls, and rank correlations."""
    found = losses_of(rows)
    dims = ("rows", "columns", "K")
    order = [f"{chunks} chunks of {along}" for along in dims for chunks in CHUNKS]
    both = [_beside(f"{size >> 10} KiB") for size in COPIES]
    order += [name for which in zip(*both, strict=True) for name in which]
    lines: list[list[str]] = []
    for name in order:
        losses = sorted(found[name].values())
        spread = [f"{value:.2f}" for value in (losses[0], losses[len(losses) // 2], losses[-1])]
        rho = rho_of(found[name])
        lines.append([name, *spread, *(f"{each:+.2f}" for each in rho)])
    some = [row for row in rows if row["question"] == LOSSES]
    head = ["loss", "least", "median", "most", *QUANTITIES]
    return f"{grid(head, lines)}\n\n{source(some)}"


# ---- claim by claim


def claim_lines(rows: list[Row]) -> list[list[str]]:
    """What the paper says, what came out here, and what that makes of it."""
    return [*_of_plans(rows), *_of_losses(rows),
            ["times on MI300X itself", "-", "not testable here"]]  # fmt: skip


def claims(rows: list[Row]) -> str:
    """What the paper says, beside what came out here."""
    return grid(["the paper, 8x MI300X", "here, the replay", ""], claim_lines(rows))


def _of_plans(rows: list[Row]) -> list[list[str]]:
    measured, tiles = scenarios_of(rows, UNSEEN)
    share = max(COLLECTIVES)
    where, _ = meshes()[f"collectives reach {share:.0%} of the links"]
    most, less = (max(m.times[SERIAL] / finest_s(m) for m in each)
                  for each in (measured, scenarios_of(rows, UNSEEN, where)[0]))  # fmt: skip
    serial, direct = (sum(m.times.get(spec, m.times[SERIAL]) < finest_s(m) for m in measured)
                      for spec in (SERIAL, "direct"))  # fmt: skip
    four = sum(min(m.times[f"{name} ring"] for name in THEIRS) <= RIGHT * finest_s(m)
               for m in measured)  # fmt: skip
    shards = sum(finest_s(m) < shard_s(m) for m in measured)
    gathers, scatters = ([m for m in measured if m.problem.op == op] for op in (GATHER, SCATTER))
    ours = score(OUR_RULE, ways(measured, tiles)[OUR_RULE], measured)
    theirs, there = (score("", reconstructed, each) for each in (gathers, scatters))
    among, cost = among_finer(gathers)
    all_of = f"{len(measured)} unseen scenarios"
    return [
        ["up to 1.6x over serial", f"up to {most:.2f}x; {less:.2f}x if the library's collectives "
         f"reach {share:.0%} of the links, not 70%", "confirmed"],
        ["finer than shards beats shards", f"in {shards} of {all_of}; behind a switch it "
         "[loses](losses.md#plans-finer-than-shards)",
         "confirmed for a mesh, where shards use one link of seven"],
        ["one of four finer plans is right", f"one of the four is best of the finer plans in "
         f"{four} of {all_of}; serial beats them all in {serial}, `direct`, which is ours, in "
         f"{direct}", "in part: not for few rows"],
        ["a rule of static sizes is right in 81 %", f"reconstructed {theirs.right:.0%} of gathers, "
         f"{among:.0%} among finer plans alone, and {there.right:.0%} of scatters, whose plans "
         f"are ours; our rule {ours.right:.0%} of both",
         "in part: for static sizes, not for the rule as far as it is known"],
        ["a wrong pick costs about 14 %", f"of gathers, among finer plans, {cost:.0%}",
         "confirmed" if cost < 0.17 else "contradicted: more here"],
    ]  # fmt: skip


def _of_losses(rows: list[Row]) -> list[list[str]]:
    losses = losses_of(rows)
    in_rows, in_k = ([rho_of(losses[f"{chunks} chunks of {along}"]) for chunks in CHUNKS]
                     for along in ("rows", "K"))  # fmt: skip
    beside = [loss for size in COPIES for loss in losses[_beside(f"{size >> 10} KiB")[0]].values()]
    # a byte that goes and one that comes
    traffic = [2 * row["copy_bytes"] / row["copy_s"] for row in rows if "copy_s" in row]
    moved = [each for row in rows if row["question"] in PARTS for steps in row["steps"].values()
             for name, (_, each) in steps.items() if not name.startswith("matmul")]  # fmt: skip

    def span(those: Sequence[Sequence[float]], which: int) -> str:
        found = sorted((rho[which] for rho in those), key=abs)
        return f"{found[0]:+.2f} to {found[-1]:+.2f}"

    return [
        ["decomposition losses follow static sizes", f"rank correlation with operations, 2 to 64 "
         f"chunks: rows {span(in_rows, 0)}, K {span(in_k, 0)}; of K with M / K {span(in_k, 3)}",
         f"in part: of {len(MATMULS)} matmuls, one below {CHANCE} may be chance"],
        ["contention losses follow static sizes", f"beside copies of {min(traffic) / 1e9:.0f} to "
         f"{max(traffic) / 1e9:.0f} GB/s, both ways, a matmul takes {min(beside):.2f} to "
         f"{max(beside):.2f} times as long; sums and moves {median(moved):.2f} times, median",
         "contradicted here: a matmul loses hardly any; a mesh has twice the traffic"],
    ]  # fmt: skip


def rho_of(losses: Mapping[Shape, float]) -> list[float]:
    """Rank correlations of a loss with each of QUANTITIES."""
    return [correlation(ranked([of(*shape) for shape in losses]), ranked(list(losses.values())))
            for of in QUANTITIES.values()]  # fmt: skip


# ---- the picture


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Speedup by plan at scenarios that are held out, our rule's pick marked."""
    measured, tiles = scenarios_of(next(iter(found.values())), UNSEEN)
    pick = ways(measured, tiles)[OUR_RULE]
    close = [m.times[pick(m)] <= RIGHT * m.best_s for m in measured]
    panel: dict[str, dict[str, float]] = {}
    marks: dict[str, float] = {}
    for m in measured[:: -(-len(measured) // DRAWN)]:
        name = m.name.partition(": ")[2]
        times = {
            "shards": shard_s(m),
            "direct": m.times.get("direct", 0.0),
            **{spec.split()[0]: m.times[spec] for spec in FINER},
        }
        panel[name] = {kind: m.times[SERIAL] / t for kind, t in times.items() if t}
        marks[name] = m.times[SERIAL] / m.times[pick(m)]
    what = "M x N x K, 8 GPUs on a full mesh"
    dots(
        {what: panel}, images / "ficco.svg", marks={what: marks}, mark="picked by our rule",
        title=f"Our rule picks the fastest plan, or one within 2%, in {fmean(close):.0%}",
        source=f"{len(panel)} of {len(measured)} unseen scenarios; links modelled",
    )  # fmt: skip


FICCO = Benchmark(
    "ficco", cases, rows=measure, apart="held-out", unit="ms", ranks=1,
    short=lambda case: case.name == f"{LOSSES} 2048, 7168, 8192", pictures=pictures,
    sections=(
        Section("docs/results/ficco.md", "ficco-claims", of_most(claims)),
        Section("docs/results/ficco.md", "ficco-scores", of_most(scores)),
        Section("docs/results/ficco.md", "ficco-losses", of_most(loss_table)),
    ),
)  # fmt: skip
