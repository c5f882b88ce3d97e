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
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoint.errors import InputError
from counterpoint.nn.grouped import Grouped, no_view
from counterpoint.ops import agreement, experts_check
from counterpoint.ops.activations import swiglu
from counterpoint.ops.all_to_all_matmul import all_to_all_matmul
from counterpoint.ops.check import (
    check_dense,
    check_group,
    check_layer,
    check_place,
    check_plan,
    is_fake,
)
from counterpoint.ops.exchange_counts import exchange_counts
from counterpoint.ops.exchange_routes import check_capacity, exchange_routes, num_islands
from counterpoint.ops.experts import one_kernel
from counterpoint.ops.matmul_all_to_all import matmul_all_to_all
from counterpoint.ops.plans import family_of, plan_key
from counterpoint.ops.room_for_rows import Layer, Room, room_for
from counterpoint.ops.router import choose_experts, order_by_expert
from counterpoint.ops.token_sums import sum_of_tokens
from counterpoint.plan import invariant
from counterpoint.ranges import instance, whole
from counterpoint.runtime.device_limits import refused_in
from counterpoint.runtime.routes import NONE
from counterpoint.runtime.workspace import workspace_of


class _Spread(torch.autograd.Function):
    """A row for each expert of a token; its gradient is their sum in fp32, in order of the experts.

    That of torch's index_select adds with atomics, in the dtype of x and in any order.
    """

    @staticmethod
    def forward(x: Tensor, token: Tensor, places: Tensor) -> Tensor:
        return x.index_select(0, token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, places = inputs
        ctx.save_for_backward(places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        (drows,) = grads
        return sum_of_tokens(drows, places), None, None


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
    dropped: Tensor | None

    def __init__(
        self, features: int, hidden: int, num_experts: int, *,
        group: dist.ProcessGroup | None = None, max_rows: int | None = None,
        capacity: str = "error", plan: str = "auto",
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
        check_layer(name, dtype, device)
        check_plan(name, plan, "all_to_all_matmul")
        if isinstance(plan, str) and invariant.says(plan):
            want = "without invariant, of which experts have no plans"
            raise InputError(name, "plan", want=want, got=repr(plan))
        self.capacity, self.dropped = capacity, None
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
            dtype of the experts' products, [..., features].

        Raises:
            InputError: an argument does not fit; nothing was launched.
            PeerTimeoutError: a rank did not come.
        """
        try:
            top_k = self._check_given(x, experts, weights, logits, top_k, renormalize)
        except InputError as error:  # hosts of peers may wait for this one
            raise agreement.refused(error, self.group, x) from None
        try:
            if logits is not None:
                logits = logits.reshape(-1, self.num_experts)
                weights, experts = choose_experts(logits, top_k, renormalize)
            assert experts is not None and weights is not None
            if logits is None:
                self._check_ids(experts)
            return no_view(self._through(x, experts, weights))
        except BaseException as error:
            agreement.left(self._get_name(), error, self.group, x)
            raise

    def _through(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        top_k, tokens = experts.shape[-1], x.reshape(-1, x.shape[-1])
        experts, weights = experts.reshape(-1, top_k), weights.reshape(-1, top_k)
        room = self._room(tokens, top_k)
        if room is not None:
            return self._with_room(tokens, experts, weights, room).view(x.shape)
        if self._by_routes(x):
            return self._routed(tokens, experts, weights, self.max_rows).view(x.shape)
        if self.max_rows is None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            want, got = "given in a CUDA graph where the host has to know counts", None
            raise InputError(self._get_name(), "max_rows", want=want, got=got)
        own, places, token = order_by_expert(experts, self.num_experts)
        counts = exchange_counts(own, group=self.group)
        if self.max_rows is None:
            counts = counts.cpu()
        rows: Tensor = _Spread.apply(tokens, token, places)  # type: ignore[assignment]
        gate_up = all_to_all_matmul(
            rows, self.gate_up.transpose(1, 2), counts=counts, group=self.group,
            max_rows=self.max_rows, plan=self.plan,
        )  # fmt: skip
        hidden = swiglu(gate_up, counts, self.group.rank())
        y = matmul_all_to_all(
            hidden, self.down.transpose(1, 2), counts=counts, group=self.group,
            max_rows=None if experts_check.host_known(counts) else len(rows), plan=self.plan,
            sum_of=(places, weights),
        )  # fmt: skip
        return y.view(x.shape)

    def _by_routes(self, x: Tensor) -> bool:
        """Whether a token goes itself, by routes: asked for, or where there are several islands."""
        family = family_of(plan_key("all_to_all_matmul", self.plan))
        if self.group.size() == 1:
            return False
        if self.capacity == "drop":
            return True
        if family not in ("auto", "islands"):
            return family == "routed"
        traced = not torch.compiler.is_compiling() and is_fake(x)
        return not traced and num_islands(self.group.group_name, str(x.device)) > 1

    def _room(self, tokens: Tensor, top_k: int) -> Room | None:
        """Room for all rows of a call that does not wait; None where another way is to be gone.

        That is where `max_rows` is given, a plan is named that the host lays out, or no one kernel
        takes the call; where memory is short; and in a compiled graph, whose sizes are its own.
        """
        if self.max_rows is not None or torch.compiler.is_compiling() or is_fake(tokens):
            return None
        plan = plan_key("all_to_all_matmul", self.plan)
        if plan not in ("auto", "fused", "routed") or self.group.size() == 1:
            return None
        device, dtype = tokens.device, tokens.dtype
        workspace = workspace_of(self.group, device)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        ranks = self.group.size()
        local = self.num_experts // ranks
        sizes = {"all_to_all_matmul": (2 * self.hidden, self.features),
                 "matmul_all_to_all": (self.features, self.hidden)}  # fmt: skip
        if not all(one_kernel(op, "auto", dtype, *nk, local, ranks) for op, nk in sizes.items()):
            return None
        if workspace.islands.number > 1 or refused_in(workspace):
            return None
        layer = Layer(self.features, self.hidden, self.num_experts, top_k, dtype)
        return room_for(layer, len(tokens), self.group, device, self._fits)

    def _with_room(self, tokens: Tensor, experts: Tensor, weights: Tensor, room: Room) -> Tensor:
        """Who has fewer tokens than others has some of no expert behind them."""
        behind = (0, 0, 0, room.tokens - len(tokens))
        if behind[-1]:
            every, experts = F.pad(tokens, behind), F.pad(experts, behind, value=NONE)
            return self._routed(every, experts, F.pad(weights, behind), room.rows)[: len(tokens)]
        return self._routed(tokens, experts, weights, room.rows)

    def _routed(
        self, tokens: Tensor, experts: Tensor, weights: Tensor, max_rows: int | None
    ) -> Tensor:  # fmt: skip
        every, group = self.num_experts, self.group
        routes = exchange_routes(
            experts, weights, num_experts=every, group=group, max_rows=max_rows,
            capacity=self.capacity,
        )  # fmt: skip
        self.dropped = routes.dropped
        plan = self.plan if max_rows is None or self.plan in ("fused", "serial") else "auto"
        gate_up = all_to_all_matmul(
            tokens, self.gate_up.transpose(1, 2), counts=routes, group=group, plan=plan
        )
        hidden, down = swiglu(gate_up, routes.counts, group.rank()), self.down.transpose(1, 2)
        return matmul_all_to_all(hidden, down, counts=routes, group=group, plan=plan)

    def _check_given(
        self, x: Tensor, experts: Tensor | None, weights: Tensor | None, logits: Tensor | None,
        top_k: int | None, renormalize: bool,
    ) -> int:  # fmt: skip
        """Refuse what does not fit; how many experts a token has where logits say which."""
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
