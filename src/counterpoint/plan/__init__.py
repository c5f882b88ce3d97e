"""What runs when: plans as data. Pure Python: neither torch nor triton."""
