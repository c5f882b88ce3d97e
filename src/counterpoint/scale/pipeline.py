"""When each stage of a pipeline computes what: one rank of each stage, its forwards and backwards.

1F1B, its interleaved form where a stage has several parts of the model, and ZB-H1, where gradients
of weights are computed apart and fill the bubble. All other ranks of a stage do the same at the
same time, so a step has 2 x stages x parts x micro-batches events (ZB-H1: 3 x), however many
replicas there are.

Source: arXiv 2104.04473, section 2.2: the order of 1F1B and its interleaved form; arXiv 2401.10241,
section 2.2: ZB-H1.
"""

from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import Literal, NamedTuple

from counterpoint.errors import InputError

MAX_EVENTS = 2**20  # some seconds of plain Python
# gradients of weights are part of the backward, unless the schedule has them apart
Kind = Literal["forward", "backward", "weight gradients", "data parallel", "optimizer"]


class Event(NamedTuple):
    """What a stage does at a time: of one part of the model, for one micro-batch."""

    kind: Kind
    part: int = 0
    batch: int = 0


class Stage(NamedTuple):
    """Seconds of one micro-batch, of each of a stage's parts.

    Args:
        forward_s: of the forwards.
        backward_s: of the backwards; without the gradients of weights where these are apart.
        weights_s: of the gradients of weights; empty where they are not apart (1F1B).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...] = ()

    @property
    def busy_s(self) -> float:
        """Of all."""
        return sum(self.forward_s) + sum(self.backward_s) + sum(self.weights_s)

    def took_s(self, event: Event) -> float:
        """Seconds of one event."""
        if event.kind == "forward":
            return self.forward_s[event.part]
        return (self.backward_s if event.kind == "backward" else self.weights_s)[event.part]


class Pipeline(NamedTuple):
    """A pipeline that was simulated.

    Args:
        stages: of one rank each, in order.
        batches: micro-batches.
        starts_s: when each stage started each of its events, in its order.
        seconds: from the first start to the last end.
    """

    stages: tuple[Stage, ...]
    batches: int
    starts_s: tuple["array[float]", ...]
    seconds: float

    def events(self, stage: int) -> Iterator[tuple[Event, float, float]]:
        """What a stage did, and when that started and ended."""
        own = self.stages[stage]
        ordered = order(stage, self.stages, self.batches)
        for event, start_s in zip(ordered, self.starts_s[stage], strict=True):
            yield event, start_s, start_s + own.took_s(event)


def order(stage: int, stages: Sequence[Stage], batches: int) -> Generator[Event]:
    """What a stage does, one after another.

    With gradients of weights apart, stage i computes them i micro-batches late: all stages then
    hold activations of as many micro-batches as there are stages, which is the most that 1F1B
    holds.
    """
    count, parts = len(stages), len(stages[0].forward_s)
    apart, total = bool(stages[0].weights_s), parts * batches
    warmup = count - stage - 1
    if parts > 1:
        warmup = 2 * warmup + (parts - 1) * count
    warmup = min(warmup, total)

    def event(kind: Kind, index: int) -> Event:
        if parts == 1:
            return Event(kind, 0, index)
        group, within = divmod(index, count * parts)
        part, batch = divmod(within, count)
        return Event(kind, part if kind == "forward" else parts - 1 - part, group * count + batch)

    for i in range(warmup):
        yield event("forward", i)
    for i in range(total):
        if warmup + i < total:
            yield event("forward", warmup + i)
        yield event("backward", i)
        if apart and i >= stage:
            yield event("weight gradients", i - stage)
    if apart:
        for i in range(max(total - stage, 0), total):
            yield event("weight gradients", i)


def simulate(stages: Sequence[Stage], batches: int, send_s: float) -> Pipeline:
    """Run all events, each as soon as its stage is free and what it starts from is there.

    Linear in the events: each is looked at when what it needs has ended.

    Args:
        stages: of one rank each, in order; all with as many parts.
        batches: micro-batches; a multiple of the stages where there are several parts.
        send_s: from one stage to the next, beside computation.

    Raises:
        InputError: more events than can be simulated in seconds.
    """
    count, parts = len(stages), len(stages[0].forward_s)
    kinds = 3 if stages[0].weights_s else 2
    num_events = kinds * count * parts * batches
    if num_events > MAX_EVENTS:
        want = f"such that {kinds} * pp * virtual_stages * num_micro_batches <= {MAX_EVENTS}"
        raise InputError("predict", "num_micro_batches", want=want, got=num_events)
    orders = [order(i, stages, batches) for i in range(count)]
    current = [next(events, None) for events in orders]
    starts_s = tuple(array("d") for _ in stages)
    free_s = [0.0] * count
    ended = _Ended(parts * count, batches, send_s if count > 1 else 0.0)
    ahead = list(range(count))
    while ahead:
        i = ahead.pop()
        while (event := current[i]) is not None:
            chunk = event.part * count + i
            ready_s = ended.ready_s(event, chunk)
            if ready_s is None:
                break
            start_s = max(free_s[i], ready_s)
            starts_s[i].append(start_s)
            free_s[i] = start_s + stages[i].took_s(event)
            current[i] = next(orders[i], None)
            if event.kind != "weight gradients":
                ended.of[event.kind][chunk][event.batch] = free_s[i]
                follower = (i + (1 if event.kind == "forward" else -1)) % count
                if follower != i:
                    ahead.append(follower)
    assert not any(current), "the order has a circle"
    return Pipeline(tuple(stages), batches, starts_s, max(free_s))


class _Ended:
    """When forwards and backwards of each chunk of the model ended; chunks go round the stages."""

    def __init__(self, chunks: int, batches: int, send_s: float) -> None:
        self.chunks, self.send_s = chunks, send_s
        self.of = {
            kind: [array("d", [-1.0]) * batches for _ in range(chunks)]
            for kind in ("forward", "backward")
        }

    def ready_s(self, event: Event, chunk: int) -> float | None:
        """When what an event starts from is there; None: not yet."""
        hop_s = self.send_s
        if event.kind == "weight gradients" or (event.kind == "forward" and chunk == 0):
            return 0.0  # its own stage did what it needs before, or it needs the input alone
        if event.kind == "forward":
            ended_s = self.of["forward"][chunk - 1][event.batch]
        elif chunk < self.chunks - 1:
            ended_s = self.of["backward"][chunk + 1][event.batch]
        else:
            ended_s, hop_s = self.of["forward"][chunk][event.batch], 0.0
        return None if ended_s < 0 else ended_s + hop_s
