"""The shapes that we publish: (M over all ranks, N and K of one rank), Llama-3 at 8 ranks, bf16.

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
