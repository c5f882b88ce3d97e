"""Score published steps that were kept back: predict each of a set once, and keep what came out.

    python -m benchmarks.scale_scored second    # steps of scale/scored_second.json

A set that has rows is scored: it is not predicted again.
"""

import argparse
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, Row, rows_of
from counterpoint.errors import InputError
from counterpoint.measure.record import append, environment
from counterpoint.presets import preset
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric
from counterpoint.scale.prediction import predict

# set -> its steps and its rows, the latest first
SETS = {
    "second": ("scored_second.json", RESULTS / "scale-scored-second.jsonl"),
    "first": ("scored_steps.json", RESULTS / "scale-scored-once.jsonl"),
}


def rows_of_set(name: str) -> list[Row]:
    """What came out of a set; [] where it is kept back still."""
    path = SETS[name][1]
    return rows_of(path) if path.is_file() else []


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """A step, as its entry says."""
    sizes = dict(row["model"])
    model = Model(
        name=row["name"], source=row["source"], gated=sizes.pop("gated_mlp"),
        sequence=sizes.pop("seq_len"), **sizes,
    )  # fmt: skip
    found = preset(row["node"]["preset"])
    machine = replace(found, **{part: replace(getattr(found, part), **row["node"].get(part, {}))
                                for part in ("device", "link")})  # fmt: skip
    layout = Layout(asynchronous=row["asynchronous"], **row["layout"])
    step = predict(model, layout, Fabric(**row["fabric"]), machine)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=SETS)
    print(score(parser.parse_args().set))
