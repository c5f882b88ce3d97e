"""A whole training step on many nodes, predicted: seconds, parts and what they stand on.

cp.scale.predict("llama3-405b", cp.scale.Layout(tp=8, pp=16, dp=128), machine="h100-8")
"""
