"""What ranks compare of a call beside its operands: what stands around that which runs."""

from typing import NamedTuple


class Around(NamedTuple):
    """Of a call that gathers or scatters a dim, which comes first where it runs.

    Args:
        dim: that is gathered or scattered.
        asks: operands of which a gradient is asked for, see `asked_of`.
    """

    dim: int = 0
    asks: str = ""

    def words(self, dim: str) -> tuple[tuple[str, int | str], ...]:
        """Their names, of which `dim` is one, and what they are."""
        return (dim, self.dim), ("requires_grad", self.asks or "nothing")
