"""Activations behind gathered matmuls of compiled models: which operators apply, and which not."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import pi

import pytest
import torch
from compiled import SEAM, overlap_pass, quick, sequence_parallel, worse
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import counterpoint as cp
from counterpoint.adapters.compile import OverlapPass
from counterpoint.adapters.graph.activations import dearer
from counterpoint.choose.known import released
from counterpoint.problem import Problem

DIM, HIDDEN, S = 16, 24, 6
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """The MLP of a decoder, written in one of several ways."""

    def __init__(self, form: str, act: Activation = F.silu, *, bias: bool = False) -> None:
        super().__init__()
        self.act, self.form = act, form
        merged = form in MERGED
        self.up = nn.Linear(DIM, HIDDEN * (1 + merged), bias=bias or form == "biased up")
        if not merged and form not in ("one", "square", "itself"):
            self.gate = nn.Linear(DIM, HIDDEN, bias=bias)
        if form == "third":
            self.third = nn.Linear(DIM, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN // (1 + (form == "half of a half")), DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return FORMS[self.form](self, x)


def chunked(m: Mlp, x: Tensor) -> Tensor:
    """As in Phi-3."""
    gate, up = m.up(x).chunk(2, -1)
    return m.down(up * m.act(gate))


def sliced(m: Mlp, x: Tensor) -> Tensor:
    """As in vLLM, but the gate is the second half."""
    y = m.up(x)
    n = y.shape[-1] // 2
    return m.down(m.act(y[..., n:]) * y[..., :n])


def interleaved(m: Mlp, x: Tensor) -> Tensor:
    y = m.up(x)
    return m.down(m.act(y[..., ::2]) * y[..., 1::2])


def quarters(m: Mlp, x: Tensor) -> Tensor:
    gate, up, *_ = m.up(x).chunk(4, -1)
    return m.down(torch.cat([m.act(gate) * up] * 2, -1))


def read(m: Mlp, x: Tensor) -> Tensor:
    gate = m.gate(x)
    return m.down(m.act(gate) * m.up(x)) + gate.sum()


def itself(m: Mlp, x: Tensor) -> Tensor:
    up = m.up(x)
    return m.down(m.act(up) * up)


def shuffled(m: Mlp, x: Tensor) -> Tensor:
    """Up reads the same numbers in other columns."""
    other = x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
    return m.down(m.act(m.gate(x)) * m.up(other))


def windows(m: Mlp, x: Tensor) -> Tensor:
    y = m.up(x)
    n = y.shape[-1] // 4
    return m.down(m.act(y[..., : 2 * n]) * y.split([n, 2 * n, n], -1)[1])


def half_of_a_half(m: Mlp, x: Tensor) -> Tensor:
    gate, up = m.up(x).chunk(2, -1)[0].chunk(2, -1)
    return m.down(m.act(gate) * up)


MERGED = (
    "chunked", "sliced", "interleaved", "one half", "quarters", "windows", "half of a half"
)  # fmt: skip
FORMS: dict[str, Callable[[Mlp, Tensor], Tensor]] = {
    "one": lambda m, x: m.down(m.act(m.up(x))),
    "two": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)),
    "turned": lambda m, x: m.down(m.up(x) * m.act(m.gate(x))),
    "wide": lambda m, x: m.down((m.act(m.gate(x).float()) * m.up(x).float()).to(x.dtype)),
    "narrow": lambda m, x: m.down(m.act(m.gate(x).bfloat16()) * m.up(x)),
    "chunked": chunked, "sliced": sliced, "interleaved": interleaved,
    "one half": lambda m, x: m.down(m.act(m.up(x).chunk(2, -1)[0])),
    "third": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x) + m.third(x)),
    "read": read, "quarters": quarters, "shuffled": shuffled, "windows": windows,
    "half of a half": half_of_a_half,
    "biased up": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)),
    "joined": lambda m, x: m.down(m.act(m.gate(x)) * m.up(x) * 2),
    "square": lambda m, x: m.down(m.act(m.up(x)).square()),
    "itself": itself,
}  # fmt: skip


def swish(h: Tensor) -> Tensor:
    return h * torch.sigmoid(h)


def gelu_tanh(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def gelu_new(h: Tensor) -> Tensor:
    """As in GPT-2."""
    return 0.5 * h * (1.0 + torch.tanh((2.0 / pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3.0))))


def made(
    model: nn.Module, dtype: torch.dtype, ranks: int, batch: int = 2
) -> tuple[nn.Module, Tensor]:
    """It, sequence parallel, and this rank's part of its input."""
    return sequence_parallel(model, "down", dtype, (batch, ranks * S, DIM))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("form", "act", "said"), [
    ("two", F.silu, "of 2 weights with silu_mul"),
    ("turned", swish, "of 2 weights with silu_mul"),
    ("wide", gelu_tanh, "of 2 weights with gelu_tanh_mul"),
    ("chunked", F.silu, "with silu_mul"),
    ("sliced", F.gelu, "with gelu_mul"),
    ("one", F.gelu, "with gelu"),
    ("one", gelu_new, "with gelu_tanh"),
])  # fmt: skip
@on_ranks(2)
def test_what_operators_apply(
    rank: int, ranks: int, form: str, act: Activation, said: str, draw: Draw
):
    """Biased where there is one weight, and of one sequence or of two."""
    found: list[str] = []
    for dtype, batch in draw([*product((torch.float32, torch.bfloat16), (1, 2))], 1):

        def make(dtype: torch.dtype, batch: int = batch) -> tuple[nn.Module, Tensor]:
            model = Mlp(form, act, bias=form == "one")
            return made(model, dtype, ranks, batch)

        operators = [f"{GATHER} {said}", SCATTER]
        found += worse(make, matched=2, train=False, dtype=dtype, operators=operators)
    return found


