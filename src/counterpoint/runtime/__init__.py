"""Run it: symmetric memory, workspaces, and one executor for all plans on CPU ranks and on GPUs."""
