"""Shapes of overlap that several operators use. Pure Python, as plan/ is."""
