"""all_to_all_matmul: rows go to their experts, which multiply them; its families of plans."""

from counterpoint.plan.expert_operators import DISPATCH as OPERATION

__all__ = ["OPERATION"]
