"""Our own steps on 2 GPUs, predicted by `counterpoint.scale` before any of them was run.

    python -m benchmarks.scale_ahead    # predictions that are not kept yet, into AHEAD

What is kept is not predicted again: a prediction counts only if its commit is older than the row
that was measured. A case of whose bench there are rows already cannot be added.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks import blocks, dlrm, experts, fsdp, steps, tp_training
from benchmarks.compile import OURS, PLAIN
from benchmarks.declare import Case
from benchmarks.rows import RESULTS, Row, results, rows_of, taken
from benchmarks.scale_dlrm import dlrm_s, dlrm_step
from benchmarks.scale_steps import ANY, GPU, RANKS
from benchmarks.steps_experts import BOTH
from benchmarks.tables import grid, ms
from counterpoint.advice.what_if import what_if
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.measure.record import append, environment
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.operators import Overlap
from counterpoint.scale.prediction import predict

AHEAD = RESULTS / "scale-ahead.jsonl"
MOST_ROWS = max(dlrm.LARGE.model.rows)  # of a table
Seconds = Mapping[str, float]  # by arm


class Step(NamedTuple):
    """A case of a bench, and what predicts its arms."""

    bench: str
    case: Case
    predicted: Callable[[Case, Machine], Seconds]


def tensor_parallel(case: Case, machine: Machine) -> Seconds:
    """A whole model, compiled by blocks: plain, and with our pass."""
    width = blocks.WIDTHS[case["width"]]
    vocabulary = tp_training.VOCABULARY[case["width"]]
    model = Model(
        name=case.name, hidden=width.dim, layers=case["layers"], heads=width.heads,
        kv_heads=width.kv_heads, ffn=width.hidden, vocab=vocabulary, sequence=case["sequence"],
    )  # fmt: skip
    layout = Layout(tp=RANKS, micro_batch=case["batch"])
    arms: dict[str, Overlap] = {PLAIN: "none", OURS: "ours"}
    return {arm: predict(model, layout, None, machine, overlap=overlap).seconds
            for arm, overlap in arms.items()}  # fmt: skip


def sharded(case: Case, machine: Machine) -> Seconds:
    """Layers under FSDP2 with AdamW: as torch runs them, and by `cp.overlap`."""
    dim, hidden, heads, kv_heads = fsdp.WIDTHS[case["width"]]
    model = Model(
        name=case.name, hidden=dim, layers=case["layers"], heads=heads, kv_heads=kv_heads,
        ffn=hidden, vocab=2, sequence=case["tokens"],
    )  # fmt: skip
    layout = Layout(dp=RANKS, data_parallel_sharding="fsdp")
    found = what_if(model, layout, Fabric(), machine)
    saves_s = sum(each.saves_s for each in found.ours if each.name == "FSDP2 in place")
    return {fsdp.AS_IS: found.step.seconds, fsdp.OURS: found.step.seconds - saves_s}


def recommender(case: Case, machine: Machine) -> Seconds:
    """DLRM-DCNv2, forward and backward."""
    arms: dict[str, Overlap] = {f"{BOTH}, by lookup": "none", f"{BOTH}, by fused": "ours"}
    return {arm: dlrm_s(dlrm_step(case["size"], MOST_ROWS, machine, overlap))
            for arm, overlap in arms.items()}  # fmt: skip


def experts_of(case: Case, machine: Machine) -> Seconds:
    """A layer of experts, forward and backward, whose counts the host knows."""
    (sizes,) = (each for each in experts.MODELS if each.name == case["model"])
    model = Model(
        name=sizes.name, hidden=sizes.hidden, ffn=0, sequence=case["size"],
        experts=RANKS * sizes.experts, top_k=sizes.top, expert_ffn=sizes.ffn, **ANY,
    )  # fmt: skip
    arms: dict[str, Overlap] = {f"{BOTH}, by torch, counts": "none", f"{BOTH}, by fused": "ours"}
    layout, network = Layout(dp=RANKS, ep=RANKS), Network(machine, Fabric())
    return {arm: Layers(model, layout, network, overlap).experts().seconds
            for arm, overlap in arms.items()}  # fmt: skip


STEPS = (
    *(Step("tp_training", case, tensor_parallel) for case in tp_training.cases(RANKS)),
    *(Step("fsdp", case, sharded) for case in fsdp.cases(RANKS) if case["adamw"]),
    *(Step("steps", case, recommender) for case in steps.cases(RANKS)
      if case["model"] == steps.DLRM and case["named"] == "uniform"),
    *(Step("steps", case, experts_of) for case in steps.cases(RANKS) if "tokens" in case.name),
)  # fmt: skip


def measured_of(bench: str) -> dict[str, Mapping[str, Row]]:
    """Rows of arms by case, on the GPUs that steps are predicted of."""
    found = results(bench, gpu=GPU).get(RANKS, [])
    return {case.head["case"]: case.main for case in taken(found, "case")}


def predict_ahead(kept: Sequence[Row], machine: Machine) -> list[dict[str, Any]]:
    """Predictions of all steps that were neither kept nor measured yet."""
    known = {(row["bench"], row["case"]) for row in kept}
    known |= {(bench, case) for bench in {s.bench for s in STEPS} for case in measured_of(bench)}
    return [
        {"bench": step.bench, "case": step.case.name, "arm": arm, "predicted_s": seconds}
        for step in STEPS if (step.bench, step.case.name) not in known
        for arm, seconds in step.predicted(step.case, machine).items()
    ]  # fmt: skip


def errors(kept: Sequence[Row]) -> list[float | None]:
    """Of each prediction: predicted over measured, less one; None: it was not run."""
    found = {bench: measured_of(bench) for bench in {row["bench"] for row in kept}}
    rows = [found[row["bench"]].get(row["case"], {}).get(row["arm"]) for row in kept]
    return [row and each["predicted_s"] / row["median_s"] - 1
            for row, each in zip(rows, kept, strict=True)]  # fmt: skip


def ahead_table(kept: Sequence[Row] | None = None) -> str:
    """Every prediction, and what was measured since."""
    kept = rows_of(AHEAD) if kept is None else kept
    off = errors(kept)
    lines = [
        [row["case"], row["arm"], ms(row["predicted_s"]),
         "-" if error is None else ms(row["predicted_s"] / (1 + error)),
         "-" if error is None else f"{error:+.1%}"]
        for row, error in zip(kept, off, strict=True)
    ]  # fmt: skip
    known = [abs(error) for error in off if error is not None]
    said = f"{len(known)} of {len(kept)} were run since"
    said += f": median error {median(known):.1%}, worst {max(known):.1%}." if known else "."
    stamp = f"Predicted on {kept[0]['date']} by commit {kept[0]['commit']}, of {GPU}-{RANKS}."
    return "\n\n".join([
        grid(["step", "arm", "predicted, ms", "measured, ms", "error"], lines), f"{stamp} {said}"
    ])  # fmt: skip


def main() -> None:
    """Keep what is predicted now, for good."""
    machine = machine_of("scale_ahead", f"{GPU}-{RANKS}")
    kept = rows_of(AHEAD) if AHEAD.is_file() else []
    here = environment()
    new = [row | {"commit": here["commit"], "date": here["date"]}
           for row in predict_ahead(kept, machine)]  # fmt: skip
    append(AHEAD, new)
    print(f"{len(new)} predictions added to {AHEAD.name}, {len(kept)} were there")


if __name__ == "__main__":
    main()
