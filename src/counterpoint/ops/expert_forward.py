"""A forward of a layer of experts at once: all memory is made, then all of it is launched.

Its calls are those that come one by one elsewhere, in their order. Where addresses repeat, as in a
training loop, what the host launches is one graph; nothing else is made ready again then.
"""

from collections.abc import Sequence
from itertools import count
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.ops import call, exchange_routes
from counterpoint.ops.expert_calls import ExpertLayer, Needs
from counterpoint.runtime import tell_routes
from counterpoint.runtime.device_routes import Found
from counterpoint.runtime.lanes_cuda import profiling
from counterpoint.runtime.launch import ALIGN
from counterpoint.runtime.launch_collective import replayed
from counterpoint.runtime.routes import NONE
from counterpoint.runtime.workspace import Operands

Shape = tuple[tuple[int, ...], torch.dtype]
_numbers = count()


class Made(NamedTuple):
    """What a forward has made: routes, tokens that have come where they are kept, and results.

    Args:
        products, hidden: of gate and up [R, 2 I], perhaps of no columns, and silu(gate) * up.
        received: tokens that have come [all, D], perhaps of no columns: see device_routes.py.
        calls: of each of the three operators how many calls of the group there had been then.
    """

    found: Found
    products: Tensor
    received: Tensor
    hidden: Tensor
    y: Tensor
    calls: list[int]


