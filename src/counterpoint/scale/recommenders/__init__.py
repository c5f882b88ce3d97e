"""A training step of a recommender, DLRM: its sizes, its parts, and a map of what overlap saves."""
