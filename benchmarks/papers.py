"""The papers on this machine: every claim, what came out, and the rows that say so.

Claims are declared; all numbers of what came out are read from committed rows or computed. A claim
whose experiment has no rows yet is "not measured", with the command that measures it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import ficco_findings as finer
from benchmarks import ficco_scores
from benchmarks import fused_findings as fused
from benchmarks import paper_findings as found
from benchmarks.options import LIMIT_S
from benchmarks.paper_findings import ELSEWHERE, NOT_YET, Found, never
from benchmarks.pictures import shown
from benchmarks.rows import KINDS, RESULTS, Row, kind_of
from benchmarks.tables import grid, source

INTRO = (
    "Each line is a claim of a paper, what came out here, and the command that measures it. "
    "Commands with `--paper` need 2 GPUs. A benchmark is stopped after "
    f"{LIMIT_S} seconds; the rows of cases that have ended by then are kept. `--part 1/4` is every "
    "fourth case; run `2/4`, `3/4` and `4/4` too."
)
HEAD = ("claim", "what came out", "verdict", "rows", "command")


class Claim(NamedTuple):
    """A claim of a paper.

    Args:
        text: the claim, in the paper's own unit.
        found: reads what came out.
        benchmark: whose rows are read; "" for none.
        command: what measures it, after `counterpoint `.
    """

    text: str
    found: Callable[[], Found]
    benchmark: str = ""
    command: str = ""


PAPER = "bench resources --paper"
FUSED = "bench fused --paper"
FICCO = "B. FiCCO (arXiv 2512.10236)"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "A. Resource-aware overlap (arXiv 2606.09200)": (
        Claim("shared memory per block and stream priority are controls over any kernel",
              found.both_controls, "resources", "bench resources"),
        Claim("no library and no kernel is modified", found.unchanged, "resources",
              "bench resources"),
        Claim("up to 25.5 % less time than plain overlap (A40, cb + all-reduce)", found.up_to,
              "resources", "bench resources"),
        Claim("shaping lets blocks of both kernels be resident, and overlap", found.shaping_alone,
              "resources", "bench resources"),
        Claim("a communication block is resident beside compute blocks of an SM",
              found.resident_together, "paper_resources", PAPER),
        Claim("the same by SM id and clock of each block, for an all-gather of ours with few "
              "registers", found.stamped, "paper_co_residency", "bench co_residency --paper"),
        Claim("without priority, overlap decays to serial at high block counts", found.decays,
              "resources", "bench resources"),
        Claim("TimeRatio over a grid of 2..1024 x 2..1024 blocks (figure)", found.figure,
              "paper_thread_blocks", "bench thread_blocks --paper --part 1/4"),
        Claim("both kernels run in up to about 90 % of the time (overlap rate)", found.rates,
              "paper_resources", PAPER),
        Claim("a model of resident blocks picks with a regret of 3.22 % (arXiv 2609.07536)",
              found.model, "resources", "bench resources"),
        Claim("times on A40, A100, H100 and MI250X; MI250X can regress",
              never(ELSEWHERE, "H100 and H200 only"), "", ""),
        Claim("no automatic choice, no other control", found.other_controls, "resources",
              "bench resources"),
    ),
    FICCO: (
        Claim("ideal speedups up to 1.7x", finer.ideal, "ficco", "bench ficco"),
        Claim("offloading communication to DMA engines lowers contention", finer.engines, "losses",
              "bench losses"),
        Claim("finer chunks bring overlap to a wider set of topologies", finer.topologies, "ficco",
              "bench ficco"),
        Claim("asymmetric communication, as of MoE", never(NOT_YET)),
    ),
    "C. Fused computation-collective operators (arXiv 2305.06942)": (
        Claim("embedding + all-to-all: 20 % less time in the mean, 32 % at most", fused.pooled,
              "embedding", "bench embedding"),
        Claim("up to 58 % less time (first version of the text)", fused.at_most, "embedding",
              "bench embedding"),
        Claim("results go straight to the peer, without a copy", fused.zero_copy, "embedding",
              "bench embedding"),
        Claim("operators of PyTorch", fused.in_torch),
        Claim("Triton, extended by communication", fused.in_triton),
        Claim("lower peak demand for the network", never(NOT_YET)),
        Claim("GEMV + all-reduce: 13 % less in the mean, 22 % at most", fused.one_token, "decode",
              "bench decode"),
        Claim("GEMM + all-to-all: 12 % less in the mean, 20 % at most", fused.combined, "experts",
              "bench experts"),
        Claim("always fused: there is no chooser", fused.always_fused, "decode",
              "bench decode experts"),
        Claim("embedding + all-to-all between nodes: 31 % less", fused.between_nodes, "two_islands",
              "bench two_islands"),
        Claim("DLRM on 128 nodes, simulated: 21 % less", fused.dlrm, "",
              "scale dlrm-paper --gpus 128 --machine h100-1 --nic 200G --what-if"),
        Claim("tasks for remote peers first: skew between nodes falls from about 7 % to 1 %",
              fused.order_of_tasks, "paper_fused", FUSED),
        Claim("fused kernels cost 12.5 % of occupancy, and still win", fused.occupancy_cost,
              "paper_fused", FUSED),
        Claim("between nodes the last block of a slice sends it", fused.slices,
              "paper_fused", FUSED),
    ),
}  # fmt: skip
PICTURES = (  # of the first paper: whose rows, the picture, what it shows
    ("paper_resources", "sharing-paper", "TimeRatio of each arm of each pair"),
    ("paper_thread_blocks", "sharing-blocks", "TimeRatio over thread blocks"),
)


def _file_of(benchmark: str) -> str:
    """The file that rows of the most GPUs are in."""
    if not benchmark:
        return "-"
    name = benchmark.replace("_", "-")
    every = (sorted(p.name for p in RESULTS.glob(f"{name}-[0-9]*x-{kind}.jsonl")) for kind in KINDS)
    found = next(filter(None, every), [])
    return f"`{found[-1]}`" if found else "-"


def _files(rows: Sequence[Row], benchmark: str) -> str:
    """The files that rows are in, else that of the benchmark."""
    names = dict.fromkeys(
        f"`{row['table'].replace('_', '-')}-{row['ranks']}x-{kind_of(row['gpu'])}.jsonl`"
        for row in rows
    )
    return ", ".join(names) or _file_of(benchmark)


def _command(text: str) -> str:
    return f"`counterpoint {text}`" if text else "-"


def lines_of(claims: Sequence[Claim]) -> tuple[list[list[str]], list[Row]]:
    """Cells of a paper's claims, and the rows that they are of."""
    lines: list[list[str]] = []
    rows: list[Row] = []
    for claim in claims:
        out = claim.found()
        lines.append([claim.text, out.text, f"**{out.verdict}**", _files(out.rows, claim.benchmark),
                      _command(claim.command)])  # fmt: skip
        rows += out.rows
    return lines, rows


def text() -> str:
    """All papers."""
    parts: dict[str, str] = {}
    for paper, claims in CLAIMS.items():
        lines, rows = lines_of(claims)
        parts[paper] = f"{grid(HEAD, lines)}\n\n{source(rows)}"
        for benchmark, name, alt in PICTURES if paper.startswith("A.") else ():
            if found.measured_rows(benchmark):
                parts[paper] += f"\n\n{shown(name, alt)}"
        if paper.startswith("A."):
            parts[paper] += found.behind()
    replay = found.most("ficco")
    lines = [[*cells[:2], f"**{cells[2]}**", _file_of("ficco"), _command("bench ficco")]
             for cells in ficco_scores.claim_lines(replay)]  # fmt: skip
    more, rows = lines_of(CLAIMS[FICCO])
    parts[FICCO] = (
        f"{grid(HEAD, [*lines, *more])}\n\nCompute measured, links modelled: {source(replay)} "
        f"Contention: {source(rows)}\n\n{finer.noise()}"
    )
    return "\n\n".join([INTRO, *(f"## {paper}\n\n{parts[paper]}" for paper in sorted(parts))])


def sections() -> dict[str, str]:
    """Marked sections of docs/results/papers.md."""
    return {"papers": text()}