class Forward:
    """The forward of calls that are known, for tensors like those of the first of them.

    Args:
        ready: the dispatch and the combine.
        tensors: x, experts, weights, gate_up, down.
    """

    def __init__(
        self, layer: ExpertLayer, needs: Needs, ready: tuple[call.Ready, call.Ready],
        tensors: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.layer, self.asks, self.ready = layer, needs.asks, ready
        self.number = next(_numbers)
        x, _, _, gate_up, down = tensors
        rows, (every, hidden), features = layer.facts.max_rows, gate_up.shape[1:], x.shape[1]
        kept = every if needs.x or needs.gate_up else 0
        self.shapes: list[Shape] = [
            *tell_routes.shapes_of(layer.sizes, layer.facts.num_experts),
            ((rows, kept), x.dtype),
            ((layer.sizes.received, features if needs.gate_up else 0), x.dtype),
            ((rows, down.shape[2]), x.dtype), ((layer.facts.tokens, hidden), x.dtype),
        ]  # fmt: skip
        # what nobody reads behind a call is one tensor: routes, then of both calls
        self.words = 0
        if x.is_cuda:
            self.words = tell_routes.words_of(layer.sizes, layer.facts.num_experts, x.device)
        self.places: list[dict[str, tuple[int, Shape]]] = []
        self.scratch = self.words
        made = self._new(x, [])
        for of, operands in zip(ready, self._operands(tensors, made, None), strict=True):
            self.places.append({})
            assert of.code is not None
            for name, each in of.code.temporaries_of(operands).items():
                self.places[-1][name] = self.scratch, (tuple(each.shape), each.dtype)
                words = -(-each.numel() * each.itemsize // 4)
                self.scratch += -(-words // ALIGN) * ALIGN

    def _new(self, x: Tensor, calls: list[int]) -> Made:
        each = [x.new_empty(shape, dtype=dtype) for shape, dtype in self.shapes]
        return Made(Found(*each[:4]), each[4], each[5], each[6], each[7], calls)

    def _operands(
        self, tensors: Sequence[Tensor], made: Made, scratch: Tensor | None
    ) -> tuple[Operands, Operands]:
        """Of both calls; without scratch those of no temporaries."""
        (each, *lists), products, received, hidden, y, _ = made
        x, _, _, gate_up, down = tensors
        dispatch, combine = self.ready
        results = {"y": products, "hidden": hidden}
        if received.shape[1]:
            results["received"] = received
        first = dispatch.bound((x, gate_up.mT, *lists), results)
        second = combine.bound((hidden, down.mT, *lists, each, None), {"y": y})
        if scratch is not None:
            for operands, places in zip((first, second), self.places, strict=True):
                for name, (start, (shape, dtype)) in places.items():
                    words = -(-prod(shape) * dtype.itemsize // 4)
                    part = scratch[start : start + words].view(dtype)
                    operands[name] = part[: prod(shape)].view(shape)
        return first, second

    def __call__(self, tensors: Sequence[Tensor]) -> Made:
        """Launch it.

        Args:
            tensors: x, experts and weights of as many tokens as all ranks bring, without gaps;
                gate_up and down.
        """
        layer, x, board = self.layer, tensors[0], self.layer.board
        with board.whole():
            if not x.is_cuda:
                return self._one_by_one(tensors)
            exchange_routes.begin(layer.workspace, tensors[1], layer.room, self.asks)
            calls = [board.calls]
            for ready in self.ready:
                board.note(ready.digest)
                calls.append(board.calls)
            made = self._new(x, calls)
            scratch = x.new_empty(self.scratch, dtype=torch.int32)

            def enqueue(_: object = None) -> None:
                memory = scratch[: self.words]
                tell_routes.enqueue(layer.workspace, layer.sizes, tensors[1:3], made.found, memory)
                operands = self._operands(tensors, made, scratch)
                for ready, given in zip(self.ready, operands, strict=True):
                    assert ready.code is not None
                    ready.code.launch(given)

            pointers = map(Tensor.data_ptr, (*tensors, *made.found, *made[1:5], scratch))
            if not replayed(layer.workspace, (self.number, *pointers), enqueue):
                enqueue()
        return made

    def _one_by_one(self, tensors: Sequence[Tensor]) -> Made:
        """As CPU ranks do, whose steps compare what was noted last."""
        layer, (x, experts, weights, *_) = self.layer, tensors
        found, _ = layer.find(experts, weights, self.asks)
        calls = [layer.board.calls]
        made = self._new(x, calls)._replace(found=found)
        for ready, operands in zip(self.ready, self._operands(tensors, made, None), strict=True):
            layer.board.note(ready.digest)
            calls.append(layer.board.calls)
            assert ready.code is not None
            ready.code.launch(operands)
        return made


@torch.no_grad()
def at_once(
    layer: ExpertLayer, x: Tensor, experts: Tensor, weights: Tensor,
    parameters: tuple[Tensor, Tensor], needs: Needs,
) -> Made | None:  # fmt: skip
    """A forward whose calls are known; None: it goes call by call.

    Args:
        parameters: gate_up and down.
    """
    if layer.facts.drops or not layer.facts.tokens or profiling():
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    gate_up, down = parameters
    key = (needs, x.dtype, experts.dtype, weights.dtype, gate_up.shape, down.shape,
           gate_up.stride(), down.stride())  # fmt: skip
    forward: Forward | None = layer.forwards.get(key)
    whole = layer.whole(x, 0.0), layer.whole(experts, NONE), layer.whole(weights, 0.0)
    if forward is None:
        if (ready := _ready(layer, x, parameters, needs)) is None:
            return None
        asked = layer.sizes, layer.facts.num_experts, (experts.dtype, weights.dtype)
        if x.is_cuda and not tell_routes.by_kernels_alone(layer.workspace, *asked):
            return None
        forward = layer.forwards[key] = Forward(layer, needs, ready, (*whole, *parameters))
    return forward((*whole, *parameters))


def _ready(
    layer: ExpertLayer, x: Tensor, parameters: tuple[Tensor, Tensor], needs: Needs
) -> tuple[call.Ready, call.Ready] | None:
    """Both calls, where they have been made before, and each is one fused step."""
    of = needs.dispatch(layer.plan), needs.combine(layer.plan)
    (_, dispatch), (_, combine) = (
        layer.known(each, w.mT, x.dtype) for each, w in zip(of, parameters, strict=True)
    )
    if dispatch is None or combine is None or not (dispatch.chains and combine.chains):
        return None
    return dispatch, combine
