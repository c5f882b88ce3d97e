"""Stages of a user's own: a plan of opaque steps, which `resources.Pipeline` makes.

It is no operator: nobody but its user knows what it computes, so it has no families, and the proof
of its plan says that no two of its stages race.
"""

from counterpoint.plan.operation import Operation
from counterpoint.schedules.sizes import check_plain

OPERATION = Operation(
    operands=lambda p: (),
    definition=lambda p, rank: iter(()),
    alone=lambda p: (),
    families=(),
    candidates=lambda p: (),
    collectives=(),
    check=check_plain,
    moved=lambda p: (0, 0),
    matmuls=lambda p: (),
    overlapped=lambda p, copy_longer: "",
)
