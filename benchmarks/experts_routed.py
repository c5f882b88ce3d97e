"""Arms of experts by routes: a token goes once to each rank that has some of its experts.

Tokens name their experts so that counts are those of the uniform case. What is timed is an operator
whose routes are known: counts on the device, by one kernel, or on the host, by the plan of auto.
Back, the weighted sums of tokens are part of it."""

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Call
from benchmarks.expert_tensors import Layer

ROUTED = ("by routes", "by routes, host")


class Routed:
    """Tokens of a layer of uniform counts, and what both operators make of them.

    Args:
        layer: of experts; its x is what the experts give, where rows go back.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, bench, top = layer, layer.bench, layer.case["top"]
        every = bench.ranks * layer.local
        # each expert as often, in random order; those of a token differ
        drawn = torch.rand(layer.sent // every, every, device=bench.device, generator=bench.draw)
        self.experts = drawn.argsort(1).view(-1, top)
        shape = self.experts.shape
        self.weights = torch.rand(shape, device=bench.device, generator=bench.draw)
        self.tokens = bench.normal(len(self.experts), layer.case["k"])

    def calls(self) -> dict[str, Call | str]:
        """The operator, with routes on the device and on the host."""
        layer, bench = self.layer, self.layer.bench
        op = cp.all_to_all_matmul if layer.dispatches else cp.matmul_all_to_all
        x = self.tokens if layer.dispatches else layer.x
        found: dict[str, Call | str] = {}
        for name, room in zip(ROUTED, (layer.limit, None), strict=True):
            routes = cp.exchange_routes(
                self.experts, self.weights, num_experts=bench.ranks * layer.local, max_rows=room,
                group=bench.group,
            )  # fmt: skip
            found[name] = lambda _, routes=routes: op(x, layer.w, counts=routes, group=bench.group)
        return found

    def exact(self) -> Tensor:
        """In fp64: every row of this rank's experts, or the sums of this rank's tokens."""
        layer, bench = self.layer, self.layer.bench
        index, weights = self._rows()
        rows = bench.whole(self.tokens)[index] if layer.dispatches else layer.x
        parts = zip(rows.split(layer.counts[:, self._own].sum(0).tolist()), layer.w, strict=True)
        product = torch.cat([each.double() @ w.double() for each, w in parts])
        if layer.dispatches:
            return product
        sums = product.new_zeros(bench.ranks * len(self.tokens), product.shape[1])
        sums.index_add_(0, index, weights.double()[:, None] * product)
        return bench.summed(sums).chunk(bench.ranks)[bench.rank]

    @property
    def _own(self) -> slice:
        first = self.layer.bench.rank * self.layer.local
        return slice(first, first + self.layer.local)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Token of all ranks' and weight of each row here, in the order that `Routes` says."""
        bench, own, every = self.layer.bench, self._own, self.layer.counts.shape[1]
        experts, weights = bench.whole(self.experts), bench.whole(self.weights)
        elsewhere = (experts < own.start) | (experts >= own.stop)
        first = experts.masked_fill(elsewhere, every).amin(1)
        # of one source by the token's first expert here, then by token
        source = torch.arange(len(first), device=bench.device) // len(self.tokens)
        order = (source * (every + 1) + first).argsort(stable=True)
        at = [(experts[order] == e).nonzero().T for e in range(own.start, own.stop)]
        token = torch.cat([order[i] for i, _ in at])
        return token, weights[token, torch.cat([j for _, j in at])]
