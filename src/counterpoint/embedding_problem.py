"""What embedding bags and their all-to-all compute: the facts of one call, equal on all ranks.

A rank's tables are pooled for the bags of all ranks; each rank gets the rows of its own bags.
"""

from dataclasses import dataclass
from operator import index

from counterpoint.errors import InputError
from counterpoint.problem import ITEM_BYTES, DType, dtype_of

EMBEDDING = "embedding_bag_all_to_all"


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
        object.__setattr__(self, "dtype", dtype_of(op, self.dtype))
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
