"""What is computed: the facts of one call, equal on all ranks.

Legend: M rows in all (the gathered or the scattered dim), N and K as one rank sees them; of a
gradient, those of the forward call.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from counterpoint.errors import InputError

Op = Literal[
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "all_gather_matmul_wgrad",
    "all_gather_matmul_backward",
    "matmul_reduce_scatter_backward",
]
DType = Literal["bfloat16", "float16", "float32"]

OPS: tuple[str, ...] = get_args(Op)
FORWARD: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Problem:
    """One distributed matmul, or the gradients of one.

    all_gather_matmul:     y[M, N] = the x_r[rows[r], K] of all ranks, one under the other, times
                           w[K, N], plus bias[N]; with `splits` one y_i for each w_i[K, splits[i]]
    matmul_reduce_scatter: y_r[rows[r], N] = own rows of the sum over ranks of x_s[M, K] w_s[K, N],
                           plus bias[N], added once

    With dy the gradient of y, and wt[N, K] the transposed weight:

    all_gather_matmul_wgrad:        dw[K, N] = (the x_r[rows[r], K], one under the other)^T dy[M, N]
    all_gather_matmul_backward:     dx_r[rows[r], K] = own rows of the sum over ranks of
                                    dy_s[M, N] wt_s[N, K], and dw as all_gather_matmul_wgrad
    matmul_reduce_scatter_backward: dx[M, K] = the dy_r[rows[r], N], one under the other, times
                                    wt[N, K], and dw[K, N] = x[M, K]^T (the dy_r, as in dx)

    Args:
        op: the operator.
        m: rows over all ranks.
        n: columns of one rank's weight.
        k: contracted size on one rank.
        ranks: number of ranks of the group.
        dtype: of x, w and y; products are accumulated in fp32.
        rows: rows of each rank; empty means equal, and then `ranks` must divide `m`.
        bias: whether a bias row is added; of forward ops.
        scratch_bytes_limit: most bytes of scratch and symmetric memory that a plan may use on a
            rank; 0 means no limit.
        splits: columns of each weight of an all_gather_matmul of several; empty means one weight.

    Raises:
        InputError: a size is negative, `rows` does not add up to `m` or `splits` to `n`, or the op
            takes no bias or one weight only.
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
    splits: tuple[int, ...] = ()

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
        if self.bias and self.op not in FORWARD:
            raise InputError(self.op, "bias", want="False: a gradient adds none", got=self.bias)
        object.__setattr__(self, "splits", tuple(self.splits))
        self._check_splits()

    def _check_splits(self) -> None:
        splits = self.splits
        if splits and (self.op != "all_gather_matmul" or self.bias):
            want = "empty: only all_gather_matmul without a bias takes several weights"
            raise InputError(self.op, "splits", want=want, got=splits)
        if splits and (sum(splits) != self.n or min(splits) < 0):
            want = f"counts >= 0 that add up to {self.n}"
            raise InputError(self.op, "splits", want=want, got=splits)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each rank's block, and M at the end: [ranks + 1]."""
        return tuple(accumulate(self.rows, initial=0))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of every operand."""
        return ITEM_BYTES[self.dtype]

    @property
    def flop(self) -> int:
        """Floating-point operations of one rank: 2 M N K for each matmul."""
        matmuls = 2 if self.op.endswith("_backward") else 1
        return matmuls * 2 * self.m * self.n * self.k

    @property
    def link_bytes(self) -> int:
        """Bytes that the busiest rank receives.

        Of what is gathered, every shard but its own; of what is scattered, from each peer a partial
        of its own rows.
        """
        gathered, scattered = self._columns
        rows = ((self.m - own) * gathered + (self.ranks - 1) * own * scattered for own in self.rows)
        return max(rows) * self.item_bytes

    @property
    def _columns(self) -> tuple[int, int]:
        """Columns of what is gathered and of what is scattered."""
        match self.op:
            case "matmul_reduce_scatter":
                return 0, self.n
            case "all_gather_matmul_backward":
                return self.k, self.k
            case "matmul_reduce_scatter_backward":
                return self.n, 0
            case _:
                return self.k, 0

    def __str__(self) -> str:
        even = len(set(self.rows)) == 1
        rows = "" if even else f" rows {'/'.join(map(str, self.rows))}"
        bias = " +bias" if self.bias else ""
        columns = "+".join(map(str, self.splits or (self.n,)))
        shape = f"M{self.m} N{columns} K{self.k}"
        return f"{self.op} {shape} {self.dtype}{bias} on {self.ranks} ranks{rows}"
