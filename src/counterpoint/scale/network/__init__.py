"""Links between GPUs and nodes, and what collectives take on them."""
