"""`--serve` of `counterpoint scale` and `counterpoint advise`: a model that is served.

It imports no torch.
"""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from counterpoint.cli.shared.show import table
from counterpoint.machine import Machine
from counterpoint.scale.operators import OVERLAPS
from counterpoint.scale.serving import COMMUNICATION, Serving, serve

WORTH_IT = 0.01  # of the time of a token or of a prompt: with less to win, the answer is no
LINE = "torch.compile(model, options=cp.compile_options())"


def show_serving(
    model: str, machine: Machine, *, tp: int, sequences: int, length: int, as_json: bool
) -> None:
    """Predict it for each way to communicate, and say whether there is anything to win."""
    found = [
        serve(model, machine, tp=tp, sequences=sequences, length=length or 2048, overlap=mode)
        for mode in OVERLAPS
    ]
    if as_json:
        print(json.dumps([_facts(each) for each in found], indent=2))
        return
    first, console = found[0], Console(highlight=False)
    how = "as measured" if machine.measured else "derived from the datasheet: not measured"
    console.print(f"{first.title}; rates {how}", markup=False, soft_wrap=True)
    console.print(str(first.memory), markup=False, soft_wrap=True,
                  style="" if first.memory.fits else "bold red")  # fmt: skip
    console.print(f"room for {first.most_sequences:,} such sequences", soft_wrap=True)
    console.print(verdict(found), markup=False, style="bold", soft_wrap=True)
    shown = table("ms", *(f">{each.overlap}" for each in found), "")
    for name, seconds in (
        ("to the first token", [each.first_s for each in found]),
        ("a token of each sequence", [each.token_s for each in found]),
    ):
        shown.add_row(name, *(f"{each * 1e3:.2f}" for each in seconds), style="bold")
        shown.add_row("  speedup over none", *(f"{seconds[0] / each:.2f}x" for each in seconds))
    rates = (f"{first.sequences / each.token_s:,.0f}" for each in found)
    shown.add_row("tokens/s", *rates)
    for what, parts in (
        ("first: ", [e.first for e in found]),
        ("token: ", [e.token for e in found]),
    ):
        for name in parts[0]:
            values = [each.get(name, 0.0) * 1e3 for each in parts]
            if max(values) >= 0.005:
                shown.add_row(f"{what}{name}", *(f"{value:.2f}" for value in values))
    console.print(shown)


def verdict(found: list[Serving]) -> str:
    """In a sentence: what ours would gain, or that there is nothing to gain."""
    none, ours = found[0], found[1]
    if not none.memory.fits:
        return "It does not fit: the times below are those of GPUs with more memory."
    shares = [each[0] / each[1] for each in (
        (none.first.get(COMMUNICATION, 0.0), none.first_s),
        (none.token.get(COMMUNICATION, 0.0), none.token_s),
    )]  # fmt: skip
    gains = none.first_s / ours.first_s, none.token_s / ours.token_s
    if max(gains) < 1 + WORTH_IT:
        return (f"Nothing to gain: communication is {shares[0]:.0%} of a prompt's time and "
                f"{shares[1]:.0%} of a token's.")  # fmt: skip
    named = zip(gains, ("to the first token", "a token"), strict=True)
    said = ", ".join(f"{gain:.2f}x {what}" for gain, what in named if gain >= 1 + WORTH_IT)
    return f"To gain, predicted: {said}, by {LINE}"


def _facts(found: Serving) -> dict[str, Any]:
    """A prediction as JSON takes it."""
    return {
        "model": asdict(found.model), "tp": found.tp, "sequences": found.sequences,
        "length": found.length, "machine": found.machine, "overlap": found.overlap,
        "first_s": found.first_s, "token_s": found.token_s, "first": dict(found.first),
        "token": dict(found.token), "memory": found.memory.as_dict(),
        "most_sequences": found.most_sequences,
    }  # fmt: skip
