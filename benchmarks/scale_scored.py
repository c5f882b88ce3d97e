"""Score published steps that were kept back: predict each of a set once, and keep what came out.

    python -m benchmarks.scale_scored second    # steps of scale/scored_second.json

A set that has rows is scored: it is not predicted again.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.rows import RESULTS, Row, rows_of
from benchmarks.tables import grid
from counterpoint.errors import InputError
from counterpoint.measure.record import append, environment
from counterpoint.scale.checked import mean_error, predict_entry, scored

LATEST = "second"
# set -> its steps and its rows
SETS = {
    "first": ("scored_steps.json", RESULTS / "scale-scored-once.jsonl"),
    LATEST: ("scored_second.json", RESULTS / "scale-scored-second.jsonl"),
}
KINDS = {"fsdp": "FSDP", "pipeline": "pipeline and tensor parallel", "experts": "experts"}


def rows_of_set(name: str) -> list[Row]:
    """What came out of a set; [] where it is kept back still."""
    path = SETS[name][1]
    return rows_of(path) if path.is_file() else []


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """A step, as its entry says."""
    step = predict_entry(row)
    low, high = (round(each / step.seconds, 4) for each in step.band_s)
    return {
        "table": "scale scored once", "case": row["name"], "paper": row["paper"],
        "kind": row["kind"], "reported_s": row["reported_step_s"],
        "predicted_s": round(step.seconds, 6), "band": [low, high],
    }  # fmt: skip


def score(name: str) -> Path:
    """Predict all steps of a set.

    Raises:
        InputError: it was scored.
    """
    steps, path = SETS[name]
    if rows_of_set(name):
        raise InputError("scale_scored", "set", want="one that is kept back", got=repr(name))
    here = environment()
    entries = json.loads((files("counterpoint.scale") / steps).read_text())["steps"]
    stamp = {key: here[key] for key in ("commit", "date")}
    append(path, [predicted(row) | stamp for row in entries])
    return path


def errors_of(name: str, kind: str = "") -> tuple[int, float, float, int]:
    """Of steps of a set, of one kind or of all.

    Returns:
        How many, the mean of |predicted / reported - 1|, the mean of it with its sign, and how many
        lie in the band of their prediction.
    """
    rows = [row for row in rows_of_set(name) if row["kind"] == (kind or row["kind"])]
    off = [row["predicted_s"] / row["reported_s"] - 1 for row in rows]
    inside = [row["band"][0] <= row["reported_s"] / row["predicted_s"] <= row["band"][1]
              for row in rows]  # fmt: skip
    return len(rows), fmean(map(abs, off)), fmean(off), sum(inside)


def scored_table(name: str) -> str:
    """Steps that were predicted once, by kind, and each; of an older set also by today's terms."""
    rows, is_known = rows_of_set(name), name != LATEST
    head = ["kind", "steps", "mean error", "with its sign", "in the printed band"]
    kinds: list[list[str]] = []
    for kind, words in (*KINDS.items(), ("", "all")):
        count, error, signed, inside = errors_of(name, kind)
        line = [words, str(count), f"{error:.1%}", f"{signed:+.1%}", f"{inside} of {count}"]
        some = tuple(step for step in scored() if step.kind == (kind or step.kind))
        kinds.append([*line, f"{mean_error(some):.1%}"] if is_known else line)
    said = f"Predicted on {rows[0]['date']} by commit {rows[0]['commit']}, once"
    steps = [[row["case"], f"{row['reported_s']:.2f}", f"{row['predicted_s']:.2f}",
              f"{row['predicted_s'] / row['reported_s']:.2f}"] for row in rows]  # fmt: skip
    return "\n\n".join([
        grid([*head, "now"] if is_known else head, kinds),
        f"{said}; *now*: by today's terms." if is_known else f"{said}.",
        grid(["step", "reported, s", "predicted, s", "predicted / reported"], steps),
    ])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=SETS)
    print(score(parser.parse_args().set))
