"""A forward of a layer of experts at once: all memory is made, then all of it is launched.

Its calls are those that come one by one elsewhere, in their order. Where addresses repeat, as in a
training loop, what the host launches is one graph; nothing else is made ready again then.
"""

from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.experts.calls import ExpertLayer, Needs
from counterpoint.experts.routes import exchange_routes
from counterpoint.experts.routes import tell as tell_routes
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import Found
from counterpoint.gpu import nvtx
from counterpoint.group.workspace import Operands
from counterpoint.ops import call
from counterpoint.run.lanes_cuda import profiling
from counterpoint.run.launch_collective import replayed

Shape = tuple[tuple[int, ...], torch.dtype]
WORDS = 64  # from a multiple of so many on a tensor of a block begins
_numbers = count()


class Made(NamedTuple):
    """What a forward has made: routes, tokens that have come where they are kept, and results.

    Args:
        received: tokens that have come [all, D], perhaps of no columns: see device_routes.py.
        products, hidden: of gate and up [R, 2 I], perhaps of no columns, and silu(gate) * up.
        calls: of each of the three operators how many calls of the group there had been then.
    """

    found: Found
    received: Tensor
    products: Tensor
    hidden: Tensor
    y: Tensor
    calls: Sequence[int]


class _Block:
    """Tensors that are made as one, of 4-byte words: their views are for later.

    Args:
        shapes: of the tensors, with their dtypes.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.words, self.places = 0, list[tuple[torch.dtype, tuple[int, ...], list[int], int]]()
        for shape, dtype in shapes:
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
            self.places.append((dtype, shape, strides, self.words * 4 // dtype.itemsize))
            self.words += -(-prod(shape) * dtype.itemsize // (4 * WORDS)) * WORDS

    def new(self, like: Tensor) -> Tensor:
        """All of them."""
        return like.new_empty(self.words, dtype=torch.int32)

    def views(self, block: Tensor) -> list[Tensor]:
        """Each of them."""
        of = {place[0]: block.view(place[0]) for place in self.places}
        return [
            of[dtype].as_strided(shape, strides, start)
            for dtype, shape, strides, start in self.places
        ]


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
        self.sums: Shape = (layer.facts.tokens, hidden), x.dtype
        # a backward needs its first part to the end, the second at its begin alone
        self.kept = _Block([
            *tell_routes.shapes_of(layer.sizes, layer.facts.num_experts),
            ((layer.sizes.received, features if needs.gate_up else 0), x.dtype),
        ])  # fmt: skip
        self.between = _Block([((rows, kept), x.dtype), ((rows, down.shape[2]), x.dtype)])
        # what nobody reads behind a call: routes, then of both calls
        words = 0
        if x.is_cuda:
            words = tell_routes.words_of(layer.sizes, layer.facts.num_experts, x.device)
        shapes: list[Shape] = [((words,), torch.int32)]
        self.names: list[list[str]] = []  # of temporaries, which scratch has
        for of, operands in zip(ready, self._operands(tensors, self._made(x)), strict=True):
            assert of.code is not None
            made = of.code.temporaries_of(operands)
            self.names.append([*made])
            shapes += [(tuple(each.shape), each.dtype) for each in made.values()]
        self.scratch = _Block(shapes)

    def _made(self, x: Tensor, blocks: Sequence[Tensor] = (), calls: Sequence[int] = ()) -> Made:
        """What is in blocks, or new: those of `kept` and `between`, and the sums."""
        kept, between, y = blocks or self._new(x)
        *found, received = self.kept.views(kept)
        products, hidden = self.between.views(between)
        return Made(Found(*found), received, products, hidden, y, calls)

    def _new(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, dtype = self.sums
        return self.kept.new(x), self.between.new(x), x.new_empty(shape, dtype=dtype)

    def _operands(
        self, tensors: Sequence[Tensor], made: Made, scratch: Sequence[Tensor] = ()
    ) -> tuple[Operands, Operands]:
        """Of both calls; without scratch those of no temporaries."""
        (each, *lists), received, products, hidden, y, _ = made
        x, _, _, gate_up, down = tensors
        dispatch, combine = self.ready
        results = {"y": products, "hidden": hidden}
        if received.shape[1]:
            results["received"] = received
        found = (
            dispatch.bound((x, gate_up.mT, *lists), results),
            combine.bound((hidden, down.mT, *lists, each, None), {"y": y}),
        )
        parts = iter(scratch)
        for operands, names in zip(found, self.names, strict=False):
            operands.update(zip(names, parts, strict=False))
        return found

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
                ready.taken.calls += 1
                calls.append(board.calls)
            blocks, scratch = self._new(x), self.scratch.new(x)

            def enqueue(_: object = None) -> None:
                made = self._made(x, blocks)
                memory, *parts = self.scratch.views(scratch)
                tell_routes.enqueue(layer.workspace, layer.sizes, tensors[1:3], made.found, memory)
                operands = self._operands(tensors, made, parts)
                for ready, given in zip(self.ready, operands, strict=True):
                    assert ready.code is not None
                    ready.code.launch(given)

            pointers = map(Tensor.data_ptr, (*tensors, *blocks, scratch))
            if not replayed(layer.workspace, (self.number, *pointers), enqueue):
                enqueue()
        return self._made(x, blocks, calls)

    def _one_by_one(self, tensors: Sequence[Tensor]) -> Made:
        """As CPU ranks do, whose steps compare what was noted last."""
        layer, (x, experts, weights, *_) = self.layer, tensors
        found, _ = layer.find(experts, weights, self.asks)
        calls = [layer.board.calls]
        made = self._made(x, calls=calls)._replace(found=found)
        for ready, operands in zip(self.ready, self._operands(tensors, made), strict=True):
            layer.board.note(ready.digest)
            ready.taken.calls += 1
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
    forward: Callable[[Sequence[Tensor]], Made] | None = layer.forwards.get(key)
    whole = layer.whole(x, 0.0), layer.whole(experts, NONE), layer.whole(weights, 0.0)
    if forward is None:
        if (ready := _ready(layer, x, parameters, needs)) is None:
            return None
        asked = layer.sizes, layer.facts.num_experts, (experts.dtype, weights.dtype)
        if x.is_cuda and not tell_routes.by_kernels_alone(layer.workspace, *asked):
            return None
        forward = nvtx.within(Forward(layer, needs, ready, (*whole, *parameters)),
                              *(each.taken.plan for each in ready))  # fmt: skip
        layer.forwards[key] = forward
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
