"""Benchmarks are declared, a file each; runner.py times them and tables.py writes what they say."""
