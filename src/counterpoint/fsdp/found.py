"""What is found of a model, group by group, and what is done with each."""

from dataclasses import dataclass, field

from counterpoint.fsdp.plan_shards import Predicted


@dataclass
class FoundGroup:
    """One parameter group of a model, and what is done with it.

    Attributes:
        name: of its module.
        parameters: how many, and `numel` elements.
        why: why FSDP2 gathers it itself, or "".
        why_scatter: why FSDP2 reduces its gradients itself, or "".
        kept: whether its parameters have memory of their own, rather than a slot.
        predicted: seconds in place and by torch; None: nothing is known of the machine.
        notes: what else is to be said.
    """

    name: str
    parameters: int
    numel: int
    why: str = ""
    why_scatter: str = ""
    kept: bool = False
    predicted: Predicted | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.name}: {self.parameters} parameters, {self.numel / 1e6:.2f} M"
        if self.why:
            return f"{what}: left to torch, {self.why}"
        where = "gathered in place, kept" if self.kept else "gathered in place"
        if not self.why_scatter:
            scattered = "gradients pushed in place, summed in fp32"
        elif self.why_scatter == "frozen":
            scattered = "frozen: no gradients"
        else:
            scattered = f"gradients left to torch, {self.why_scatter}"
        predicted = [f"predicted alone: {self.predicted}"] if self.predicted else []
        return "; ".join([f"{what}: {where}", scattered, *predicted, *self.notes])
