"""Embedding bags of table-wise shards, and their all-to-all."""
