"""Ranks and what they share: memory, messages, the notice board, islands."""
