"""Exchanges that the GPU starts: puts to other nodes that a kernel posts as it computes.

No launch by the host, and no meeting of an island before each message. This library has no such
exchange: what is priced here is part of no plan, and of no column of `predict`.
"""

from counterpoint.choose.by_model import parts_s
from counterpoint.scale.constants import Constant
from counterpoint.scale.network.fabric import Network
from counterpoint.scale.operators import Placed, pair_s

# DeepEP V1's README (docs/legacy.md), low-latency kernels over NVSHMEM's IBGDA: 128 tokens, 7168
# numbers, 8 experts a token, fp8, NICs of 50 GB/s, nodes of 8; by GPUs, seconds of a dispatch
PUBLISHED_S = {16: 118e-6, 32: 155e-6, 64: 173e-6, 128: 192e-6, 256: 194e-6}
PUBLISHED_PUTS = 128 * 8  # of a rank, one for each expert of a token
PUT_BYTES = Constant(
    7168 + 4 * 56 + 16, "bytes of a put, at least", "counted",
    "a token of that dispatch: fp8, a scale for each 128 numbers, where it comes from; puts of so "
    "many bytes cost nothing beside them: what its dispatch takes does not grow with their number",
)  # fmt: skip
PUT_S = Constant(
    31e-6, "s of an exchange beside its bytes", "assumed",
    "DeepEP V1's dispatch of 128 tokens on 16 to 256 GPUs (118 to 194 us), less its bytes for "
    "other nodes at nic_share of 50 GB/s: 26 to 34 us, the start of a kernel and casts included",
)  # fmt: skip
CONSTANTS = {"put_bytes": PUT_BYTES, "put_s": PUT_S}


def applies(place: Placed) -> bool:
    """Whether some of an operator's ranks are on other islands."""
    return place.problem.islands > 1 or not place.planned


def seconds(place: Placed, network: Network) -> float:
    """Seconds of an operator whose kernel posts puts, or of the serial plan if that is faster.

    Of computation C and links L, max(C, L) + min(C, L) / waves + PUT_S: all SMs compute what is
    put first, and what is put last is hidden behind nothing.
    """
    serial_s, _ = pair_s(place, "none")
    compute_s, links_s = parts_s(place.problem, place.machine)
    puts = links_s * network.nic.bytes_per_s / PUT_BYTES.value
    waves = max(puts / network.machine.device.num_sms, 1.0)
    both_s = max(compute_s, links_s) + min(compute_s, links_s) / waves + PUT_S.value
    return min(serial_s, both_s)
