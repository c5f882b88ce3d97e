"""matmul_all_to_all: experts multiply, and rows go back to their owners; its families of plans."""

from counterpoint.plan.expert_operators import COMBINE as OPERATION

__all__ = ["OPERATION"]
