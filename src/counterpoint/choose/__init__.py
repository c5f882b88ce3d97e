"""Which plan. Pure Python."""