APART = [
    ("third", f"{GATHER} of 3 weights", "silu_mul stays apart, as other matmuls share its gather"),
    ("read", f"{GATHER} of 2 weights", "silu_mul stays apart, as sum reads its products, too"),
    ("joined", f"{GATHER} of 2 weights", "silu_mul stays apart, as torch joins it with mul"),
    ("square", GATHER, "silu stays apart, as torch joins it with pow"),
    ("hooked", f"{GATHER} of 2 weights", ""),
    ("narrow", f"{GATHER} of 2 weights", ""),
    ("itself", GATHER, "silu stays apart, as mul reads its products, too"),
    ("interleaved", GATHER, ""),
    ("one half", GATHER, ""),
    ("quarters", GATHER, ""),
    ("windows", GATHER, ""),
    ("half of a half", GATHER, ""),
    ("biased up", f"{GATHER} of 2 weights", "silu_mul stays apart, as its products have a bias"),
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("form", "operator", "apart"), APART)
@on_ranks(2)
def test_what_stays_apart(rank: int, ranks: int, form: str, operator: str, apart: str):
    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        model = Mlp("two" if form == "hooked" else form)
        if form == "hooked":
            model.gate.register_forward_hook(lambda module, args, y: y.clamp(max=0.5))
        return made(model, dtype, ranks)

    return worse(make, matched=2, train=False, operators=[operator, SCATTER], apart=apart)


@on_ranks(2)
def test_matmuls_that_read_other_columns_are_left(rank: int, ranks: int):
    return worse(
        lambda dtype: made(Mlp("shuffled"), dtype, ranks), matched=1, train=False,
        left=["its matmuls read it differently"],
    )  # fmt: skip


@on_ranks(2)
def test_parts_of_parts_stay_apart_where_sizes_are_not_known(rank: int, ranks: int):
    return worse(
        lambda dtype: made(Mlp("half of a half"), dtype, ranks), matched=2, train=False,
        dynamic=True, operators=[GATHER, SCATTER],
    )  # fmt: skip


@on_ranks(2)
def test_gate_and_up_with_a_bias_stay_apart(rank: int, ranks: int):
    return worse(
        lambda dtype: made(Mlp("two", bias=True), dtype, ranks), matched=2, train=False,
        apart="silu_mul stays apart, as its products have a bias",
    )  # fmt: skip


@on_ranks(2)
def test_in_training_they_stay_apart(rank: int, ranks: int):
    return worse(
        lambda dtype: made(Mlp("two"), dtype, ranks), matched=4,
        apart="silu_mul stays apart, as a gradient needs its products",
    )  # fmt: skip


@on_ranks(2)
def test_sizes_that_differ_from_call_to_call(rank: int, ranks: int):
    return worse(
        lambda dtype: made(Mlp("two"), dtype, ranks), matched=2, train=False, dynamic=True,
        operators=[f"{GATHER} of 2 weights with silu_mul", SCATTER],
    )  # fmt: skip


@on_ranks(2)
def test_rounding_as_eager_does_is_kept(rank: int, ranks: int):
    """It rounds between silu and the product; so the operator, which does not, is not taken."""
    model, x = made(Mlp("two"), torch.bfloat16, ranks)
    overlap, rounding = overlap_pass(), config.patch(emulate_precision_casts=True)
    with torch.no_grad(), by_reference(), quick(overlap) as backend, rounding:
        assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    assert overlap.reports[0].found[0].operator == f"{GATHER} of 2 weights"


@on_ranks(2)
def test_nothing_is_copied_between_two_operators(rank: int, ranks: int):
    """Rows leave one in the order in which the other takes them; inductor runs both."""
    model, x = made(Mlp("two"), torch.float32, ranks)
    graphs: list[list[str]] = []

    class Seen(OverlapPass):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            graphs.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    options = {SEAM: Seen((), False)}
    with torch.no_grad(), by_reference(), fresh_cache():
        compiled = torch.compile(model, options=options)
        torch.testing.assert_close(compiled(x), model(x))
    assert str(cp.explain(compiled)).count("with silu_mul") == 1
    (targets,) = graphs
    assert "aten.clone.default" not in targets, targets


def test_prices_decide_where_they_are_known():
    machine = released("NVIDIA H200", 2)
    assert machine is not None
    for m, dtype in ((64, "bfloat16"), (8192, "bfloat16"), (2048, "float32")):
        plain = Problem(GATHER, m, 14336, 4096, 2, dtype, splits=(7168, 7168))  # type: ignore[arg-type]
        both = plain, replace(plain, activation="silu_mul")
        behind_s = machine.costs.memory_s(3 * m * 7168 * plain.item_bytes)
        apart_s = cp.choose(plain, machine).seconds + behind_s
        together_s = cp.choose(both[1], machine).seconds
        said = dearer(both, machine)
        assert bool(said) == (together_s > apart_s) == (dtype == "float32")
        want = f"predicted to take {apart_s * 1e6:.1f} us, not {together_s * 1e6:.1f}"
        assert not said or said == want
    assert not dearer(both, None) and not dearer(None, machine)
