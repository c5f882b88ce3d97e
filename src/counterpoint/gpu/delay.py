"""Who is launched first owns the SMs: compute is held back until communication has its own.

A persistent matmul takes every SM and keeps them to its end; a collective launched just after it
waits for all of that. So a short delay stands before a compute stage that follows a collective.
The delay is a guess, bounded and calibrated: CUDA tells nobody when the blocks of another library's
kernel have started. Its launch-order edges between graph nodes would, but act as full dependencies
behind kernels that are launched in clusters, as NCCL's are (4xH200, driver 580, 2026-11).
"""

from typing import Any

import torch

from counterpoint.kernels.delay import delay_kernel


class Delay:
    """A wait of fixed length on a stream. Compiled here, so that it may be captured."""

    def __init__(self, device: torch.device) -> None:
        self._passed = torch.zeros(1, dtype=torch.int64, device=device)
        launch: Any = delay_kernel
        with torch.cuda.device(device):
            launch[(1,)](self._passed, 0, num_warps=1)
        self._launch = launch

    def __call__(self, seconds: float) -> None:
        """Let the current stream wait.

        Args:
            seconds: a few microseconds: a delay is a nudge, not a schedule.
        """
        if seconds:
            self._launch[(1,)](self._passed, round(seconds * 1e9), num_warps=1)
