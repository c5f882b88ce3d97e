"""Seconds by what they are spent on, of a forward and of its backward."""

from dataclasses import dataclass, field


class Parts(dict[str, float]):
    """Seconds by what they are spent on."""

    def __add__(self, other: "Parts") -> "Parts":
        names = dict.fromkeys((*self, *other))
        return Parts({name: self.get(name, 0.0) + other.get(name, 0.0) for name in names})

    def __mul__(self, factor: float) -> "Parts":
        return Parts({name: seconds * factor for name, seconds in self.items()})

    @property
    def seconds(self) -> float:
        """Of all."""
        return sum(self.values())


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
