"""Seconds of one layer on one rank, forward and backward, by parts.

Matmuls with a collective beside them are priced as operators of this library: the serial plan, the
plan that `choose` takes, or the longer side alone. All else is products over a rate, bytes over a
rate, or a collective of the network.
"""

from dataclasses import dataclass
from functools import cached_property, partial

from counterpoint.machine import Machine
from counterpoint.problem import Counts, Problem
from counterpoint.scale import constants
from counterpoint.scale.layout import ExpertRows, Layout
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Group, Network
from counterpoint.scale.operators import (
    ITEM_BYTES,
    Overlap,
    Placed,
    between,
    pair_s,
    placed,
    sent,
)
from counterpoint.scale.parts import Both, Collective, Parts, Sent


@dataclass(frozen=True)
class Layers:
    """What layers of a model cost on one rank of a layout.

    Args:
        model: its sizes.
        layout: that it fits.
        network: of the GPUs.
        overlap: of matmuls with the collectives beside them: "none", "ours" or "ideal".
    """

    model: Model
    layout: Layout
    network: Network
    overlap: Overlap

    @cached_property
    def tokens(self) -> int:
        """Of a micro-batch, as the tensor-parallel ranks share them."""
        return self.layout.tokens(self.model)

    @cached_property
    def between(self) -> float:
        """Tokens that one rank has between matmuls."""
        shared = self.layout.tp if self.layout.sequence_parallel else 1
        return self.tokens / shared

    @cached_property
    def alone(self) -> Machine:
        """What one GPU costs at settled clocks."""
        return self.network.as_machine(Group(1, 1))

    @property
    def apart(self) -> bool:
        """Whether gradients of weights are computed apart: then operators are, that make both.

        The plan of both at once hides some of the communication of one behind the other.
        """
        return self.layout.schedule == "zero-bubble"

    @cached_property
    def experts_group(self) -> Group:
        """Ranks that share out the experts."""
        return Group(self.layout.ep, self.layout.tp)

    @cached_property
    def routes(self) -> bool:
        """Whether tokens may go to experts by routes: where our plans are between islands."""
        return self.overlap != "none" and between(self.network, self.experts_group) > 1

    @property
    def hosts_wait(self) -> bool:
        """Whether hosts wait for how many rows experts get: plans of ours leave that to GPUs."""
        return self.overlap == "none"

    @property
    def rows_by(self) -> ExpertRows:
        """What puts rows in the order of experts: ours is fused, where experts are shared out."""
        return self.layout.rows_by if self.hosts_wait or self.layout.ep == 1 else "fused"

    def dense(self) -> Both:
        """A layer whose MLP every token goes through."""
        mlp = self.mlp(self.model.ffn)
        return self._layer(mlp)

    def sparse(self) -> Both:
        """A layer of experts, with the shared expert if there is one."""
        shared = self.mlp(self.model.shared_ffn) if self.model.shared_ffn else Both()
        return self._layer(shared, self.experts())

    def head(self) -> Both:
        """The logits and the loss, on the last stage."""
        vocab = -(-self.model.vocab // self.layout.tp)
        rows, hidden = self.tokens, self.model.hidden
        loss_s = self.memory_s(constants.LOSS_BYTES.value * rows * vocab) / 2
        forward = Parts({"matmuls": self.matmul_s(rows, vocab, hidden), "loss": loss_s})
        inputs = Parts({"matmuls": self.matmul_s(rows, hidden, vocab), "loss": loss_s})
        weights = Parts({"matmuls": self.matmul_s(hidden, vocab, rows)})
        return Both.of(forward, inputs, weights)

    def matmul_s(self, rows: float, n: float, k: float, count: int = 1) -> float:
        """Seconds of `count` matmuls on one GPU in one launch."""
        machine = self.alone
        rows, n, k = (max(round(size), 1) for size in (rows, n, k))
        return machine.costs.matmul_s(rows, n, k, ITEM_BYTES, machine.sms, count=count)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so much."""
        return self.alone.costs.memory_s(round(num_bytes))

    def pair_s(self, place: Placed) -> tuple[float, float]:
        """Seconds of an operator with its communication, and of its matmuls alone."""
        return pair_s(place, self.overlap)

    def _layer(self, mlp: Both, routed: Both | None = None) -> Both:
        """Attention, the MLP and the routed experts given, with what lies between and again."""
        memory_s = self.memory_s(
            constants.REPLICATED_BYTES.value * self.between * self.model.hidden
        )
        small = Parts({"memory": memory_s})
        core = self._attention()
        routed = routed or Both()
        found = matmuls = self.projections() + mlp + routed
        found += core + Both(small, small * constants.BACKWARD_BYTES.value)
        # selective: every second matmul, and what is between them; no grouped one is kept
        grouped = Parts({name: s for name, s in routed.forward.items() if name != "all-to-all"})
        again = {
            "none": Parts(), "attn": core.forward, "full": found.forward,
            "selective": (matmuls.forward + grouped) * 0.5 + small,
        }  # fmt: skip
        return found + Both(backward=again[self.layout.recompute])

    def _attention(self) -> Both:
        """Scores, softmax and what is made of the values, of this rank's heads and sequences."""
        model, layout = self.model, self.layout
        length, heads = layout.length(model), model.heads / layout.tp
        pairs = model.attended(length) if layout.flash_attention else length * length
        scores = layout.micro_batch * heads * pairs / layout.cp
        flop = 2 * scores * (model.key_width + model.width)
        if layout.flash_attention:
            rate = constants.FLASH_SHARE.value * self.alone.device.bf16_flop_per_s
            forward_s = flop / 2 / rate  # causal: half of the scores
            backward_s = forward_s * constants.FLASH_BACKWARD.value
        else:
            forward_s = self._unfused_s(scores, flop, constants.SCORE_BYTES,
                                        constants.SCORE_MATMUL_BYTES)  # fmt: skip
            backward_s = self._unfused_s(scores, 2 * flop, constants.SCORE_BACKWARD_BYTES,
                                         constants.SCORE_MATMUL_BACKWARD_BYTES)  # fmt: skip
        return Both(
            Parts({"attention": forward_s}) + self._keys("all_gather"),
            Parts({"attention": backward_s})
            + self._keys("all_gather")
            + self._keys("reduce_scatter"),
        )

    def _unfused_s(
        self, scores: float, flop: float, moved: constants.Constant, beside: constants.Constant
    ) -> float:
        """Kernels that keep the scores: matmuls by products or bytes, the others by bytes."""
        costs = self.alone.costs
        matmuls_s = max(flop / costs.gemm_flop_per_s, scores * beside.value / costs.hbm_bytes_per_s)
        return matmuls_s + scores * (moved.value - beside.value) / costs.hbm_bytes_per_s

    @property
    def keys_bytes(self) -> float:
        """Of keys and values of whole sequences, of this rank's heads."""
        model, layout = self.model, self.layout
        columns = 2 * max(model.kv_heads / layout.tp, 1) * model.width
        if model.key_rank:
            columns = model.key_rank + model.rope_dim
        return layout.micro_batch * layout.length(model) * columns * ITEM_BYTES

    def _keys(self, kind: Collective) -> Parts:
        """Context-parallel ranks gather keys and values, or scatter their gradients."""
        group = Group(self.layout.cp, self.layout.tp)
        if group.size == 1:
            return Parts()
        seconds = self.network.all_gather_s(self.keys_bytes, group)
        name = "context parallel"
        return Parts({name: seconds}, {Sent(name, kind, group): self.keys_bytes})

    def projections(self) -> Both:
        """The matmuls before and behind attention."""
        model, tp = self.model, self.layout.tp
        *first, last = model.attention_weights
        found = [self._row(last[0] // tp)]
        if model.key_rank:
            # what all heads share is computed on every rank
            (shared, latent), *heads = first
            found += [self._local(latent, shared), *(self._local(n / tp, k) for k, n in heads)]
        else:
            # ranks that share a head of keys have one each
            heads = model.heads + 2 * max(model.kv_heads, tp)
            found.append(self._column(heads * model.width // tp))
        return sum(found, Both())

    def mlp(self, inner: int) -> Both:
        """Both matmuls of an MLP and what is between them."""
        local, gates = inner // self.layout.tp, 1 + self.model.gated
        moved = constants.ACTIVATION_BYTES.value * self.tokens * local * (gates + 1)
        between = Parts({"memory": self.memory_s(moved)})
        small = Both(between, between * constants.BACKWARD_BYTES.value)
        return self._column(gates * local) + self._row(local) + small

    def _local(self, n: float, k: float) -> Both:
        """A matmul without communication, and its two gradients."""
        rows = self.tokens
        times = self.matmul_s(rows, n, k), self.matmul_s(rows, k, n), self.matmul_s(k, n, rows)
        return Both.of(*(Parts({"matmuls": seconds}) for seconds in times))

    def _column(self, n: int) -> Both:
        """A matmul whose columns are shared out; its input is gathered, or every rank has it."""
        tp, rows, hidden = self.layout.tp, self.tokens, self.model.hidden
        if tp == 1:
            return self._local(n, hidden)
        if not self.layout.sequence_parallel:
            return Both.of(
                Parts({"matmuls": self.matmul_s(rows, n, hidden)}),
                self._pair("matmul_all_reduce", rows, hidden, n),
                Parts({"matmuls": self.matmul_s(hidden, n, rows)}),
            )
        forward = self._pair("all_gather_matmul", rows, n, hidden)
        if not self.apart:
            return Both(forward, self._pair("all_gather_matmul_backward", rows, n, hidden))
        return Both.of(
            forward,
            self._pair("matmul_reduce_scatter", rows, hidden, n),
            self._pair("all_gather_matmul_wgrad", rows, n, hidden),
        )

    def _row(self, k: int) -> Both:
        """A matmul whose contracted size is shared out; its result is summed over ranks."""
        tp, rows, hidden = self.layout.tp, self.tokens, self.model.hidden
        if tp == 1:
            return self._local(hidden, k)
        weights = Parts({"matmuls": self.matmul_s(k, hidden, rows)})
        if not self.layout.sequence_parallel:
            inputs = Parts({"matmuls": self.matmul_s(rows, k, hidden)})
            return Both.of(self._pair("matmul_all_reduce", rows, hidden, k), inputs, weights)
        forward = self._pair("matmul_reduce_scatter", rows, hidden, k)
        if not self.apart:
            return Both(forward, self._pair("matmul_reduce_scatter_backward", rows, hidden, k))
        return Both.of(forward, self._pair("all_gather_matmul", rows, k, hidden), weights)

    def _pair(self, op: str, m: int, n: int, k: int) -> Parts:
        """An operator of the tensor-parallel ranks."""
        group, name = Group(self.layout.tp, 1), "tensor parallel"
        place = placed(Problem(op, m=m, n=n, k=k, ranks=group.size), self.network, group)
        seconds, compute_s = self.pair_s(place)
        parts = {"matmuls": compute_s, name: seconds - compute_s}
        return Parts(parts, sent(place.problem, name, group))

    def experts(self) -> Both:
        """Dispatch, experts and combine: a row for each expert of a token, or by routes.

        By these, a row goes once to each island, and there once to each rank. The faster counts.
        """
        ways: tuple[Counts, ...] = ("equal", "routed") if self.routes else ("equal",)
        return min(map(self._experts, ways), key=lambda both: both.seconds)

    def _experts(self, counts: Counts) -> Both:
        """All experts have as many rows, but for half a tile each.

        Routing is random: of the last tile of an expert's rows, half is empty in the mean.
        """
        model, ep = self.model, self.layout.ep
        local, hidden = model.experts // ep, model.hidden
        cells = ep * local
        each = max(-(-int(self.between) * model.top_k // cells), 1)  # rows of a rank and an expert
        rows, inner, wide = each * cells, model.expert_ffn, (1 + model.gated) * model.expert_ffn
        pair = partial(self._exchange, counts) if ep > 1 else self._grouped
        forward = pair("all_to_all_matmul", rows, wide, hidden)
        forward += pair("matmul_all_to_all", rows, hidden, inner)
        inputs = pair("all_to_all_matmul", rows, inner, hidden)
        inputs += pair("matmul_all_to_all", rows, hidden, wide)
        # of one expert on one rank: rows that all ranks send it
        dw_s = self.matmul_s(hidden, wide, each * ep, local)
        dw_s += self.matmul_s(inner, hidden, each * ep, local)
        between_s = self.memory_s(constants.ACTIVATION_BYTES.value * rows * (wide + inner))
        there_s, back_s = (
            self.memory_s(each.value * rows * hidden) for each in constants.ROWS_BYTES[self.rows_by]
        )
        if counts == "routed":  # plans put rows in order and sum them
            weighted = constants.ROUTED_WEIGHTS_BYTES.value * rows
            there_s, back_s = 0.0, self.memory_s(weighted * (hidden + 2 * inner))
        inputs += Parts({"memory": between_s * constants.BACKWARD_BYTES.value + back_s})
        forward += Parts({"memory": between_s + there_s})
        return Both.of(forward, inputs, Parts({"experts": dw_s}))

    def _grouped(self, _: str, m: int, n: int, k: int) -> Parts:
        """A matmul of every expert, all of them on this rank; m rows in all."""
        local = self.model.experts // self.layout.ep
        seconds = self.matmul_s(m / local + self.alone.gemm_tile[0] / 2, n, k, local)
        return Parts({"experts": seconds})

    def _exchange(self, counts: Counts, op: str, m: int, n: int, k: int) -> Parts:
        """An operator of the ranks that share out the experts."""
        group, name = self.experts_group, "all-to-all"
        problem = Problem(op, m=m, n=n, k=k, ranks=group.size, counts=counts,
                          experts=self.model.experts // group.size,
                          top_k=self.model.top_k if counts == "routed" else 0)  # fmt: skip
        place = placed(problem, self.network, group)
        seconds, compute_s = self.pair_s(place)
        local = problem.experts
        even_s = self.matmul_s(m / local, n, k, local)
        uneven_s = self._grouped(op, m, n, k).seconds - even_s
        parts = {"experts": compute_s + uneven_s, name: seconds - compute_s}
        return Parts(parts, sent(place.problem, name, group))
