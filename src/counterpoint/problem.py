"""What is computed: the facts of one call, equal on all ranks.

What one operator makes of these facts stands in its declaration alone: operators.py lists those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from counterpoint.errors import InputError
from counterpoint.operators import declaration, op_names
from counterpoint.ranges import check, plain

if TYPE_CHECKING:  # plan/ is made of problems
    from counterpoint.plan.operation import Operation

DType = Literal["bfloat16", "float16", "float32"]
Counts = Literal["equal", "host", "device", "routed", "device_routed"]
Norm = Literal["", "rms", "layer"]
Quantized = Literal["", "tensor", "rows"]
Scales = Literal["", "tensor", "row", "block"]
Float8 = Literal["", "float8_e4m3fn", "float8_e5m2"]
Activation = Literal["", "relu", "silu", "gelu", "gelu_tanh", "relu_mul", "silu_mul", "gelu_mul",
                     "gelu_tanh_mul"]  # fmt: skip
GATED = "_mul"  # behind the name of an activation: times the product of a second weight
W_DTYPE: Float8 = "float8_e4m3fn"  # of a w with scales: tensor cores multiply no two float8_e5m2
SCALE_BLOCK = 128  # numbers of K, and columns of w, that share a scale where scales are of blocks
ITEM_BYTES: Mapping[str, int] = {
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8,
}  # fmt: skip


def dtype_of(op: str, dtype: object) -> DType:
    """The name of a dtype, also of torch's, which is not imported here."""
    for name in get_args(DType):
        if str(dtype) in (name, f"torch.{name}"):
            return name
    raise InputError(op, "dtype", want=f"one of {', '.join(get_args(DType))}", got=repr(dtype))


