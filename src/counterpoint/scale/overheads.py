"""What a step spends beside matmuls, bandwidth and links: each of it a part of its own.

Computation takes longer than its kernels counted one by one, and a step waits for its slowest GPU;
of experts it waits for the fullest rank, and for the host that reads how many rows there are.
"""

from dataclasses import replace
from math import log, sqrt

from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.parts import Both, Parts

COMPUTATION = ("matmuls", "experts", "attention", "memory", "loss")
COUNTED_EXPERTS = 64  # that EXPERT_CV is of
MEASURED_ON = 4  # GPUs; times of one machine are those of its slowest GPU


def slowest(count: float) -> float:
    """Standard deviations by which the largest of so many lies above the mean."""
    return sqrt(2 * log(count)) if count > 1 else 0.0


def straggling(layout: Layout) -> float:
    """Of computation, what a step waits for its slowest GPU, above that of a machine."""
    more = slowest(layout.num_gpus) - slowest(MEASURED_ON)
    return constants.STRAGGLER_CV.value * max(more, 0.0)


def imbalance(layers: Layers) -> float:
    """Of the experts' time, what a step waits for the rank that has most rows.

    Of fewer experts than were counted, each is taken as several of these.
    """
    ep = layers.layout.ep
    each = max(layers.model.experts, COUNTED_EXPERTS) / ep
    return constants.EXPERT_CV.value / sqrt(each) * slowest(ep)


def computed(both: Both, layout: Layout) -> Both:
    """With gaps and small kernels, and with what a step waits for its slowest GPU."""
    uncounted, straggle = constants.UNCOUNTED.value, straggling(layout)

    def more(parts: Parts) -> Parts:
        seconds = sum(parts.get(name, 0.0) for name in COMPUTATION)
        waited_s = seconds * (1 + uncounted) * straggle
        return parts + Parts({"small kernels": seconds * uncounted, "stragglers": waited_s})

    return Both(more(both.forward), more(both.backward), more(both.weights))


def routed(layers: Layers, both: Both) -> Both:
    """A layer of experts, with its routing, the host that waits for counts, and its imbalance."""
    tokens, far = layers.between, layers.layout.ep > 1
    routing_s = constants.ROUTING_S.value + constants.ROUTING_TOKEN_S.value * tokens
    waited_s = constants.COUNTS_S.value / 2 * (far and layers.hosts_wait)
    beside = Both(Parts({"routing": routing_s, "host": waited_s}), Parts({"host": waited_s}))
    share = imbalance(layers)

    def more(parts: Parts) -> Parts:
        seconds = parts.get("experts", 0.0) + parts.get("all-to-all", 0.0)
        return parts + Parts({"imbalance": seconds * share})

    return replace(both, forward=more(both.forward), backward=more(both.backward),
                   weights=more(both.weights)) + beside  # fmt: skip
