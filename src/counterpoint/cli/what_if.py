"""`--what-if` of `counterpoint scale`: what each mechanism would save of a step.

It imports no torch.
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from counterpoint.cli.shared.show import table
from counterpoint.machine import Machine
from counterpoint.scale.assumptions import listed
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric
from counterpoint.scale.prediction import Prediction
from counterpoint.scale.recommenders.dlrm import Dlrm

if TYPE_CHECKING:
    from counterpoint.advice.what_if import Mechanism, WhatIf


def show_what_if(
    model: Model | Dlrm, layout: Layout, fabric: Fabric, machine: Machine, *, as_json: bool
) -> None:
    """A row for each mechanism that saves something, and why the others do not."""
    from counterpoint.advice.what_if import what_if  # not for steps that are only predicted

    found = what_if(model, layout, fabric, machine)
    if as_json:
        print(json.dumps(_facts(found), indent=2))
        return
    step, console = found.step, Console(highlight=False)
    console.print(step.title, markup=False, soft_wrap=True)
    console.print(str(step.memory), markup=False, soft_wrap=True,
                  style="" if step.memory.fits else "bold red")  # fmt: skip
    console.print(f"{found.step.seconds * 1e3:,.3f} ms a step by serial plans, predicted\n")
    console.print(_table(found) if found.ours else "nothing of this library saves any of it")
    if found.without:
        console.print("\nnothing is saved by:")
        for why in dict.fromkeys(each.why for each in found.without):
            names = ", ".join(each.name for each in found.without if each.why == why)
            console.print(f"  {names}: {why}", markup=False, soft_wrap=True)
    last = found.puts
    console.print(f"\n{last.name}, {last.line}: {_of_puts(found)}", markup=False, soft_wrap=True)
    if found.sizes:
        console.print(_sizes(found))
    lines = dict.fromkeys((*step.assumptions, *found.assumptions))
    text = listed(lines, console.width)
    console.print(f"\n{text}", markup=False, style="dim", soft_wrap=True)


def _table(found: "WhatIf") -> Any:
    shown = table("mechanism, each alone", ">saves, ms", ">speedup", "turned on by")
    for each in found.ours:
        shown.add_row(each.name, f"{each.saves_s * 1e3:.3f}", f"{each.speedup:.3f}x", each.line)
    none_s, all_s = found.step.seconds, found.together_s
    saves, speedup = f"{(none_s - all_s) * 1e3:.3f}", f"{none_s / all_s:.3f}x"
    shown.add_row("all of these", saves, speedup, "", style="bold")
    return shown


def _of_puts(found: "WhatIf") -> str:
    last = found.puts
    if last.why:
        return last.why
    alone = f"would save {last.saves_s * 1e3:.3f} ms alone, {last.speedup:.3f}x"
    beyond = f"; {found.beyond_s * 1e3:.3f} ms more than all of these"
    return alone + beyond * bool(found.ours)


def _sizes(found: "WhatIf") -> Any:
    """What sending as it pools would save of a DLRM's step, by its sizes."""
    title = f"\nshares of a step that are saved; GPU-initiated: {found.puts.line}"
    columns = ">step, ms", ">ours", ">GPU-initiated", ">of forward", ">at most"
    shown = table("sizes", *columns, title=title)
    for each in found.sizes:
        shares = (each.ours, each.puts, each.of_forward, each.bound)
        shown.add_row(each.label, f"{each.seconds * 1e3:.3f}",
                      *(f"{share:.1%}" for share in shares))  # fmt: skip
    return shown


def _facts(found: "WhatIf") -> dict[str, Any]:
    """All of it as JSON takes it; what is not in this library is last."""

    def of(each: "Mechanism", *, ours: bool) -> dict[str, Any]:
        return asdict(each) | {"in_library": ours}

    mechanisms = [of(each, ours=True) for each in (*found.ours, *found.without)]
    return {
        "step": facts(found.step), "together_s": found.together_s,
        "mechanisms": [*mechanisms, of(found.puts, ours=False) | {"beyond_s": found.beyond_s}],
        "sizes": [each._asdict() for each in found.sizes],
        "assumptions": list(found.assumptions),
    }  # fmt: skip


def facts(found: Prediction) -> dict[str, Any]:
    """A prediction as JSON takes it."""
    return {
        "model": asdict(found.model), "layout": asdict(found.layout), "machine": found.machine,
        "overlap": found.overlap, "seconds": found.seconds, "parts": found.parts,
        "items": found.items, "unit": found.unit, "flop_per_s": found.flop_per_s,
        "memory": found.memory.as_dict(), "notes": list(found.notes),
        "assumptions": list(found.assumptions),
    }  # fmt: skip
