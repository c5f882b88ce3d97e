"""Linear layers over the ranks of a group, sequence parallel and tensor parallel.

Between layers a rank has its part of the sequence; within a pair of layers it has its features.

    ColumnParallelLinear   y_r = gather(x) W_r^T + b_r               W_r: [out/n, in]
    RowParallelLinear      y_r = rows of rank r of (sum over s of x_s W_s^T) + b    W_s: [out, in/n]

A rank's weight is its slice of the whole layer's, in the layout of torch.nn.Linear: "column" and
"row" are those of W^T, by which x is multiplied.
"""

from collections.abc import Sequence
from typing import ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint import ranges
from counterpoint.errors import InputError
from counterpoint.nn import rowwise
from counterpoint.nn.grouped import Grouped, no_view
from counterpoint.nn.replicated import copy_to_group
from counterpoint.ops.activations import activate, weights_of
from counterpoint.ops.check import check_dense, check_dim, check_group, check_layer, check_plan
from counterpoint.ops.plans import plan_key
from counterpoint.plan.steps import Plan
from counterpoint.ranges import instance
from counterpoint.tensor_parallel.all_gather_matmul import all_gather_matmul
from counterpoint.tensor_parallel.matmul_reduce_scatter import matmul_reduce_scatter

RECIPES = ("rowwise",)
Module = TypeVar("Module", bound=nn.Module)


