"""transformers: a callback by which its Trainer's FSDP2 steps are overlapped, and its experts.

    trainer.add_callback(counterpoint.adapters.transformers.Overlap())

The Trainer shards the model by accelerate, with `fsdp_config={"version": 2}` or a
DistributedConfig, before its first step: the callback then calls `counterpoint.overlap` on it.

    import counterpoint.adapters.transformers
    how = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="counterpoint")
    AutoModelForCausalLM.from_pretrained(name, distributed_config=how)

From transformers 5.24 on. Experts of an unmodified model get their tokens by `ExpertParallelMLP`;
`explain_experts(model)` says which of them do not, and why.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import counterpoint.nn as cnn
from counterpoint.adapters.experts import explain_experts, note
from counterpoint.adapters.seams import taken
from counterpoint.errors import UnsupportedError
from counterpoint.experts.layer import Route
from counterpoint.fsdp.overlap import overlap
from counterpoint.fsdp.overlapped import Overlapped
from counterpoint.fsdp.torch_parts import states_of

__all__ = ["Overlap", "explain_experts"]
TESTED = "5.24.0"
Callback: Any
(Callback,) = taken("transformers", TESTED, "transformers", "TrainerCallback")


class Overlap(Callback):
    """Overlaps the model of a Trainer once it is sharded, and ends that with the training.

    Args:
        options: of `counterpoint.overlap`.

    Attributes:
        overlapped: what `counterpoint.overlap` returned; None before the training.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.overlapped: Overlapped | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Overlap it.

        Raises:
            InputError: the Trainer has not sharded its model by FSDP2, or an option is wrong.
        """
        self.overlapped = overlap(kwargs["model"], **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model back to torch, as it is to be saved or evaluated."""
        if self.overlapped is not None and states_of(kwargs["model"]):
            self.overlapped.off()


def experts_of(implementation: Any, all_to_all: Any) -> Any:
    """Our way for tokens to come to their experts, as transformers' registry takes it.

    Args:
        implementation: transformers' EPImplementation, which is its base.
        all_to_all: its AllToAllEP, for experts that ours are not.
    """

    class CounterpointEP(implementation):
        """Experts of one module, by `ExpertParallelMLP` over the ranks of the expert mesh."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            why = left_out(experts, ep_mesh.size())
            self._experts, self._layer = experts, None
            self._theirs = all_to_all(experts, ep_mesh, tp_mesh) if why else None
            note(experts, "transformers", why)

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Any:
            if self._theirs is not None:
                return self._theirs(hidden_states, top_k_index, top_k_weights)
            gate_up, down = (p.to_local() if isinstance(p, DTensor) else p for p in
                             (self._experts.gate_up_proj, self._experts.down_proj))  # fmt: skip
            if self._layer is None:
                every = self.num_local_experts * self.ep_mesh.size()
                self._layer = cnn.ExpertParallelMLP(
                    down.shape[1], down.shape[2], every, group=self.ep_mesh.get_group(),
                    device="meta", dtype=down.dtype,
                )  # fmt: skip
            given = hidden_states, top_k_index, top_k_weights
            if self.tp_mesh.size() == 1:
                return self._layer.through(given[0], route_of(*given[1:]), None, (gate_up, down))
            # ranks of a tensor-parallel group have one batch: each takes its part of the tokens
            x, *route = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for t in given
            )
            y = self._layer.through(x, route_of(*route), None, (gate_up, down))
            shape, stride = hidden_states.shape, (hidden_states.shape[-1], 1)
            whole: Any = DTensor.from_local(
                y.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride
            )
            return whole.full_tensor()

    return CounterpointEP


def route_of(experts: Tensor, weights: Tensor) -> Route:
    """Of experts and weights that a router has chosen."""
    return Route(None, experts, weights, renormalize=True)


def left_out(experts: Any, ranks: int) -> str:
    """Why experts go transformers' own way; "" if they do not."""
    gate = getattr(type(experts), "_apply_gate", None)
    function = getattr(experts, "act_fn", None)
    reasons = {
        "its ranks are one": ranks == 1,
        "biases": getattr(experts, "has_bias", False),
        "its experts have no gate": not getattr(experts, "has_gate", True),
        "its weights are transposed": getattr(experts, "is_transposed", False),
        "gate and up are interleaved": not getattr(experts, "is_concatenated", True),
        "a norm is behind each expert": getattr(experts, "has_post_expert_norm", False),
        "its own gate": getattr(gate, "__name__", "") != "_default_apply_gate",
        f"activation {type(function).__name__}": not _is_silu(function),
    }
    return next((why for why, left in reasons.items() if left), "")


def _is_silu(function: Any) -> bool:
    """By its values: transformers has classes of its own."""
    some = torch.linspace(-4, 4, 65)
    with suppress(Exception):
        return torch.equal(function(some), nn.functional.silu(some))
    return False


with suppress(UnsupportedError):  # transformers before 5.24 has only the callback's place
    _base, _other, _registry = taken(
        "transformers", TESTED, "transformers.distributed.expert_parallel",
        "EPImplementation", "AllToAllEP", "EPImplementationInterface",
    )  # fmt: skip
    _registry.register("counterpoint", experts_of(_base, _other))
