"""What is computed: the facts of one call, equal on all ranks.

Legend: M rows in all (the gathered or the scattered dim), N and K as one rank sees them; of a
gradient, those of the forward call.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import index
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
]
DType = Literal["bfloat16", "float16", "float32"]

EXPERTS: tuple[Op, ...] = ("all_to_all_matmul", "matmul_all_to_all")
OPS: tuple[Op, ...] = tuple(op for op in get_args(Op) if op not in EXPERTS)
EMBEDDING = "embedding_bag_all_to_all"  # an EmbeddingProblem
FORWARD: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def _dtype_of(op: str, dtype: object) -> DType:
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
        object.__setattr__(self, "dtype", _dtype_of(self.op, self.dtype))
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


@dataclass(frozen=True, slots=True)
class EmbeddingProblem:
    """One embedding_bag_all_to_all: table-wise shards, each row to the rank that owns its bag.

    Args:
        dims: columns of each rank's tables.
        batch: bags of each rank; or of all of them, if each has as many.
        indices: of each rank's tables in all bags; where they are spread is not asked.
        dtype: of tables and output, or torch's of that name; sums are in fp32.
        out: the output is memory that peers write to (`PooledOutputs`); else it is copied.

    Raises:
        InputError: no count for each rank, one that is negative, or no tables at all.
    """

    dims: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...] | int
    indices: tuple[int, ...]
    dtype: DType = "bfloat16"
    out: bool = False

    def __post_init__(self) -> None:
        op = "EmbeddingProblem"
        try:
            dims = tuple(tuple(map(index, each)) for each in self.dims)
        except TypeError:  # no sequences, or not of whole numbers
            dims = ()
        ranks = len(dims)
        if not any(dims) or min(min(each, default=1) for each in dims) < 1:
            want = "columns >= 1 of the tables of each rank, some at least"
            fix = "of two ranks ((64, 64), (64,)), for example"
            raise InputError(op, "dims", want=want, got=self.dims, fix=fix)
        batch = self.batch
        if isinstance(batch, int):
            if batch % ranks:
                want = f"a multiple of {ranks} ranks, or a count for each"
                raise InputError(op, "batch", want=want, got=batch)
            batch = (batch // ranks,) * ranks
        batch = self._counts("batch", batch, ranks)
        indices = self._counts("indices", self.indices, ranks)
        if any(n and not each for n, each in zip(indices, dims, strict=True)):
            raise InputError(op, "indices", want="0 where a rank has no tables", got=indices)
        object.__setattr__(self, "dtype", _dtype_of(op, self.dtype))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "indices", indices)

    @staticmethod
    def _counts(name: str, given: object, ranks: int) -> tuple[int, ...]:
        try:
            counts = tuple(map(index, given))  # type: ignore[call-overload]
        except TypeError:  # no sequence, or not of whole numbers
            counts = ()
        if len(counts) != ranks or min(counts) < 0:
            raise InputError("EmbeddingProblem", name, want=f"{ranks} counts >= 0", got=given)
        return counts

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return len(self.dims)

    @property
    def bags(self) -> tuple[int, ...]:
        """Of each rank."""
        assert not isinstance(self.batch, int)
        return self.batch

    def read_bytes(self, rank: int) -> float:
        """What a rank's tables are read for: rows, as wide as its tables in the mean, and indices.

        Int64 indices, and where each bag begins.
        """
        tables, item = len(self.dims[rank]), ITEM_BYTES[self.dtype]
        row = sum(self.dims[rank]) / tables * item if tables else 0.0
        return self.indices[rank] * (row + 8) + sum(self.bags) * tables * 8

    def lookup_bytes(self, rank: int) -> int:
        """The pooled rows of a rank's tables, for all bags."""
        return sum(self.bags) * sum(self.dims[rank]) * ITEM_BYTES[self.dtype]

    def sent_bytes(self, rank: int) -> int:
        """Those of them for other ranks."""
        others = sum(self.bags) - self.bags[rank]
        return others * sum(self.dims[rank]) * ITEM_BYTES[self.dtype]

    def received_bytes(self, rank: int) -> int:
        """The pooled rows of others' tables, for a rank's bags."""
        columns = sum(map(sum, self.dims)) - sum(self.dims[rank])
        return self.bags[rank] * columns * ITEM_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Of the rank that has most bags."""
        return max(self.bags) * sum(map(sum, self.dims)) * ITEM_BYTES[self.dtype]

    def mean_bag(self, rank: int) -> float:
        """Indices of a bag, in the mean of a rank's tables."""
        return self.indices[rank] / max(sum(self.bags) * len(self.dims[rank]), 1)

    def __str__(self) -> str:
        tables = "/".join(str(len(each)) for each in self.dims)
        pooling = "/".join(f"{self.mean_bag(rank):.3g}" for rank in range(self.ranks))
        where = "into outputs of its own" if self.out else "copied"
        return (
            f"{EMBEDDING} {tables} tables, {sum(map(sum, self.dims))} columns, "
            f"{sum(self.bags)} bags of {pooling} indices, {self.dtype} on {self.ranks} ranks, "
            f"{where}"
        )
