"""Sizes of recommendation models (DLRM), by name, with where they are published."""

from dataclasses import dataclass
from math import expm1

from counterpoint.errors import InputError
from counterpoint.ranges import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Dlrm:
    """Sizes of a deep-learning recommendation model, and what a step looks up.

    The pooled rows of all tables and the output of the bottom MLP are vectors of `dim` numbers.
    They interact, by a low-rank cross network (DCNv2) or by dot products of each two, and the top
    MLP follows.

    Args:
        name: for texts.
        rows: of each table.
        pooling: of each table, how many of its rows a sample names.
        dim: columns of a table.
        features: numbers of a sample beside what it names.
        bottom: widths of the bottom MLP; the last one is `dim`.
        top: widths of the top MLP.
        cross: layers of the cross network and their rank; (0, 0): dot products of each two.
        batch: samples of a published step, over all GPUs; 0: none is.
        source: where the sizes are published, and what was assumed.

    Raises:
        InputError: a size is of another kind or out of its range, or two do not fit.

    Example:
        >>> Dlrm(name="mine", rows=(10**6,) * 8, pooling=(1, 1, 1, 1, 2, 2, 20, 50), dim=64,
        ...      bottom=(512, 64), top=(1024, 1)).width
        100
    """

    name: str
    rows: tuple[int, ...]
    pooling: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    features: int = 13
    cross: tuple[int, int] = (0, 0)
    batch: int = 0
    source: str = "sizes given by hand"

    def __post_init__(self) -> None:
        op = f"Dlrm {self.name}"
        check(op, self)
        if not self.rows or len(self.pooling) != len(self.rows):
            want = f"a count for each of {len(self.rows)} tables, of which there is one at least"
            raise InputError(op, "pooling", want=want, got=self.pooling[:8])
        if not self.top or self.bottom[-1:] != (self.dim,):
            want = f"of at least one layer, the last one {self.dim} wide, as the tables; and a top"
            raise InputError(op, "bottom", want=want, got=self.bottom)
        if (self.cross[0] == 0) != (self.cross[1] == 0):
            want = "(layers, rank), or (0, 0) for dot products"
            raise InputError(op, "cross", want=want, got=self.cross)

    @property
    def columns(self) -> int:
        """Of all tables."""
        return len(self.rows) * self.dim

    @property
    def vectors(self) -> int:
        """That interact: one for each table, and the output of the bottom MLP."""
        return len(self.rows) + 1

    @property
    def width(self) -> int:
        """Of what goes into the top MLP."""
        if self.cross[0]:
            return self.vectors * self.dim
        return self.dim + self.vectors * (self.vectors - 1) // 2

    @property
    def mlps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(inputs, outputs) of the layers of the bottom and of the top MLP."""
        bottom = zip((self.features, *self.bottom), self.bottom, strict=False)
        return tuple(bottom), tuple(zip((self.width, *self.top), self.top, strict=False))

    @property
    def cross_weights(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the cross network's matmuls, two in each layer."""
        (layers, rank), wide = self.cross, self.vectors * self.dim
        return ((wide, rank), (rank, wide)) * layers

    @property
    def dense_parameters(self) -> int:
        """Of all but the tables; biases are left out."""
        return sum(k * n for k, n in (*self.mlps[0], *self.cross_weights, *self.mlps[1]))

    @property
    def parameters(self) -> int:
        """In all."""
        return self.dense_parameters + sum(self.rows) * self.dim

    @property
    def flop(self) -> int:
        """Of one sample, forward and backward: products of matmuls; lookups are none."""
        dots = 0 if self.cross[0] else 2 * self.vectors**2 * self.dim
        return 3 * (2 * self.dense_parameters + dots)

    def named(self, samples: int) -> tuple[float, ...]:
        """Of each table, how many different rows so many samples name: draws are even."""
        return tuple(
            -rows * expm1(-samples * each / rows)
            for rows, each in zip(self.rows, self.pooling, strict=True)
        )


DLRMS = {
    model.name: model
    for model in (
        Dlrm(name="dlrm-dcnv2", dim=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1),
             rows=(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000,
                   3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000,
                   40_000_000, 590_152, 12_973, 108, 36),
             pooling=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3,
                      1, 1),
             cross=(3, 512), batch=135_168,
             source="MLPerf training v4.0, DLRM-DCNv2; batch of its steps on 64 and 128 GPUs"),
        Dlrm(name="dlrm-paper", dim=96, rows=(10**6,) * 128, pooling=(70,) * 128,
             bottom=(*(512,) * 8, 96), top=(*(512,) * 12, 1), batch=65_536,
             source="the model of arXiv 2305.06942, simulated on 128 nodes; sizes are not in the "
                    "text that we have and all ASSUMED: 128 tables of 10^6 rows of 96, 70 rows a "
                    "sample, MLPs of 9 and 13 layers of 512, dot products, batch 65536"),
    )
}  # fmt: skip
