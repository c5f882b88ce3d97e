"""The README's table and what it says of speed: each operator where most GPUs have measured it."""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks import compile as compiled
from benchmarks import decode, embedding, experts, overlap
from benchmarks.rows import Row, Timed, gpus_of, results, taken
from benchmarks.sources import is_current
from benchmarks.steps import UNFUSED
from benchmarks.tables import MARK, measured

HEAD = ("layer", "serial", "torch's fused operator", "counterpoint", "speedup")
NOTE = (
    "Serial is NCCL with cuBLAS, or torch's grouped matmul and a permutation. Picked lines of what "
    "one of 8 GPUs holds. Eager lines, which suit torch better, kept the GPU busy. The last is "
    "eager, the others CUDA graphs."
)
OTHER = f"{MARK} Not known to be of today's code."
STEP = "forward + backward, by "


class Line(NamedTuple):
    """One line of the table, in seconds; without a peer, torch has no such operator."""

    layer: str
    serial_s: float
    ours_s: float
    rows: Sequence[Row]
    peer_s: float | None = None


def rows_of(name: str) -> list[Row]:
    """The rows of the most GPUs."""
    return next(iter(results(name).values()))


def _fair(layer: str, case: Timed, peers: Sequence[str]) -> Line:
    """A line in the mode in which the better of torch's operators does better."""
    times = {
        mode: {name: row["median_s"] for name, row in arms.items()}
        for mode, arms in case.modes.items() if {"serial", "auto", peers[0]} <= {*arms}
    }  # fmt: skip
    mode, best = min(times.items(), key=lambda t: min(t[1][p] for p in peers) / t[1]["auto"])
    layer += ", eager" if mode == "eager" else ""
    return Line(layer, best["serial"], best["auto"], case.rows, min(best[p] for p in peers))


def lines() -> list[Line]:
    """One layer of each operator, and a step whose kernels stay as they are."""
    found: list[Line] = []
    matmuls = overlap.shapes_of(rows_of("overlap"))
    for op, (m, n, k), layer in (
        ("all_gather_matmul", (8192, 1280, 8192), "Llama-3-70B QKV shard: all-gather + matmul"),
        (
            "matmul_reduce_scatter",
            (8192, 8192, 3584),
            "Llama-3-70B down shard: matmul + reduce-scatter",
        ),
    ):
        (case,) = (c for c in matmuls if (c.head["op"], *(c.head[i] for i in "mnk"))
                   == (op, m, n, k))  # fmt: skip
        found.append(_fair(f"{layer}, {m} tokens", case, [overlap.PEER]))
    (case,) = (c for c in decode.shapes_of(rows_of("decode"))
               if (c.head["m"], c.head["layer"]) == (1, "Llama-3-70B O"))  # fmt: skip
    found.append(_fair("Llama-3-70B O shard: matmul + all-reduce, 1 token", case, decode.TORCH))
    (back,) = (c for c in experts.said(rows_of("experts")) if c.combines and
               (c.head["model"], c.head["tokens"], c.head["routing"])
               == ("DeepSeek-V3", 4096, "uniform"))  # fmt: skip
    layer = "DeepSeek-V3 experts: grouped matmul + all-to-all, 4096 tokens"
    found.append(Line(layer, back.in_place_s, back.auto[1], back.case.rows))
    whole = taken(rows_of("steps"), "model", "size")
    (step,) = (c for c in whole if (c.head["model"], c.head["size"]) == ("Qwen3-235B", 4096))
    layer = f"Qwen3-235B experts: forward + backward, 4096 tokens ({gpus_of(step.rows)})"
    arms = {arm.removeprefix(STEP): row["median_s"] for arm, row in step.eager.items()}
    unfused_s = min(arms[way] for way in UNFUSED["experts"] if way in arms)
    found.append(Line(layer, unfused_s, arms["default"], step.rows))
    return found


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def table() -> str:
    """Of the README."""
    every = [
        ([line.layer, _time(line.serial_s), _time(line.peer_s), _time(line.ours_s),
          f"**{line.serial_s / line.ours_s:.2f}x**"], line.rows)
        for line in lines()
    ]  # fmt: skip
    return measured(HEAD, every, NOTE, older=_mark, said_of=OTHER)


