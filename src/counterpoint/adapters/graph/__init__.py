"""Graphs of torch.compile: their collectives are found, and operators take their places."""
