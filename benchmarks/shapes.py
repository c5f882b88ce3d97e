"""The shapes that we publish: (M gathered, N and K of one rank), Llama-3 at 8 ranks, bf16.

Source: layer sizes of Llama-3-70B and Llama-3.1-405B; M = tokens.
"""

SHAPES: dict[str, dict[str, tuple[int, int, int]]] = {
    "all_gather_matmul": {
        "70B qkv": (8192, 1280, 8192),
        "70B gate+up": (8192, 7168, 8192),
        "405B gate+up": (8192, 13312, 16384),
        "70B gate+up, 2048 tokens": (2048, 7168, 8192),
        "70B gate+up, 512 tokens": (512, 7168, 8192),
    },
    "matmul_reduce_scatter": {
        "70B o": (8192, 8192, 1024),
        "70B down": (8192, 8192, 3584),
        "405B down": (8192, 16384, 6656),
        "70B down, 2048 tokens": (2048, 8192, 3584),
        "70B down, 512 tokens": (512, 8192, 3584),
    },
}

# the least serial / best that we promise on 8 GPUs, by shape
BARS_ON_8: dict[str, dict[str, float]] = {
    "all_gather_matmul": {
        "70B qkv": 1.44,
        "70B gate+up": 1.24,
        "405B gate+up": 1.12,
        "70B gate+up, 2048 tokens": 1.22,
    },
    "matmul_reduce_scatter": {
        "70B o": 1.31,
        "70B down": 1.40,
        "405B down": 1.25,
        "70B down, 2048 tokens": 1.20,
    },
}
