"""Where plans finer than shards win: predictions for a full mesh beside those for a switch.

Nothing here is measured on a mesh. The reason in numbers: links that a step has at work.
"""

from pathlib import Path

from counterpoint.choose.by_model import parts_s, refusal
from counterpoint.machine import Machine
from counterpoint.measure.speedups import Speedups, draw_speedups
from counterpoint.model.estimate import predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.finer import FINER
from counterpoint.plan.variants import variants
from counterpoint.presets import preset
from counterpoint.problem import Op, Problem

SHAPES: dict[Op, tuple[tuple[int, int, int], ...]] = {
    "all_gather_matmul": (
        (2048, 7168, 8192), (8192, 1280, 8192), (8192, 7168, 8192), (16384, 13312, 16384),
    ),
    "matmul_reduce_scatter": (
        (2048, 8192, 3584), (8192, 8192, 1024), (8192, 8192, 3584), (16384, 16384, 6656),
    ),
}  # fmt: skip
MACHINES = {"mi300x-8": "MI300X, full mesh", "h200-8": "H200, NVSwitch"}
KINDS = {"shard_p2p": ("shard_p2p",), "graded": ("graded",), "finer than shards": FINER}
SHORT = {"all_gather_matmul": "AG", "matmul_reduce_scatter": "RS"}


def best_s(problem: Problem, machine: Machine, families: tuple[str, ...]) -> tuple[float, str]:
    """The fastest by prediction of the plans of some families that "auto" may take."""
    specs = [s for s in variants(problem.op, problem.ranks) if s.split()[0] in families]
    plans = [plan for spec in specs if not refusal(plan := build(problem, spec, machine))]
    return min((predicted_s(plan, machine), plan.spec) for plan in plans)


def panels() -> tuple[list[Speedups], list[list[str]]]:
    """What is drawn, and the cells of a table that says it in numbers."""
    drawn: list[Speedups] = []
    cells: dict[str, list[str]] = {}
    for name, title in MACHINES.items():
        machine, rows, ideals = preset(name), {}, {}
        for op, shapes in SHAPES.items():
            for shape in shapes:
                problem = Problem(op, *shape, 8)
                label = f"{SHORT[op]} {', '.join(map(str, shape))}"
                serial_s = predicted_s(build(problem, "serial"), machine)
                found = {kind: best_s(problem, machine, which) for kind, which in KINDS.items()}
                rows[label] = {kind: serial_s / s for kind, (s, _) in found.items()}
                ideals[label] = serial_s / max(parts_s(problem, machine))
                finest = found["finer than shards"][1].split()[0]
                cells.setdefault(label, [label]).extend(
                    [*(f"{v:.2f}" for v in rows[label].values()), f"`{finest}`",
                     f"{ideals[label]:.2f}"]
                )  # fmt: skip
        drawn.append(Speedups(title, rows, ideals))
    return drawn, list(cells.values())


def table(images: Path) -> str:
    """Draw the picture; the table beside it."""
    drawn, cells = panels()
    draw_speedups(
        drawn, images / "mesh-prediction.png", title="Plans finer than shards, on two topologies",
        source="predictions from datasheet rates, 8 GPUs, bf16; the fastest of each kind",
    )  # fmt: skip
    head = ["M, N, K"]
    for title in MACHINES.values():
        head += [f"{title}: shard_p2p", "graded", "finer", "which", "ideal"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(line) + " |" for line in cells)])
