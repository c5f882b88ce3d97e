"""Kernels that move rows and multiply them: their plan, memory and launches."""
