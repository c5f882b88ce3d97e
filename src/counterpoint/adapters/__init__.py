"""Seams of frameworks through which unchanged models reach the operators."""

from counterpoint.lazy import need

need("torch", "counterpoint.adapters")
