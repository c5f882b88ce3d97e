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
    "all_to_all_matmul",
    "matmul_all_to_all",
    "pipeline",
]
DType = Literal["bfloat16", "float16", "float32"]

EXPERTS: tuple[Op, ...] = ("all_to_all_matmul", "matmul_all_to_all")
OPS: tuple[Op, ...] = tuple(op for op in get_args(Op) if op not in (*EXPERTS, "pipeline"))
FORWARD: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def dtype_of(op: str, dtype: object) -> DType:
    """The name of a dtype, also of torch's, which is not imported here."""
    for name in get_args(DType):
        if str(dtype) in (name, f"torch.{name}"):
            return name
    raise InputError(op, "dtype", want=f"one of {', '.join(ITEM_BYTES)}", got=repr(dtype))


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

    With experts, `experts` of them on each rank, and equally many rows, c, for each pair of a rank
    and an expert: M = ranks * experts * c is what a rank sends in all, itself included, and what it
    gets; block d of x is for rank d. w[experts * K, N] has a rank's experts one under the other:

    all_to_all_matmul: y[M, N] = for each expert of this rank the rows that all ranks have for it,
                       rank 0 first, times its weight[K, N]
    matmul_all_to_all: the way back: x lies as that y does, and rows go to where they were in x

    A "pipeline" is stages of the user's own, of which nothing is known here but the ranks.

    Args:
        op: the operator.
        m: rows over all ranks; with experts, rows of x on each.
        n: columns of one rank's weight.
        k: contracted size on one rank.
        ranks: number of ranks of the group.
        dtype: of x, w and y, or torch's of that name; products are accumulated in fp32.
        rows: rows of each rank; empty means equal, and then `ranks` must divide `m`.
        bias: whether a bias row is added; of forward ops.
        scratch_bytes_limit: most bytes of scratch and symmetric memory that a plan may use on a
            rank; 0 means no limit.
        splits: columns of each weight of an all_gather_matmul of several; empty means one weight.
        experts: of one rank; 0 for ops without.

    Raises:
        InputError: a size is negative, `rows` does not add up to `m` or `splits` to `n`, the op
            takes no bias or one weight only, or rows are not equal for all experts.
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
    experts: int = 0

    def __post_init__(self) -> None:
        if self.op not in get_args(Op):
            want = f"one of {', '.join(get_args(Op))}"
            raise InputError("Problem", "op", want=want, got=repr(self.op))
        object.__setattr__(self, "dtype", dtype_of(self.op, self.dtype))
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
            who = "experts add" if self.op in EXPERTS else "a gradient adds"
            raise InputError(self.op, "bias", want=f"False: {who} none", got=self.bias)
        object.__setattr__(self, "splits", tuple(self.splits))
        self._check_splits()
        self._check_experts()

    def _check_splits(self) -> None:
        splits = self.splits
        if splits and (self.op != "all_gather_matmul" or self.bias):
            want = "empty: only all_gather_matmul without a bias takes several weights"
            raise InputError(self.op, "splits", want=want, got=splits)
        if splits and (sum(splits) != self.n or min(splits) < 0):
            want = f"counts >= 0 that add up to {self.n}"
            raise InputError(self.op, "splits", want=want, got=splits)

    def _check_experts(self) -> None:
        if (self.experts > 0) != (self.op in EXPERTS) or self.experts < 0:
            want = "1 or more" if self.op in EXPERTS else "0: the op has none"
            raise InputError(self.op, "experts", want=want, got=self.experts)
        if self.experts and (len(set(self.rows)) > 1 or self.rows[0] % self.experts):
            want = f"equal, and a multiple of the {self.experts} experts of a rank"
            raise InputError(self.op, "rows", want=want, got=self.rows)

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
        of its own rows, or with experts a block.
        """
        gathered, scattered = self._columns
        rows = ((self.m - own) * gathered + (self.ranks - 1) * own * scattered for own in self.rows)
        return max(rows) * self.item_bytes

    @property
    def _columns(self) -> tuple[int, int]:
        """Columns of what is gathered and of what is scattered."""
        match self.op:
            case "matmul_reduce_scatter" | "matmul_all_to_all":
                return 0, self.n
            case "all_to_all_matmul":
                return 0, self.k
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
        shape += f" experts {self.experts}" if self.experts else ""
        return f"{self.op} {shape} {self.dtype}{bias} on {self.ranks} ranks{rows}"
