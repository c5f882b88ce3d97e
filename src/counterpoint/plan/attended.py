"""Which of a rank's queries attend to which keys: blocks of both, and none that is masked.

A step "attention" makes y and lse, the log-sum-exp of each row and head; with what is there as its
last reads they are merged, in fp32. A step "attention_backward" makes dq, dk and dv by y and lse of
all keys; with dq as its last read it adds to it. Either may be of some heads alone, which are
columns: as large a share of the queries' as of the keys'. Its args say whose keys it is given:
"peer", an offset, and "first", their first row in his shard; where nothing is causal they may be
all keys.

Where it is causal, a rank has two parts of the sequence, its r-th and its r-th from the end, so
that all ranks have equal work: its own rows are in order, of a lower rank all of its rows attend to
the earlier half, and of a higher one its later half attends to all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from counterpoint.plan.boxes import Box, Part
from counterpoint.plan.steps import Kind, Step
from counterpoint.problem import Problem

ATTENTION: tuple[Kind, ...] = ("attention", "attention_backward")


class Block(NamedTuple):
    """Queries and keys, as rows of what a step reads: each attends to all.

    Args:
        diagonal: or, of as many queries as keys, the i-th to the first i.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool = False


def blocks(p: Problem, rank: int, owner: int, first: int, num_keys: int) -> tuple[Block, ...]:
    """The blocks of all queries of a rank and some keys; of equal keys, queries in order.

    Args:
        owner: the rank whose keys they are.
        first: of its rows, the first of these keys.
    """
    rows, last = p.rows[rank], first + num_keys
    if not p.causal:
        found = [Block((0, rows), (0, num_keys))]
    elif owner == rank:
        keys = (0, num_keys)
        found = [Block((first, last), keys, diagonal=True), Block((last, rows), keys)]
    elif owner < rank:
        found = [Block((0, rows), (0, min(last, rows // 2) - first))]
    else:
        found = [Block((rows // 2, rows), (0, num_keys))]
    return tuple(b for b in found if b.queries[0] < b.queries[1] and b.keys[0] < b.keys[1])


def attended(
    p: Problem, step: Step, ranks: tuple[int, int], reads: Sequence[Box], writes: Sequence[Box]
) -> tuple[Part, ...]:
    """The parts of a step: of each block its y and lse, or its dq; then dk and dv.

    Args:
        ranks: whose queries, and whose keys.
        reads: a box for each region.
        writes: likewise.

    Raises:
        ValueError: boxes are not all own queries, or do not fit their keys.
    """
    forward, first = step.kind == "attention", int(step.arg("first"))
    _check_shapes(p, reads, writes, forward=forward)
    # without columns there is nothing to attend to
    found = () if p.empty else blocks(p, *ranks, first, reads[1].shape[0])
    parts = _forward(found, reads, writes) if forward else _backward(found, reads, writes)
    return tuple(part for part in parts if not part.write.empty)


def _forward(found: Sequence[Block], reads: Sequence[Box], writes: Sequence[Box]) -> Iterator[Part]:
    for queries, keys, diagonal in found:
        given = _some(reads[:1], queries) + _some(reads[1:3], keys)
        merged = _some(reads[3:], queries)
        for i, target in enumerate(_some(writes, queries)):  # lse needs no values
            yield Part((*given[: 3 - i], *merged[i : i + 1]), target, diagonal)


def _backward(
    found: Sequence[Block], reads: Sequence[Box], writes: Sequence[Box]
) -> Iterator[Part]:
    for queries, keys, diagonal in found:
        given = _some(reads[:1], queries) + _some(reads[1:3], keys)
        (dq,) = _some(writes[:1], queries)
        yield Part(given + _some(reads[3:], queries), dq, diagonal)
    last = 0
    if found:  # all blocks of a step are of the same keys, and their queries follow one another
        queries, keys = (found[0].queries[0], found[-1].queries[1]), found[0].keys
        given = _some(reads[:1], queries) + _some(reads[1:3], keys) + _some(reads[3:6], queries)
        yield from (Part(given, t, found[0].diagonal) for t in _some(writes[1:], keys))
        last = keys[1]
    for target in writes[1:]:
        yield Part((), target._replace(r0=target.r0 + last))


def _some(boxes: Sequence[Box], rows: tuple[int, int]) -> tuple[Box, ...]:
    return tuple(box._replace(r0=box.r0 + rows[0], r1=box.r0 + rows[1]) for box in boxes)


def _check_shapes(
    p: Problem, reads: Sequence[Box], writes: Sequence[Box], *, forward: bool
) -> None:
    cols, (keys, key_cols) = reads[0].shape[1], reads[1].shape
    lse_cols = cols // max(p.head_dim, 1)
    whole_heads = key_cols % max(p.head_dim, 1) == 0 and cols * p.k == key_cols * p.n
    q, k, lse = (max(p.rows), cols), (keys, key_cols), (max(p.rows), lse_cols)
    want = [q, k, k, q, lse] if forward else [q, k, k, q, q, lse, q]
    want = [*want[: len(reads)], *((q, lse) if forward else (q, k, k))]
    shapes = [box.shape for box in (*reads, *writes)]
    if shapes != want or not whole_heads:
        raise ValueError(f"shapes {shapes} do not fit an attention of {p.n} and {p.k} columns")
