"""Where the names of points go on a picture: beside them, none over another, none over a line.

All in inches from the lower left corner of a square field.
"""

from collections.abc import Sequence
from math import ceil, hypot, inf
from typing import NamedTuple

LABEL_STEP, LABEL_HEIGHT, LABEL_PAD, LABEL_APART = 0.06, 0.16, 0.05, 0.12


class Box(NamedTuple):
    """A rectangle on the field, in inches from its lower left corner."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right
            and self.bottom < other.top and other.bottom < self.top
        )  # fmt: skip

    def distance(self, x: float, y: float) -> float:
        near_x = min(max(x, self.left), self.right)
        return hypot(near_x - x, min(max(y, self.bottom), self.top) - y)

    def docked(self, x: float, y: float) -> "Line":
        """Return the line from (x, y) to the box: to the middle of a side, else straight to it."""
        if self.left <= x <= self.right:
            return Line(x, y, x, self.bottom if y < self.bottom else self.top)
        return Line(x, y, self.left if x < self.left else self.right, (self.bottom + self.top) / 2)


class Line(NamedTuple):
    """A straight line on the field, in inches."""

    x: float
    y: float
    end_x: float
    end_y: float

    def crosses(self, box: Box) -> bool:
        """Say whether some of it is inside of the box; its ends may touch the box."""
        num_parts = ceil(hypot(self.end_x - self.x, self.end_y - self.y) / (LABEL_HEIGHT / 4)) or 1
        shares = [part / num_parts for part in range(1, num_parts)]
        return any(
            box.left < self.x + share * (self.end_x - self.x) < box.right
            and box.bottom < self.y + share * (self.end_y - self.y) < box.top
            for share in shares
        )


def free_box(
    at: tuple[float, float], width_in: float, edge_in: float, *, above: bool,
    markers: Sequence[tuple[float, float]], boxes: Sequence[Box], lines: Sequence[Line],
) -> Box | None:  # fmt: skip
    """Return the best box of this width that is free of names and lines, or None.

    Near the point is good. To cover a marker costs an inch, and so does it to leave the point's
    side of the diagonal and to cover the diagonal.

    Args:
        at: The point that is named.
        width_in: Of the name.
        edge_in: Of the square field.
        above: Whether the point is above the diagonal.
        markers: All points.
        boxes, lines: What is there already.
    """
    x, y = at
    steps = range(-ceil(edge_in / LABEL_STEP), ceil(edge_in / LABEL_STEP))
    lefts = [left for i in steps if (left := x + LABEL_APART + i * LABEL_STEP) > LABEL_PAD]
    bottoms = [low for i in steps if (low := y + (i * LABEL_STEP - LABEL_HEIGHT / 2)) > LABEL_PAD]
    boxes_inside = [
        Box(left, low, left + width_in, low + LABEL_HEIGHT)
        for left in lefts
        for low in bottoms
        if max(left + width_in, low + LABEL_HEIGHT) < edge_in - LABEL_PAD
    ]
    best, best_in = None, inf
    for box in sorted(boxes_inside, key=lambda box: box.distance(x, y)):
        # from here on all are further
        if box.distance(x, y) >= best_in:
            break
        line = box.docked(x, y)
        if any(box.overlaps(other) or line.crosses(other) for other in boxes):
            continue
        if any(other.crosses(box) for other in lines):
            continue
        covered = sum(box.distance(*place) < LABEL_APART - 0.01 for place in markers)
        over, under = box.bottom > box.right, box.top < box.left
        stays = over if above else under
        cost_in = box.distance(x, y) + covered + (not stays) + (not over and not under)
        if cost_in < best_in:
            best, best_in = box, cost_in
    return best