def _spread(ratios: Sequence[float]) -> str:
    """A geometric mean, and the least of the set."""
    return f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}x)"


def bullets() -> str:
    """What each kind of user gains in the mean and at least, and where something is slower."""
    large = overlap.shapes_of(rows_of("overlap"))
    few = decode.few_of(rows_of("decode"))
    bags = embedding.said(rows_of("embedding"))
    where = {name: gpus_of(rows_of(name)) for name in ("overlap", "decode", "experts",
                                                       "embedding")}  # fmt: skip
    found = results("experts")
    device = {gpus_of(rows): [c.pair_s / c.ours_s for c in experts.said(rows)]
              for rows in found.values()}  # fmt: skip
    each = "; ".join(
        f"{_spread(ratios)} on {which}{_mark(rows)}"
        for (which, ratios), rows in zip(device.items(), found.values(), strict=True)
    )
    lost = ", ".join(f"{sum(r < 1 for r in ratios)} of {len(ratios)} on {which}"
                     for which, ratios in device.items())  # fmt: skip
    lost = lost.replace(" on ", " expert cases on ", 1)
    worst = min(r for ratios in device.values() for r in ratios)
    two = results("decode")[2]
    plain = min(c.eager["serial"]["plain_eager_s"] / c.eager["auto"]["plain_eager_s"]
                for c in decode.shapes_of(two))  # fmt: skip
    tensor, one = ([c.s("serial") / c.s("auto") for c in cases] for cases in (large, few))
    pooled = [c.serial_s / c.copy_s for c in bags]
    return "\n".join([
        "Speedups: geometric mean (least), NVLink multicast "
        "[off](docs/support.md#nvlink-multicast).",
        "",
        f"- **Tensor parallelism**: {_spread(tensor)}{_mark(rows_of('overlap'))} over NCCL, then "
        f"cuBLAS, in CUDA graphs: {len(large)} Llama-3 layers as one of 8 GPUs holds them, run on "
        f"{where['overlap']}.",
        f"- **Decoding**: {_spread(one)}{_mark(rows_of('decode'))} over the same: matmul + "
        f"all-reduce of 1 to 64 tokens, {where['decode']}. {_whole()}",
        f"- **Experts**: over NCCL and torch's grouped matmul, counts on the GPU: {each}.",
        f"- **Embedding tables**: {_spread(pooled)}{_mark(bags[0].case.rows)} over lookups, then "
        f"NCCL, single calls, {len(bags)} sizes, {where['embedding']}.",
        "",
        f"Slower: {lost}, {worst:.2f}x at worst; single eager decode calls, {plain:.2f}x at worst "
        f"({gpus_of(two)}). Where no gain is predicted, "
        '`plan="auto"` calls NCCL and cuBLAS, except for experts with counts on the GPU.',
    ])  # fmt: skip


def _whole() -> str:
    """What whole layers gain in decoding, of which matmul + all-reduce are a part."""
    torch = (compiled.PLAIN, compiled.SCHEDULED, compiled.ONE_SHOT)
    rows = [r for r in rows_of("compile") if r["step"] == compiled.DECODE and r["width"] == "70B"]
    ratios = [ratio for case in taken(rows, "case")
              if (ratio := compiled.over(case.graph, torch)) is not None]  # fmt: skip
    return f"A whole compiled 70B layer: {_spread(ratios)}{_mark(rows)}, {gpus_of(rows)}."


def _mark(rows: Sequence[Row]) -> str:
    """A mark where rows were made from other code than today's."""
    return f" {MARK}" if any(not is_current(row) for row in rows) else ""
