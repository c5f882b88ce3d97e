"""Measure it: timing, profiled runs, pictures, record rows."""
