"""The README's table and what it says of speed: whole programs first, then operators."""

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks import (
    decode,
    embedding,
    experts,
    fsdp,
    overlap,
    served,
    tp_training,
    transformers_experts,
)
from benchmarks.rows import Row, Timed, by_cut, gpus_of, held, results, taken
from benchmarks.sources import is_current
from benchmarks.tables import MARK, measured

HEAD = ("program or layer", "torch's best", "counterpoint", "speedup (least)")
NOTE = (
    "*torch's best*: the fastest of its own settings. In parentheses: the least of all sizes. "
    "Models are unmodified but for fewer layers. Training is eager, all else CUDA graphs."
)
NAMED = {served.PLAIN: "torch.compile", served.ONE_SHOT: "torch.compile, one-shot all-reduce",
        overlap.PEER: "torch's fused operator", "torch one_shot": "one-shot all-reduce",
        "torch two_shot": "two-shot all-reduce", "serial": "NCCL and cuBLAS",
         fsdp.ZERO_CTA: "NCCL's copy-engine gathers"}  # fmt: skip
OTHER = f"{MARK} By older code."


class Line(NamedTuple):
    """One line of the table, in seconds."""

    name: str
    theirs: str
    """Which of torch's ways is the fastest."""
    theirs_s: float
    ours_s: float
    rows: Sequence[Row]
    least: float
    """Of all cases of the kind."""


def rows_of(name: str) -> list[Row]:
    """The rows of the most GPUs that ran layers cut for them; else those of the most GPUs."""
    return by_cut(results(name))[0]


def _line(
    name: str, cases: Sequence[Timed], pick: Callable[[Timed], bool], torchs: Sequence[str],
    ours: str,
) -> Line:  # fmt: skip
    """Of the one case that is picked; the least is of all."""
    (case,) = filter(pick, cases)
    best = case.fastest(torchs)

    def gain(each: Timed) -> float:
        return each.s(each.fastest(torchs)) / each.s(ours)

    worst = min(cases, key=gain)
    rows = case.rows if worst is case else [*case.rows, *worst.rows]
    return Line(name, best, case.s(best), case.s(ours), rows, gain(worst))


def programs() -> list[Line]:
    """Unmodified models, whole steps of them, on the GPUs that were lent last."""
    found = taken(results("served")[2], "step", "model", "sequences", "length")
    torchs = (served.PLAIN, served.ONE_SHOT)
    lines: list[Line] = []
    for step, sequences, length, what in (
        (served.DECODE, 1, 2048, "1 token behind 2048"),
        (served.PREFILL, 1, 8192, "8192 tokens"),
    ):
        some = [case for case in found if case.head["step"] == step]
        head = some[0].head
        name = f"transformers {step}, Llama-8B ({head['layers']} layers), {what}"
        lines.append(_line(
            name, some, lambda c, given=(sequences, length): (
                c.head["sequences"], c.head["length"]) == given, torchs, served.OURS,
        ))  # fmt: skip
    steps = taken(results("fsdp")[2], "case")
    name = f"FSDP2 training step, {fsdp.LAYERS} Llama-8B layers, 4096 tokens"
    lines.append(_line(name, steps, lambda c: c.head["case"] == "eager 4096", fsdp.TORCHS,
                       fsdp.OURS))  # fmt: skip
    moe = taken(results("transformers_experts")[2], "model", "tokens")
    name = (
        f"transformers training step, Qwen3-30B-A3B ({moe[0].head['layers']} layers), 4096 tokens"
    )
    lines.append(_line(name, moe, lambda c: c.head["tokens"] == 4096, [transformers_experts.THEIRS],
                       transformers_experts.OVERLAPPED))  # fmt: skip
    sharded = taken(results("tp_training").get(2, []), "case")
    if sharded:
        name = (
            f"tensor-parallel training step, Llama-8B ({sharded[0].head['layers']} layers), "
            "8192 tokens"
        )
        lines.append(_line(name, sharded, lambda c: c.head["sequence"] == 8192, tp_training.TORCHS,
                           tp_training.OURS))  # fmt: skip
    return lines


