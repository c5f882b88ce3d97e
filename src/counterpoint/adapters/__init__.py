"""Seams of frameworks through which unchanged models reach the operators."""