@dataclass(frozen=True, slots=True)
class Problem:
    """One distributed operator on its tensors, or the gradients of one.

    all_gather_matmul:     y[M, N] = the x_r[rows[r], K] of all ranks, one under the other, times
                           w[K, N], plus bias[N]; with `splits` one y_i for each w_i[K, splits[i]];
                           or the activation of that, where it is gated y[M, N/2] of two weights
    matmul_reduce_scatter: y_r[rows[r], N] = own rows of the sum over ranks of x_s[M, K] w_s[K, N],
                           plus bias[N], added once; with `splits` each x w is the sum of
                           x_i[M, splits[i]] w_i[splits[i], N]
    matmul_all_reduce:     y[M, N] = the sum over ranks of x_s[M, K] w_s[K, N], plus bias[N], added
                           once, on every rank

    With dy the gradient of y, and wt[N, K] the transposed weight:

    all_gather_matmul_wgrad:        dw[K, N] = (the x_r[rows[r], K], one under the other)^T dy[M, N]
    all_gather_matmul_backward:     dx_r[rows[r], K] = own rows of the sum over ranks of
                                    dy_s[M, N] wt_s[N, K], and dw as all_gather_matmul_wgrad;
                                    both with `splits` for weights of so many columns
    matmul_reduce_scatter_backward: dx[M, K] = the dy_r[rows[r], N], one under the other, times
                                    wt[N, K], and dw[K, N] = x[M, K]^T (the dy_r, as in dx)

    With `experts` experts on each rank, and equally many rows, c, for each pair of a rank and an
    expert: M = ranks * experts * c is what a rank sends in all, itself included, and what it gets;
    block d of x is for rank d. w[experts * K, N] has a rank's experts one under the other:

    all_to_all_matmul: y[M, N] = for each expert of this rank the rows that all ranks have for it,
                       rank 0 first, times its weight[K, N]
    matmul_all_to_all: the combine: x lies as that y does, and rows go to where they were in x

    Where counts differ they are an operand, `counts`[ranks, ranks * experts], rows of each rank for
    each expert, and M is the most rows that a rank has on either side.

    With `tables` of each rank, whose rows are pooled for the M bags of all ranks:

    embedding_bag_all_to_all: y_r[rows[r], N] = the pooled rows of all ranks' tables for the bags of
                              this rank, those of rank 0's tables first

    With heads of `head_dim` columns, and a key and value head for as many query heads on each rank:

    all_gather_attention: y_r[rows[r], N] = softmax(scale q k^T) v of q_r[rows[r], N] and of all
                          ranks' k[M, K] and v[M, K], head by head. Where it is causal, rank r has
                          parts r and 2 ranks - 1 - r of 2 ranks parts of the sequence, and a row
                          attends to itself and those before it
    all_gather_attention_backward: its gradients dq, dk and dv, from dy and the log-sum-exp of rows

    With rows that are normalised, by their RMS or as a LayerNorm:

    all_reduce_norm: h[M, N] = the sum over ranks of x_s[M, N], plus residual[M, N], and y[M, N] =
                     norm(h) * weight[N], plus bias[N] of a LayerNorm, on every rank

    A "pipeline" is stages of the user's own, of which nothing is known here but the ranks.

    Args:
        op: the operator.
        m: rows over all ranks; with experts, and of matmul_all_reduce, rows of x on each; with
            tables the bags of all ranks.
        n: columns of one rank's weight; with tables those of all tables, filled in.
        k: contracted size on one rank.
        ranks: number of ranks of the group.
        islands: groups of equally many neighbouring ranks that reach each other's memory; between
            them there are NICs alone. It divides `ranks`.
        dtype: of x, w and y, or torch's of that name; products are accumulated in fp32. With
            `scales` it is that of y alone, bfloat16.
        rows: rows of each rank; empty means equal, and then `ranks` must divide `m`.
        bias: whether a bias row is added; of forward ops.
        scratch_bytes_limit: most bytes of scratch and symmetric memory that a plan may use on a
            rank; 0 means no limit.
        splits: columns of each weight of an all_gather_matmul of several, and of its gradients;
            contracted size of each product of a matmul_reduce_scatter of several; empty: of one.
        experts: of one rank; 0 for ops without.
        counts: of rows for each expert: all "equal", or an operand that differs from call to call,
            known to the "host" before a call, or to the "device" alone; or "routed", see `Routes`:
            known to the host, and a row of x is a token that may have several experts; or
            "device_routed": likewise, known to the device alone.
        top_k: experts of a token, of routes: M rows by expert are then M / top_k tokens,
            by which times are predicted; 0: not known.
        tables: columns of each rank's tables; empty for ops without.
        indices: of each rank's tables in all bags, by which times are predicted; empty: none known.
        out: whether y is memory that peers write to (`PooledOutputs`), of ops with tables.
        head_dim: columns of a head; 0 for ops without; of an attention the most that divide both
            N and K, up to 128, if it is 0.
        causal: whether rows attend to earlier ones only, of an attention.
        scale: of q k^T; 0 is head_dim^-0.5.
        invariant: the bits of a row do not depend on M, on where the row stands, nor on the plan,
            see `batch_invariant`.
        norm: of ops that have one; "rms" if it is not said.
        residual: whether one is added before the norm.
        quantized: whether y is fp8 (e4m3), by a scale that is given for the whole "tensor", or by
            one of each row, which are a result.
        eps: added to the mean square, of a norm.
        scales: x and w are fp8, and so many of their numbers share an fp32 scale: those of a whole
            "tensor", x's the same on all ranks; of a "row" of x and of a column of w; or of a
            "block": 128 numbers of a row of x, 128x128 of w. "": they have none.
        x_dtype: of x with scales: float8_e4m3fn, as w, or float8_e5m2; filled in.
        activation: of y, of an all_gather_matmul: "relu", "silu", "gelu" or "gelu_tanh", its
            approximation by tanh. With "_mul" behind it is gated: of the product of the first of
            two weights, times that of the second; `splits` are filled in.

    Raises:
        InputError: there is no such op, a field is of another kind or out of its range, `rows` does
            not add up to `m` or `splits` to `n`, or the op has no bias, no experts, one weight
            only, equal rows, no scales, or no activation.
    """

    op: str
    m: int = 0
    n: int = 0
    k: int = 0
    ranks: int = 0
    dtype: DType = "bfloat16"
    rows: tuple[int, ...] = ()
    bias: bool = False
    scratch_bytes_limit: int = 0
    splits: tuple[int, ...] = ()
    experts: int = 0
    counts: Counts = "equal"
    top_k: int = 0
    tables: tuple[tuple[int, ...], ...] = ()
    indices: tuple[int, ...] = ()
    out: bool = False
    head_dim: int = 0
    causal: bool = False
    scale: float = 0.0
    islands: int = 1
    invariant: bool = False
    norm: Norm = ""
    residual: bool = False
    quantized: Quantized = ""
    eps: float = 0.0
    scales: Scales = ""
    x_dtype: Float8 = ""
    activation: Activation = ""

    def __post_init__(self) -> None:
        if declaration(self.op) is None:
            near = get_close_matches(str(self.op), op_names(), 1)
            fix = f"did you mean {near[0]!r}?" if near else ""
            want = f"one of {', '.join(op_names())}"
            raise InputError("Problem", "op", want=want, got=repr(self.op), fix=fix)
        object.__setattr__(self, "dtype", dtype_of(self.op, self.dtype))
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check(self.op, self)
        for name, value in self.operation.filled(self).items():
            object.__setattr__(self, name, value)
        if self.ranks < 1:
            raise InputError(self.op, "ranks", want="at least 1", got=self.ranks)
        if self.ranks % self.islands:
            want = f"a divisor of the {self.ranks} ranks"
            raise InputError(self.op, "islands", want=want, got=self.islands)
        object.__setattr__(self, "rows", self._rows())
        if self.counts not in get_args(Counts) or (self.counts != "equal" and not self.experts):
            want = f"one of {', '.join(get_args(Counts)) if self.experts else 'equal'}"
            raise InputError(self.op, "counts", want=want, got=repr(self.counts))
        every = self.experts * self.ranks if self.by_routes else 0
        if self.top_k > every:
            want = f"at most {every}, all experts" if every else "0 where counts are not routed"
            raise InputError(self.op, "top_k", want=want, got=self.top_k)
        if self.invariant and not self.operation.invariant:
            want = "False: the op has no batch-invariant plans"
            fix = "call it outside of counterpoint.batch_invariant"
            raise InputError(self.op, "invariant", want=want, got=True, fix=fix)
        if self.activation and not self.operation.activations:
            want = "left out: the op has none, or sums over ranks behind its matmuls"
            raise InputError(self.op, "activation", want=want, got=repr(self.activation))
        self.operation.check(self)
        self._check_scales()

    def _check_scales(self) -> None:
        def refuse(name: str, want: str) -> NoReturn:
            raise InputError(self.op, name, want=want, got=repr(getattr(self, name)))

        if not self.scales:
            if self.x_dtype:
                refuse("x_dtype", "left out: x has no scales")
            return
        if not self.operation.scales:
            refuse("scales", "left out: the op has none")
        if not self.x_dtype:
            object.__setattr__(self, "x_dtype", W_DTYPE)
        if self.scales == "block" and self.x_dtype != W_DTYPE:
            refuse("x_dtype", f"{W_DTYPE} with block scales")
        if self.dtype != "bfloat16":
            refuse("dtype", "bfloat16, of y, where x and w have scales")
        if self.splits and not self.gated:
            refuse("splits", "empty: with scales there is one weight")
        if self.invariant:
            refuse("scales", "left out of batch-invariant plans")
        # as tensor cores take them
        weights = 2 if self.gated else 1
        if self.n % (16 * weights):
            want = f"a multiple of 16 with {self.scales} scales"
            refuse("n", f"{want}, of gate and of up" if self.gated else want)
        block = SCALE_BLOCK if self.scales == "block" else 16
        if self.k % block:
            refuse("k", f"a multiple of {block} with {self.scales} scales")

    def _rows(self) -> tuple[int, ...]:
        rows = self.rows
        if not rows and not self.operation.shares_rows:
            return tuple((self.m + i) // self.ranks for i in range(self.ranks))
        if not rows:
            if self.m % self.ranks:
                want = f"a multiple of the {self.ranks} ranks"
                fix = "pass rows=, one count per rank"
                raise InputError(self.op, "m", want=want, got=self.m, fix=fix)
            rows = (self.m // self.ranks,) * self.ranks
        if len(rows) != self.ranks or sum(rows) != self.m or min(rows) < 0:
            want = f"{self.ranks} counts >= 0 that add up to {self.m}"
            raise InputError(self.op, "rows", want=want, got=rows)
        return rows

    @property
    def operation(self) -> "Operation":
        """What the operator is: its declaration."""
        return declaration(self.op)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each rank's block, and M at the end: [ranks + 1]."""
        return tuple(accumulate(self.rows, initial=0))

    @property
    def column_starts(self) -> tuple[int, ...]:
        """First column of each rank's tables, and their number at the end: [ranks + 1]."""
        return tuple(accumulate(map(sum, self.tables), initial=0))

    @property
    def by_routes(self) -> bool:
        """Whether a row of x is a token, which may have several experts."""
        return self.counts in ("routed", "device_routed")

    @property
    def empty(self) -> bool:
        """Whether no result has a cell that anything is computed for."""
        return not (self.m and self.n and (self.k or self.tables or self.norm))

    @property
    def equal_rows(self) -> bool:
        """Whether all ranks have equally many rows."""
        return len(set(self.rows)) == 1

    @property
    def gated(self) -> bool:
        """Whether y is made of the products of two weights."""
        return self.activation.endswith(GATED)

    @property
    def y_columns(self) -> int:
        """Columns of y, of several all together."""
        return self.n // 2 if self.gated else self.n

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of every operand; with scales, of the results."""
        return ITEM_BYTES[self.dtype]

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of x and of w."""
        return ITEM_BYTES[self.x_dtype or self.dtype]

    @property
    def x_row_bytes(self) -> int:
        """Bytes of a row of x, its scales included."""
        scales = {"row": 1, "block": self.k // SCALE_BLOCK}.get(self.scales, 0)
        return self.k * self.operand_bytes + scales * ITEM_BYTES["float32"]

    @property
    def flop(self) -> int:
        """Floating-point operations of one rank: 2 M N K for each matmul."""
        return sum(2 * rows * n * k for rows, n, k in self.operation.matmuls(self))

    @property
    def link_bytes(self) -> int:
        """Bytes that the busiest rank receives.

        Of what is gathered, every shard but its own; of what is scattered, from each peer a partial
        of its own rows, or with experts a block.
        """
        gathered, scattered = self.operation.moved(self)
        rows = ((self.m - own) * gathered + (self.ranks - 1) * own * scattered for own in self.rows)
        return max(rows) * self.item_bytes

    def __str__(self) -> str:
        even = self.equal_rows or not self.operation.shares_rows
        rows = "" if even else f" rows {'/'.join(map(str, self.rows))}"
        bias = " +bias" if self.bias else ""
        bias += f" {self.activation}" if self.activation else ""
        columns = "+".join(map(str, self.splits or (self.n,)))
        shape = f"M{self.m} N{columns}" + f" K{self.k}" * (not (self.tables or self.norm))
        shape += f" experts {self.experts}" if self.experts else ""
        if self.counts != "equal":
            shape += " routed" if self.counts == "routed" else f" counts of the {self.counts}"
            shape += f" top {self.top_k}" if self.top_k else ""
        shape += self.operation.described(self)
        shape += f" {self.x_dtype} with {self.scales} scales to" if self.scales else ""
        shape += " batch-invariant" if self.invariant else ""
        where = f"{self.ranks} ranks" + (f" of {self.islands} islands" if self.islands > 1 else "")
        return f"{self.op} {shape} {self.dtype}{bias} on {where}{rows}"
