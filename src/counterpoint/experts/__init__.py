"""Mixture of experts: dispatch and matmul, matmul and combine, and a layer of both."""
