"""What a plan will cost: pure, no torch."""
