"""What is computed: the facts of one call, equal on all ranks.

Legend: M rows in all (the gathered or the scattered dim), N and K as one rank sees them.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from counterpoint.errors import InputError

Op = Literal["all_gather_matmul", "matmul_reduce_scatter"]
DType = Literal["bfloat16", "float16", "float32"]

OPS: tuple[str, ...] = get_args(Op)
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Problem:
    """One distributed matmul.

    all_gather_matmul:     y[M, N] = the x_r[rows[r], K] of all ranks, one under the other, times
                           w[K, N], plus bias[N]
    matmul_reduce_scatter: y_r[rows[r], N] = own rows of the sum over ranks of x_s[M, K] w_s[K, N],
                           plus bias[N], added once

    Args:
        op: the operator.
        m: rows over all ranks.
        n: columns of one rank's weight.
        k: contracted size on one rank.
        ranks: number of ranks of the group.
        dtype: of x, w and y; products are accumulated in fp32.
        rows: rows of each rank; empty means equal, and then `ranks` must divide `m`.
        bias: whether a bias row is added.
        scratch_bytes_limit: most bytes of scratch and symmetric memory that a plan may use on a
            rank; 0 means no limit.

    Raises:
        InputError: a size is negative, or `rows` does not add up to `m`.
    """

    op: Op
    m: int
    n: int
    k: int
    ranks: int
    dtype: DType = "bfloat16"
    rows: tuple[int, ...] = ()
    bias: bool = False
    scratch_bytes_limit: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InputError("Problem", "op", want=f"one of {', '.join(OPS)}", got=repr(self.op))
        if self.dtype not in ITEM_BYTES:
            want = f"one of {', '.join(ITEM_BYTES)}"
            raise InputError(self.op, "dtype", want=want, got=repr(self.dtype))
        if self.ranks < 1:
            raise InputError(self.op, "ranks", want="at least 1", got=self.ranks)
        for name in ("m", "n", "k", "scratch_bytes_limit"):
            if getattr(self, name) < 0:
                raise InputError(self.op, name, want="0 or more", got=getattr(self, name))
        rows = tuple(self.rows)
        if not rows:
            if self.m % self.ranks:
                want = f"a multiple of the {self.ranks} ranks"
                fix = "pass rows=, one count per rank"
                raise InputError(self.op, "m", want=want, got=self.m, fix=fix)
            rows = (self.m // self.ranks,) * self.ranks
        if len(rows) != self.ranks or sum(rows) != self.m or min(rows) < 0:
            want = f"{self.ranks} counts >= 0 that add up to {self.m}"
            raise InputError(self.op, "rows", want=want, got=rows)
        object.__setattr__(self, "rows", rows)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each rank's block, and M at the end: [ranks + 1]."""
        return tuple(accumulate(self.rows, initial=0))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of x, w and y."""
        return ITEM_BYTES[self.dtype]

    @property
    def flop(self) -> int:
        """Floating-point operations of one rank: 2 M N K."""
        return 2 * self.m * self.n * self.k

    @property
    def link_bytes(self) -> int:
        """Bytes that the busiest rank receives: every shard (or partial) but its own."""
        if self.op == "all_gather_matmul":
            return (self.m - min(self.rows)) * self.k * self.item_bytes
        return (self.ranks - 1) * max(self.rows) * self.n * self.item_bytes

    def __str__(self) -> str:
        even = len(set(self.rows)) == 1
        rows = "" if even else f" rows {'/'.join(map(str, self.rows))}"
        bias = " +bias" if self.bias else ""
        shape = f"M{self.m} N{self.n} K{self.k}"
        return f"{self.op} {shape} {self.dtype}{bias} on {self.ranks} ranks{rows}"
