"""Attention to the keys and values of all ranks."""