def operators() -> list[Line]:
    """Layers, each beside the better of torch's ways."""
    matmuls, few = overlap.shapes_of(rows_of("overlap")), decode.shapes_of(rows_of("decode"))
    gathers = [case for case in matmuls if case.head["op"] == "all_gather_matmul"]
    name = "all-gather + matmul, Llama-70B's QKV, 8192 tokens"
    lines = [_line(name, gathers, lambda c: c.head["layer"] == "70B qkv",
                   ["serial", overlap.PEER], "auto")]  # fmt: skip
    name = "matmul + all-reduce, Llama-70B's output projection, 1 token"
    lines.append(_line(name, few, lambda c: (c.head["m"], c.head["layer"]) == (1, "Llama-3-70B O"),
                       ["serial", *decode.TORCH], "auto"))  # fmt: skip
    return lines


def _time(seconds: float) -> str:
    number, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{number:#.3g} {unit}".replace(". ", " ")


def table() -> str:
    """Of the README."""
    every = [
        ([line.name, f"{_time(line.theirs_s)}, {NAMED.get(line.theirs, line.theirs)}",
          _time(line.ours_s), f"**{line.theirs_s / line.ours_s:.2f}x** ({line.least:.2f}x)"],
         line.rows)
        for line in (*programs(), *operators())
    ]  # fmt: skip
    return measured(HEAD, every, NOTE, older=_mark, said_of=OTHER)


def _spread(ratios: Sequence[float]) -> str:
    """A geometric mean, and the least of the set."""
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}x)"


def bullets() -> str:
    """What each kind of operator gains in the mean and at least, and where something is slower."""
    matmuls, few = rows_of("overlap"), rows_of("decode")
    layers, one = overlap.shapes_of(matmuls), decode.few_of(few)
    bags = embedding.said(rows_of("embedding"))
    routed = rows_of("experts")
    known_late = [case.pair_s / case.ours_s for case in experts.said(routed)]
    slower = [ratio for ratio in known_late if ratio < 1]
    plain = min(map(overlap.plain_gain, (*layers, *decode.shapes_of(few))))
    serial = [[c.s("serial") / c.s("auto") for c in cases] for cases in (layers, one)]
    peers = [c.fair(overlap.PEER, "auto") for c in layers], [decode.over_torch(c) for c in one]
    pooled = [c.serial_s / c.copy_s for c in bags]
    return "\n".join([
        "Operators, geometric mean (least):",
        "",
        f"- **Tensor parallelism**: {_spread(serial[0])}{_mark(matmuls)} over NCCL and cuBLAS, "
        f"{_spread(peers[0])} over torch's fused operators: {len(layers)} matmuls of Llama-70B"
        f"{held(matmuls)}, {gpus_of(matmuls)}.",
        f"- **Decoding**: {_spread(serial[1])}{_mark(few)} over NCCL and cuBLAS, "
        f"{_spread(peers[1])} over torch's all-reduces: matmul + all-reduce of 1 to 64 tokens"
        f"{held(few)}, {gpus_of(few)}.",
        f"- **Experts**: {_spread(known_late)}{_mark(routed)} over NCCL and torch's grouped "
        f"matmul, no host waits for token counts: {len(known_late)} sizes, {gpus_of(routed)}.",
        f"- **Embedding tables**: {_spread(pooled)}{_mark(bags[0].case.rows)} over lookups, then "
        f"NCCL, single calls, {len(bags)} sizes, {gpus_of(rows_of('embedding'))}.",
        "",
        f"Slower: {len(slower)} of the {len(known_late)} expert sizes, {min(known_late):.2f}x at "
        f"worst; single eager calls of few tokens, {plain:.2f}x at worst. Elsewhere, where no gain "
        'is predicted, `plan="auto"` calls NCCL and cuBLAS.',
    ])  # fmt: skip


def _mark(rows: Sequence[Row]) -> str:
    """A mark where rows were made from other code than today's."""
    return MARK if any(not is_current(row) for row in rows) else ""
