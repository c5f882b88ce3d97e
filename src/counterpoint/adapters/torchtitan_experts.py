"""torchtitan: its routed experts get their tokens by `ExpertParallelMLP`.

    --override.imports counterpoint.adapters.torchtitan_experts.experts

`explain_experts(model)` says which of a sharded model do not, and why. Gate and up are put together
in each call, as torchtitan has them apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import counterpoint.nn as cnn
from counterpoint.adapters.experts import explain_experts, note
from counterpoint.adapters.seams import taken
from counterpoint.experts.layer import Route

__all__ = ["Experts", "experts", "explain_experts"]
TESTED = "0.3.0"
override: Any
derive: Any
override, derive = taken("torchtitan", TESTED, "torchtitan.config", "override", "derive")
Routed: Any
Grouped: Any
Routed, Grouped = taken(
    "torchtitan", TESTED, "torchtitan.models.common.moe", "RoutedExperts", "GroupedExperts"
)


class Experts(Routed):
    """Routed experts whose tokens go by `ExpertParallelMLP` over the ranks of the expert mesh.

    In bf16, as torchtitan multiplies them, and in calls that torch does not compile.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Routed.Config):
        """As torchtitan's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._layer: list[cnn.ExpertParallelMLP] = []  # no module of this one

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan does, which then knows the expert mesh."""
        super().parallelize(parallel_dims)
        mesh: Any = parallel_dims.get_optional_mesh("ep")
        inner, why = self.inner_experts, ""
        if mesh is None or mesh.size() == 1:
            why = "its ranks are one"
        elif type(inner) is not Grouped:
            why = f"its experts are {type(inner).__name__}"
        else:
            _, hidden, features = inner.w1_EFD.shape
            self._layer = [
                cnn.ExpertParallelMLP(
                    features, hidden, inner.num_experts, group=mesh.get_group(), device="meta",
                    dtype=torch.bfloat16,
                )
            ]  # fmt: skip
        note(self, "torchtitan", why)

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:  # fmt: skip
        """As torchtitan's: the sums of tokens by experts on all ranks of the mesh."""
        if not self._layer or torch.compiler.is_compiling():
            given = topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            return super().forward(x_BLD, *given)
        gate, down, up = (
            (w.to_local() if isinstance(w, DTensor) else w).bfloat16()
            for w in (getattr(self.inner_experts, name) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
        )
        x = x_BLD.flatten(0, 1)
        route = Route(None, topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1), True)
        parameters = torch.cat((gate, up), 1), down
        y = self._layer[0].through(x.bfloat16(), route, None, parameters)
        return y.type_as(x).view(x_BLD.shape)


@override(target=Routed.Config, description="tokens go to experts by counterpoint", exact=True)
def experts(config: Any) -> Any:
    """Routed experts by `ExpertParallelMLP`: see `Experts`, and `explain_experts`.

    Returns:
        Their configuration.
    """
    return derive(config, Experts.Config)
