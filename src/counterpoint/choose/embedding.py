"""Which way embedding bags take, and why: one kernel or three passes, predicted."""

from dataclasses import dataclass

from counterpoint.choose.choice import Candidate
from counterpoint.embedding_problem import EmbeddingProblem
from counterpoint.machine import Machine
from counterpoint.model.embedding import Predicted, predict


@dataclass(frozen=True)
class EmbeddingChoice:
    """The way chosen for embedding bags, and both with their times.

    Args:
        problem: what is computed.
        machine: where.
        plan: "fused" or "serial", as the operator's `plan=` takes it.
        table: both ways, the faster first.
        predicted: seconds of both, and of their parts.
    """

    problem: EmbeddingProblem
    machine: Machine
    plan: str
    table: tuple[Candidate, ...]
    predicted: Predicted

    @property
    def seconds(self) -> float:
        """Time of the way chosen."""
        return next(c.seconds for c in self.table if c.spec == self.plan)

    @property
    def serial_s(self) -> float:
        """Time of the serial way."""
        return self.predicted.serial_s

    def explain(self) -> str:
        """The choice in words and a table: times, their parts, why not the other."""
        parts, us = self.predicted, 1e6
        known = "measured" if self.machine.measured else "datasheet"
        lines = [
            f"{self.problem}",
            f"on {self.machine.name} ({known} rates: {self.machine.source}), in a CUDA graph",
            f"lookup alone {parts.lookup_s * us:.0f} us, all-to-all alone "
            f"{parts.exchange_s * us:.0f} us, storing rows to peers {parts.store_s * us:.0f} us",
            f"chosen predicted: {self.plan}, {self.seconds * us:.0f} us, "
            f"{self.serial_s / self.seconds:.2f}x serial",
            "",
            f"{'plan':6}        us  serial /  basis        verdict",
        ]
        lines += [
            f"{c.spec:6}  {c.seconds * us:8.1f}  {self.serial_s / c.seconds:8.2f}  {c.basis:11}  "
            f"{c.verdict}"
            for c in self.table
        ]
        return "\n".join(lines)


def choose_embedding(problem: EmbeddingProblem, machine: Machine) -> EmbeddingChoice:
    """Choose as the operator's `plan="auto"` does at the first call of such bags."""
    guess = predict(problem, machine)
    plan = "fused" if guess.fused else "serial"
    least = f"not {guess.margin - 1:.0%} faster than serial"
    why = {"fused": least, "serial": "slower"} | {plan: "chosen"}
    if problem.ranks == 1:
        why["fused"] = "the same kernel: no other rank"
    times = {"serial": guess.serial_s, "fused": guess.fused_s}
    table = [Candidate(spec, s, "closed form", why[spec]) for spec, s in times.items()]
    table.sort(key=lambda c: c.seconds)
    return EmbeddingChoice(problem, machine, plan, tuple(table), guess)
