"""Training steps of FSDP2 models, whose communication is hidden: see overlap.py."""