class SlicedLinear(Grouped):
    """A rank's slice of a torch.nn.Linear; `forward` is that of the layers below.

    OP: what `forward` calls. SHARD_DIM: the dim of the weight that is sliced. SLICES_BIAS: a rank
    has its part of the bias.
    """

    fp8: str = ""  # the recipe by which it multiplies in fp8, see `to_fp8`
    OP: ClassVar[str] = "all_gather_matmul"
    SHARD_DIM: ClassVar[int]
    SLICES_BIAS: ClassVar[bool]
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, *, group: dist.ProcessGroup | None = None,
        bias: bool = True, plan: str | Plan = "auto", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = self._get_name()
        self.group = check_group(name, group)
        self.in_features = in_features = ranges.whole(name, "in_features", in_features)
        self.out_features = out_features = ranges.whole(name, "out_features", out_features)
        check_layer(name, dtype, device, bias=bias)
        check_plan(name, plan, self.OP)
        self.plan = plan
        ranks, shape = self.group.size(), [out_features, in_features]
        if shape[self.SHARD_DIM] % ranks:
            split = ("out_features", "in_features")[self.SHARD_DIM]
            want, got = f"a multiple of the {ranks} ranks", shape[self.SHARD_DIM]
            fix = "pad the layer, or take another number of ranks"
            raise InputError(name, split, want=want, got=got, fix=fix)
        shape[self.SHARD_DIM] //= ranks
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        size = shape[0] if self.SLICES_BIAS else out_features
        own = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill with this rank's slice of what a torch.nn.Linear of the whole size would hold.

        The whole layer is made on this device, and freed: so all ranks draw the same numbers where
        they were given the same seed, and their generators end where that of one GPU does.
        """
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        sizes, has_bias = (self.in_features, self.out_features), self.bias is not None
        for name, whole in nn.Linear(*sizes, bias=has_bias, **like).named_parameters():
            getattr(self, name).copy_(self._part(whole))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None,
        plan: str | Plan = "auto",
    ) -> Self:  # fmt: skip
        """Slice a whole layer, equal on all ranks; `linear` can be freed afterwards.

        Raises:
            InputError: as for the class.
        """
        instance(cls.__name__, "linear", linear, nn.Linear, "a torch.nn.Linear")
        has_bias = getattr(linear, "bias", None) is not None
        layer = cls(
            linear.in_features, linear.out_features, group=group, bias=has_bias, plan=plan,
            device="meta",
        )  # fmt: skip
        for name, whole in linear.named_parameters():
            part = layer._part(whole.detach()).clone()
            setattr(layer, name, nn.Parameter(part, whole.requires_grad))
        return layer

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Gather the whole layer, the inverse of `from_linear`. All ranks call it.

        Returns:
            A torch.nn.Linear of new memory, equal on all ranks.
        """
        sizes, has_bias = (self.in_features, self.out_features), self.bias is not None
        linear = nn.Linear(*sizes, bias=has_bias, device="meta")
        for name, part in self.named_parameters():
            setattr(linear, name, nn.Parameter(self._whole(part), part.requires_grad))
        return linear

    def _part(self, whole: Tensor) -> Tensor:
        if whole.dim() == 1 and not self.SLICES_BIAS:
            return whole
        return whole.chunk(self.group.size(), self.SHARD_DIM)[self.group.rank()]

    def _whole(self, part: Tensor) -> Tensor:
        if part.dim() == 1 and not self.SLICES_BIAS:
            return part.clone()
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, self.SHARD_DIM)

    def _check(self, x: Tensor) -> None:
        features = self.weight.shape[1]
        check_dense(self._get_name(), x=x)
        if x.shape[-1:] != (features,):
            want = f"[..., {features}], {self.in_features} in_features"
            if self.SHARD_DIM == 1:
                want += f" over {self.group.size()} ranks"
            raise InputError(self._get_name(), "x", want=want, got=tuple(x.shape))

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and how many ranks have it."""
        plan = self.plan if isinstance(self.plan, str) else self.plan.spec
        fp8 = f", fp8={self.fp8!r}" if self.fp8 else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self.group.size()}, plan={plan!r}{fp8}"
        )


class ColumnParallelLinear(SlicedLinear):
    """The first linear layer of a pair: y_r = gather(x) W_r^T + b_r.

    [S / n, ..., in_features] -> [S, ..., out_features / n], where gather_dim is 0. By
    `all_gather_matmul`, whose contract it has. The part of x is what is saved for the backward; it
    is gathered again.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; a multiple of the ranks.
        group: of the ranks; the default group if None.
        bias: whether there is one; a rank has that of its columns.
        gather_dim: the dim of x that is the sequence; 0 needs no copy.
        plan: see `all_gather_matmul`.
        device: of the parameters, as for torch.nn.Linear; "meta" as well.
        dtype: of the parameters.

    Raises:
        InputError: out_features is no multiple of the ranks, or there is no group.

    Example:
        >>> up = cnn.ColumnParallelLinear(4096, 14336, group=tp)  # doctest: +SKIP
    """

    SHARD_DIM, SLICES_BIAS = 0, True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup | None = None,
        bias: bool = True,
        gather_dim: int = 0,
        plan: str | Plan = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, group=group, bias=bias, plan=plan, device=device, dtype=dtype
        )
        self.gather_dim = ranges.whole(self._get_name(), "gather_dim", gather_dim, -64, 63)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None,
        gather_dim: int = 0, plan: str | Plan = "auto",
    ) -> Self:  # fmt: skip
        """Slice a whole layer, equal on all ranks; `linear` can be freed afterwards.

        Raises:
            InputError: as for the class.
        """
        layer = super().from_linear(linear, group=group, plan=plan)
        layer.gather_dim = ranges.whole(cls.__name__, "gather_dim", gather_dim, -64, 63)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """The features of this rank for the whole sequence.

        Raises:
            InputError: x does not fit; nothing was launched.
        """
        self._check(x)
        if self.fp8:
            return self._in_fp8(x, self.weight, self.bias)
        return no_view(all_gather_matmul(
            x, self.weight.t(), group=self.group, bias=self.bias, plan=self.plan,
            gather_dim=self.gather_dim,
        ))  # fmt: skip

    def _in_fp8(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        check_dim(self._get_name(), "gather_dim", self.gather_dim, x[..., 0])
        front, plan = x.movedim(self.gather_dim, 0), plan_key(self.OP, self.plan)
        dim = self.gather_dim % x.dim()
        y = rowwise.gathered(front, weight, bias, self.group, plan, dim)
        return no_view(y.movedim(0, self.gather_dim).to(rowwise.result_of(x)))

    def extra_repr(self) -> str:
        """As that of a torch.nn.Linear, with what is more here."""
        return f"{super().extra_repr()}, gather_dim={self.gather_dim}"


class RowParallelLinear(SlicedLinear):
    """The second linear layer of a pair: y_r = rows of rank r of (sum over s of x_s W_s^T) + b.

    [S, ..., in_features / n] -> [S / n, ..., out_features], where scatter_dim is 0. By
    `matmul_reduce_scatter`, whose contract it has. Every rank has all of the bias, and its gradient
    is summed over the group.

    Args:
        in_features: of the whole layer; a multiple of the ranks.
        out_features: of the whole layer.
        group: of the ranks; the default group if None.
        bias: whether there is one, the same on all ranks.
        scatter_dim: the dim of x that is the sequence, a multiple of the ranks; 0 needs no copy.
        plan: see `matmul_reduce_scatter`.
        device: of the parameters, as for torch.nn.Linear; "meta" as well.
        dtype: of the parameters.

    Raises:
        InputError: in_features is no multiple of the ranks, or there is no group.

    Example:
        >>> down = cnn.RowParallelLinear(14336, 4096, group=tp)  # doctest: +SKIP
    """

    OP, SHARD_DIM, SLICES_BIAS = "matmul_reduce_scatter", 1, False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup | None = None,
        bias: bool = True,
        scatter_dim: int = 0,
        plan: str | Plan = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, group=group, bias=bias, plan=plan, device=device, dtype=dtype
        )
        self.scatter_dim = ranges.whole(self._get_name(), "scatter_dim", scatter_dim, -64, 63)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None,
        scatter_dim: int = 0, plan: str | Plan = "auto",
    ) -> Self:  # fmt: skip
        """Slice a whole layer, equal on all ranks; `linear` can be freed afterwards.

        Raises:
            InputError: as for the class.
        """
        layer = super().from_linear(linear, group=group, plan=plan)
        layer.scatter_dim = ranges.whole(cls.__name__, "scatter_dim", scatter_dim, -64, 63)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """All features for this rank's part of the sequence.

        Raises:
            InputError: x does not fit; nothing was launched.
        """
        self._check(x)
        bias = None if self.bias is None else copy_to_group(self.bias, group=self.group)
        if self.fp8:
            check_dim(self._get_name(), "scatter_dim", self.scatter_dim, x[..., 0])
            front, plan = x.movedim(self.scatter_dim, 0), plan_key(self.OP, self.plan)
            dim = self.scatter_dim % x.dim()
            y = rowwise.scattered(front, self.weight, bias, self.group, plan, dim)
            return no_view(y.movedim(0, self.scatter_dim).to(rowwise.result_of(x)))
        return no_view(matmul_reduce_scatter(
            x, self.weight.t(), group=self.group, bias=bias, plan=self.plan,
            scatter_dim=self.scatter_dim,
        ))  # fmt: skip

    def extra_repr(self) -> str:
        """As that of a torch.nn.Linear, with what is more here."""
        return f"{super().extra_repr()}, scatter_dim={self.scatter_dim}"


def gather_once(x: Tensor, *layers: ColumnParallelLinear) -> list[Tensor]:
    """Call several layers on one x: [layer(x) for layer in layers], but x is gathered once.

    For q, k and v; for gate and up see `gather_gated`. A bias is added after its matmul. Forward
    hooks of the layers do not run.

    Args:
        x: as for each of the layers.
        layers: of equal in_features, group, gather_dim, plan and recipe of `to_fp8`.

    Returns:
        One result for each layer.

    Raises:
        InputError: the layers differ, or x does not fit; nothing was launched.

    Example:
        >>> q, k, v = cnn.gather_once(x, self.q, self.k, self.v)  # doctest: +SKIP
    """
    first = _alike("gather_once", x, layers)
    if first.fp8:  # one weight
        whole = torch.cat([layer.weight for layer in layers])
        y = first._in_fp8(x, whole, None)  # pyright: ignore[reportPrivateUsage]
        ys = y.split([len(layer.weight) for layer in layers], -1)
    else:
        ys = all_gather_matmul(
            x, [layer.weight.t() for layer in layers], group=first.group, plan=first.plan,
            gather_dim=first.gather_dim,
        )  # fmt: skip
    biases = [layer.bias for layer in layers]
    return [y if b is None else y + b.to(y.dtype) for y, b in zip(ys, biases, strict=True)]


def gather_gated(
    x: Tensor, gate: ColumnParallelLinear, up: ColumnParallelLinear, activation: str = "silu_mul"
) -> Tensor:
    """activation(gate(x)) * up(x), but x is gathered once: the first half of a gated MLP.

    By `all_gather_matmul`, which says what is saved where it is trained. Layers with a bias and
    those of `to_fp8` have their products first, as by `gather_once`, and the activation in one
    kernel behind them. Forward hooks of the layers do not run.

    Args:
        x: as for both layers.
        gate: equal to `up` in all but its weight.
        up: whose result is multiplied.
        activation: "silu_mul", "gelu_mul", "gelu_tanh_mul" or "relu_mul".

    Returns:
        As one layer.

    Raises:
        InputError: the layers differ, x does not fit, or there is no such activation; nothing was
            launched.

    Example:
        >>> y = self.down(cnn.gather_gated(x, self.gate, self.up))  # doctest: +SKIP
    """
    first = _alike("gather_gated", x, (gate, up))
    weights = gate.weight.t(), up.weight.t()
    weights_of("gather_gated", activation, weights, None)
    if first.fp8 or gate.bias is not None or up.bias is not None:
        return activate(gather_once(x, gate, up), activation)
    return all_gather_matmul(
        x, weights, group=first.group, plan=first.plan, gather_dim=first.gather_dim,
        activation=activation,
    )  # fmt: skip


def _alike(name: str, x: Tensor, layers: Sequence[ColumnParallelLinear]) -> ColumnParallelLinear:
    """The first of layers that may be called on one x."""
    if not layers:
        raise InputError(name, "layers", want="one or more", got="none")
    first = layers[0]
    for layer in layers:
        instance(name, "layers", layer, ColumnParallelLinear, "ColumnParallelLinear")
        layer._check(x)  # pyright: ignore[reportPrivateUsage]
        for field in ("group", "gather_dim", "plan", "fp8"):
            ours, theirs = getattr(first, field), getattr(layer, field)
            if ours is not theirs and ours != theirs:
                want, got = f"of one {field}", f"{ours} and {theirs}"
                raise InputError(name, "layers", want=want, got=got)
    return first


def to_fp8(module: Module, recipe: str = "rowwise") -> Module:
    """Let the ColumnParallelLinear and RowParallelLinear in a module multiply in fp8.

    By torchao's rowwise recipe: x and the weight are quantised in each forward to float8_e4m3fn,
    with a scale, a power of 2, for each row of x and each feature of the result. What is gathered
    is half as many bytes; partial results are bf16, as the result is before it takes the dtype of
    x. The backward is that of the layers in bf16, with x and the weight as they were: it is no
    faster. Parameters, what is saved of them, and the other layers stay as they are. A plan that
    has no fp8 matmuls is refused in the forward: see `Scaled`.

    Args:
        module: of such layers, or one of them; changed in place. Their in_features and out_features
            on a rank are multiples of 16.
        recipe: "rowwise", or "" for none: as they were.

    Returns:
        The module.

    Raises:
        InputError: there is no such recipe or layer, or a size is no multiple of 16.

    Example:
        >>> cnn.to_fp8(model)  # doctest: +SKIP
    """
    instance("to_fp8", "module", module, nn.Module, "a torch.nn.Module")
    if recipe not in ("", *RECIPES):
        want = f"one of '', {', '.join(RECIPES)}"
        raise InputError("to_fp8", "recipe", want=want, got=repr(recipe))
    kinds = (ColumnParallelLinear, RowParallelLinear)
    layers = [each for each in module.modules() if isinstance(each, kinds)]
    if not layers:
        want = "a module with a ColumnParallelLinear or RowParallelLinear"
        raise InputError("to_fp8", "module", want=want, got=type(module).__name__)
    for layer in layers:
        if recipe and (layer.weight.shape[0] % 16 or layer.weight.shape[1] % 16):
            want = "of layers whose features on a rank are multiples of 16"
            got = f"a weight {tuple(layer.weight.shape)}"
            raise InputError("to_fp8", "module", want=want, got=got)
    for layer in layers:
        layer.fp8 = recipe
    return module
