"""Small kernels compiled, without a GPU: order of memory, 16 bytes at a time, registers.

x86 orders stores, so no run on CPU ranks shows a missing release, or a missing barrier before it.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from kernel_code import code, generations, wide
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import PTXASError

from benchmarks.kernel_exchange import exchange_kernel
from benchmarks.kernel_matmul import matmul_kernel
from counterpoint import machine
from counterpoint.attention.kernel_merge import merge_attention_kernel
from counterpoint.embedding import kernel_gradient
from counterpoint.embedding import launch_gradient as gradients
from counterpoint.experts.fused import weighted_rows
from counterpoint.experts.fused.kernel_combine import collect_kernel
from counterpoint.experts.fused.kernel_dispatch import clear_kernel
from counterpoint.experts.fused.kernel_sums import token_sum_gradient_kernel, token_sum_kernel
from counterpoint.experts.fused.kernel_weighted_rows import weighted_rows_kernel
from counterpoint.experts.routes import kernel_on_device, kernel_router, kernel_rows
from counterpoint.experts.routes import launch as launch_routes
from counterpoint.experts.routes import router as routing
from counterpoint.kernels.activation import activation_gradient_kernel, activation_kernel
from counterpoint.kernels.delay import delay_kernel
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.norms.kernel_add_norm import add_norm_kernel
from counterpoint.run import activated
from counterpoint.testing.ptx import Compiled, lines_with

NORM = {"LAYER": False, "HAS_RESIDUAL": True, "HAS_BIAS": False, "WHOLE": True}
TABLES = {"i32": "bags rows starts row_tables names marks long", "i64": "tables bounds",
          "fp32": "scales rates partials"}  # fmt: skip


class Row(NamedTuple):
    """A kernel, how it is launched, and what its code must be.

    Args:
        given: of `code`.
        wide: of `kernel_code.wide`; None: how it reads is not looked at.
        registers: at most.
        spills: at most.
    """

    kernel: Any
    given: dict[str, Any]
    wide: dict[str, Any] | None = None
    registers: int = 255
    spills: int = 0


def of_rows() -> Iterator[tuple[str, Row]]:
    """What moves rows of a token or of an expert."""
    moved = {"loads": 2, "stores": 1}
    given: dict[str, Any] = {"WORLD": 4, "EXPERTS": 64, "DOTS": True, "sizes": "N",
             "BLOCK_N": weighted_rows.BLOCK_N, "pointers": {"bf16": "rows", "fp32": "weights dots"},
             **weighted_rows.OPTIONS}  # fmt: skip
    yield "weighted_rows", Row(weighted_rows_kernel, given, moved)
    for more, weighted in ((0, False), (0, True), (4, False)):
        given = {"TOP": 8, "MORE": more, "WEIGHTED": weighted, "BLOCK_N": 2048, "sizes": "N",
                 "pointers": {"bf16": "rows", "i32": "index more_index"},
                 "plain": "index weights more_index"}  # fmt: skip
        yield f"token_sum {more} {weighted}", Row(token_sum_kernel, given, {})
    given = {"TOP": 8, "BLOCK_N": 2048, "WEIGHTS": True, "pointers": {"fp32": "weights dweights"},
             "plain": "weights index named dweights", "sizes": "N"}  # fmt: skip
    yield "token_sum_gradient", Row(token_sum_gradient_kernel, given, {})
    nothing_alone = {"narrow": r"(?!.*\.b16).*"}  # no element by itself
    yield "clear", Row(clear_kernel, {"BLOCK_N": 2048, "sizes": "N"}, {"loads": 0} | nothing_alone)
    given = {"TOP": 0, "SOME": False, "BLOCK_N": 2048, "sizes": "N half_bytes",
             "pointers": {"bf16": "index weights y"}}  # fmt: skip
    yield "collect", Row(collect_kernel, given, nothing_alone)


def summed() -> Iterator[tuple[str, Row]]:
    """Parts that peers have sent, and where they come from."""
    strides = "cols stride_slot stride_slots stride_own stride_out"
    for dtype in ("bf16", "fp16", "fp32"):
        given = {"HAS_BIAS": True, "BLOCK": 1024, "dtype": dtype, "pointers": {"i64": "order"},
                 "sizes": strides}  # fmt: skip
        # the number of a slot is one word for the whole block; 8 blocks and more on an SM
        yield f"reduce {dtype}", Row(reduce_kernel, given, {"narrow": r"ld\.b64"}, 64)
    given = {"HAS_BIAS": False, "BLOCK": 1024, "pointers": {"i64": "order"}, "plain": "all"}
    yield "reduce of any width", Row(reduce_kernel, given)
    given = {"BLOCK": 2048, "pointers": {"i32": "source"}}
    yield "exchange of any part", Row(exchange_kernel, given)
    given = {**given, "sizes": "part source_stride"}
    # the address of a peer's memory is one word for the whole block
    yield "exchange", Row(exchange_kernel, given, {"narrow": r"ld\.b64"}, 64)


def routers() -> Iterator[tuple[str, Row]]:
    experts, top = 512, 16
    tokens = {"RENORMALIZE": True, "TOKENS": 1, "CHOICES": top, "num_warps": 1}
    order = {"BLOCK": routing.BLOCK, "num_warps": routing.NUM_WARPS}
    for kernel, given in (
        (kernel_router.choose_experts_kernel, tokens | {"TOP": top}),
        (kernel_router.choose_experts_gradient_kernel, tokens | {"TOP": top}),
        (kernel_router.count_experts_kernel, order),
        (kernel_router.place_rows_kernel, order | {"BLOCKS": routing.COUNTS // experts}),
    ):  # fmt: skip
        kinds = {"fp32": "logits dlogits weights dweights", "i32": "counts"}
        given |= {"EXPERTS": experts, "dtype": "i32", "pointers": kinds, "sizes": "E"}
        yield kernel.__name__, Row(kernel, given)


def beside_table_gradients() -> Iterator[tuple[str, Row]]:
    plain: dict[str, Any] = {"plain": "all", "pointers": TABLES}
    given = {"DTYPE": tl.bfloat16, "WRITES": "rows", "SEGMENT": gradients.SEGMENT, "VEC": 8,
             "STEP": gradients.LONG_TILE // 128, "BLOCK_D": 128, "num_warps": 8}  # fmt: skip
    yield "long_rows", Row(kernel_gradient.long_rows_kernel, given | plain)
    plain["pointers"] = {"i64": "bags tables order", "i32": "names"}
    yield "names", Row(kernel_gradient.names_kernel, {"BLOCK": 1024} | plain)
    given = {"DTYPE": tl.bfloat16, "ENTRIES": 16, "BLOCK_D": 64, "num_warps": 2}
    plain["pointers"] = {"i64": "bags tables", "i32": "indices", "fp32": "out"}
    yield "weight_gradient", Row(kernel_gradient.weight_gradient_kernel, given | plain)
    given = {"SCALED": True, "SEGMENT": gradients.SEGMENT, "BLOCK": gradients.BLOCK}
    plain["pointers"] = {"i64": "bags order", "i32": "rows starts tables sorted_bags marks",
                         "fp32": "scales sorted_scales"}  # fmt: skip
    yield "mark_rows", Row(kernel_gradient.mark_rows_kernel, given | plain)


ROWS = dict([*of_rows(), *summed(), *routers(), *beside_table_gradients()])


def check(row: Row, capability: int) -> Compiled:
    found = code(row.kernel, capability, **row.given)
    assert found.spills <= row.spills and found.registers <= row.registers
    if row.wide is not None:
        wide(found, **row.wide)
    return found


@pytest.mark.parametrize("capability", generations(4))
@pytest.mark.parametrize("name", ROWS)
def test_it_moves_16_bytes_at_a_time_and_spills_nothing(name: str, capability: int):
    found = check(ROWS[name], capability)
    if name.startswith(("reduce", "exchange")):
        assert not found.shared_bytes


@pytest.mark.drawn(6)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("name", "rows"),
    [("silu", False), ("gelu", False), ("gelu_tanh", False), ("relu", False), ("silu", True)],
)
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_activations(capability: int, name: str, rows: bool, gradient: bool):
    numbers = activated.ROW_BLOCK if rows else activated.BLOCK
    warps = activated.ROW_WARPS if rows else activated.NUM_WARPS
    each = numbers // (8 * 32 * warps)  # times that a thread moves 16 bytes
    kernel = activation_gradient_kernel if gradient else activation_kernel
    given = {"NAME": name, "GATED": True, "SIDE": rows, "BLOCK": numbers, "sizes": "N",
             "WORLD": 4 if rows else 1, "EXPERTS": 64 * rows, "num_warps": warps,
             "pointers": {"i32": "counts"}}  # fmt: skip
    check(Row(kernel, given, {"loads": (2 + gradient) * each, "stores": (1 + gradient) * each}),
          capability)  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("writes", ["rows", "named", "sgd", "rowwise_adagrad"])
def test_gradients_of_tables(writes: str):
    given = {"DTYPE": tl.bfloat16, "WRITES": writes, "SCALED": True, "BLOCK_D": 128, "VEC": 8,
             "SEGMENT": gradients.SEGMENT, "ROWS": gradients.TILE // 128,
             "UNROLL": gradients.UNROLL, "num_warps": gradients.NUM_WARPS,
             "pointers": TABLES}  # fmt: skip
    found = check(Row(kernel_gradient.table_gradient_kernel, given), 90)
    assert "ld.global.v4.b32" in found.ptx and re.search(r"st\.global\.v\d\.b32", found.ptx)


ROUTE_KERNELS = ("tell_experts", "tally_tokens", "place_tokens", "place_pairs", "name_entries",
                 "rows_here")  # fmt: skip
SHARES = (8, 256, 8), (2, 512, 16)  # ranks, experts, experts of a token


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ROUTE_KERNELS)
@pytest.mark.parametrize(
    ("capability", "sizes"),
    [(90, SHARES[0]), (90, SHARES[1]), (80, SHARES[0]), (80, SHARES[1]), (100, SHARES[0]),
     (100, SHARES[1])],
)  # fmt: skip
def test_routes_are_found_in_registers(capability: int, sizes: tuple[int, int, int], name: str):
    """And two programs of each kernel are on an SM at once."""
    ranks, experts, top = sizes
    shares = launch_routes.shares_of(4096, ranks, experts)
    fixed = launch_routes.fixed_of(*shares, ranks, experts, top)
    told = (("TOP", top), ("E", experts), ("BLOCK", launch_routes.BLOCK))
    entries = (("BLOCK", launch_routes.BLOCK),)
    here = (("E", experts), ("LOCAL", experts // ranks), ("LOCALS", experts // ranks))
    known = dict(zip(ROUTE_KERNELS, (told, *fixed, entries, here), strict=True))[name]
    kinds = {"i64": "counts table", "i32": "weights rows"}
    if name == "tell_experts":
        kinds = {"bf16": "weights"}
    if name == "rows_here":
        kinds = {"i64": "counts rows"}
    if name == "name_entries":
        kinds = {"fp32": "sent each"}
    given = {"dtype": "i32", "pointers": kinds,
             "num_warps": launch_routes.NUM_WARPS, **dict(known)}  # fmt: skip
    home = kernel_rows if name in ("name_entries", "rows_here") else kernel_on_device
    check(Row(getattr(home, f"{name}_kernel"), given), capability)


@pytest.mark.shows("matmul_all_reduce_rms_norm", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("capability", generations(1))
@pytest.mark.parametrize("n", [4096, 16384])
def test_a_row_of_a_norm_stays_in_registers(capability: int, n: int):
    warps = min(16, n // 512)
    found = code(add_norm_kernel, capability, sizes="N", plain="scale scales", num_warps=warps,
                 FP8=0, BLOCK=n, **NORM)  # fmt: skip
    # x, the residual and the weight once each, of 8 elements a load
    assert len(lines_with(found.ptx, r"ld\.global\.v4\.[bu]32")) == 3 * n // (32 * warps) // 8
    assert not found.spills


@pytest.mark.parametrize("quantized", [1, 2])
def test_what_is_no_number_is_not_clamped(quantized: int):
    """On a GPU a plain maximum leaves NaN out."""
    ptx = code(add_norm_kernel, plain="all", pointers={"fp8e4nv": "y"}, FP8=quantized, BLOCK=1024,
               **NORM).ptx  # fmt: skip
    assert lines_with(ptx, r"max\.NaN\.f32") and lines_with(ptx, r"min\.NaN\.f32")
    assert bool(lines_with(ptx, r"setp\.(nan|neu?|num)\.f32")) == (quantized == 2)


@pytest.mark.shows("all_gather_attention", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("capability", generations(1))
def test_attentions_are_merged_16_bytes_at_a_time(capability: int):
    """Rows are in several warps: without a barrier a late one reads what another has stored."""
    strides = " ".join(n for n in merge_attention_kernel.arg_names if n.startswith("stride"))
    found = code(merge_attention_kernel, capability, pointers={"fp32": "lse lse_other"},
                 sizes=strides, HEAD_DIM=128, BLOCK_ROWS=32, BLOCK_DIM=128)  # fmt: skip
    wide(found)
    assert len(lines_with(found.ptx, r"\bld\.global\.(v4\.b32|v2\.b64)")) >= 2
    assert found.registers <= 128
    barrier = lines_with(found.ptx, r"\bbar(rier)?\.sync")[0]
    sums = lines_with(found.ptx, r"\bld\.global\.b32")  # rows of y are loaded 16 bytes at a time
    assert sums and max(sums) < barrier < lines_with(found.ptx, r"\bst\.global")[0]


SIGNAL = {"pointers": {"i32": "epoch"}, "plain": "all", "num_warps": 1,
          "types": {"post_ptrs": "*i64", "wait_ptrs": "*i64"}}  # fmt: skip


@pytest.mark.shows("all_gather_matmul matmul_reduce_scatter", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("lanes", [32, 128])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("capability", generations(2))
def test_signal_publishes_and_acquires(capability: int, advance: bool, lanes: int):
    """And with one warp it fits beside any kernel."""
    found = code(signal_kernel, capability, ADVANCE=advance, LANES=lanes, **SIGNAL)
    releases = lines_with(found.ptx, r"atom\.global\.sys\.release\.exch\.b32")
    polls = r"atom\.global\.sys\.acquire\.add\.u32|ld\.global\.sys\.acquire"
    acquires = lines_with(found.ptx, polls)
    barriers = lines_with(found.ptx, r"\bbar(rier)?\.(warp\.)?sync")
    stores = lines_with(found.ptx, r"\bst\.global")
    assert len(releases) == len(acquires) == lanes // 32
    # the epoch's store, then a barrier of the block, then the release; then the polls
    if advance:
        assert stores[0] < barriers[0]
    assert barriers[0] < releases[0] <= releases[-1] < acquires[0]
    # nothing of it has block or GPU scope
    assert not lines_with(found.ptx, r"\b(atom|red|ld|st)\.\S*(\.gpu|\.cta)\b")
    assert "globaltimer" in found.ptx
    # that a wait gave up, the epoch far back, and the word of the fault: after the polls
    assert len(stores) == advance + 3
    assert stores[-3] > acquires[-1]
    if lanes == 32:
        assert found.registers <= 32
        assert found.shared_bytes == found.spills == 0
        assert ".reqntid 32" in found.ptx, "one warp"


@pytest.mark.parametrize("capability", ["6.0", *machine.CAPABILITIES])
def test_signals_compile_where_kernels_are_said_to_run(capability: str):
    refused = capability not in machine.CAPABILITIES
    with pytest.raises(PTXASError, match="target sm_70") if refused else nullcontext():
        number = int(capability.replace(".", ""))
        assert code(signal_kernel, number, ADVANCE=True, LANES=32, **SIGNAL).cubin


@pytest.mark.parametrize("capability", generations(1))
def test_a_delay_reads_the_clock_until_it_has_passed(capability: int):
    found = code(delay_kernel, capability, pointers={"i64": "out"}, types={"delay_ns": "i64"},
                 plain="all", num_warps=1)  # fmt: skip
    body = found.ptx[found.ptx.index(".visible") :]
    same_block = r"(?:(?!\$L__BB).)*"
    loop = rf"(\$L__BB\d+_\d+):{same_block}globaltimer{same_block}bra\s+\1"
    assert re.search(loop, body, re.DOTALL), "no loop reads the clock"
    assert found.shared_bytes == found.spills == 0


def test_a_delay_is_one_kernel_whatever_its_length():
    """Its length is no part of what is compiled: a search tries several."""
    length = next(p for p in delay_kernel.params if p.name == "delay_ns")
    assert length.do_not_specialize and not length.is_constexpr


def tiled(
    tile: tuple[int, int, int], num_stages: int = 3, num_warps: int = 4, capability: int = 90
) -> Compiled:
    """As a launch on bf16 of contiguous tensors, all sizes multiples of 16, would compile it."""
    m, n, k = tile
    return code(matmul_kernel, capability, sizes="M N K", num_warps=num_warps,
                num_stages=num_stages, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8)  # fmt: skip


@pytest.mark.parametrize("tile", [(64, 64, 32), (128, 64, 64)])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.drawn(1))])
def test_the_matmul_runs_on_tensor_cores(capability: int, tile: tuple[int, int, int]):
    ptx = tiled(tile, 2, capability=capability).ptx
    core = {80: r"mma\.sync\.aligned\S*\.f32\.bf16\.bf16\.f32", 90: r"wgmma\.mma_async\S*\.bf16"}
    assert re.search(core[capability], ptx)
    # tiles come by copies of 16 bytes in the background, as stages have it
    assert re.search(r"cp\.async\.cg\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*0x10", ptx)
    assert not re.search(r"\bfma\.rn\.f32", ptx), "no products on ordinary cores"


def test_shared_memory_is_that_of_the_stages():
    """What shaping adds to: two operands of each stage, 8 KiB at this tile."""
    sizes = [tiled((64, 64, 32), stages).dynamic_bytes for stages in (2, 3, 4)]
    assert sizes == [16384, 24576, 32768]


@pytest.mark.parametrize("tile", [(64, 64, 32), (128, 128, 64)])
def test_the_subject_of_shaping_leaves_room_for_it(tile: tuple[int, int, int]):
    """Several blocks per SM, nothing spilled: shared memory can bring the number down."""
    narrow = tile[0] == 64
    found = tiled(tile, num_warps=4 if narrow else 8)
    assert not found.spills
    assert 32 <= found.registers <= 128 if narrow else found.registers <= 255


@pytest.mark.parametrize("capability", [80, 90])
def test_triton_launches_by_the_numbers_that_are_known(capability: int):
    """Of a launch that shaping changes: `shape` refuses any other layout."""
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8}
    types = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16") | dict.fromkeys("MNK", "i32")
    source = ASTSource(
        fn=matmul_kernel, signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )  # fmt: skip
    options = {"num_warps": 4, "num_stages": 2}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = kernel.metadata
    assert kernel.packed_metadata == (4, 1, metadata.shared)
    assert (metadata.name, metadata.num_warps, metadata.num_ctas) == ("matmul_kernel", 4, 1)
