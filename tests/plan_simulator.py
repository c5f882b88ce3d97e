"""A plan run on arrays, its events interleaved at random: what validate says, seen from outside.

Shares `bind` with validate, and no more. What a step reads has to stay while the step is under
way; what it writes is NaN until it ends; inputs change with every call; some rank or lane is slow.
"""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from counterpoint.plan.attended import ATTENTION
from counterpoint.plan.bind import BoundStep, Box, bind
from counterpoint.plan.scaled import SCALE
from counterpoint.plan.steps import Plan

Array = NDArray[np.float64]
CALLS = 2


def products(
    own: dict[str, Array], other: dict[str, Array], seen: Array, key_heads: int, *, backward: bool
) -> dict[str, Array]:
    """What each key head and its queries make, side by side."""

    def by_head(given: dict[str, Array]) -> list[dict[str, Array]]:
        parts = zip(*(np.split(x, key_heads, 1) for x in given.values()), strict=True)
        return [dict(zip(given, of_head, strict=True)) for of_head in parts]

    each = [_products(mine, theirs, seen, backward=backward)
            for mine, theirs in zip(by_head(own), by_head(other), strict=True)]  # fmt: skip
    return {name: np.concatenate([found[name] for found in each], 1) for name in each[0]}


def _products(
    own: dict[str, Array], other: dict[str, Array], seen: Array, *, backward: bool
) -> dict[str, Array]:
    """In place of softmax a product, so that sums are exact in any order.

    A query weighs a key by what each has in sum; a result depends on all rows that go into it.
    """
    queries = own["q"].sum(1)
    for i, name in enumerate(("dy", "y", "lse") if backward else ()):
        queries = queries + (i + 2) * own[name].sum(1)
    keys, values = other["k"].sum(1), other["v"].sum(1)
    weights = queries[:, None] * (keys + (3 * values if backward else 0))[None, :] * seen

    def rows(numbers: Array, like: Array) -> Array:
        return np.repeat(numbers[:, None], like.shape[1], 1)

    if not backward:
        heads = own["heads"]
        return {"y": rows(weights @ values, own["q"]), "lse": rows(weights.sum(1), heads)}
    return {
        "dq": rows(weights.sum(1), own["q"]),
        "dk": rows(queries @ seen * keys, other["k"]),
        "dv": rows(queries @ seen * values, other["k"]),
    }


def bent(sums: Array) -> Array:
    """In place of an activation: neither linear nor the same when applied again, and exact."""
    return sums * sums + sums


