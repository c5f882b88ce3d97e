"""How lanes share a GPU: what a kernel takes of it."""
