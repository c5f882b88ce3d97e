"""DeepSeek-V3's layer of experts for few tokens, forward in a CUDA graph: weights from memory.

Ours with default arguments and with max_rows, and two ways of the libraries that a graph can hold:
all_to_all_single with split sizes that the host knew before ("torch, counts"), and a gather of all
tokens whose sums are reduce-scattered ("torch, gathered"). "Weights once" is the time to read the
weights of all experts that some token names, on the rank that has most of them, at the rate of the
memory of the rows' GPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, geometric_mean

import torch
from torch import Tensor

from benchmarks.declare import Arms, Bench, Benchmark, Case, Section
from benchmarks.expert_tensors import MODELS, Model, hbm_bytes_per_s
from benchmarks.experts_in_torch import Batch, batch_of, in_torch, own_of, swiglu_mlp
from benchmarks.rows import Row, Timed, taken
from benchmarks.steps_experts import Way, by_torch, forward, ours, weights_of
from benchmarks.tables import by_machine, measured, us
from counterpoint.measure.timing import relative_error

TOKENS = (1, 8, 64, 128)  # of a rank
SETS = 8  # of tokens in rotation
COUNTED, GATHERED = "torch, counts", "torch, gathered"
THEIRS, OURS = (COUNTED, GATHERED), ("default", "max_rows")


def case_of(model: Model, tokens: int) -> Case:
    """One layer."""
    facts = {**model._asdict(), "model": model.name, "tokens": tokens}
    return Case(f"{model.name}, {tokens} tokens", facts)


def cases(_: int) -> list[Case]:
    """The layer that has most experts."""
    return [case_of(MODELS[0], tokens) for tokens in TOKENS]


def gathered(b: Batch, gate_up: Tensor, down: Tensor, bench: Bench) -> Tensor:
    """The layer where each rank gets all tokens, and sums what its experts make of them."""
    local, top = len(down), b.experts.shape[1]
    x, experts, weights = (bench.whole(t) for t in (b.x, b.experts, b.weights))
    own = experts.flatten() - bench.rank * local
    own = torch.where((own < 0) | (own >= local), local, own)  # those of others come last
    ids, order = own.sort(stable=True)
    most = len(x) * min(top, local)  # that can be of this rank's experts
    ids, order = ids[:most], order[:most]
    edges = torch.searchsorted(ids, torch.arange(local + 1, device=ids.device))
    token = order // top
    y = swiglu_mlp(x.index_select(0, token), gate_up, down, edges.diff())
    each = weights.flatten()[order][:, None] * y.float()
    each = torch.where((ids < local)[:, None], each, 0)  # nothing has written the others
    sums = torch.zeros(x.shape, device=x.device).index_add(0, token, each).to(x.dtype)
    out = torch.empty_like(b.x)
    bench.reduce_scatter(out, sums)
    return out


def arms(case: Case, bench: Bench, dtype: torch.dtype = torch.bfloat16) -> Arms:
    """All ways, on the same weights."""
    model = Model(*(case[field] for field in Model._fields))
    tokens, local = case["tokens"], model.experts
    batches = [batch_of(tokens, model, dtype, bench) for _ in range(SETS)]
    weights = weights_of(model, dtype, bench)
    gate_up, down = weights
    most = bench.ranks * tokens * min(local, model.top)  # few tokens may all go to one rank
    by_gather = partial(gathered, gate_up=gate_up, down=down, bench=bench)
    ways = {
        COUNTED: by_torch(weights, bench, known=True), GATHERED: Way(by_gather, weights),
        "default": ours(model, weights, bench),
        "max_rows": ours(model, weights, bench, max_rows=most),
    }  # fmt: skip
    first = batches[0]
    with torch.no_grad():
        exact = first._replace(x=first.x.double(), weights=first.weights.double())
        want = in_torch(exact, gate_up.double(), down.double(), bench.group, known=True)
    named = [float((own_of(b.known, bench.group).sum(0) > 0).sum()) for b in batches]
    expert_bytes = 3 * model.ffn * model.hidden * gate_up.element_size()
    facts = {"weight_bytes": round(fmean(bench.most(named)) * expert_bytes), "sets": SETS}
    return Arms({name: forward(batches, way) for name, way in ways.items()},
                lambda _, got: [relative_error(got, want)], baseline=COUNTED, floor=4e-3,
                limit=0.05, sets=SETS, facts=facts)  # fmt: skip


# ---- what is said of the rows


class Few:
    """One case: times of a graph, and their ratios."""

    def __init__(self, case: Timed) -> None:
        self.case, self.theirs = case, case.fastest(THEIRS)
        self.weights_s = case.head["weight_bytes"] / hbm_bytes_per_s(case.head)
        self.speedup = case.s(self.theirs) / case.s("default")
        self.over_weights = case.s("default") / self.weights_s


def table(rows: list[Row]) -> str:
    """Microseconds of every number of tokens."""
    found = [Few(case) for case in taken(rows, "model", "tokens")]
    head = ["model, tokens of a rank", "fastest of torch", *(f"**{way}**" for way in OURS),
            "weights once", "speedup", "default / weights once"]  # fmt: skip
    lines: list[tuple[Sequence[str], Sequence[Row]]] = []
    for few in found:
        case = few.case
        lines.append(([
            f"{case.head['model']}, {case.head['tokens']}",
            f"{us(case.s(few.theirs))} {few.theirs}", *(f"**{us(case.s(way))}**" for way in OURS),
            us(few.weights_s), f"{few.speedup:.2f}x", f"{few.over_weights:.2f}",
        ], case.rows))  # fmt: skip
    mean = geometric_mean(few.speedup for few in found)
    note = (
        f"Microseconds of a whole layer, forward, CUDA graphs, one rotation a case. *{COUNTED}* is "
        f"an all-to-all with split sizes that the host knew before. *{GATHERED}* gathers all "
        f"tokens and reduce-scatters their sums. *Speedup* is of the default over the faster of "
        f"the two, {mean:.2f}x in the mean. *Weights once* is calculated, "
        f"at the rate of this GPU, {hbm_bytes_per_s(rows[0]) / 1e12:.1f} TB/s."
    )
    return measured(head, lines, note)


write: Callable[[Mapping[int, list[Row]]], str] = by_machine(table)
DECODE_EXPERTS = Benchmark(
    "decode_experts", cases, arms, rounds=15, soak_s=0.1,
    short=lambda case: case["tokens"] == 1,
    sections=(Section("docs/results/experts.md", "decode-experts", write),),
)  # fmt: skip