def attended(
    kind: str, made: int, reads: list[Array], target: Array, diagonal: bool, head_dim: int
) -> list[Array]:
    """What a part of an attention adds up: what it makes, and what was there."""
    if not reads:
        return [np.zeros_like(target)]
    backward = kind == "attention_backward"
    names = ("q", "k", "v", "dy", "y", "lse") if backward else ("q", "k", "v")[: 3 - made]
    given = {"v": reads[1], "heads": target, **dict(zip(names, reads, strict=False))}
    seen = np.ones((len(given["q"]), len(given["k"])))
    seen, key_heads = np.tril(seen) if diagonal else seen, max(given["k"].shape[1] // head_dim, 1)
    found = products(given, given, seen, key_heads, backward=backward)
    return [found[(("dq", "dk", "dv") if backward else ("y", "lse"))[made]], *reads[len(names) :]]


class Stuck(Exception):
    """No rank can go on."""


def simulate(plan: Plan, seed: int) -> bool:
    """Whether every call on every rank leaves in the outputs what the op defines.

    Raises:
        Stuck: the ranks wait for one another.
    """
    return _Simulation(plan, Random(seed)).run()


class _Simulation:
    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan = plan
        self.random = random
        self.ranks = range(plan.problem.ranks)
        self.programs = [bind(plan, rank) for rank in self.ranks]
        self.memory = {(b.name, r): self.fresh(b.name, r) for b in plan.buffers for r in self.ranks}
        self.pads = [[0] * plan.num_slots for _ in self.ranks]
        self.ended: set[tuple[int, int, str]] = set()  # call, rank, step
        self.gathered: dict[tuple[int, int, str], Array] = {}
        self.read: dict[tuple[int, int, str], dict[str, Array]] = {}
        rng = np.random.default_rng(random.randrange(1 << 32))
        p = plan.problem
        self.inputs = [
            [
                {
                    b.name: rng.integers(-8, 9, self.memory[b.name, r].shape[1:]).astype(float)
                    for b in plan.buffers
                    if b.space == "input"
                }
                for r in self.ranks
            ]
            for _ in range(CALLS)
        ]
        self.starts = p.row_starts
        self.right = True

    def fresh(self, name: str, rank: int) -> Array:
        buffer, p = self.plan.buffer(name), self.plan.problem
        rows, cols = buffer.shape
        slots = p.ranks if buffer.holds == "slots" else 1
        if buffer.split and buffer.holds == "peers":
            rows -= p.rows[rank]
        elif buffer.split and buffer.holds == "island":
            size = p.ranks // p.islands
            rows = sum(n for r, n in enumerate(p.rows) if r // size == rank // size)
        elif buffer.split and buffer.holds != "all":
            rows = p.rows[rank]
        return np.full((slots, rows, cols), np.nan)

    def run(self) -> bool:
        actors: dict[tuple[int, str], Iterator[bool]] = {}
        call = dict.fromkeys(self.ranks, -1)
        in_order = self.random.random() < 0.5  # one SM step after the other, as if each filled it
        speed: dict[tuple[int, str], float] = {}
        for rank in self.ranks:
            self.enter(call, rank, actors, in_order)
        while actors:
            for key in actors:
                if key not in speed or self.random.random() < 0.02:
                    speed[key] = self.random.random()
            for key in sorted(actors, key=lambda key: speed[key]):
                try:
                    moved = next(actors[key])
                except StopIteration:
                    del actors[key]
                    rank, moved = key[0], True
                    if not any(r == rank for r, _ in actors):
                        self.leave(call[rank], rank)
                        self.enter(call, rank, actors, in_order)
                if moved:
                    break
            else:
                raise Stuck(f"{self.plan.spec}: {sorted(actors)}")
        return self.right

    def enter(self, call: dict[int, int], rank: int, actors: dict, in_order: bool) -> None:
        call[rank] += 1
        if call[rank] == CALLS:
            return
        for name, values in self.inputs[call[rank]][rank].items():
            self.memory[name, rank][0] = values
        for buffer in self.plan.buffers:
            if buffer.space == "output":
                self.memory[buffer.name, rank][:] = np.nan
        queues: dict[str, list[BoundStep]] = {}
        for bound in self.programs[rank].steps:
            lane = self.plan.lane(bound.step.lane)
            queue = "sm" if in_order and lane.engine != "copy" else lane.name
            queues.setdefault(queue, []).append(bound)
        for queue, steps in queues.items():
            actors[rank, queue] = self.lane(call[rank], rank, steps)

    def leave(self, call: int, rank: int) -> None:
        for name, want in self.wanted(self.inputs[call], rank).items():
            self.right = self.right and bool(np.array_equal(self.memory[name, rank][0], want))

    def wanted(self, inputs: list[dict[str, Array]], rank: int) -> dict[str, Array]:
        """The outputs of `rank` as the op defines them."""
        if self.plan.problem.head_dim:
            inputs = [{**each, "heads": self.memory["lse", 0][0]} for each in inputs]
        if self.plan.problem.scales:
            whole = [{name: each[name] * each[name + SCALE] for name in "xw"} for each in inputs]
            biases = [{"bias": each["bias"]} if "bias" in each else {} for each in inputs]
            inputs = [{**one, **bias} for one, bias in zip(whole, biases, strict=True)]
        mine = inputs[rank]
        own = slice(self.starts[rank], self.starts[rank + 1])
        key_heads = max(self.plan.problem.k // max(self.plan.problem.head_dim, 1), 1)

        def gathered(name: str) -> Array:
            return np.concatenate([each[name] for each in inputs])

        def scattered(x: str, w: str) -> Array:
            numbers = [name[len(x) :] for name in mine if name.startswith(x)]
            terms = [each[x + i] @ each[w + i] for each in inputs for i in numbers]
            return np.sum(terms, axis=0)[own]

        def weight_gradients() -> dict[str, Array]:
            dys = {name: dy for name, dy in mine.items() if name.startswith("dy")}
            return {name.replace("y", "w"): gathered("x").T @ dy for name, dy in dys.items()}

        bias = mine.get("bias", np.zeros((1, 1)))
        match self.plan.problem.op:
            case "all_gather_matmul":
                weights = {name: w for name, w in mine.items() if name.startswith("w")}
                x = gathered("x")
                sums = {name.replace("w", "y"): x @ w + bias for name, w in weights.items()}
                if self.plan.problem.gated:
                    return {"y": bent(sums["y0"]) * sums["y1"]}
                return {"y": bent(sums["y"])} if self.plan.problem.activation else sums
            case "matmul_reduce_scatter":
                return {"y": scattered("x", "w") + bias}
            case "matmul_all_reduce":
                return {"y": np.sum([each["x"] @ each["w"] for each in inputs], axis=0) + bias}
            case "all_reduce_norm":
                total = np.sum([each["x"] for each in inputs if "x" in each], axis=0)
                h = mine.get("total", total) + mine.get("residual", 0)
                y = h / np.sqrt(np.square(h).mean(1, keepdims=True) + 1) * mine["weight"]
                return {"y": y, "h": h}
            case "all_to_all_matmul":
                return {"y": self.to_experts(inputs)[rank]}
            case "matmul_all_to_all":
                return {"y": self.to_owners(inputs)[rank]}
            case "all_gather_matmul_wgrad":
                return weight_gradients()
            case "all_gather_matmul_backward":
                return {"dx": scattered("dy", "wt"), **weight_gradients()}
            case "matmul_reduce_scatter_backward":
                dy = gathered("dy")
                return {"dx": dy @ mine["wt"], "dw": mine["x"].T @ dy}
            case "embedding_bag_all_to_all":
                tables = self.plan.problem.tables
                bags = zip(inputs, map(sum, tables), strict=True)
                return {"y": np.concatenate([each["bags"][own, :n] for each, n in bags], axis=1)}
            case "all_gather_attention":
                parts = [
                    products(mine, each, seen, key_heads, backward=False)
                    for each, seen in zip(inputs, self.seen(rank), strict=True)
                ]
                return {of: np.sum([part[of] for part in parts], axis=0) for of in ("y", "lse")}
            case "all_gather_attention_backward":
                pairs = zip(inputs, self.seen(rank), strict=True)
                found = {
                    "dq": [
                        products(mine, each, s, key_heads, backward=True)["dq"] for each, s in pairs
                    ]
                }
                by_rank = [
                    products(each, mine, self.seen(r)[rank], key_heads, backward=True)
                    for r, each in enumerate(inputs)
                ]
                found |= {of: [part[of] for part in by_rank] for of in ("dk", "dv")}
                return {of: np.sum(parts, axis=0) for of, parts in found.items()}
            case op:
                raise AssertionError(f"what {op} computes is not written down here")

    def seen(self, rank: int) -> list[Array]:
        """Of the keys of each rank, which own query attends to which: 1, or else 0."""
        p = self.plan.problem
        rows, half = p.rows[0], p.rows[0] // 2
        if not p.causal:
            return [np.ones((rows, rows))] * p.ranks
        parts = [(half * r, half * (2 * p.ranks - 1 - r)) for r in self.ranks]
        places = [np.concatenate([np.arange(half) + start for start in each]) for each in parts]
        return [(keys[None, :] <= places[rank][:, None]).astype(float) for keys in places]

    def to_experts(self, inputs: list[dict[str, Array]]) -> list[Array]:
        """Rows of all ranks by expert, multiplied, on each rank."""
        p = self.plan.problem
        # source, destination, expert, rows -> destination, expert, source, rows
        rows = np.stack([each["x"].reshape(p.ranks, p.experts, -1, p.k) for each in inputs])
        found: list[Array] = []
        for d in self.ranks:
            each = zip(rows[:, d].swapaxes(0, 1), self.weights(inputs[d]), strict=True)
            found.append(np.concatenate([x.reshape(-1, p.k) @ w for x, w in each]))
        return found

    def to_owners(self, inputs: list[dict[str, Array]]) -> list[Array]:
        """Rows by expert, multiplied where they are, back on each rank."""
        p = self.plan.problem
        products = np.stack([
            np.stack([x @ w for x, w in zip(each["x"].reshape(p.experts, -1, p.k),
                                            self.weights(each), strict=True)])
            for each in inputs
        ])  # fmt: skip
        # rank of the expert, expert, owner, rows
        products = products.reshape(p.ranks, p.experts, p.ranks, -1, p.n)
        return [products[:, :, owner].reshape(-1, p.n) for owner in self.ranks]

    def weights(self, of_rank: dict[str, Array]) -> Array:
        p = self.plan.problem
        return of_rank["w"].reshape(p.experts, p.k, p.n)

    def lane(self, call: int, rank: int, steps: list[BoundStep]) -> Iterator[bool]:
        """Yields True after an event, False where it has to wait."""
        for bound in steps:
            step = bound.step
            while not all((call, rank, name) in self.ended for name in step.after):
                yield False
            if step.kind == "barrier":
                self.post(call, bound)
                yield True
            while not all(self.pads[rank][slot] > call for slot, _ in bound.waits):
                yield False
            if step.kind == "collective":
                yield from self.collective(call, rank, bound)
            elif step.kind == "exchange":
                yield from self.exchange(call, rank, bound)
            elif step.kind == "fused" and not step.looks_up:
                yield from self.fused(call, rank, bound)
            elif step.kind != "barrier":
                seen = [[self.at(box).tobytes() for box in part.reads] for part in bound.parts]
                for part in bound.parts:
                    if not any(b[:3] == part.write[:3] for p in bound.parts for b in p.reads):
                        self.at(part.write)[:] = np.nan
                yield True
                self.finish(bound, seen)
            if step.kind != "barrier":
                self.post(call, bound)
            self.ended.add((call, rank, step.name))
            yield True

    def post(self, call: int, bound: BoundStep) -> None:
        for slot, rank in bound.posts:
            self.pads[rank][slot] = call + 1

    def finish(self, bound: BoundStep, seen: list[list[bytes]]) -> None:
        same = all(
            self.at(box).tobytes() == before
            for part, reads in zip(bound.parts, seen, strict=True)
            for box, before in zip(part.reads, reads, strict=True)
        )
        for part in self.random.sample(bound.parts, len(bound.parts)):
            reads = [self.at(box) for box in part.reads]
            if bound.step.kind in ATTENTION:
                made = [r.buffer for r in bound.step.writes].index(part.write.buffer)
                reads = attended(bound.step.kind, made, reads, self.at(part.write), part.diagonal,
                                 self.plan.problem.head_dim)  # fmt: skip
            if bound.step.kind == "matmul":
                if bound.step.arg("scales"):
                    x, w, x_scale, w_scale, *rest = reads
                    reads = [x * x_scale, w * w_scale, *rest]
                x = reads[0].T if bound.step.arg("contract") else reads[0]
                up = x @ reads.pop(2) if bound.step.weights > 1 else 1.0
                reads = [x @ reads[1], *reads[2:]]
            result = sum(reads)
            if bound.step.arg("activation"):
                result = bent(result) * up if bound.step.weights > 1 else bent(result)
            self.at(part.write)[:] = result if same else np.nan

    def fused(self, call: int, rank: int, bound: BoundStep) -> Iterator[bool]:
        """The op on what the step reads, into the outputs that it writes; else it has no effect.

        What does not spin knows what its own rank reads, what spins all ranks of an island.
        """
        name = bound.step.name
        self.read[call, rank, name] = {
            region.buffer: self.memory[region.buffer, rank][0].copy() for region in bound.step.reads
        }
        yield True
        size = len(self.ranks) // self.plan.problem.islands
        mates = range(rank // size * size, rank // size * size + size)
        known = mates if bound.step.spins else [rank] * len(self.ranks)
        while not all((call, r, name) in self.read for r in known):
            yield False
        reads = {r: self.read[call, r, name] for r in known}
        if bound.step.spins and size < len(self.ranks):
            values = self.of_island(reads, rank)
        else:
            values = self.wanted([reads[r] for r in known], rank)
        for region in bound.step.writes:
            if region.buffer in values:
                self.memory[region.buffer, rank][0] = values[region.buffer]

    def of_island(self, reads: dict[int, dict[str, Array]], rank: int) -> dict[str, Array]:
        """What the experts of an island make of the tokens of rails; others have no weight.

        Args:
            reads: by each rank of it.
        """
        p, size = self.plan.problem, len(reads)
        wide = p.m // p.islands
        here = slice(rank // size * wide, rank // size * wide + wide)
        inputs = [{"x": np.zeros((p.m, p.k)), "w": np.zeros((p.experts * p.k, p.n))}
                  for _ in self.ranks]  # fmt: skip
        for mate, read in reads.items():
            inputs[mate] |= {name: read[name] for name in ("x", "w") if name in read}
        if p.op == "matmul_all_to_all":
            sums = self.to_owners(inputs)[rank % size :: size]
            return {"rail": np.concatenate([each[here] for each in sums])}
        for s in self.ranks:
            rail = reads[rank - rank % size + s % size]["rail"]
            inputs[s]["x"][here] = rail[s // size * wide : s // size * wide + wide]
        return {"y": self.to_experts(inputs)[rank]}

    def exchange(self, call: int, rank: int, bound: BoundStep) -> Iterator[bool]:
        """Both ends are there, and what is sent stays as it is until it has arrived."""
        step, (part,) = bound.step, bound.parts
        to, source = self.plan.met(step, rank)
        sent = self.at(part.reads[0])
        self.gathered[call, rank, step.name] = before = sent.copy()
        self.at(part.write)[:] = np.nan
        yield True
        while not all((call, r, step.name) in self.gathered for r in (to, source)):
            yield False
        self.at(part.write)[:] = self.gathered[call, source, step.name]
        if sent.tobytes() != before.tobytes():
            self.right = False

    def collective(self, call: int, rank: int, bound: BoundStep) -> Iterator[bool]:
        name = bound.step.name
        part = bound.parts[0]  # what follows are words of its transport
        self.gathered[call, rank, name] = self.at(part.reads[0]).copy()
        self.at(part.write)[:] = np.nan
        yield True
        while not all((call, r, name) in self.gathered for r in self.ranks):
            yield False
        everyone = [self.gathered[call, r, name] for r in self.ranks]
        if bound.step.arg("collective") == "all_gather":
            self.at(part.write)[:] = np.concatenate(everyone)
        elif bound.step.arg("collective") == "all_reduce":
            self.at(part.write)[:] = sum(everyone)
        elif self.plan.problem.tables:
            mine = slice(self.starts[rank], self.starts[rank + 1])
            columns = zip(everyone, map(sum, self.plan.problem.tables), strict=True)
            self.at(part.write)[:] = np.concatenate([x[mine, :n] for x, n in columns], axis=1)
        elif bound.step.arg("collective") == "all_to_all":
            p = self.plan.problem

            def blocks(rows: Array, buffer: str) -> Array:
                """[ranks, experts, rows, columns], in whichever order they are stored."""
                cols = rows.shape[-1]
                if self.plan.buffer(buffer).chunks > 1:
                    return rows.reshape(p.experts, p.ranks, -1, cols).swapaxes(0, 1)
                return rows.reshape(p.ranks, p.experts, -1, cols)

            target = blocks(self.at(part.write), part.write.buffer)
            for s, rows in enumerate(everyone):
                target[s] = blocks(rows, part.reads[0].buffer)[rank]
        else:
            start, stop = list(pairwise(self.starts))[rank]
            self.at(part.write)[:] = sum(each[start:stop] for each in everyone)

    def at(self, box: Box) -> Array:
        whole = self.memory[box.buffer, box.rank]
        return whole[box.slot, box.r0 : box.r1, box.c0 : box.c1]
