"""A linear layer whose weight is gathered: data parallel, a part of it on each rank (FSDP).

y_r = x_r W^T + b is, transposed, y_r^T = gather(W) x_r^T: an `all_gather_matmul` in which the
weight moves and the activation stays. So the gather of W hides behind the matmul, and in the
backward behind that of the weight's gradient, whose sum over the ranks hides behind the
activation's.
"""

from torch import Tensor

from counterpoint.nn.grouped import no_view
from counterpoint.nn.linear import SlicedLinear
from counterpoint.nn.replicated import copy_to_group
from counterpoint.tensor_parallel.all_gather_matmul import all_gather_matmul


class FullyShardedLinear(SlicedLinear):
    """y_r = x_r W^T + b of each rank's own x_r, where rank r keeps rows r of W.

    [..., in_features] -> [..., out_features], equally many rows on all ranks. By
    `all_gather_matmul`, whose contract it has: what is kept for the backward is x and the own part
    of the weight; W is gathered again. Gradients of weight and bias are summed over the group:
    divide the loss by the ranks for their mean. Every rank has all of the bias.

    The result is a transposed view: its columns, not its rows, lie together in memory, so that it
    takes `reshape`, not `view`.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; a multiple of the ranks.
        group: of the ranks; the default group if None.
        bias: whether there is one, the same on all ranks.
        plan: see `all_gather_matmul`; M is out_features, N the rows of x.
        device: of the parameters, as for torch.nn.Linear; "meta" as well.
        dtype: of the parameters.

    Raises:
        InputError: out_features is no multiple of the ranks, or there is no group.

    Example:
        >>> layer = cnn.FullyShardedLinear(4096, 14336, group=dp)  # doctest: +SKIP
    """

    SHARD_DIM, SLICES_BIAS = 0, False

    def forward(self, x: Tensor) -> Tensor:
        """All features of this rank's rows.

        Raises:
            InputError: x does not fit; nothing was launched.
        """
        self._check(x)
        rows = x.reshape(-1, x.shape[-1])
        y = all_gather_matmul(self.weight, rows.t(), group=self.group, plan=self.plan).t()
        if self.bias is not None:
            y = y + copy_to_group(self.bias, group=self.group).to(y.dtype)
        return no_view(y.reshape(*x.shape[:-1], y.shape[-1]))
