"""The tile by which experts multiply in one kernel: for its launch, and for its prediction."""

from dataclasses import dataclass

# rows of an expert. Few are one block of rows, and reading the weight is all the time; of many the
# matmul is, which fewer senders and loads in flight leave more to
FEW_ROWS, MANY_ROWS = 96, 512
LONG_K = 4096  # from which a tile's own stores matter little


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time.

    Args:
        block_m, block_n, block_k: rows and columns of y, and how much of K is loaded at a time.
        stages: loads in flight.
        num_warps: of a program.
        group_m: blocks of rows that share their columns of w in L2.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    num_warps: int = 8
    group_m: int = 8

    @property
    def constants(self) -> tuple[int, ...]:
        """As the kernels take them."""
        return self.block_m, self.block_n, self.block_k, self.group_m, self.stages


def tile_of(rows: int, k: int, n: int, experts: int, *, back: bool) -> Tile:
    """The tile for `rows` in all of so many experts on a rank, by measurements on 4 H200."""
    each = rows / max(experts, 1)
    if each <= FEW_ROWS:
        return Tile(64, 256, 64, 4, 4)
    few = rows * n < 132 * 128 * 256
    if back and (k < LONG_K or few):
        return Tile(128, 128, 64, 4, 4)
    return Tile(stages=4 if back or each < MANY_ROWS else 3)
