"""What a step is made of: seconds by what they are spent on, and bytes by what sends them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from counterpoint.scale.network.fabric import Group

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Key = TypeVar("Key", bound=Hashable)


class Sent(NamedTuple):
    """One kind of collective of a group, and the part of a step that its exposed seconds are in."""

    part: str
    kind: Collective
    group: Group


class Parts(dict[str, float]):
    """Seconds by what they are spent on.

    Args:
        seconds: by names.
        sent: bytes of the full (gathered, or sent) tensors, by the collectives that send them.
    """

    def __init__(
        self, seconds: Mapping[str, float] | None = None, sent: Mapping[Sent, float] | None = None
    ) -> None:
        super().__init__(seconds or {})
        self.sent = {key: num_bytes for key, num_bytes in (sent or {}).items() if num_bytes}

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(_sum(self, other), _sum(self.sent, other.sent))

    def __mul__(self, factor: float) -> "Parts":
        return Parts(
            {name: seconds * factor for name, seconds in self.items()},
            {key: num_bytes * factor for key, num_bytes in self.sent.items()},
        )

    @property
    def seconds(self) -> float:
        """Of all."""
        return sum(self.values())


def _sum(one: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in dict.fromkeys((*one, *other))}


@dataclass(frozen=True, slots=True)
class Both:
    """A forward and its backward.

    Args:
        forward: of all of it.
        backward: of all of it.
        weights: what of the backward is gradients of weights, for which no other stage waits.
    """

    forward: Parts = field(default_factory=Parts)
    backward: Parts = field(default_factory=Parts)
    weights: Parts = field(default_factory=Parts)

    def __add__(self, other: "Both") -> "Both":
        return Both(self.forward + other.forward, self.backward + other.backward,
                    self.weights + other.weights)  # fmt: skip

    def __mul__(self, factor: float) -> "Both":
        return Both(self.forward * factor, self.backward * factor, self.weights * factor)

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward.seconds + self.backward.seconds

    @classmethod
    def of(cls, forward: Parts, inputs: Parts, weights: Parts) -> "Both":
        """Of a backward whose gradients of inputs and of weights are computed apart."""
        return cls(forward, inputs + weights, weights)
