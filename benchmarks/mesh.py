"""Where plans finer than shards win: predictions for a full mesh beside those for a switch.

Nothing here is measured on a mesh. The reason in numbers: links that a step has at work.
"""

from pathlib import Path

import counterpoint as cp
from benchmarks.pictures import dots, layer_name
from counterpoint.choose.by_model import refusal
from counterpoint.model.estimate import predicted_s
from counterpoint.plan import finer
from counterpoint.plan.operation import operation_of

SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "all_gather_matmul": (
        (2048, 7168, 8192), (8192, 1280, 8192), (8192, 7168, 8192), (16384, 13312, 16384),
    ),
    "matmul_reduce_scatter": (
        (2048, 8192, 3584), (8192, 8192, 1024), (8192, 8192, 3584), (16384, 16384, 6656),
    ),
}  # fmt: skip
MACHINES = {"mi300x-8": "MI300X, full mesh", "h200-8": "H200, NVSwitch"}
KINDS = {"shard_p2p": ("shard_p2p",), "graded": ("graded",), "finer than shards": finer.NAMES}
SHORT = {"all_gather_matmul": "AG", "matmul_reduce_scatter": "RS"}


def table(images: Path) -> str:
    """Draw the picture; the table beside it."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    marks: dict[str, dict[str, float]] = {}
    lines: dict[str, list[str]] = {}
    head = ["M, N, K"]
    for name, title in MACHINES.items():
        machine = cp.preset(name)
        head += [f"{title}: shard_p2p", "graded", "finer", "which", "longer part"]
        panel, mark = panels.setdefault(title, {}), marks.setdefault(title, {})
        for op, shapes in SHAPES.items():
            for shape in shapes:
                problem = cp.Problem(op, *shape, 8)
                choice = cp.choose(problem, machine)
                specs = operation_of(op).candidates(problem)
                specs = [s for s in specs if s.split()[0] not in ("direct", "fused")]
                plans = [cp.build(problem, spec, machine) for spec in specs]
                label = f"{SHORT[op]} {', '.join(map(str, shape))}"
                found = {
                    kind: min((predicted_s(plan, machine), plan.spec) for plan in plans
                              if plan.family in families and not refusal(plan, machine))
                    for kind, families in KINDS.items()
                }  # fmt: skip
                name = layer_name(*shape)
                panel[name] = {kind: choice.serial_s / s for kind, (s, _) in found.items()}
                mark[name] = choice.serial_s / choice.longer_s
                finest = found["finer than shards"][1].split()[0]
                ratios = [f"{ratio:.2f}" for ratio in panel[name].values()]
                lines.setdefault(label, [label]).extend(
                    [*ratios, f"`{finest}`", f"{mark[name]:.2f}"]
                )
    dots(
        panels,
        images / "mesh-prediction.svg",
        marks=marks,
        mark="the longer part alone (an estimate, not a bound)",
        title="Predicted: chunks finer than shards win on a full mesh, not on a switch",
        source="predictions from datasheet rates, 8 GPUs, bf16; the fastest plan of each kind",
        over="serial, both predicted",
    )
    from benchmarks.tables import grid

    return grid(head, lines.values())
