"""When each stage of a pipeline computes what: one rank of each stage, its forwards and backwards.

1F1B, and its interleaved form where a stage has several parts of the model. All other ranks of a
stage do the same at the same time, so a step has 2 x stages x parts x micro-batches events,
however many replicas there are.

Source: arXiv 2104.04473, section 2.2: the order of both schedules.
"""

from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.errors import InputError

MAX_EVENTS = 2**20  # some seconds of plain Python, 300 MB


class Event(NamedTuple):
    """A forward or backward of one part of the model on one stage, for one micro-batch."""

    backward: bool
    part: int
    batch: int


class Stage(NamedTuple):
    """Seconds of one micro-batch: forwards and backwards of each of a stage's parts."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def order(stage: int, stages: int, parts: int, batches: int) -> list[Event]:
    """What a stage does, one after another."""
    total = parts * batches
    if parts == 1:
        warmup = min(stages - stage - 1, batches)
    else:
        warmup = min((stages - stage - 1) * 2 + (parts - 1) * stages, total)

    def event(index: int, backward: bool) -> Event:
        group, within = divmod(index, stages * parts)
        part, batch = divmod(within, stages)
        if parts == 1:
            return Event(backward, 0, index)
        return Event(backward, parts - 1 - part if backward else part, group * stages + batch)

    events = [event(i, False) for i in range(warmup)]
    for i in range(total - warmup):
        events += [event(warmup + i, False), event(i, True)]
    return events + [event(i, True) for i in range(total - warmup, total)]


def makespan_s(stages: Sequence[Stage], batches: int, send_s: float) -> float:
    """Seconds from the first forward to the last backward.

    Linear in the events: each is looked at when what it needs has ended.

    Args:
        stages: of one rank each, in order; all with as many parts.
        batches: micro-batches; a multiple of the stages where there are several parts.
        send_s: from one stage to the next, beside computation.

    Raises:
        InputError: more events than can be simulated in seconds.
    """
    count, parts = len(stages), len(stages[0].forward_s)
    num_events = 2 * count * parts * batches
    if num_events > MAX_EVENTS:
        want = f"such that 2 * pp * virtual_stages * num_micro_batches <= {MAX_EVENTS}"
        raise InputError("predict", "num_micro_batches", want=want, got=num_events)
    if count == 1:
        return batches * (sum(stages[0].forward_s) + sum(stages[0].backward_s))
    ended: dict[tuple[int, Event], float] = {}
    orders = [order(i, count, parts, batches) for i in range(count)]
    nexts, free_s = [0] * count, [0.0] * count
    ahead = list(range(count))
    while ahead:
        i = ahead.pop()
        while nexts[i] < len(orders[i]):
            event = orders[i][nexts[i]]
            needed = _needed(i, event, count, parts)
            if needed is not None and needed not in ended:
                break
            start_s = free_s[i]
            if needed is not None:
                hop_s = send_s if needed[0] != i else 0.0
                start_s = max(start_s, ended[needed] + hop_s)
            took = stages[i].backward_s if event.backward else stages[i].forward_s
            ended[i, event] = free_s[i] = start_s + took[event.part]
            nexts[i] += 1
            follower = (i - 1) % count if event.backward else (i + 1) % count
            if follower != i:
                ahead.append(follower)
    assert all(nexts[i] == len(orders[i]) for i in range(count)), "the order has a circle"
    return max(free_s)


def _needed(stage: int, event: Event, stages: int, parts: int) -> tuple[int, Event] | None:
    """Whose result an event starts from; None: the first forward, of the input."""
    backward, part, batch = event
    if not backward:
        if stage:
            return stage - 1, event
        return (stages - 1, Event(False, part - 1, batch)) if part else None
    if stage < stages - 1:
        return stage + 1, event
    if part == parts - 1:
        return stage, Event(False, part, batch)
    return 0, Event(True, part + 1, batch)
