"""PyTorch operators, one file each: check, choose, run, differentiate."""
