"""The model of who is resident against the sweeps of `counterpoint bench resources`: its constants
are fitted to FITTED, it is scored on all other pairs, and it predicts GPUs that are not here."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import log, log2
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.declare import Section
from benchmarks.loop import COLLECTIVE_BYTES, SHAPES, TRITON
from benchmarks.pictures import Axis, curves, place, shown
from benchmarks.residency_model import (
    Constants,
    Setting,
    Sharing,
    best,
    regridded,
    time_ratio,
)
from benchmarks.rows import KINDS, Row, gpus_of, kind_of, results
from benchmarks.sharing import in_graph
from benchmarks.tables import measured
from counterpoint import presets
from counterpoint.gpu.occupancy import Kernel
from counterpoint.machine import Machine

# what NCCL 2.28.9 launches on H200s, as captured graphs show it: a block, and how many
NCCL = {"all_reduce": (Kernel(544, 96, 21568, 82240), 24),
        "all_to_all": (Kernel(640, 96, 21568, 82240), 32)}  # fmt: skip
REGISTERS = {"64x64x32": 64, "64x64x64": 72, "128x128x64": 121}  # compiled for sm_90
FITTED = (("cb", "64x64x32"), ("cb", "128x128x64"))
START = Constants(full_blocks=0.5, full_bytes=24576.0, sharpness=4.0, crowding=0.05,
                  drain_waves=2.0)  # fmt: skip
ERROR_BAR, REGRET_BAR = 0.08, 0.05
H200 = presets.H200.device
ASSUMED = (
    "This is predicted for the paper's GPUs, with the constants of the H200. Of these GPUs we have "
    "timed H100s alone, and only 2 of them. A matmul of 8192 x 8192 x 8192 by tiles of 64x64x32 "
    "and a collective of 896 MiB reach the same shares of the datasheet's peaks as on the H200, "
    "and blocks have the same registers."
)
GPUS = ("a40-4", "a100-8", "h100-8", "mi250x-8")  # of the paper


class Point(NamedTuple):
    """A setting that was measured: its TimeRatio."""

    setting: Setting
    ratio: float


class Swept(NamedTuple):
    """A pair and all its settings; `fitted` where the constants are of them too."""

    label: str
    ranks: int
    fitted: bool
    sharing: Sharing
    points: list[Point]
    rows: list[Row]

    def errors(self, constants: Constants) -> list[float]:
        """Of each setting: predicted / measured - 1."""
        return [time_ratio(self.sharing, p.setting, constants) / p.ratio - 1 for p in self.points]

    def pick(self, constants: Constants) -> tuple[Setting, float]:
        """What the model takes, and its regret: how much longer that took than the fastest."""
        found = best(self.sharing, [p.setting for p in self.points], constants)
        return found, self.regret(found)

    def regret(self, setting: Setting) -> float:
        """How much longer a setting took than the fastest."""
        times = {p.setting: p.ratio for p in self.points}
        return times[setting] / min(times.values()) - 1


def block_of(tile: str) -> tuple[Kernel, int]:
    """A block of a Triton tile on sm_90, and the operands that it loads in a step."""
    m, n, k, warps, stages = TRITON[tile]
    step_bytes = (m + n) * k * 2
    return Kernel(32 * warps, REGISTERS[tile], 0, stages * step_bytes), step_bytes


def sharing_of(gemm: str, tile: str, collective: str, compute_s: float, comm_s: float) -> Sharing:
    """The loop of a pair on an H200."""
    block, step_bytes = block_of(tile)
    (m, n, _), (tile_m, tile_n, *_) = SHAPES[gemm], TRITON[tile]
    comm, num_comm_blocks = NCCL[collective]
    return Sharing(device=H200, compute=block, num_blocks=m // tile_m * (n // tile_n),
                   step_bytes=step_bytes, compute_s=compute_s, comm=comm,
                   num_comm_blocks=num_comm_blocks, comm_s=comm_s)  # fmt: skip


def fitted_on() -> dict[int, list[Row]]:
    """Number of GPUs -> all rows of the kind of GPU whose pairs constants are fitted on."""
    return results("resources", gpu="h200")


def swept(found: Mapping[int, list[Row]]) -> list[Swept]:
    """The sweeps of rows, and of those of the paper's experiment on that GPU; full size, NCCL as it
    is."""
    return _swept(found) + _of_paper(_kind(found)).get(0, [])


def _kind(found: Mapping[int, list[Row]]) -> str:
    """The GPU that rows are of, as files call it."""
    return kind_of(next(iter(found.values()))[0]["gpu"])


def _of_paper(gpu: str) -> dict[int, list[Swept]]:
    """The sweeps of the paper's experiment on a GPU, by threads of NCCL's blocks; 0: as it is."""
    every = results("paper_resources", gpu=gpu)
    threads = sorted({row["nccl_threads"] for rows in every.values() for row in rows})
    return {
        t: _swept({n: [r for r in rows if r["nccl_threads"] == t] for n, rows in every.items()})
        for t in threads
    }


def _swept(found: Mapping[int, list[Row]]) -> list[Swept]:
    """Each with the times of its parts alone."""
    every: list[Swept] = []
    for ranks, rows in found.items():
        for label in dict.fromkeys(r["pair"] for r in rows if r.get("arm") == "shapes"):
            own = [r for r in rows if r["pair"] == label and r.get("scale", 1) == 1]
            sweep = [r for r in own if r.get("arm") == "shapes"]
            parts = [r for r in own if r.get("mode") == "graph" and "gemm_s" in r]
            if not sweep or not parts or sweep[0]["kernel"] not in REGISTERS:
                continue
            head = parts[-1]
            sharing = sharing_of(head["gemm"], head["kernel"], head["collective"], head["gemm_s"],
                                 head["comm_sm_s"])  # fmt: skip
            if "comm_threads" in head:  # as NCCL's kernel was launched there
                block = Kernel(head["comm_threads"], head["comm_registers"],
                               head["comm_shared_bytes"])  # fmt: skip
                sharing = replace(sharing, comm=block, num_comm_blocks=head["comm_blocks"])
            points = [
                Point(Setting(None if r["unshaped"] else r["blocks_per_sm"], r["priority"]),
                      r["time_ratio"])
                for r in sweep
            ]  # fmt: skip
            fitted = (head["gemm"], head["kernel"]) in FITTED
            every.append(Swept(label, ranks, fitted, sharing, points, [*sweep, head]))
    return every


def fit(pairs: Sequence[Swept]) -> Constants:
    """The constants with the least mean |log(predicted / measured)| over all settings: each is
    moved by steps that halve where no step helps."""

    def loss(constants: Constants) -> float:
        return fmean(abs(log(1 + e)) for pair in pairs for e in pair.errors(constants))

    found = START
    least = loss(found)
    steps = {f.name: 0.25 * getattr(START, f.name) for f in fields(START)}
    for _ in range(8):
        moved = True
        while moved:
            moved = False
            for name, step in steps.items():
                for way in (step, -step):
                    tried = replace(found, **{name: max(0.0, getattr(found, name) + way)})
                    if tried.sharpness >= 1 and (error := loss(tried)) < least - 1e-9:
                        found, least, moved = tried, error, True
                        break
        steps = {name: step / 2 for name, step in steps.items()}
    return found


def scores(found: Mapping[int, list[Row]]) -> str:
    """How far the model is off on each pair, and what its pick costs."""
    pairs = swept(found)
    fitted, held = ([p for p in pairs if p.fitted is which] for which in (True, False))
    if not fitted or not held:
        return ""
    constants = fit(fitted)
    lines: list[tuple[list[str], list[Row]]] = []
    for pair in (*held, *fitted):
        errors = sorted(map(abs, pair.errors(constants)))
        setting, regret = pair.pick(constants)
        lines.append(([
            f"{pair.label}, {gpus_of(pair.rows)}", "fitted" if pair.fitted else "held out",
            f"{len(errors)}", f"{median(errors):.1%}, {errors[-1]:.1%}", spelt(setting),
            f"{regret:.1%}",
        ], pair.rows))  # fmt: skip
    others = (on_another(gpu, constants) for gpu in KINDS if gpu != _kind(found))
    every = [said(held, constants), *filter(None, others)]
    return "\n\n".join(every) + "\n\n" + measured(
        ["pair", "constants", "settings", "error: median, worst", "its pick", "regret"], lines,
        f"Constants of {sum(len(p.points) for p in fitted)} settings: {told(constants)}"
        f"{outside(found)}",
    )  # fmt: skip


def spelt(setting: Setting) -> str:
    """A setting as tables call it."""
    blocks = f"{setting.blocks_per_sm} blocks per SM" if setting.blocks_per_sm else "unshaped"
    return blocks + (", priority" if setting.priority else "")


def told(constants: Constants) -> str:
    """The constants in words."""
    return (
        f"an SM is full from {constants.full_blocks:.2f} + {constants.full_bytes / 1024:.1f} KiB / "
        f"(operands of a block's step) blocks on, sharpness {constants.sharpness:.1f}, crowding "
        f"{constants.crowding:.2f} per 64 KiB, {constants.drain_waves:.1f} waves until a "
        "collective of high priority has its SMs. The form of the law was chosen after we had seen "
        "all rows; its constants were fitted without those held out."
    )


def outside(found: Mapping[int, list[Row]]) -> str:
    """What the model is not for: kernels whose blocks stay to the end."""
    cases = [c for rows in found.values() for c in in_graph(rows) if c.head["kernel"] == "cuBLAS"]
    ratios = [c.s("priority") / c.s("sequential") for c in cases if "priority" in c]
    if not ratios:
        return ""
    return (
        " The model leaves out cuBLAS. Its blocks stay to the end, so priority should gain "
        f"nothing, but {min(ratios):.2f} to {max(ratios):.2f} was measured."
    )


def on_another(gpu: str, constants: Constants) -> str:
    """What the constants are worth on a GPU whose rows they have not seen; an SM holds as much."""
    parts: list[str] = []
    for threads, pairs in _of_paper(gpu).items():
        how = f", NCCL with {threads} threads a block" if threads else ""
        where = f"{pairs[0].ranks}x {pairs[0].rows[0]['gpu']}{how}"
        parts.append(f"{where}, measured later, by the same constants: {said(pairs, constants)}")
    return "\n\n".join(parts)


def said(held: Sequence[Swept], constants: Constants) -> str:
    """The two bars, and what came out on pairs that are held out."""
    errors = [abs(e) for pair in held for e in pair.errors(constants)]
    regrets = [pair.pick(constants)[1] for pair in held]
    rule = fmean(pair.regret(Setting(None, priority=True)) for pair in held)
    return (
        f"TimeRatio (overlapped / sequential) on {len(held)} pairs that are held out, "
        f"{len(errors)} settings: median error **{median(errors):.1%}** (bar {ERROR_BAR:.0%}), "
        f"mean regret of the model's pick **{fmean(regrets):.1%}** (bar {REGRET_BAR:.0%}), worst "
        f"{max(regrets):.1%}. Priority alone, in every case, has a mean regret of {rule:.1%}."
    )


# ---- GPUs that are not here


def elsewhere(machine: Machine, collective: str, here: Swept) -> Sharing:
    """The loop cb on another GPU.

    As much of the peak as here, of the matmul and of the link. The collective's block has the
    threads and registers that it has here, and no shared memory, which differs by architecture.
    """
    own, device = here.sharing, machine.device
    m, n, k = SHAPES["cb"]
    share = 2 * m * n * k / own.compute_s / H200.bf16_flop_per_s
    link = COLLECTIVE_BYTES / own.comm_s / presets.H200.link.bytes_per_s
    comm, num_comm_blocks = NCCL[collective]
    return Sharing(
        device=device, compute=own.compute, num_blocks=own.num_blocks, step_bytes=own.step_bytes,
        compute_s=2 * m * n * k / device.bf16_flop_per_s / share,
        comm=Kernel(comm.threads, comm.registers_per_thread),
        num_comm_blocks=num_comm_blocks,
        comm_s=COLLECTIVE_BYTES / machine.link.bytes_per_s / link,
    )  # fmt: skip


def picture(found: Mapping[int, list[Row]], images: Path) -> None:
    """TimeRatio over thread blocks, in the shape of the paper's figure, on its GPUs: predicted."""
    pairs = swept(found)
    here = {p.sharing.num_comm_blocks: p for p in pairs if p.fitted and "64x64x32" in p.label}
    if len(here) < len(NCCL):
        return
    constants = fit([p for p in pairs if p.fitted])
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in GPUS:
        machine = presets.preset(name)
        panel = panels.setdefault(machine.device.name, {})
        for collective, (_, count) in NCCL.items():
            pair = elsewhere(machine, collective, here[count])
            for priority in (False, True):
                curve = f"cb + {collective.replace('_', '-')}" + ", priority" * priority
                panel[curve] = [
                    (blocks, time_ratio(regridded(pair, blocks, constants),
                                        Setting(None, priority), constants))
                    for blocks in (2**p for p in range(4, 21))
                ]  # fmt: skip
    axis = Axis("thread blocks of the matmul", "TimeRatio: overlapped / sequential",
                x_text=_power,
                y_text="{:.2f}".format, log_y=False, at_one=True)  # fmt: skip
    curves(panels, images / "sharing-predicted.svg", axis,
           title="Predicted, not measured: priority helps once blocks come and go",
           source="Model fitted on "
                  f"{place([r for p in pairs for r in p.rows])}; peaks of datasheets")  # fmt: skip


def _power(x: float) -> str:
    """Every fourth power of two."""
    power = int(log2(x))
    return "" if power % 4 else f"2^{power}"


def predicted(_: Mapping[int, list[Row]]) -> str:
    """The picture, and what it takes for granted."""
    return f"{ASSUMED}\n\n{shown('sharing-predicted', 'Predicted TimeRatio over thread blocks')}"


SECTIONS: Sequence[Section] = (
    Section("docs/results/sharing.md", "residency", lambda _: scores(fitted_on())),
    Section("docs/results/sharing.md", "predicted-picture", predicted),
)
