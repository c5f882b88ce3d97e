"""Steps of attention: torch's own kernels on a GPU, the formula on a CPU rank; and their merge.

Queries are taken some rows at a time where a result is merged: what is not merged yet then takes no
more memory than the keys of a shard, and is in the cache when it is.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from counterpoint.attention.kernel_merge import merge_attention_kernel
from counterpoint.errors import UnsupportedError
from counterpoint.group.workspace import Action, Operands, Place, Places
from counterpoint.plan.bind import BoundStep, Part, Program, bind

aten: Any = torch.ops.aten
MERGED_ROWS = 32  # of one program
ROWS_APART = 128  # queries at a time are a multiple of it: tiles of the library's kernels are
# at least so many, two tiles for each SM at 32 heads; and so many elements of a result
LEAST_ROWS, MOST_ELEMENTS = 1024, 1 << 23
BATCH_STRIDE = 8 * 1_000_003  # that no tensor of a user's has: see CuDNN.backward


class Library(Protocol):
    """Attention of [1, heads, rows, head dim] tensors, and its gradients."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """y like q, and the log-sum-exp [heads, rows] in fp32."""
        ...

    def backward(self, given: "Given", causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv by these keys, where y and lse are of all."""
        ...


class Given(NamedTuple):
    """What a gradient is made of, each [1, heads, rows, head dim]; lse is [heads, rows]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    y: Tensor
    lse: Tensor


class CuDNN:
    """The faster one on Hopper."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        y, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return y, lse.view(q.shape[1:3])

    def backward(self, given: Given, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`.

        Torch 2.11 keeps cuDNN's gradient graph by the shapes and strides of q, k and v alone, and
        uses it again for a dy of other strides, whose gradient is then wrong. All of ours have the
        same strides for the same q; of the user's own attention a batch stride keeps ours apart,
        which addresses nothing in a batch of one.
        """
        q, k, v, dy, y, lse = given
        q = q.as_strided(q.shape, (BATCH_STRIDE, *q.stride()[1:]))
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that is none
        return aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, y, lse[None, :, :, None], seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip


class Flash:
    """The one of GPUs before Hopper."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        y, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return y, lse[0]

    def backward(self, given: Given, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`."""
        q, k, v, dy, y, lse = given
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that is none
        return aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, lse[None], None, None, q.shape[2], k.shape[2], 0.0, causal,
            seed, seed[0], scale=scale,
        )  # fmt: skip


class Formula:
    """In fp32, with all scores at once."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        y = (scores - lse[..., None]).exp() @ _for_queries(v, q)
        return y.to(q.dtype), lse[0]

    def backward(self, given: Given, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`."""
        q, k, v, dy, y, lse = given
        weights = (self._scores(q, k, causal, scale) - lse[None, :, :, None]).exp()
        dy = dy.float()
        mean = (dy * y.float()).sum(-1, keepdim=True)
        dscores = weights * (dy @ _for_queries(v, q).mT - mean) * scale
        dq, dk = dscores @ _for_queries(k, q), dscores.mT @ q.float()
        dv = weights.mT @ dy
        shape = (1, k.shape[1], -1, *k.shape[2:])
        return dq, dk.view(shape).sum(2), dv.view(shape).sum(2)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q.float() @ _for_queries(k, q).mT * scale
        if not causal:
            return scores
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, float("-inf"))


def _for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each query head."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def library_of(places: Places, like: Operands | None) -> Library:
    """Whose kernels attend on this device.

    Raises:
        UnsupportedError: nobody's.
    """
    if places.workspace.device.type == "cpu":
        return Formula()
    p, cuda = places.plan.problem, torch.backends.cuda
    assert like is not None, "a call has operands"
    q, k, v = (_by_head(like[name], p.head_dim) for name in "qkv")
    params = cuda.SDPAParams(q, k, v, None, 0.0, p.causal, q.shape[1] != k.shape[1])
    if cuda.can_use_cudnn_attention(params):
        return CuDNN()
    if cuda.can_use_flash_attention(params):
        return Flash()
    raise UnsupportedError(f"{p.op}: torch has no attention for {p} on this GPU")


def attention(bound: BoundStep, places: Places, like: Operands | None) -> list[Action]:
    """y and lse by some keys, merged into what is there if the step merges."""
    library, merges = library_of(places, like), bound.step.accumulates
    pairs = zip(bound.parts[::2], bound.parts[1::2], strict=True)
    return [_attention(y, lse, places, library, merges=merges) for y, lse in pairs]


def made_whole(program: Program) -> set[str]:
    """Outputs that one step makes whole: what the library returns takes their places."""
    buffers = {b.name for b in program.plan.buffers if b.space == "output"}
    rows = program.plan.problem.rows[program.rank]
    return {
        part.write.buffer
        for bound in program.steps
        if bound.step.kind == "attention" and not bound.step.accumulates
        for part in bound.parts
        if part.write.buffer in buffers and part.write.shape[0] == rows
    }


def _attention(part: Part, beside: Part, places: Places, library: Library, *,
               merges: bool) -> Action:  # fmt: skip
    p, causal = places.plan.problem, part.diagonal
    scale = scale_of(p.scale, p.head_dim)
    q, k, v = (_heads(places.of(box), p.head_dim) for box in part.reads[:3])
    y, lse = places.of(part.write), places.of(beside.write)
    rows = part.write.shape[0]
    starts = _starts(rows, rows if causal else rows_at_a_time(max(p.rows) * p.k, p.n))
    made = made_whole(bind(places.plan, places.workspace.rank))

    def merge(o: Operands) -> None:
        queries, keys, values = q(o), k(o), v(o)
        old, sums = _by_row(y(o), p.head_dim), lse(o).t()
        for start, stop in pairwise(starts):
            found = library.forward(queries[:, :, start:stop], keys, values, causal, scale)
            merge_into(old[start:stop], sums[:, start:stop], found[0][0].transpose(0, 1), found[1])
            del found  # the next ones take its place

    def make(o: Operands) -> None:
        result, sums = library.forward(q(o), k(o), v(o), causal, scale)
        flat = result[0].transpose(0, 1).flatten(1)
        for place, box, found in ((y, part.write, flat), (lse, beside.write, sums.t())):
            if box.buffer in made:
                o[box.buffer] = found
            else:
                place(o).copy_(found)

    return merge if merges else make


def attention_backward(bound: BoundStep, places: Places, like: Operands | None) -> list[Action]:
    """dq, dk and dv by some keys; dq is added to what is there if the step adds."""
    p, library = places.plan.problem, library_of(places, like)
    scale, dim = scale_of(p.scale, p.head_dim), p.head_dim
    targets = [region.buffer for region in bound.step.writes]
    adds = bound.step.accumulates

    def zero(part: Part) -> Action:
        place = places.of(part.write)
        return lambda o: place(o).zero_()

    found = [zero(part) for part in bound.parts if not part.reads]
    blocks = [part for part in bound.parts if part.reads and part.write.buffer == targets[0]]
    rest = [part for part in bound.parts if part.reads and part.write.buffer != targets[0]]
    dkv = [places.of(part.write) for part in rest]
    given = [[places.of(box) for box in part.reads[:6]] for part in blocks]
    dqs = [places.of(part.write) for part in blocks]

    def run(o: Operands) -> None:
        totals: list[Tensor] = []
        for part, boxes, dq in zip(blocks, given, dqs, strict=True):
            q, k, v, dy, y, lse = (box(o) for box in boxes)
            # the library reads a log-sum-exp without gaps, whatever its strides say
            q, k, v, dy, y = (_by_head(x, dim) for x in (q, k, v, dy, y))
            of = Given(q, k, v, dy, y, lse.t().contiguous())
            new, *both = library.backward(of, part.diagonal, scale)
            flat, target = new[0].transpose(0, 1).flatten(1), dq(o)
            target.add_(flat) if adds else target.copy_(flat)
            if totals:
                both = [a.float() + b for a, b in zip(totals, both, strict=True)]
            totals = both
        for place, total in zip(dkv, totals, strict=True):
            _by_row(place(o), dim).copy_(total[0].transpose(0, 1))

    return [*found, run] if blocks else found


def scale_of(scale: float, head_dim: int) -> float:
    """Of q k^T."""
    return scale or head_dim**-0.5


def merge_into(y: Tensor, lse: Tensor, other: Tensor, lse_other: Tensor) -> None:
    """Merge an attention into another of the same queries, by other keys.

    Args:
        y: [rows, heads, head dim], columns without gaps.
        lse: fp32 [heads, rows], rows without gaps.
        other: as y.
        lse_other: as lse.
    """
    rows, heads, dim = y.shape
    if not y.is_cuda:
        weight = (lse_other - lse).sigmoid().t()[..., None]
        y.copy_(y.float() + weight * (other.float() - y.float()))
        lse.copy_(torch.logaddexp(lse, lse_other))
        return
    launch: Any = merge_attention_kernel  # its constexpr arguments are plain values for the caller
    launch[-(-rows // MERGED_ROWS), heads](
        y, lse, other, lse_other, rows, y.stride(0), y.stride(1), lse.stride(0),
        other.stride(0), other.stride(1), lse_other.stride(0), HEAD_DIM=dim,
        BLOCK_ROWS=MERGED_ROWS, BLOCK_DIM=1 << (dim - 1).bit_length(),
    )  # fmt: skip


def rows_at_a_time(key_elements: int, columns: int) -> int:
    """Queries whose result has as many elements as the keys of a shard, if they are not many."""
    rows = -(-min(key_elements, MOST_ELEMENTS) // max(columns, 1))
    return max(LEAST_ROWS, -(-rows // ROWS_APART) * ROWS_APART)


def _starts(rows: int, at_a_time: int) -> list[int]:
    """Where some rows at a time begin, and the end."""
    return [*range(0, rows, at_a_time), rows]


def _by_row(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(1, (-1, head_dim))


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    """[rows, heads * head dim] as the library has it."""
    return _by_row(x, head_dim).transpose(0, 1)[None]


def _heads(place: Place, head_dim: int) -> Callable[[Operands], Tensor]:
    return lambda operands: _by_head(place(operands), head_dim)
