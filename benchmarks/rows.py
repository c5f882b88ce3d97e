"""Committed rows: read, put into one form, and taken together by case."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.errors import InputError

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file.

    Raises:
        InputError: a line is no JSON object.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InputError("rows_of", str(path), want="a JSON object a line",
                                 got=f"line {number}: {line[:40]!r}")  # fmt: skip
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Timed:
    """The rows of one case.

    Args:
        head: any row: for what they have in common.
        modes: mode -> arm -> row.
    """

    head: Row
    modes: Mapping[str, Mapping[str, Row]]

    @property
    def rows(self) -> list[Row]:
        """All of them."""
        return [row for arms in self.modes.values() for row in arms.values()]

    @property
    def graph(self) -> Mapping[str, Row]:
        """Arms in a CUDA graph."""
        return self.modes.get("graph", {})

    @property
    def eager(self) -> Mapping[str, Row]:
        """Arms as single calls."""
        return self.modes.get("eager", {})

    @property
    def main(self) -> Mapping[str, Row]:
        """Arms in a graph, or as single calls where nothing is captured."""
        return self.graph or self.eager

    def __contains__(self, arm: str) -> bool:
        return arm in self.main

    def s(self, arm: str) -> float:
        """Median seconds of an arm."""
        return self.main[arm]["median_s"]

    def fair(self, peer: str, ours: str) -> float:
        """Time of a peer's arm over that of ours, the lowest of all modes that have both.

        Each mode is a rotation of its own, and clocks of two rotations differ.
        """
        return min(
            arms[peer]["median_s"] / arms[ours]["median_s"]
            for arms in self.modes.values() if peer in arms and ours in arms
        )  # fmt: skip

    def fastest(self, arms: Iterable[str]) -> str:
        """The arm that took least, of those that there are."""
        return min((arm for arm in arms if arm in self.main), key=self.s)


def taken(rows: Sequence[Row], *keys: str) -> list[Timed]:
    """Rows by case, in their order; of an arm measured once more the last rotation counts.

    Args:
        keys: fields that tell cases apart.
    """
    cases: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    heads: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if "median_s" in row and "arm" in row:
            key = tuple(_hashable(row.get(name)) for name in keys)
            heads.setdefault(key, row)
            arms = cases.setdefault(key, {}).setdefault(row.get("mode", "graph"), {})
            if row["arm"] in arms:  # times of two rotations do not compare
                arms.clear()
            arms[row["arm"]] = row
    return [Timed(heads[key], modes) for key, modes in cases.items()]


def kind_of(gpu: str) -> str:
    """What files of rows call a GPU: "NVIDIA H100 80GB HBM3" -> "h100", "NVIDIA GeForce RTX 4090"
    -> "geforce-rtx-4090"."""
    return re.sub(r"[^a-z0-9]+", "-", _name(gpu).lower()).strip("-")


def gpus(ranks: int, gpu: str) -> str:
    """So many GPUs by their kind: 2, "NVIDIA H100 80GB HBM3" -> "2 H100s"."""
    return f"{ranks} {_name(gpu)}{'s' * (ranks != 1)}"


def gpus_of(rows: Sequence[Row]) -> str:
    """The GPUs that rows of one machine are of, as `gpus` says it."""
    return gpus(rows[0]["ranks"], rows[0]["gpu"])


def _name(gpu: str) -> str:
    short = re.match(r"NVIDIA ([A-Z]+\d+[A-Z]*)\b", gpu)
    return short[1] if short else gpu.removeprefix("NVIDIA ")


def results(name: str, folder: Path = RESULTS, gpu: str = "") -> dict[int, list[Row]]:
    """Number of GPUs -> committed rows of a benchmark in one form, from the most GPUs down.

    Args:
        name: of the benchmark.
        folder: of the files.
        gpu: as `kind_of` says it: rows of this kind alone; "": of each number of GPUs, and each cut
            of models, those of the kind that was measured last.

    Raises:
        InputError: a file has rows of more than one GPU, such as an H100 PCIe and an H100 NVL.
    """
    last: dict[tuple[int, int], list[Row]] = {}
    for kind in (gpu,) if gpu else KINDS:
        for cut, rows in _cuts(_of_kind(name, folder, kind)).items():
            if cut not in last or _last(rows) > _last(last[cut]):
                last[cut] = rows
    found: dict[int, list[Row]] = {}
    for (ranks, _), rows in last.items():
        found.setdefault(ranks, []).extend(rows)
    return dict(sorted(found.items(), reverse=True))


OF = 8  # GPUs that sizes of layers are written down for


def cut_for(of_8: int, shards: int) -> int:
    """What one of so many GPUs holds where one of 8 holds `of_8`."""
    return of_8 * OF // shards


def held(rows: Sequence[Row]) -> str:
    """ ", what one of 8 GPUs holds" where rows are not cut for the GPUs that ran, else ""."""
    shards = rows[0].get("shards", 0)
    return f", what one of {shards} GPUs holds" if shards not in (0, rows[0]["ranks"]) else ""


def by_cut(found: Mapping[int, list[Row]]) -> list[list[Row]]:
    """Rows of one machine and one cut of models: those cut for the GPUs that ran come first."""
    return sorted(_cuts(found).values(), key=lambda rows: bool(held(rows)))


def _cuts(found: Mapping[int, list[Row]]) -> dict[tuple[int, int], list[Row]]:
    """By number of GPUs, and by that of those that a model is cut over."""
    cuts: dict[tuple[int, int], list[Row]] = {}
    for ranks, rows in found.items():
        for row in rows:
            cuts.setdefault((ranks, row.get("shards", 0)), []).append(row)
    return cuts


def _last(rows: Sequence[Row]) -> str:
    """The day of the newest."""
    return max(row.get("date", "") for row in rows)


def _of_kind(name: str, folder: Path, gpu: str) -> dict[int, list[Row]]:
    """As `results`, of one kind of GPU."""
    end = f"x-{gpu}.jsonl"
    files = {
        int(path.name.removesuffix(end).rpartition("-")[2]): path
        for old in (*OLDER.get(name, ()), name)
        for path in folder.glob(f"{old.replace('_', '-')}-[0-9]*{end}")
    }
    found: dict[int, list[Row]] = {}
    for ranks, path in files.items():
        rows = rows_of(path)
        gpus = sorted({row["gpu"] for row in rows if "gpu" in row})
        if len(gpus) > 1:
            raise InputError("results", str(path), want="rows of one GPU", got=", ".join(gpus))
        if rows:
            # before rows said it
            found[ranks] = [{"shards": OF} | row if name in CUT else row for row in one_form(rows)]
    return found


CUT = ("overlap", "few_rows", "decode", "experts", "fp8")  # tables of layers that are cut
KINDS = ("h200", "h100")
OLDER = {"transports": ("copies",)}  # whose file had these rows before


def one_form(rows: Sequence[Row]) -> list[Row]:
    """Rows as the runner writes them, of rows that were written before there was one; each with its
    line in the file, since files are added to: what comes later is newer."""
    hosts = {_key(r): r["host_s"] for r in rows if r.get("host_s") and r.get("mode") == "graph"}
    # operators whose copies were measured both ways: what says no push pulled
    both = {row.get("op") for row in rows if " push" in str(row.get("arm"))}
    found: list[Row] = []
    for number, old in enumerate(rows):
        row: Row = {"line": number, **old}
        for before, now in RENAMED.items():
            if before in row and row[before] is not None:
                row.setdefault(now, row[before])
        for name in ("arm", "spec", "plan", "chosen", "pick", "question"):
            if isinstance(row.get(name), str):
                pulls = row.get("op") in both
                row[name] = plan_word(PULLED.sub(r"\1 pull", row[name]) if pulls else row[name])
        if row.get("mode") == "plain eager":
            row |= {"mode": "eager", "plain_eager_s": row["median_s"], "host_s": hosts[_key(row)]}
        found.append(row)
    return found


def plan_word(text: str) -> str:
    """The spec of a plan as it is written now: rows of before 2026-11-22 have other words."""
    for before, now in WORDS.items():
        text = re.sub(before, now, text)
    return text


# plans that are gone; their times stay
PULLED = re.compile(r"\b((?:shard_p2p|graded)(?: [\d/]+)? (?:ring|xor))\b(?! push)")
WORDS = {
    r"\bserial (direct|fused)\b": r"\1",
    r"\b(ring|xor) push\b": r"\1",
    r"\b(one_shot|two_shot) words\b": r"\1",
    r"\bpieces=": "chunks=",
    r"\bin pieces\b": "in chunks",
}
RENAMED = {
    "seconds": "median_s", "serial_over_auto": "baseline_over_arm", "pieces": "chunks",
    "serial_over_arm": "baseline_over_arm", "plain_over_arm": "baseline_over_arm",
}  # fmt: skip


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("arm", "m", "n", "k"))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
