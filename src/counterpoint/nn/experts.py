"""A layer of experts, some of them on each rank: each token is sent to a few, and comes back.

rows of tokens, sorted by expert
  --all_to_all_matmul-->  gate and up of the experts here
  --SwiGLU, matmul_all_to_all-->  each token's rows back, summed by their weights

By routes tokens go themselves, once to each island or rank: between islands, by plan "routed",
where rows may be dropped, and where there is room for all that can come, so that no host waits.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint.errors import InputError
from counterpoint.experts.layer import Route
from counterpoint.experts.routes.exchange_routes import check_capacity
from counterpoint.experts.routes.room_for_rows import Layer
from counterpoint.group.workspace import workspace_of, workspaces
from counterpoint.nn.beside import beside
from counterpoint.nn.expert_ways import Experts, Parameters, Way, through, way_of
from counterpoint.nn.grouped import Grouped, no_view
from counterpoint.ops import agreement, batch_invariant, call
from counterpoint.ops.check import (
    check_dense,
    check_group,
    check_layer,
    check_place,
    check_plan,
    is_fake,
)
from counterpoint.ranges import instance, whole
from counterpoint.schedules import invariant

MOST_KNOWN = 1024  # calls that a layer has checked


class ExpertParallelMLP(Grouped):
    """out[t] = sum over j of weights[t, j] mlp_e(x[t]), e = experts[t, j]; mlp is SwiGLU.

    mlp_e(x) = (silu(x gate_e^T) * (x up_e^T)) down_e^T, without biases. The router is yours: it
    gives logits, or `experts` and `weights`, and gets the gradient of the logits or the weights.
    Gradients of an expert are of the tokens of all ranks, without another sum: divide the loss by
    the tokens of all of them.

    Parameters: gate_up [E_local, 2 hidden, features], gate before up, and down [E_local, features,
    hidden], of experts rank * E_local onwards.

    Args:
        features: of a token.
        hidden: of one expert.
        num_experts: on all ranks together; a multiple of the ranks.
        group: of the ranks; the default group if None.
        max_rows: rows that the experts of a rank may get at most in one call. None: on a GPU there
            is room for all that can come, ranks * tokens * min(top_k, experts here), and the host
            does not wait for the GPU, in no direction, eager or in a CUDA graph. Hosts tell each
            other how many tokens they bring, which may differ by rank and by call. That is so for
            plans "auto", "fused" and "routed" on one island of 2, 4, 8, ... ranks, of 16-bit
            numbers, features and hidden multiples of 8, where a model of eight such layers fits in
            the memory that is free at the layer's first call with such tokens; of fp16 the
            gradients of weights wait. Else, and in a compiled graph, the counts go to the host
            at each call, which waits for them, in no CUDA graph; the layer's repr says where memory
            was short. Given: on a GPU the host does not wait, and results have room for so many;
            all ranks then have as many tokens. Between islands each token then goes to each island:
            `Routes` says what that costs, and `exchange_routes` where the host waits all the same.
        capacity: what is done with rows above max_rows: "error", as `exchange_routes` says it, or
            "drop": those of the least weights add nothing, and no weight is made larger for it. By
            plans "auto", "fused", "routed" and "serial", of 2 ranks or more.
        plan: see `all_to_all_matmul`; "routed" sends a token once to a rank, and by one kernel each
            way where the host does not wait.
        shared: experts of all tokens, as one module, x [..., features] to the same shape, which is
            added to the sum. Its parameters are equal on all ranks, and it calls no collective.
            On a GPU it runs beside the others, on a stream of its own; in a CUDA graph behind them.
        device: of the parameters, as for torch.nn.Linear; "meta" as well.
        dtype: of the parameters.

    Attributes:
        dropped: int64 [ranks], on the tokens' device: rows that the last call has dropped on their
            way to each rank; None: nothing may be. To read it waits, to keep it does not.

    Raises:
        InputError: num_experts is no multiple of the ranks, max_rows is < 1, there is no such plan,
            capacity or group, or rows are to be dropped and max_rows is not given.

    Example:
        >>> layer = cp.nn.ExpertParallelMLP(7168, 2048, 256, group=ep)  # doctest: +SKIP
        >>> y = layer(x, logits=router(x), top_k=8)  # doctest: +SKIP
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    shared: nn.Module | None
    dropped: Tensor | None

    def __init__(
        self, features: int, hidden: int, num_experts: int, *,
        group: dist.ProcessGroup | None = None, max_rows: int | None = None,
        capacity: str = "error", plan: str = "auto", shared: nn.Module | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = check_group(self._get_name(), group)
        name = self._get_name()
        self.features = features = whole(name, "features", features)
        self.hidden = hidden = whole(name, "hidden", hidden, 1)
        self.num_experts = num_experts = whole(name, "num_experts", num_experts, 1)
        self.max_rows = None if max_rows is None else whole(name, "max_rows", max_rows, 1)
        self.plan = plan
        self._fits: dict[tuple[Layer, int], bool] = {}  # see room_for_rows.py
        self._known: dict[tuple[object, ...], Way | None] = {}  # calls that were checked
        check_layer(name, dtype, device)
        check_plan(name, plan, "all_to_all_matmul")
        if isinstance(plan, str) and invariant.says(plan):
            want = "without invariant, of which experts have no plans"
            raise InputError(name, "plan", want=want, got=repr(plan))
        self.capacity, self.dropped = capacity, None
        if shared is not None:
            instance(name, "shared", shared, nn.Module)
        self.register_module("shared", shared)
        check_capacity(name, capacity, max_rows)
        ranks = self.group.size()
        if capacity == "drop":
            if ranks == 1:
                raise InputError(name, "capacity", want="error in a group of one rank", got="drop")
            if plan not in ("auto", "fused", "routed", "serial"):
                want = 'auto, fused, routed or serial with capacity="drop"'
                raise InputError(name, "plan", want=want, got=repr(plan))
        if num_experts % ranks:
            want, fix = f"a multiple of the {ranks} ranks", "take another number of ranks"
            raise InputError(name, "num_experts", want=want, got=num_experts, fix=fix)
        local = num_experts // ranks
        shapes = {"gate_up": (local, 2 * hidden, features), "down": (local, features, hidden)}
        for parameter, shape in shapes.items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(parameter, nn.Parameter(empty))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill with this rank's experts of what torch.nn.Linear layers of all experts would hold.

        All experts are drawn, one at a time: ranks of one seed draw the same numbers, and their
        generators end where that of one GPU does.
        """
        local = self.num_experts // self.group.size()
        first = self.group.rank() * local
        for e in range(self.num_experts):
            for own in (self.gate_up, self.down):
                drawn = torch.empty_like(own[0]).uniform_(-1, 1).mul_(own.shape[2] ** -0.5)
                if 0 <= e - first < local:
                    own[e - first] = drawn

    def forward(
        self, x: Tensor, experts: Tensor | None = None, weights: Tensor | None = None, *,
        logits: Tensor | None = None, top_k: int | None = None, renormalize: bool = True,
    ) -> Tensor:  # fmt: skip
        """Each token through its experts, by logits of a router or by `experts` and `weights`.

        The experts of a token are those of its `top_k` largest logits; of equal ones a GPU takes
        the first, and NaN is above all. Its weights are their part of the softmax over all
        experts, in fp32, divided by their sum, as in Mixtral and Qwen3.

        Args:
            x: [..., features], this rank's tokens.
            experts: int32 or int64 [..., top_k], 0 to num_experts - 1; those of one token may be
                equal. Others are refused where the host reads them: on CPU ranks, and on GPUs under
                COUNTERPOINT_CHECK=1. Else the sums of their tokens are NaN by routes; elsewhere the
                kernel that sums finds rows that nobody sent: a later call raises, and the group is
                unusable.
            weights: floating point [..., top_k].
            logits: floating point [..., num_experts], in place of `experts` and `weights`.
            top_k: how many experts a token has, 1 to num_experts; with `logits` alone.
            renormalize: False: weights are not divided by their sum; with `logits` alone.

        Returns:
            dtype of the experts' products, [..., features]; with `shared` that of the sum.

        Raises:
            InputError: an argument does not fit, and nothing was launched; or what `shared` has
                made of x does not, behind the call.
            PeerTimeoutError: a rank did not come.
        """
        route = Route(logits, experts, weights, renormalize)
        parameters = self.gate_up, self.down
        if self.shared is None:
            return self.through(x, route, top_k, parameters)
        name, shared = self._get_name(), self.shared
        return beside(name, shared, x, lambda: self.through(x, route, top_k, parameters))

    def through(
        self, x: Tensor, route: Route, top_k: int | None, parameters: Parameters
    ) -> Tensor:  # fmt: skip
        """`forward` with parameters that another module has, as adapters of frameworks call it.

        Args:
            x: as of `forward`, as are its tensors in `route`, and `top_k`.
            route: logits, or else experts and weights; and `renormalize`.
            top_k: with logits alone.
            parameters: gate_up [E_local, 2 hidden, features] and down [E_local, features, hidden].

        Raises:
            InputError, PeerTimeoutError: as `forward`.
        """
        try:
            key = None if agreement.checking() else self._key(x, route, top_k, parameters)
            known = key is not None and key in self._known
            if not known:
                top_k = self._check_given(x, route, top_k)
        except InputError as error:  # hosts of peers may wait for this one
            raise agreement.refused(error, self.group, x) from None
        try:
            if route.experts is not None:
                if not known or x.is_cpu:  # on GPUs known calls are not looked at
                    self._check_ids(route.experts)
                top_k = route.experts.shape[-1]
            assert top_k is not None
            of = Experts(self.features, self.hidden, self.num_experts, top_k, self.group,
                         self.max_rows, self.capacity, self.plan, self._fits)  # fmt: skip
            way = None
            if key is not None:
                way = self._known[key] if known else way_of(of, x, parameters)
            y, self.dropped = through(of, x, route, parameters, way)
            if key is not None and not known:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = way
        except BaseException as error:
            agreement.left(self._get_name(), error, self.group, x)
            raise
        return no_view(y)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_known": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = {"shared": None} | state["_modules"]  # one that was kept before there were any
        super().__setstate__({"_known": {}} | state | {"_modules": modules})

    def _key(
        self, x: Tensor, route: Route, top_k: int | None, parameters: Parameters
    ) -> tuple[object, ...] | None:
        """What a call that nothing watches is known by; None: it goes by the operators."""
        if not (top_k is None or type(top_k) is int) or type(route.renormalize) is not bool:
            return None  # equal to what is right, perhaps, and still to be refused
        tensors = x, *route[:3], *parameters
        key = call.key_of(self._get_name(), tensors, self.plan, None, 0, whole=True)
        if key is None or batch_invariant.depth:
            return None
        device = x.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        options = top_k, route.renormalize, self.max_rows, self.capacity, cast
        workspace = workspaces.get((self.group.group_name, x.device))
        return *key, *options, torch.is_grad_enabled(), id(workspace)

    def _check_given(self, x: Tensor, route: Route, top_k: int | None) -> int:
        """Refuse what does not fit; how many experts a token has where logits say which."""
        logits, experts, weights, renormalize = route
        if logits is None:
            if top_k is not None or not renormalize:
                want, got = "given with top_k and renormalize", "none"
                raise InputError(self._get_name(), "logits", want=want, got=got)
            self._check(x, experts, weights)
            return 0
        for given, tensor in (("experts", experts), ("weights", weights)):
            if tensor is not None:
                want, got = "left out where there are logits", type(tensor).__name__
                raise InputError(self._get_name(), given, want=want, got=got)
        return self._check_logits(x, logits, top_k, renormalize)

    def _check(self, x: Tensor, experts: Any, weights: Any) -> None:
        name = self._get_name()
        for given, tensor in (("experts", experts), ("weights", weights)):
            if tensor is None:
                want = "a Tensor where there are no logits"
                raise InputError(name, given, want=want, got="NoneType")
        self._check_tokens(x, experts=experts, weights=weights)
        if experts.shape[:-1] != x.shape[:-1] or experts.dim() != x.dim() or not experts.shape[-1]:
            want = f"{(*x.shape[:-1], 'top_k')} as x"
            raise InputError(name, "experts", want=want, got=tuple(experts.shape))
        if experts.dtype not in (torch.int32, torch.int64):
            raise InputError(name, "experts", want="int32 or int64", got=experts.dtype)
        if weights.shape != experts.shape:
            want = f"{tuple(experts.shape)} as experts"
            raise InputError(name, "weights", want=want, got=tuple(weights.shape))

    def _check_logits(
        self, x: Tensor, logits: Tensor, top_k: int | None, renormalize: bool
    ) -> int:  # fmt: skip
        name = self._get_name()
        self._check_tokens(x, logits=logits)
        if logits.shape != (*x.shape[:-1], self.num_experts):
            want = f"{(*x.shape[:-1], self.num_experts)}, one for each expert"
            raise InputError(name, "logits", want=want, got=tuple(logits.shape))
        if not logits.is_floating_point():
            raise InputError(name, "logits", want="floating point", got=logits.dtype)
        instance(name, "renormalize", renormalize, bool)
        return whole(name, "top_k", top_k, 1, self.num_experts)

    def _check_tokens(self, x: Tensor, **of_router: Tensor) -> None:
        name = self._get_name()
        check_dense(name, x=x, **of_router)
        check_place(name, x=x)
        for given, tensor in of_router.items():
            if tensor.device != x.device:
                raise InputError(name, given, want=f"on {x.device} as x", got=tensor.device)
        if x.shape[-1:] != (self.features,):
            raise InputError(name, "x", want=f"[..., {self.features}]", got=tuple(x.shape))

    def _check_ids(self, experts: Tensor) -> None:
        """Refuse ids of no expert, on all ranks alike; where it may cost what a check does."""
        if torch.compiler.is_compiling() or (experts.is_cuda and not agreement.checking()):
            return
        if is_fake(experts):
            return
        if experts.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        name, refused, last = self._get_name(), None, self.num_experts - 1
        low, high = (int(n) for n in experts.aminmax()) if experts.numel() else (0, 0)
        if low < 0 or high > last:
            got = f"{low} to {high} on rank {self.group.rank()}"
            refused = InputError(name, "experts", want=f"0 to {last}", got=got)
        agreement.agree(name, {"op": name}, workspace_of(self.group, experts.device), refused)

    def extra_repr(self) -> str:
        """Sizes of the whole layer, how many ranks have it, and when the host waits for counts."""
        waits = sorted({tokens for (_, tokens), fits in self._fits.items() if not fits})
        more = f", short of memory for all rows of {waits} tokens: give max_rows" if waits else ""
        more += ", capacity='drop'" if self.capacity == "drop" else ""
        return (
            f"features={self.features}, hidden={self.hidden}, num_experts={self.num_experts}, "
            f"ranks={self.group.size()}, max_rows={self.max_rows}, plan={self.plan!r}{more}"
        )
