"""What is refused, and in which words: bad arguments of the whole public surface.

A row is what replaces arguments of a good call, and the text of the error behind its operator's
name. Operators are called by two ranks: both hear the same, and nothing is launched.
"""

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint import nn as cnn
from counterpoint.errors import CounterpointError, InputError, PlanError, UnsupportedError
from counterpoint.group.workspace import workspaces_of
from counterpoint.machine import Machine
from counterpoint.plan.steps import Buffer, Plan
from counterpoint.problem import Problem

NAN, INF = math.nan, math.inf
H200 = cp.preset("h200-4")
GOOD = Problem("all_gather_matmul", 8, 3, 5, 4)
PLAN = cp.build(GOOD, "graded 1/1/2")
STEPS = PLAN.steps
OTHER = cp.build(Problem("matmul_reduce_scatter", 6, 4, 5, 2, "float32"), "serial")
X, W, BIAS, SCALAR = torch.randn(6, 5), torch.randn(5, 4), torch.randn(4), torch.randn(())
RESIDUAL, LIKE = torch.randn(6, 4), torch.randn(2, 4)
with warnings.catch_warnings():  # both are called experimental
    warnings.simplefilter("ignore")
    CSR, NESTED = X.to_sparse_csr(), torch.nested.nested_tensor([X, X[:2]])
ROWS, EXPERTS, TABLE = torch.randn(4, 4), torch.randn(2, 4, 3), torch.ones(2, 4, dtype=torch.int64)
INDEX, WEIGHTS, COUNTS = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2), torch.arange(4)
TABLES, IDS = [torch.randn(4, 3)], torch.arange(4)
CHOSEN, SHARES = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)


def problem(**bad: Any) -> object:
    return Problem(**{"op": "all_gather_matmul", "m": 8, "n": 3, "k": 5, "ranks": 4} | bad)


def experts(**bad: Any) -> object:
    good = {"op": "all_to_all_matmul", "m": 8, "n": 3, "k": 5, "ranks": 2, "experts": 2}
    return Problem(**good | bad)


def tables(**bad: Any) -> object:
    return Problem(**{"op": "embedding_bag_all_to_all", "m": 8, "tables": ((3,), (4,))} | bad)


def from_file(**bad: Any) -> object:
    """A plan from a file in which the field at a path such as steps0__kind is another."""
    data = json.loads(PLAN.to_json())
    for path, value in bad.items():
        *parts, last = path.split("__")
        place = data["plan"]
        for part in parts:
            name, number = re.fullmatch(r"([a-z]+)(\d*)", part).groups()  # type: ignore[union-attr]
            place = place[name][int(number)] if number else place[name]
        place[last] = value
    return Plan.from_json(json.dumps(data))


def layer_of(make: Callable[..., Any], good: dict[str, Any], *of_forward: str) -> Any:
    """A function that makes a layer, and calls it where what is bad is an argument of that."""

    def layer(**bad: Any) -> None:
        inputs = {name: bad[name] for name in of_forward if name in bad}
        made = make(**{k: v for k, v in (good | bad).items() if k not in of_forward})
        if inputs:
            defaults = {"x": LIKE, "experts": CHOSEN, "weights": SHARES}
            defaults = {name: defaults.get(name) for name in of_forward}
            made(**{n: v for n, v in (defaults | inputs).items() if n in inputs or v is not None})

    return layer


def sharded_bags(**bad: Any) -> None:
    at = {name: bad.pop(name) for name in ("indices", "offsets", "keys", "pooled") if name in bad}
    bags = cnn.ShardedEmbeddingBags(**{"tables": [(4, 3), (5, 3)]} | bad)
    if "keys" in at:
        bags.keyed(LIKE, at["keys"])
    elif "pooled" in at:
        bags.split(at["pooled"])
    elif at:
        bags(**{"indices": IDS, "offsets": IDS} | at)


def with_timeout(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_TIMEOUT_S", text)
        cp.all_gather_matmul(X, W)


def given(function: Callable[..., Any], **good: Any) -> Callable[..., Any]:
    return lambda **bad: function(**good | bad)


def sliced(linear: Any) -> object:
    return cnn.RowParallelLinear.from_linear(linear)


def gathered(x: Any = LIKE, layers: Any = None) -> object:
    made = layers if layers is not None else (cnn.ColumnParallelLinear(4, 4),)
    return cnn.gather_once(x, *made)


BAG_INPUT: dict[str, Any] = {"tables": TABLES, "indices": IDS, "offsets": IDS}
BAG_INPUT |= {"dims": [[3], [3]]}
EXPERT_INPUT: dict[str, Any] = {"x": ROWS, "w": EXPERTS, "counts": TABLE}
PROBLEM = cp.Problem("all_gather_matmul", 8, 3, 5, 2, "float32")
CALLS: dict[str, Callable[..., Any]] = {
    "problem": problem, "experts": experts, "tables": tables,
    "device": lambda **bad: replace(H200.device, **bad),
    "link": lambda **bad: replace(H200.link, **bad),
    "machine": lambda **bad: replace(H200, **bad),
    "costs": lambda **bad: replace(H200.costs, **bad),
    "machine_json": Machine.from_json, "plan_json": Plan.from_json, "plan_file": from_file,
    "validate": cp.validate, "validate_plan": lambda **bad: cp.validate(replace(PLAN, **bad)),
    "bind": given(cp.bind, plan=PLAN, rank=0),
    "build": given(cp.build, problem=GOOD, spec="graded"),
    "estimate": given(cp.estimate, plan=PLAN, machine=H200),
    "choose": given(cp.choose, problem=GOOD, machine="h200-4"), "preset": cp.preset,
    "gather": given(cp.all_gather_matmul, x=X, w=W),
    "scatter": given(cp.matmul_reduce_scatter, x=X, w=W),
    "reduce": given(cp.matmul_all_reduce, x=X, w=W),
    "norm": given(cp.matmul_all_reduce_rms_norm, x=X, w=W, residual=RESIDUAL, norm_weight=BIAS),
    "dispatch": given(cp.all_to_all_matmul, **EXPERT_INPUT),
    "combine": given(cp.matmul_all_to_all, **EXPERT_INPUT),
    "exchange": cp.exchange_counts,
    "routes": given(cp.exchange_routes, experts=INDEX, weights=WEIGHTS, num_experts=4),
    "bags": given(cp.embedding_bag_all_to_all, **BAG_INPUT),
    "outputs": given(cp.PooledOutputs, columns=4, dtype=torch.float32, batch=4),
    "run": given(cp.run_on_ranks, fn=print),
    "check": cp.check, "release": cp.release, "profile": given(cp.profile, fn=lambda: 1),
    "tune": given(cp.tune, problem=PROBLEM),
    "column": layer_of(cnn.ColumnParallelLinear, {"in_features": 4, "out_features": 4}, "x"),
    "row": layer_of(cnn.RowParallelLinear, {"in_features": 8, "out_features": 4}, "x"),
    "sharded": layer_of(cnn.FullyShardedLinear, {"in_features": 4, "out_features": 4}, "x"),
    "slices": sliced, "once": gathered, "copied": given(cnn.copy_to_group, parameter=BIAS),
    "mlp": layer_of(cnn.ExpertParallelMLP, {"features": 4, "hidden": 4, "num_experts": 4},
                    "x", "experts", "weights"),
    "routed": layer_of(cnn.ExpertParallelMLP, {"features": 4, "hidden": 4, "num_experts": 4},
                       "x", "logits", "top_k", "renormalize"),
    "sharded_bags": sharded_bags, "timeout": with_timeout,
}  # fmt: skip


class Area(NamedTuple):
    """Bad inputs of one function.

    Args:
        call: of CALLS.
        op: what its errors begin with, where a text does not say it.
        rows: what is passed, and the text.
        ranks: that call it; 0: none, it needs no group.
    """

    call: str
    op: str
    ranks: int
    rows: list[tuple[dict[str, Any], str]]


BAD: dict[str, Area] = {
    "Problem": Area(
        "problem", "all_gather_matmul", 0, [
            ({"op": None}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"op": "matmul_all_reduse"}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"op": "families"}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"op": ["a"]}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, got 'int8'"),
            ({"dtype": None}, "dtype must be one of bfloat16, float16, float32, got None"),
            ({"dtype": float}, "dtype must be one of bfloat16, float16, float32, got <class 'float'>"),
            ({"m": "a"}, "m must be a whole number from 0 to 2**40, got 'a'"),
            ({"m": None}, "m must be a whole number from 0 to 2**40, got None"),
            ({"m": 8.0}, "m must be a whole number from 0 to 2**40, got 8.0"),
            ({"m": True}, "m must be a whole number from 0 to 2**40, got True"),
            ({"m": NAN}, "m must be a whole number from 0 to 2**40, got nan"),
            ({"m": -4}, "m must be a whole number from 0 to 2**40, got -4"),
            ({"m": 2 ** 70}, "m must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"m": 9}, "m must be a multiple of the 4 ranks, got 9; pass rows=, one count per rank"),
            ({"n": -1}, "n must be a whole number from 0 to 2**40, got -1"),
            ({"n": 3.0}, "n must be a whole number from 0 to 2**40, got 3.0"),
            ({"n": "3"}, "n must be a whole number from 0 to 2**40, got '3'"),
            ({"k": None}, "k must be a whole number from 0 to 2**40, got None"),
            ({"k": INF}, "k must be a whole number from 0 to 2**40, got inf"),
            ({"k": False}, "k must be a whole number from 0 to 2**40, got False"),
            ({"ranks": None}, "ranks must be a whole number from 0 to 2**16, got None"),
            ({"ranks": "4"}, "ranks must be a whole number from 0 to 2**16, got '4'"),
            ({"ranks": 4.0}, "ranks must be a whole number from 0 to 2**16, got 4.0"),
            ({"ranks": True}, "ranks must be a whole number from 0 to 2**16, got True"),
            ({"ranks": 0}, "ranks must be at least 1, got 0"),
            ({"ranks": -1}, "ranks must be a whole number from 0 to 2**16, got -1"),
            ({"ranks": 2 ** 40}, "ranks must be a whole number from 0 to 2**16, got 1099511627776"),
            ({"rows": 3}, "rows must be a tuple, got 3"),
            ({"rows": "2222"}, "rows must be a tuple, got '2222'"),
            ({"rows": [2, 2, 2, 2.0]}, "rows[3] must be a whole number from 0 to 2**40, got 2.0"),
            ({"rows": [2, 2, 2, True]}, "rows[3] must be a whole number from 0 to 2**40, got True"),
            ({"rows": [None] * 4}, "rows[0] must be a whole number from 0 to 2**40, got None"),
            ({"rows": {2: 2}}, "rows must be a tuple, got dict"),
            ({"rows": (4, 4)}, "rows must be 4 counts >= 0 that add up to 8, got (4, 4)"),
            ({"rows": (2, 2, 2, 3)}, "rows must be 4 counts >= 0 that add up to 8, got (2, 2, 2, 3)"),
            ({"rows": (9, 0, 0, -1)}, "rows[3] must be a whole number from 0 to 2**40, got -1"),
            ({"bias": None}, "bias must be True or False, got None"),
            ({"bias": 1}, "bias must be True or False, got 1"),
            ({"bias": "yes"}, "bias must be True or False, got 'yes'"),
            ({"scratch_bytes_limit": NAN}, "scratch_bytes_limit must be a whole number from 0 to 2**60, got nan"),
            ({"scratch_bytes_limit": -1}, "scratch_bytes_limit must be a whole number from 0 to 2**60, got -1"),
            ({"scratch_bytes_limit": None}, "scratch_bytes_limit must be a whole number from 0 to 2**60, got None"),
            ({"scratch_bytes_limit": True}, "scratch_bytes_limit must be a whole number from 0 to 2**60, got True"),
            ({"splits": 3}, "splits must be a tuple, got 3"),
            ({"splits": [1, 2.0]}, "splits[1] must be a whole number from 0 to 2**40, got 2.0"),
            ({"splits": (2, 2)}, "splits must be counts >= 0 that add up to 3, got (2, 2)"),
            ({"splits": (4, -1)}, "splits[1] must be a whole number from 0 to 2**40, got -1"),
            ({"splits": (1, 2), "bias": True}, "splits must be empty with a bias, got (1, 2)"),
            ({"experts": -1}, "experts must be a whole number from 0 to 2**20, got -1"),
            ({"experts": 1}, "experts must be 0: the op has none, got 1"),
            ({"counts": "some"}, "counts must be one of equal, host, device, routed, device_routed, got 'some'"),
            ({"counts": 3}, "counts must be one of equal, host, device, routed, device_routed, got 3"),
            ({"tables": 3}, "tables must be a tuple, got 3"),
            ({"tables": [[1]]}, "tables must be left out: the op has no tables, got ((1,),)"),
            ({"indices": [1.5]}, "indices[0] must be a whole number from 0 to 2**60, got 1.5"),
            ({"out": None}, "out must be True or False, got None"),
            ({"out": 1}, "out must be True or False, got 1"),
        ],
    ),
    "Problem of experts": Area(
        "experts", "all_to_all_matmul", 0, [
            ({"experts": 0}, "experts must be 1 or more, got 0"),
            ({"experts": 1.5}, "experts must be a whole number from 0 to 2**20, got 1.5"),
            ({"experts": "a"}, "experts must be a whole number from 0 to 2**20, got 'a'"),
            ({"counts": "x"}, "counts must be one of equal, host, device, routed, device_routed, got 'x'"),
            ({"m": 7}, "m must be a multiple of the 2 ranks, got 7; pass rows=, one count per rank"),
            ({"bias": True}, "bias must be False: the op adds none, got True"),
            ({"splits": (1, 2)}, "splits must be empty: the op has one weight, got (1, 2)"),
        ],
    ),
    "Problem of tables": Area(
        "tables", "embedding_bag_all_to_all", 0, [
            ({"tables": 3}, "tables must be a tuple, got 3"),
            ({"tables": "ab"}, "tables must be a tuple, got 'ab'"),
            ({"tables": ((3.0,), (4,))}, "tables[0][0] must be a whole number from 0 to 2**40, got 3.0"),
            ({"tables": ((True,), (4,))}, "tables[0][0] must be a whole number from 0 to 2**40, got True"),
            ({"tables": ((-3,), (4,))}, "tables[0][0] must be a whole number from 0 to 2**40, got -3"),
            ({"tables": (None, None)}, "tables[0] must be a tuple, got None"),
            ({"tables": ((2 ** 70,), (3,))}, "tables[0][0] must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"indices": (1,)}, "indices must be 2 counts, got (1,)"),
            ({"indices": (1.5, 2)}, "indices[0] must be a whole number from 0 to 2**60, got 1.5"),
            ({"indices": (-1, 2)}, "indices[0] must be a whole number from 0 to 2**60, got -1"),
            ({"n": 9}, "n must be 7, columns of all tables, or 0, got 9"),
            ({"out": "a"}, "out must be True or False, got 'a'"),
            ({"m": 7}, "m must be a multiple of the 2 ranks, got 7; pass rows=, one count per rank"),
            ({"k": 3}, "k must be 0: nothing is contracted, got 3"),
        ],
    ),
    "DeviceSpec": Area(
        "device", "DeviceSpec H200 SXM", 0, [
            ({"num_sms": 0}, "num_sms must be a whole number from 1 to 4096, got 0"),
            ({"num_sms": 1e+308}, "num_sms must be a whole number from 1 to 4096, got 1e+308"),
            ({"num_sms": INF}, "num_sms must be a whole number from 1 to 4096, got inf"),
            ({"num_sms": NAN}, "num_sms must be a whole number from 1 to 4096, got nan"),
            ({"num_sms": "132"}, "num_sms must be a whole number from 1 to 4096, got '132'"),
            ({"num_sms": None}, "num_sms must be a whole number from 1 to 4096, got None"),
            ({"num_sms": True}, "num_sms must be a whole number from 1 to 4096, got True"),
            ({"max_threads_per_sm": 0}, "max_threads_per_sm must be a whole number from 1 to 2**16, got 0"),
            ({"max_threads_per_sm": 8}, "max_threads_per_sm must be at least one for each of 64 warps, got 8"),
            ({"max_warps_per_sm": -1}, "max_warps_per_sm must be a whole number from 1 to 4096, got -1"),
            ({"max_blocks_per_sm": 2 ** 20}, "max_blocks_per_sm must be a whole number from 1 to 4096, got 1048576"),
            ({"registers_per_sm": 64}, "registers_per_sm must be a whole number from 1024 to 2**24, got 64; pass registers, not Ki"),
            ({"shared_bytes_per_sm": 228}, "shared_bytes_per_sm must be a whole number from 1024 to 2**30, got 228; pass bytes, not KiB"),
            ({"shared_bytes_per_block": 227}, "shared_bytes_per_block must be a whole number from 1024 to 2**30, got 227; pass bytes, not KiB"),
            ({"shared_reserved_bytes_per_block": -1}, "shared_reserved_bytes_per_block must be a whole number from 0 to 2**20, got -1"),
            ({"shared_granule_bytes": 0}, "shared_granule_bytes must be a whole number from 1 to 2**20, got 0"),
            ({"bf16_flop_per_s": 989}, "bf16_flop_per_s must be a number from 1e+09 to 1e+18, got 989; pass flop/s, not Tflop/s"),
            ({"bf16_flop_per_s": 1e+308}, "bf16_flop_per_s must be a number from 1e+09 to 1e+18, got 1e+308; pass flop/s, not Tflop/s"),
            ({"fp32_flop_per_s": NAN}, "fp32_flop_per_s must be a number from 1e+09 to 1e+18, got nan; pass flop/s, not Tflop/s"),
            ({"hbm_bytes_per_s": 4800}, "hbm_bytes_per_s must be a number from 1e+08 to 1e+16, got 4800; pass bytes/s, not GB/s"),
            ({"hbm_bytes_per_s": INF}, "hbm_bytes_per_s must be a number from 1e+08 to 1e+16, got inf; pass bytes/s, not GB/s"),
            ({"hbm_bytes": 141}, "hbm_bytes must be a number from 1e+09 to 1e+15, got 141; pass bytes, not GB"),
            ({"l2_bytes": 50}, "l2_bytes must be a whole number from 2**19 to 2**40, got 50; pass bytes, not MiB"),
            ({"l2_bytes": 1000000000.0}, "l2_bytes must be a whole number from 2**19 to 2**40, got 1000000000.0"),
            ({"name": 3}, "DeviceSpec 3: name must be text, got 3"),
            ({"source": None}, "source must be text, got None"),
        ],
    ),
    "LinkSpec": Area(
        "link", "LinkSpec NVLink 4, NVSwitch", 0, [
            ({"bytes_per_s": 450}, "bytes_per_s must be a number from 1e+06 to 1e+15, got 450; pass bytes/s, not GB/s"),
            ({"bytes_per_s": INF}, "bytes_per_s must be a number from 1e+06 to 1e+15, got inf; pass bytes/s, not GB/s"),
            ({"bytes_per_s": None}, "bytes_per_s must be a number from 1e+06 to 1e+15, got None"),
            ({"latency_s": 2.0}, "latency_s must be a number from 0 to 0.1, got 2.0; pass seconds, not us"),
            ({"latency_s": "2us"}, "latency_s must be a number from 0 to 0.1, got '2us'"),
            ({"copy_overhead_s": -1e-06}, "copy_overhead_s must be a number from 0 to 0.1, got -1e-06; pass seconds, not us"),
            ({"copy_overhead_s": NAN}, "copy_overhead_s must be a number from 0 to 0.1, got nan; pass seconds, not us"),
            ({"topology": "ring"}, "topology must be one of switch, mesh, pcie, got 'ring'"),
            ({"topology": None}, "topology must be one of switch, mesh, pcie, got None"),
            ({"topology": ["switch"]}, "topology must be one of switch, mesh, pcie, got ['switch']"),
            ({"name": None}, "LinkSpec None: name must be text, got None"),
        ],
    ),
    "Machine": Area(
        "machine", "Machine h200-4", 0, [
            ({"num_devices": 0}, "num_devices must be a whole number from 1 to 2**16, got 0"),
            ({"num_devices": 1.5}, "num_devices must be a whole number from 1 to 2**16, got 1.5"),
            ({"num_devices": True}, "num_devices must be a whole number from 1 to 2**16, got True"),
            ({"num_devices": 2 ** 40}, "num_devices must be a whole number from 1 to 2**16, got 1099511627776"),
            ({"gemm_tile": (128, 0)}, "gemm_tile[1] must be a whole number from 1 to 4096, got 0"),
            ({"gemm_tile": (128,)}, "gemm_tile must be a tuple of 2, got (128,)"),
            ({"gemm_tile": (2 ** 40, 128)}, "gemm_tile[0] must be a whole number from 1 to 4096, got 1099511627776"),
            ({"gemm_tile": (1.5, 2)}, "gemm_tile[0] must be a whole number from 1 to 4096, got 1.5"),
            ({"gemm_tile": None}, "gemm_tile must be a tuple of 2, got None"),
            ({"device": None}, "device must be a DeviceSpec, got None"),
            ({"link": {}}, "link must be a LinkSpec, got dict"),
            ({"measured": 3}, "measured must be a Costs or None, got 3"),
            ({"source": 3}, "source must be text, got 3"),
        ],
    ),
    "Costs": Area(
        "costs", "Costs", 0, [
            ({"gemm_flop_per_s": 800.0}, "gemm_flop_per_s must be a number from 1e+09 to 1e+20, got 800.0; pass flop/s, not Tflop/s"),
            ({"gemm_flop_per_s": NAN}, "gemm_flop_per_s must be a number from 1e+09 to 1e+20, got nan; pass flop/s, not Tflop/s"),
            ({"hbm_bytes_per_s": 3800.0}, "hbm_bytes_per_s must be a number from 1e+06 to 1e+18, got 3800.0; pass bytes/s, not GB/s"),
            ({"copy_bytes_per_s": INF}, "copy_bytes_per_s must be a number from 1e+06 to 1e+18, got inf; pass bytes/s, not GB/s"),
            ({"collective_bytes_per_s": -316000000000.0}, "collective_bytes_per_s must be a number from 1e+06 to 1e+18, got -316000000000.0; pass bytes/s, not GB/s"),
            ({"direct_bytes_per_s": "a"}, "direct_bytes_per_s must be a number from 1e+06 to 1e+18, got 'a'"),
            ({"gemm_settling_s": 0.25}, "gemm_settling_s must be a number from 0 to 0.1, got 0.25; pass seconds, not us"),
            ({"kernel_s": 1.5}, "kernel_s must be a number from 0 to 0.1, got 1.5; pass seconds, not us"),
            ({"copy_overhead_s": -6e-06}, "copy_overhead_s must be a number from 0 to 0.1, got -6e-06; pass seconds, not us"),
            ({"host_step_s": NAN}, "host_step_s must be a number from 0 to 0.1, got nan; pass seconds, not us"),
            ({"all_gather_s": None}, "all_gather_s must be a number from 0 to 1, got None"),
            ({"gemm_settled": 0.9}, "gemm_settled must be a number from 1 to 10, got 0.9"),
            ({"gemm_settled": True}, "gemm_settled must be a number from 1 to 10, got True"),
            ({"matmul_beside_copy": 110}, "matmul_beside_copy must be a number from 1 to 10, got 110"),
            ({"copy_beside_matmul": [1.1]}, "copy_beside_matmul must be a number from 1 to 10, got [1.1]"),
        ],
    ),
    "Machine.from_json": Area(
        "machine_json", "Machine.from_json", 0, [
            ({"text": None}, "text must be JSON written by Machine.to_json, got NoneType"),
            ({"text": ""}, "text must be JSON written by Machine.to_json, got no JSON"),
            ({"text": "[]"}, "text must be JSON written by Machine.to_json, got a machine that is no object"),
            ({"text": "{}"}, "text must be JSON written by Machine.to_json, got a machine without name, device, link, num_devices"),
            ({"text": "[" * 100000}, "text must be JSON written by Machine.to_json, got no JSON"),
            ({"text": H200.to_json().replace("num_sms", "sms")}, "text must be JSON written by Machine.to_json, got device without num_sms"),
            ({"text": H200.to_json().replace("capability", "cc")}, "text must be JSON written by Machine.to_json, got device with the unknown field cc"),
            ({"text": H200.to_json().replace('"latency_s"', '"latency_us"')}, "text must be JSON written by Machine.to_json, got link with the unknown field latency_us"),
            ({"text": H200.to_json().replace("450000000000.0", "450")}, "LinkSpec NVLink 4, NVSwitch: bytes_per_s must be a number from 1e+06 to 1e+15, got 450; pass bytes/s, not GB/s"),
            ({"text": H200.to_json().replace("132", "1e308")}, "DeviceSpec H200 SXM: num_sms must be a whole number from 1 to 4096, got 1e+308"),
            ({"text": H200.to_json().replace("132", "Infinity")}, "DeviceSpec H200 SXM: num_sms must be a whole number from 1 to 4096, got inf"),
            ({"text": H200.to_json().replace("256", "1099511627776")}, "Machine h200-4: gemm_tile[1] must be a whole number from 1 to 4096, got 1099511627776"),
        ],
    ),
    "Plan.from_json": Area(
        "plan_json", "plan file", 0, [
            ({"text": None}, "text must be JSON that to_json wrote, got NoneType: the JSON object must be str, bytes or bytearray, not NoneType"),
            ({"text": 3}, "text must be JSON that to_json wrote, got int: the JSON object must be str, bytes or bytearray, not int"),
            ({"text": b"x"}, "text must be JSON that to_json wrote, got bytes: ..."),
            ({"text": ""}, "text must be JSON that to_json wrote, got str: ..."),
            ({"text": "null"}, "the field 'format' must be 'counterpoint-plan-6'"),
            ({"text": "{}"}, "the field 'format' must be 'counterpoint-plan-6'"),
            ({"text": "[" * 100000}, "text must be JSON that to_json wrote, got str: ..."),
            ({"text": "1" * 10000}, "text must be JSON that to_json wrote, got str: ..."),
            ({"text": PLAN}, "text must be JSON that to_json wrote, got Plan: the JSON object must be str, bytes or bytearray, not Plan"),
            ({'text': '{"format": "counterpoint-plan-6"}'}, "plan must be a Plan, got None"),
            ({'text': '{"format": "counterpoint-plan-1"}'}, "the field 'format' must be 'counterpoint-plan-6', got 'counterpoint-plan-1': build the plan again"),
            ({'text': '{"format": "counterpoint-plan-6", "plan": 3}'}, "plan must be a Plan, got 3"),
        ],
    ),
    "a file of a plan": Area(
        "plan_file", "plan file", 0, [
            ({"family": 3}, "plan.family must be text, got 3"),
            ({"peers": "mesh"}, "plan.peers must be one of ring, xor, grid, got 'mesh'"),
            ({"peers": "x" * 10000}, "plan.peers must be one of ring, xor, grid, got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."),
            ({"steps": {}}, "plan.steps must be a tuple, got dict"),
            ({"lanes": [3]}, "plan.lanes[0] must be a Lane, got 3"),
            ({"extra": 1}, "plan must be a Plan of problem, family, variant, peers, buffers, lanes, steps, got problem, family, variant, peers, buffers, lanes, steps, extra"),
            ({"problem__m": True}, "all_gather_matmul: m must be a whole number from 0 to 2**40, got True"),
            ({"problem__m": -7}, "all_gather_matmul: m must be a whole number from 0 to 2**40, got -7"),
            ({"problem__m": 2 ** 70}, "all_gather_matmul: m must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"problem__op": "eval"}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"problem__op": ["a"]}, "Problem: op must be one of all_gather_attention, all_gather_attention_backward, all_gather_matmul, all_gather_matmul_backward, all_gather_matmul_wgrad, all_reduce_norm, all_to_all_matmul, embedding_bag_all_to_all, matmul..."),
            ({"problem__rows": [3, 5]}, "all_gather_matmul: rows must be 4 counts >= 0 that add up to 8, got (3, 5)"),
            ({"problem__splits": 5}, "all_gather_matmul: splits must be a tuple, got 5"),
            ({"steps0__kind": "exec"}, "plan.steps[0].kind must be one of copy, matmul, move, reduce, spread, fold, barrier, collective, exchange, fused, opaque, attention, attention_backward, got 'exec'"),
            ({"steps0__kind": ["copy"]}, "plan.steps[0].kind must be one of copy, matmul, move, reduce, spread, fold, barrier, collective, exchange, fused, opaque, attention, attention_backward, got ['copy']"),
            ({"steps0__after": "open"}, "plan.steps[0].after must be a tuple, got 'open'"),
            ({"steps0__after": [1]}, "plan.steps[0].after[0] must be text, got 1"),
            ({"steps0__posts": [[1, []]]}, "plan.steps[0].posts[0] must be a Signal, got [1, []]"),
            ({"steps0__posts": [{"slot": True, "at": [1]}]}, "plan.steps[0].posts[0].slot must be a whole number from 0 to 2**30, got True"),
            ({"steps0__posts": [{"slot": 1.0, "at": [1]}]}, "plan.steps[0].posts[0].slot must be a whole number from 0 to 2**30, got 1.0"),
            ({"steps0__posts": [{"slot": 1, "at": ["1"]}]}, "plan.steps[0].posts[0].at[0] must be a whole number from -2**16 to 2**16, got '1'"),
            ({"steps0__posts": [{"slot": -1, "at": [1]}]}, "plan.steps[0].posts[0].slot must be a whole number from 0 to 2**30, got -1"),
            ({"steps0__posts": [{"slot": 2 ** 40, "at": [1]}]}, "plan.steps[0].posts[0].slot must be a whole number from 0 to 2**30, got 1099511627776"),
            ({"steps0__args": [["bias"]]}, "plan.steps[0].args[0] must be a tuple of 2, got ('bias',)"),
            ({"steps0__args": [["bias", None]]}, "plan.steps[0].args[0][1] must be a whole number from -2**63 to 2**63 or text, got None"),
            ({"steps0__args": [["bias", True]]}, "plan.steps[0].args[0][1] must be a whole number from -2**63 to 2**63 or text, got True"),
            ({"steps0__spins": 1}, "plan.steps[0].spins must be True or False, got 1"),
            ({"steps0__color": "red"}, "plan.steps[0] must be a Step of name, lane, kind, reads, writes, after, waits, posts, args, spins, got name, lane, kind, reads, writes, after, waits, ..."),
            ({"buffers0__space": "disk"}, "plan.buffers[0].space must be one of input, output, scratch, symmetric, words, flags, turns, got 'disk'"),
            ({"buffers0__dtype": 3}, "plan.buffers[0].dtype must be text, got 3"),
            ({"buffers0__split": 1}, "plan.buffers[0].split must be True or False, got 1"),
            ({"buffers0__chunks": None}, "plan.buffers[0].chunks must be a whole number from 1 to 2**16, got None"),
            ({"buffers0__chunks": 0}, "plan.buffers[0].chunks must be a whole number from 1 to 2**16, got 0"),
            ({"buffers0__shape": [7]}, "plan.buffers[0].shape must be a tuple of 2, got (7,)"),
            ({"buffers0__shape": [7, 8, 9]}, "plan.buffers[0].shape must be a tuple of 2, got (7, 8, 9)"),
            ({"buffers0__shape": ["7", 8]}, "plan.buffers[0].shape[0] must be a whole number from 0 to 2**40, got '7'"),
            ({"buffers0__shape": [-8, 5]}, "plan.buffers[0].shape[0] must be a whole number from 0 to 2**40, got -8"),
            ({"buffers0__shape": [8, 2 ** 70]}, "plan.buffers[0].shape[1] must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"lanes0__num_sms": 0}, "plan.lanes[0].num_sms must be a whole number from 1 to 4096 or None, got 0"),
            ({"lanes0__priority": 10 ** 9}, "plan.lanes[0].priority must be a whole number from -1000 to 1000, got 1000000000"),
            ({"lanes0__engine": "gpu"}, "plan.lanes[0].engine must be one of sm, copy, nic, got 'gpu'"),
        ],
    ),
    "validate": Area(
        "validate", "validate", 0, [
            ({"plan": None}, "plan must be a Plan, got None"),
            ({"plan": "graded"}, "plan must be a Plan, got 'graded'"),
            ({"plan": GOOD}, "plan must be a Plan, got Problem"),
            ({"plan": PLAN.steps}, "plan must be a Plan, got (Step(name='open', lane='signal', kind='barrier', reads=(), writes=(), after=..."),
        ],
    ),
    "validate a plan": Area(
        "validate_plan", "plan graded 1/1/2 ring", 0, [
            ({"steps": None}, "steps must be a tuple, got None"),
            ({"steps": (None,)}, "steps[0] must be a Step, got None"),
            ({"lanes": []}, "lanes must be a tuple, got []"),
            ({"problem": None}, "problem must be a Problem, got None"),
            ({"family": 3}, "plan 3 1/1/2 ring: family must be text, got 3"),
            ({"buffers": (Buffer("x", (-8, 5), "bfloat16", "input"),)}, "buffers[0].shape[0] must be a whole number from 0 to 2**40, got -8"),
            ({"buffers": (Buffer("x", (8, 2 ** 70), "bfloat16", "input"),)}, "buffers[0].shape[1] must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"buffers": (Buffer("x", (8, 5), None, "input"),)}, "buffers[0].dtype must be text, got None"),
        ],
    ),
    "bind": Area(
        "bind", "bind", 0, [
            ({"plan": None}, "plan must be a Plan, got None"),
            ({"plan": GOOD}, "plan must be a Plan, got Problem"),
            ({"rank": None}, "rank must be a whole number from 0 to 3, got None"),
            ({"rank": "0"}, "rank must be a whole number from 0 to 3, got '0'"),
            ({"rank": 0.0}, "rank must be a whole number from 0 to 3, got 0.0"),
            ({"rank": True}, "rank must be a whole number from 0 to 3, got True"),
            ({"rank": 4}, "rank must be a whole number from 0 to 3, got 4"),
            ({"rank": -1}, "rank must be a whole number from 0 to 3, got -1"),
            ({"rank": NAN}, "rank must be a whole number from 0 to 3, got nan"),
        ],
    ),
    "build": Area(
        "build", "all_gather_matmul", 0, [
            ({"problem": None}, "build: problem must be a Problem, got None"),
            ({"problem": PLAN}, "build: problem must be a Problem, got Plan"),
            ({"spec": None}, "plan must be text, got None"),
            ({"spec": 3}, "plan must be text, got 3"),
            ({"spec": ""}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"spec": "x"}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"spec": ["serial"]}, "plan must be text, got ['serial']"),
            ({"spec": b"serial"}, "plan must be text, got b'serial'"),
            ({"spec": "auto"}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"spec": "graded " + "9" * 5000}, "plan must be a spec with sizes like 1/1/2; '9999999999999999999999999999999999999999' are none, got 'graded 999999999999999999999999999999999999999999..."),
            ({"spec": "graded 9999999999999999999/1"}, "plan must be a spec with sizes like 1/1/2; '9999999999999999999/1' are none, got 'graded 9999999999999999999/1'"),
            ({"machine": 3}, "build: machine must be a Machine, its name, its JSON or a file of it, got int"),
            ({"machine": "no.json"}, "build: machine must be a file of a machine, got no.json: No such file or directory"),
        ],
    ),
    "estimate": Area(
        "estimate", "estimate", 0, [
            ({"plan": None}, "plan must be a Plan, got None"),
            ({"plan": "serial"}, "plan must be a Plan, got 'serial'"),
            ({"plan": GOOD}, "plan must be a Plan, got Problem"),
            ({"machine": None}, "machine must be a Machine, its name, its JSON or a file of it, got NoneType"),
            ({"machine": "h300-4"}, "preset: name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got 'h300-4'"),
            ({"machine": H200.device}, "machine must be a Machine, its name, its JSON or a file of it, got DeviceSpec"),
            ({"eager": "a"}, "eager must be True or False, got 'a'"),
        ],
    ),
    "choose": Area(
        "choose", "choose", 0, [
            ({"problem": "op"}, "problem must be a Problem, got 'op'"),
            ({"problem": None}, "problem must be a Problem, got None"),
            ({"problem": PLAN}, "problem must be a Problem, got Plan"),
            ({"machine": 3}, "machine must be a Machine, its name, its JSON or a file of it, got int"),
            ({"machine": NAN}, "machine must be a Machine, its name, its JSON or a file of it, got float"),
            ({"machine": ""}, "preset: name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got ''"),
            ({"machine": "h200-99"}, "preset: name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got 'h200-99'"),
            ({"machine": b"h200-8"}, "machine must be a Machine, its name, its JSON or a file of it, got bytes"),
            ({"machine": ["h200-8"]}, "machine must be a Machine, its name, its JSON or a file of it, got list"),
            ({"machine": H200.device}, "machine must be a Machine, its name, its JSON or a file of it, got DeviceSpec"),
            ({"machine": "h200-2"}, "machine must be a machine of 4 GPUs or more, as the problem has ranks, got h200-2"),
            ({"machine": "no.json"}, "machine must be a file of a machine, got no.json: No such file or directory"),
            ({"machine": "\x00.json"}, 'machine must be a file of a machine, got \x00.json: embedded null byte'),
            ({"machine": "{"}, "Machine.from_json: text must be JSON written by Machine.to_json, got no JSON"),
            ({"machine": '{"machine": 3}'}, "Machine.from_json: text must be JSON written by Machine.to_json, got a machine that is no object"),
            ({"by": "x"}, "by must be model or rule, got 'x'"),
            ({"by": None}, "by must be model or rule, got None"),
            ({"by": ["model"]}, "by must be model or rule, got ['model']"),
            ({"eager": "a"}, "eager must be True or False, got 'a'"),
            ({"eager": None}, "eager must be True or False, got None"),
        ],
    ),
    "preset": Area(
        "preset", "preset", 0, [
            ({"name": None}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got None"),
            ({"name": 3}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got 3"),
            ({"name": ""}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got ''"),
            ({"name": b"h200-8"}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got b'h200-8'"),
            ({"name": ["h200-8"]}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got ['h200-8']"),
            ({"name": "h200-99"}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got 'h200-99'"),
            ({"name": "H200-8"}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got 'H200-8'"),
            ({"name": NAN}, "name must be one of a100-8, a40-4, h100-8, h200-8, b200-8, gb200-72, mi250x-8, mi300x-8, or these with 1 to 8 GPUs (gb200: to 72), got nan"),
        ],
    ),
    "all_gather_matmul": Area(
        "gather", "all_gather_matmul", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": 3}, "x must be a Tensor, got int"),
            ({"x": [1.0]}, "x must be a Tensor, got list"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"x": CSR.to_sparse()}, "x must be a dense tensor, got torch.sparse_coo"),
            ({"x": NESTED}, "x must be a dense tensor, got a nested one"),
            ({"x": X.to("meta")}, "x must be on cpu or cuda, got meta"),
            ({"x": X.bool()}, "x must be bf16, fp16 or fp32, got torch.bool"),
            ({"x": X.long()}, "x must be bf16, fp16 or fp32, got torch.int64"),
            ({"x": X.double()}, "x must be bf16, fp16 or fp32, got torch.float64"),
            ({"x": X[0]}, "x must be [rows, ..., K] of 2 or more dims, got 1-D"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"w": 3}, "w must be a Tensor, got int"),
            ({"w": CSR}, "w must be a dense tensor, got torch.sparse_csr"),
            ({"w": NESTED}, "w must be a dense tensor, got a nested one"),
            ({"w": W.to("meta")}, "w must be on cpu as x, got meta"),
            ({"w": W[0]}, "w must be [K, N] of 2 dims, got 1-D"),
            ({"w": W[None]}, "w must be [K, N] of 2 dims, got 3-D"),
            ({"w": W.t()}, "w must be [K=5, N], got (4, 5); pass w.t() of a torch.nn.Linear weight"),
            ({"w": W.bfloat16()}, "w must be torch.float32 as x, got torch.bfloat16"),
            ({"w": []}, "w must be a Tensor or several, got none"),
            ({"w": [W, 3]}, "w must be a Tensor, got int"),
            ({"w": [None]}, "w must be a Tensor, got NoneType"),
            ({"w": [W, CSR]}, "w must be a dense tensor, got torch.sparse_csr"),
            ({"w": [W, W.t()]}, "w must be [K=5, N], got (4, 5); pass w.t() of a torch.nn.Linear weight"),
            ({"w": [W, W], "bias": BIAS}, "bias must be None with several weights, got a Tensor; add it to the result, or make one weight of them"),
            ({"bias": [1.0]}, "bias must be a Tensor, got list"),
            ({"bias": NESTED}, "bias must be a dense tensor, got a nested one"),
            ({"bias": CSR}, "bias must be a dense tensor, got torch.sparse_csr"),
            ({"bias": X[0]}, "bias must be [N=4], got (5,)"),
            ({"bias": BIAS[None]}, "bias must be [N=4], got (1, 4)"),
            ({"bias": BIAS.half()}, "bias must be torch.float32 as x, got torch.float16"),
            ({"group": "tp"}, "group must be a ProcessGroup that has this rank, got tp"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
            ({"rows": [6]}, "rows must be 2 counts >= 0, got [6]"),
            ({"rows": []}, "rows must be 2 counts >= 0, got []"),
            ({"rows": [8, -2]}, "rows must be 2 counts >= 0, got [8, -2]"),
            ({"rows": 6}, "rows must be 2 counts >= 0, got 6"),
            ({"rows": (2.5, 3.5)}, "rows must be 2 counts >= 0, got (2.5, 3.5)"),
            ({"rows": "33"}, "rows must be 2 counts >= 0, got 33"),
            ({"rows": [True, 5]}, "rows must be 2 counts >= 0, got [True, 5]"),
            ({"rows": [None, 6]}, "rows must be 2 counts >= 0, got [None, 6]"),
            ({"rows": [2 ** 70, 0]}, "rows must be 2 counts >= 0, got [1180591620717411303424, 0]"),
            ({"rows": {6: 1}}, "rows must be 2 counts >= 0, got {6: 1}"),
            ({"rows": {6, 5}}, "rows must be 2 counts >= 0, got {5, 6}"),
            ({"rows": torch.tensor([6, 6])}, "rows must be 2 counts >= 0, got tensor([6, 6])"),
            ({"gather_dim": 2}, "gather_dim must be a dim of x, 0 to 1, got 2"),
            ({"gather_dim": -3}, "gather_dim must be a dim of x, 0 to 1, got -3"),
            ({"gather_dim": "rows"}, "gather_dim must be a dim of x, 0 to 1, got 'rows'"),
            ({"gather_dim": None}, "gather_dim must be a dim of x, 0 to 1, got None"),
            ({"gather_dim": True}, "gather_dim must be a dim of x, 0 to 1, got True"),
            ({"gather_dim": 0.0}, "gather_dim must be a dim of x, 0 to 1, got 0.0"),
            ({"gather_dim": 2 ** 70}, "gather_dim must be a dim of x, 0 to 1, got 1180591620717411303424"),
            ({"plan": None}, "plan must be a family's name or a Plan, got NoneType"),
            ({"plan": 5}, "plan must be a family's name or a Plan, got int"),
            ({"plan": True}, "plan must be a family's name or a Plan, got bool"),
            ({"plan": b"auto"}, "plan must be a family's name or a Plan, got bytes"),
            ({"plan": ["auto"]}, "plan must be a family's name or a Plan, got list"),
            ({"plan": STEPS}, "plan must be a family's name or a Plan, got tuple"),
            ({"plan": ""}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"plan": "fast"}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"plan": "serail"}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"plan": "\x00"}, "plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused..."),
            ({"plan": "\x00.json"}, "plan must be a file that can be read, got embedded null byte"),
            ({"plan": "/of/no/plan.json"}, "plan must be a file that can be read, got ..."),
            ({"plan": Path("/")}, "plan must be a file that can be read, got ..."),
            ({"plan": "graded 9999999999999999999"}, "plan must be a spec with sizes like 1/1/2; '9999999999999999999' are none, got 'graded 9999999999999999999'"),
            ({"plan": "graded 1/1/1"}, "plan must be a spec whose sizes add up to 2; '1/1/1' do not, got 'graded 1/1/1'"),
            ({"plan": "graded 1/" + "1" * 5000}, "plan must be a spec with sizes like 1/1/2; '1/11111111111111111111111111111111111111' are none, got 'graded 1/1111111111111111111111111111111111111111..."),
            ({"plan": "graded 1/²"}, "plan must be a spec with sizes like 1/1/2; '1/²' are none, got 'graded 1/²'"),
            ({"plan": "serial ring"}, "plan must be a spec of words that serial knows; 'ring' is none, got 'serial ring'"),
            ({"plan": "serial serial"}, "plan must be a spec of words that serial knows; 'serial' is none, got 'serial serial'"),
            ({"plan": "shard_p2p chunks=9"}, "plan must be a spec of words that shard_p2p knows; 'chunks=9' is none, got 'shard_p2p chunks=9'"),
            ({"plan": "shard_p2p ring xor"}, "plan must be a spec that makes each choice once; 'xor' is the second, got 'shard_p2p ring xor'"),
            ({"plan": "plan:of another process"}, "plan must be a known plan, got plan:of another process; pass the Plan itself to the function"),
        ],
    ),
    "matmul_reduce_scatter": Area(
        "scatter", "matmul_reduce_scatter", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": NESTED}, "x must be a dense tensor, got a nested one"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"w": CSR}, "w must be a dense tensor, got torch.sparse_csr"),
            ({"bias": NESTED}, "bias must be a dense tensor, got a nested one"),
            ({"rows": [1, 2]}, "rows must be counts that add up to 6, got [1, 2]"),
            ({"rows": [True, 5]}, "rows must be 2 counts >= 0, got [True, 5]"),
            ({"scatter_dim": 2}, "scatter_dim must be a dim of x, 0 to 1, got 2"),
            ({"scatter_dim": True}, "scatter_dim must be a dim of x, 0 to 1, got True"),
            ({"scatter_dim": None}, "scatter_dim must be a dim of x, 0 to 1, got None"),
            ({"plan": "serail"}, "plan must be auto or one of serial, direct, fused, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, unifor..."),
            ({"plan": "fused one_shot"}, "plan must be for 64 rows or fewer, of 16-bit numbers, got 'fused one_shot'"),
            ({"plan": "fused 0x0x0"}, "plan must be a spec with sizes like 64x64x8; '0x0x0' are none, got 'fused 0x0x0'"),
            ({"plan": "fused 16x16"}, "plan must be a spec with sizes like 64x64x8; '16x16' are none, got 'fused 16x16'"),
            ({"plan": "fused 16x16x2 warps=3"}, "plan must be for 64 rows or fewer, of 16-bit numbers, got 'fused 16x16x2 warps=3'"),
            ({"plan": "fused 16x16x2 warps=64"}, "plan must be a spec of words that fused knows; 'warps=64' is none, got 'fused 16x16x2 warps=64'"),
            ({"plan": "fused 2048x16x2"}, "plan must be for 64 rows or fewer, of 16-bit numbers, got 'fused 2048x16x2'"),
            ({"plan": "fused warps=99999999999999999999"}, "plan must be a spec of words that fused knows; 'warps=99999999999999999999' is none, got 'fused warps=99999999999999999999'"),
            ({"x": X[:5]}, "x must be [M, ..., K] with M a multiple of the 2 ranks, got (5, 5); pass rows=, one count per rank"),
        ],
    ),
    "matmul_all_reduce": Area(
        "reduce", "matmul_all_reduce", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"x": NESTED}, "x must be a dense tensor, got a nested one"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"w": NESTED}, "w must be a dense tensor, got a nested one"),
            ({"bias": CSR}, "bias must be a dense tensor, got torch.sparse_csr"),
            ({"bias": 3}, "bias must be a Tensor, got int"),
            ({"plan": None}, "plan must be a family's name or a Plan, got NoneType"),
            ({"plan": "graded"}, "plan must be auto or one of serial, direct, fused, shard_p2p, running_sum, islands, got 'graded'"),
            ({"plan": "fused scatter"}, "plan must be a spec of one_shot or two_shot, got 'fused scatter'"),
            ({"plan": "fused 99999999999999999999x64x2"}, "plan must be a spec with sizes like 64x64x8; '99999999999999999999x64x2' are none, got 'fused 99999999999999999999x64x2'"),
            ({"plan": "direct direct"}, "plan must be a spec of words that direct knows; 'direct' is none, got 'direct direct'"),
            ({"plan": OTHER}, "plan must be for matmul_all_reduce M6 N4 K5 float32 on 2 ranks, got for matmul_reduce_scatter M6 N4 K5 float32 on 2 ranks"),
        ],
    ),
    "matmul_all_reduce_rms_norm": Area(
        "norm", "matmul_all_reduce_rms_norm", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": 3}, "x must be a Tensor, got int"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"w": W[0, 0]}, "w must be [K, N] of 2 dims, got 0-D"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"residual": BIAS}, "residual must be (6, 4), got (4,)"),
            ({"residual": RESIDUAL.double()}, "residual must be torch.float32 on cpu as x, got torch.float64 on cpu"),
            ({"residual": CSR}, "residual must be a dense tensor, got torch.sparse_csr"),
            ({"norm_weight": 3}, "norm_weight must be a Tensor, got int"),
            ({"norm_weight": X[0]}, "norm_weight must be [N=4], got (5,)"),
            ({"eps": "a"}, "eps must be a number >= 0, got a"),
            ({"eps": NAN}, "eps must be a number >= 0, got nan"),
            ({"eps": INF}, "eps must be a number >= 0, got inf"),
            ({"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
            ({"eps": True}, "eps must be a number >= 0, got True"),
            ({"plan": None}, "matmul_all_reduce: plan must be a family's name or a Plan, got NoneType"),
        ],
    ),
    "all_to_all_matmul": Area(
        "dispatch", "all_to_all_matmul", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"x": NESTED}, "x must be a dense tensor, got a nested one"),
            ({"x": ROWS[0]}, "x must be [rows, K] of 2 dims, got 1-D"),
            ({"x": ROWS.double()}, "x must be bf16, fp16 or fp32, got torch.float64"),
            ({"x": ROWS.to("meta")}, "x must be on cpu or cuda, got meta"),
            ({"x": [1]}, "x must be a Tensor, got list"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"w": EXPERTS.to_sparse()}, "w must be a dense tensor, got torch.sparse_coo"),
            ({"w": NESTED}, "w must be a dense tensor, got a nested one"),
            ({"w": EXPERTS[0]}, "w must be [E_local, K, N] of 3 dims, got 2-D"),
            ({"w": EXPERTS.transpose(1, 2)}, "w must be [E_local, K=4, N], got (2, 3, 4); pass w.transpose(1, 2) of weights that are stored as [E_local, N, K]"),
            ({"w": EXPERTS.bfloat16()}, "w must be torch.float32 as x, got torch.bfloat16"),
            ({"w": EXPERTS[:1]}, "counts must be int32 or int64 [2, 2], rows of each rank for each expert, got torch.int64 [2, 4]; w has 1 experts on each of 2 ranks"),
            ({"w": torch.randn(2, 4, 6)[:, :, ::2]}, "w must be with a unit stride in K or N, got strides (24, 6, 2); pass w.contiguous()"),
            ({"counts": None}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got None"),
            ({"counts": 3}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got 3"),
            ({"counts": "ab"}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got 'ab'"),
            ({"counts": TABLE.float()}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got torch.float32 [2, 4]; w has 2 experts on each of 2 ranks"),
            ({"counts": TABLE.bool()}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got torch.bool [2, 4]; w has 2 experts on each of 2 ranks"),
            ({"counts": TABLE[:1]}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got torch.int64 [1, 4]; w has 2 experts on each of 2 ranks"),
            ({"counts": TABLE.to_sparse()}, "counts must be a dense tensor, got torch.sparse_coo"),
            ({"counts": TABLE.to("meta")}, "counts must be on cpu or on cpu as x, got meta"),
            ({"counts": [[1, 2], [3, 4, 5, 6]]}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got 2 rows of [2, 4]"),
            ({"counts": [[1.5] * 4] * 2}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got [[1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]]"),
            ({"counts": [[True] * 4] * 2}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got [[True, True, True, True], [True, True, True, True]]"),
            ({"counts": [[2 ** 70] * 4] * 2}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got [[1180591620717411303424, 1180591620717411303424, 1180591620717411303424,..."),
            ({"counts": [[1, 1, 1, -1]] * 2}, "counts must be >= 0, got -1"),
            ({"max_rows": 1}, "max_rows must be >= 4, what rank 0 gets, got 1"),
            ({"max_rows": -1}, "max_rows must be a whole number from 0 to 2**40, got -1"),
            ({"max_rows": "all"}, "max_rows must be a whole number from 0 to 2**40, got 'all'"),
            ({"max_rows": 1.0}, "max_rows must be a whole number from 0 to 2**40, got 1.0"),
            ({"max_rows": True}, "max_rows must be a whole number from 0 to 2**40, got True"),
            ({"max_rows": 2 ** 70}, "max_rows must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"plan": "fast"}, "plan must be auto or one of serial, fused, grouped, islands, routed, got 'fast'"),
            ({"plan": 1}, "plan must be a family's name or a Plan, got int"),
            ({"plan": "grouped 1/2/3"}, "plan must be a spec whose sizes add up to 2; '1/2/3' do not, got 'grouped 1/2/3'"),
            ({"plan": "fused 1x1x1"}, "plan must be a spec with sizes like 1/1/2; '1x1x1' are none, got 'fused 1x1x1'"),
            ({"group": "ep"}, "group must be a ProcessGroup that has this rank, got ep"),
            ({"return_rows": "yes"}, "return_rows must be True or False, got 'yes'"),
        ],
    ),
    "matmul_all_to_all": Area(
        "combine", "matmul_all_to_all", 2, [
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"w": None}, "w must be a Tensor, got NoneType"),
            ({"counts": None}, "counts must be int32 or int64 [2, 4], rows of each rank for each expert, got None"),
            ({"counts": TABLE.to_sparse()}, "counts must be a dense tensor, got torch.sparse_coo"),
            ({"max_rows": True}, "max_rows must be a whole number from 0 to 2**40, got True"),
            ({"plan": "fast"}, "plan must be auto or one of serial, fused, grouped, islands, routed, got 'fast'"),
            ({"sum_of": 3}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got int"),
            ({"sum_of": INDEX}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got Tensor"),
            ({"sum_of": (1, 2)}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got no Tensors"),
            ({"sum_of": (INDEX, 1.0)}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got no Tensors"),
            ({"sum_of": (INDEX.float(), WEIGHTS)}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got torch.float32 [3, 2] and torch.float32 [3, 2]"),
            ({"sum_of": (INDEX, WEIGHTS.long())}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got torch.int64 [3, 2] and torch.int64 [3, 2]"),
            ({"sum_of": (INDEX, WEIGHTS[:2])}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got torch.int64 [3, 2] and torch.float32 [2, 2]"),
            ({"sum_of": (INDEX[0], WEIGHTS[0])}, "sum_of must be (rows, weights), int32 or int64 and floating point, both [tokens, top_k], got torch.int64 [2] and torch.float32 [2]"),
            ({"sum_of": (INDEX.to_sparse(), WEIGHTS)}, "sum_of must be a dense tensor, got torch.sparse_coo"),
            ({"sum_of": (INDEX, WEIGHTS.to("meta"))}, "sum_of must be on cpu as x, got cpu and meta"),
            ({"sum_of": (INDEX + 4, WEIGHTS)}, "sum_of must be of rows 0 to 3, got 4 to 4"),
            ({"sum_of": (INDEX - 1, WEIGHTS)}, "sum_of must be of rows 0 to 3, got -1 to -1"),
        ],
    ),
    "exchange_counts": Area(
        "exchange", "exchange_counts", 2, [
            ({"counts": None}, "counts must be a Tensor, got NoneType"),
            ({"counts": [1, 2]}, "counts must be a Tensor, got list"),
            ({"counts": COUNTS.float()}, "counts must be int32 or int64 [E], got torch.float32 [4]"),
            ({"counts": COUNTS.view(2, 2)}, "counts must be int32 or int64 [E], got torch.int64 [2, 2]"),
            ({"counts": COUNTS[:3]}, "counts must be [E], E a multiple of the 2 ranks, got [3]"),
            ({"counts": COUNTS.to_sparse()}, "counts must be a dense tensor, got torch.sparse_coo"),
            ({"counts": COUNTS.to("meta")}, "counts must be on cpu or cuda, got meta"),
            ({"counts": COUNTS.bool()}, "counts must be int32 or int64 [E], got torch.bool [4]"),
            ({"counts": NESTED}, "counts must be a dense tensor, got a nested one"),
        ],
    ),
    "exchange_routes": Area(
        "routes", "exchange_routes", 2, [
            ({"experts": None}, "experts must be a Tensor, got NoneType"),
            ({"experts": INDEX.float()}, "experts must be int32 or int64 [tokens, top_k], got torch.float32 [3, 2]"),
            ({"experts": INDEX[0]}, "experts must be int32 or int64 [tokens, top_k], got torch.int64 [2]"),
            ({"experts": INDEX.to("meta")}, "experts must be on cpu or cuda, got meta"),
            ({"experts": INDEX + 4}, "experts must be 0 to 3, got 4 to 4 on rank 0"),
            ({"weights": WEIGHTS.long()}, "weights must be floating point [3, 2] as experts, got torch.int64 [3, 2]"),
            ({"weights": WEIGHTS.to("meta")}, "weights must be on cpu as experts, got meta"),
            ({"weights": WEIGHTS[:2]}, "weights must be floating point [3, 2] as experts, got torch.float32 [2, 2]"),
            ({"weights": NESTED}, "weights must be a dense tensor, got a nested one"),
            ({"num_experts": 3}, "num_experts must be a multiple of the 2 ranks, which are 2 or more, got 3"),
            ({"num_experts": 0}, "num_experts must be a whole number from 1 to 2**40, got 0"),
            ({"capacity": "all"}, "capacity must be error or drop, got 'all'"),
            ({"capacity": "drop"}, 'max_rows must be given with capacity="drop", got None'),
        ],
    ),
    "embedding_bag_all_to_all": Area(
        "bags", "embedding_bag_all_to_all", 2, [
            ({"tables": None}, "tables must be a list of Tensors, got NoneType"),
            ({"tables": TABLES[0]}, "tables must be a list of Tensors, got Tensor"),
            ({"tables": [None]}, "tables must be a list of Tensors, got list of NoneType"),
            ({"tables": [CSR]}, "tables[0] must be a dense tensor, got torch.sparse_csr"),
            ({"tables": [NESTED]}, "tables[0] must be a dense tensor, got a nested one"),
            ({"tables": "t"}, "tables must be a list of Tensors, got str"),
            ({"tables": [TABLES[0][0]]}, "tables[0] must be [rows, D] with elements of a row side by side, got (3,), (1,)"),
            ({"tables": [TABLES[0].long()]}, "tables[0] must be bf16, fp16 or fp32, and alike, got torch.int64"),
            ({"tables": [TABLES[0].to("meta")]}, "tables[0] must be on cpu as indices, got meta"),
            ({"tables": [TABLES[0].t()]}, "tables[0] must be [rows, D] with elements of a row side by side, got (3, 4), (1, 3)"),
            ({"tables": [TABLES[0], TABLES[0].half()]}, "tables[1] must be bf16, fp16 or fp32, and alike, got torch.float16"),
            ({"indices": None}, "indices must be a Tensor, got NoneType"),
            ({"indices": [0, 1]}, "indices must be a Tensor, got list"),
            ({"indices": IDS.float()}, "indices must be int32 or int64, got torch.float32"),
            ({"indices": IDS[None]}, "indices must be a 1-D Tensor without gaps, got (1, 4)"),
            ({"indices": IDS.to_sparse()}, "indices must be a dense tensor, got torch.sparse_coo"),
            ({"indices": IDS.to("meta")}, "indices must be on meta as indices, cpu or cuda, got meta"),
            ({"indices": IDS.bool()}, "indices must be int32 or int64, got torch.bool"),
            ({"indices": IDS + 99}, "indices of tables[0] must be 0 to 3, got 99 to 102 on rank 0"),
            ({"indices": IDS - 1}, "indices of tables[0] must be 0 to 3, got -1 to 2 on rank 0"),
            ({"offsets": None}, "offsets must be a Tensor, got NoneType"),
            ({"offsets": IDS.float()}, "offsets must be int32 or int64, got torch.float32"),
            ({"offsets": IDS + 1}, "offsets must be 0 at first, rising to 4 indices, got others on rank 0"),
            ({"offsets": IDS.flip(0)}, "offsets must be 0 at first, rising to 4 indices, got others on rank 0"),
            ({"offsets": IDS[:3]}, "offsets must be 2 equal parts, got 3 bags; pass batch= with the bags of each rank, on all ranks; or pass include_last_offset=True if the last of them ..."),
            ({"offsets": IDS.to_sparse()}, "offsets must be a dense tensor, got torch.sparse_coo"),
            ({"mode": None}, "mode must be 'sum' or 'mean', got None"),
            ({"mode": "max"}, "mode must be 'sum' or 'mean', got 'max'"),
            ({"mode": ["sum"]}, "mode must be 'sum' or 'mean', got ['sum']"),
            ({"mode": True}, "mode must be 'sum' or 'mean', got True"),
            ({"per_sample_weights": 3}, "per_sample_weights must be a Tensor, got int"),
            ({"per_sample_weights": [1.0]}, "per_sample_weights must be a Tensor, got list"),
            ({"per_sample_weights": torch.ones(3)}, "per_sample_weights must be torch.float32, (4,) as indices, got torch.float32 (3,)"),
            ({"per_sample_weights": torch.ones(4).double()}, "per_sample_weights must be torch.float32, (4,) as indices, got torch.float64 (4,)"),
            ({"per_sample_weights": torch.ones(4).to_sparse()}, "per_sample_weights must be a dense tensor, got torch.sparse_coo"),
            ({"per_sample_weights": torch.ones(4), "mode": "mean"}, "per_sample_weights must be None unless mode is 'sum', got mean"),
            ({"include_last_offset": "a"}, "include_last_offset must be True or False, got 'a'"),
            ({"include_last_offset": None}, "include_last_offset must be True or False, got None"),
            ({"include_last_offset": 1}, "include_last_offset must be True or False, got 1"),
            ({"batch": "a"}, "batch must be a count >= 0 for each rank, got a"),
            ({"batch": 3}, "batch must be a count >= 0 for each rank, got 3"),
            ({"batch": [2.0, 2]}, "batch must be a count >= 0 for each rank, got [2.0, 2]"),
            ({"batch": [-2, 6]}, "batch must be a count >= 0 for each rank, got [-2, 6]"),
            ({"batch": [3]}, "batch must be a count for each of 2 ranks, 4 in all, got (3,)"),
            ({"batch": [3, 3]}, "batch must be a count for each of 2 ranks, 4 in all, got (3, 3)"),
            ({"dims": 3}, "dims must be columns of each rank's tables, got 3"),
            ({"dims": "a"}, "dims must be columns of each rank's tables, got a"),
            ({"dims": [3]}, "dims must be columns of each rank's tables, got [3]"),
            ({"dims": [[3.0], [3]]}, "dims must be columns of each rank's tables, got [[3.0], [3]]"),
            ({"dims": [[4], [3]]}, "dims must be of the tables of each of 2 ranks, (3,) on rank 0, got ((4,), (3,))"),
            ({"dims": [[3]]}, "dims must be of the tables of each of 2 ranks, (3,) on rank 0, got ((3,),)"),
            ({"dtype": "bfloat16"}, "dtype must be torch.float32 as tables, got bfloat16"),
            ({"dtype": torch.int32}, "dtype must be torch.float32 as tables, got torch.int32"),
            ({"sparse": "a"}, "sparse must be True or False, got 'a'"),
            ({"sparse": None}, "sparse must be True or False, got None"),
            ({"out": 3}, "out must be PooledOutputs, got int; make one of them, counterpoint.PooledOutputs(...), for all calls"),
            ({"plan": None}, "plan must be a family's name or a Plan, got NoneType"),
            ({"plan": 3}, "plan must be a family's name or a Plan, got int"),
            ({"plan": "grouped"}, "plan must be auto or one of serial, fused, fused_after_barrier, islands, got 'grouped'"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
        ],
    ),
    "run_on_ranks": Area(
        "run", "run_on_ranks", 0, [
            ({"fn": None}, "fn must be a function of a torch.device, got NoneType"),
            ({"fn": "work"}, "fn must be a function of a torch.device, got str"),
            ({"fn": lambda device: None}, "fn must be a module-level function, got <lambda>"),
            ({"ranks": 0}, "ranks must be a whole number from 1 to 256, got 0"),
            ({"ranks": 1000}, "ranks must be a whole number from 1 to 256, got 1000"),
            ({"ranks": 2.0}, "ranks must be a whole number from 1 to 256, got 2.0"),
            ({"ranks": None}, "ranks must be a whole number from 1 to 256, got None"),
            ({"timeout_s": 0}, "timeout_s must be a number from 0.001 to 1e+06, got 0; pass seconds"),
            ({"timeout_s": "60"}, "timeout_s must be a number from 0.001 to 1e+06, got '60'"),
            ({"timeout_s": NAN}, "timeout_s must be a number from 0.001 to 1e+06, got nan; pass seconds"),
        ],
    ),
    "PooledOutputs": Area(
        "outputs", "PooledOutputs", 2, [
            ({"columns": 0}, "columns must be a whole number from 1 to 2**40, got 0"),
            ({"columns": "a"}, "columns must be a whole number from 1 to 2**40, got 'a'"),
            ({"columns": 4.0}, "columns must be a whole number from 1 to 2**40, got 4.0"),
            ({"columns": True}, "columns must be a whole number from 1 to 2**40, got True"),
            ({"columns": 2 ** 70}, "columns must be a whole number from 1 to 2**40, got 1180591620717411303424"),
            ({"dtype": None}, "dtype must be bf16, fp16 or fp32, got None"),
            ({"dtype": "f"}, "dtype must be bf16, fp16 or fp32, got f"),
            ({"dtype": torch.int8}, "dtype must be bf16, fp16 or fp32, got torch.int8"),
            ({"batch": -2}, "batch must be a whole number from 0 to 2**40, got -2"),
            ({"batch": "a"}, "batch must be 2 counts >= 0, got a"),
            ({"batch": 4.0}, "batch must be 2 counts >= 0, got 4.0"),
            ({"batch": None}, "batch must be 2 counts >= 0, got None"),
            ({"batch": [4.0, 4]}, "batch must be 2 counts >= 0, got [4.0, 4]"),
            ({"batch": [-1, 3]}, "batch must be 2 counts >= 0, got [-1, 3]"),
            ({"batch": [1]}, "batch must be 2 counts >= 0, got [1]"),
            ({"batch": 3}, "batch must be a multiple of 2 ranks, or a count for each, got 3"),
            ({"batch": True}, "batch must be a whole number from 0 to 2**40, got True"),
            ({"batch": 2 ** 40}, "batch must be so that 2 outputs have at most 1099511627776 bytes, got 8796093022208 bytes each"),
            ({"turns": 1}, "turns must be a whole number from 2 to 1024, got 1"),
            ({"turns": "a"}, "turns must be a whole number from 2 to 1024, got 'a'"),
            ({"turns": 2.0}, "turns must be a whole number from 2 to 1024, got 2.0"),
            ({"turns": 2 ** 60}, "turns must be a whole number from 2 to 1024, got 1152921504606846976"),
            ({"captured": -1}, "captured must be a whole number from 0 to 1024, got -1"),
            ({"captured": "a"}, "captured must be a whole number from 0 to 1024, got 'a'"),
            ({"device": 3.5}, "device must be a torch.device or its name, got 3.5"),
            ({"device": "nope"}, "device must be a torch.device or its name, got 'nope'"),
            ({"device": "meta"}, "device must be cpu or cuda, got meta"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
        ],
    ),
    "check": Area(
        "check", "check", 2, [
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
            ({"group": []}, "group must be a ProcessGroup that has this rank, got []"),
            ({"group": True}, "group must be a ProcessGroup that has this rank, got True"),
        ],
    ),
    "release": Area(
        "release", "release", 2, [
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
        ],
    ),
    "profile": Area(
        "profile", "profile", 2, [
            ({"fn": None}, "fn must be a function, got None"),
            ({"fn": "f"}, "fn must be a function, got 'f'"),
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
            ({"title": 3}, "title must be text, got 3"),
        ],
    ),
    "tune": Area(
        "tune", "tune", 2, [
            ({"problem": None}, "problem must be a Problem, got None"),
            ({"problem": "op"}, "problem must be a Problem, got 'op'"),
            ({"problem": GOOD}, "group must be of 4 ranks as the problem, got 2 ranks"),
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
            ({"specs": "serial"}, "specs must be a list of texts, got 'serial'"),
            ({"specs": 3}, "specs must be a list of texts, got 3"),
            ({"specs": [3]}, "specs must be a list of texts, got [3]"),
            ({"specs": ["nope"]}, "all_gather_matmul: plan must be auto or one of serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfuse..."),
            ({"rounds": 0}, "rounds must be a whole number from 1 to 1e+06, got 0"),
            ({"rounds": "a"}, "rounds must be a whole number from 1 to 1e+06, got 'a'"),
            ({"rounds": 1.5}, "rounds must be a whole number from 1 to 1e+06, got 1.5"),
            ({"rounds": True}, "rounds must be a whole number from 1 to 1e+06, got True"),
            ({"device": 3.5}, "device must be a torch.device or its name, got 3.5"),
            ({"device": "nope"}, "device must be a torch.device or its name, got 'nope'"),
            ({"device": "meta"}, "device must be cpu or cuda, got meta"),
            ({"save": "a"}, "save must be True or False, got 'a'"),
            ({"progress": 3}, "progress must be a function of a text, got 3"),
        ],
    ),
    "ColumnParallelLinear": Area(
        "column", "ColumnParallelLinear", 2, [
            ({"in_features": None}, "in_features must be a whole number from 0 to 2**40, got None"),
            ({"in_features": "a"}, "in_features must be a whole number from 0 to 2**40, got 'a'"),
            ({"in_features": 4.0}, "in_features must be a whole number from 0 to 2**40, got 4.0"),
            ({"in_features": True}, "in_features must be a whole number from 0 to 2**40, got True"),
            ({"in_features": -4}, "in_features must be a whole number from 0 to 2**40, got -4"),
            ({"out_features": -4}, "out_features must be a whole number from 0 to 2**40, got -4"),
            ({"out_features": 3}, "out_features must be a multiple of the 2 ranks, got 3; pad the layer, or take another number of ranks"),
            ({"out_features": 2 ** 70}, "out_features must be a whole number from 0 to 2**40, got 1180591620717411303424"),
            ({"bias": None}, "bias must be True or False, got None"),
            ({"bias": "a"}, "bias must be True or False, got 'a'"),
            ({"gather_dim": None}, "gather_dim must be a whole number from -64 to 63, got None"),
            ({"gather_dim": "a"}, "gather_dim must be a whole number from -64 to 63, got 'a'"),
            ({"gather_dim": 1.0}, "gather_dim must be a whole number from -64 to 63, got 1.0"),
            ({"plan": None}, "plan must be one of auto, serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused_2..."),
            ({"plan": 3}, "plan must be one of auto, serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused_2..."),
            ({"plan": "fast"}, "plan must be one of auto, serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused_2..."),
            ({"dtype": "f"}, "dtype must be bf16, fp16 or fp32, got f"),
            ({"dtype": torch.int8}, "dtype must be bf16, fp16 or fp32, got torch.int8"),
            ({"device": "nope"}, "device must be a torch.device or its name, got 'nope'"),
            ({"device": 3.5}, "device must be a torch.device or its name, got 3.5"),
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": 3}, "x must be a Tensor, got int"),
            ({"x": SCALAR}, "x must be [..., 4], 4 in_features, got ()"),
            ({"x": X}, "x must be [..., 4], 4 in_features, got (6, 5)"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"x": NESTED}, "x must be a dense tensor, got a nested one"),
            ({"x": LIKE.to("meta")}, "all_gather_matmul: x must be on cpu or cuda, got meta"),
            ({"x": LIKE.double()}, "all_gather_matmul: x must be bf16, fp16 or fp32, got torch.float64"),
            ({"x": LIKE.long()}, "all_gather_matmul: x must be bf16, fp16 or fp32, got torch.int64"),
        ],
    ),
    "RowParallelLinear": Area(
        "row", "RowParallelLinear", 2, [
            ({"in_features": 3}, "in_features must be a multiple of the 2 ranks, got 3; pad the layer, or take another number of ranks"),
            ({"in_features": "a"}, "in_features must be a whole number from 0 to 2**40, got 'a'"),
            ({"out_features": None}, "out_features must be a whole number from 0 to 2**40, got None"),
            ({"scatter_dim": None}, "scatter_dim must be a whole number from -64 to 63, got None"),
            ({"scatter_dim": True}, "scatter_dim must be a whole number from -64 to 63, got True"),
            ({"plan": "nope"}, "plan must be one of auto, serial, direct, fused, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_..."),
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": SCALAR}, "x must be [..., 4], 8 in_features over 2 ranks, got ()"),
            ({"x": X}, "x must be [..., 4], 8 in_features over 2 ranks, got (6, 5)"),
        ],
    ),
    "FullyShardedLinear": Area(
        "sharded", "FullyShardedLinear", 2, [
            ({"out_features": "a"}, "out_features must be a whole number from 0 to 2**40, got 'a'"),
            ({"out_features": 3}, "out_features must be a multiple of the 2 ranks, got 3; pad the layer, or take another number of ranks"),
            ({"plan": 3}, "plan must be one of auto, serial, direct, shard_p2p, graded, uniform_fused_1d, uniform_unfused_1d, hetero_fused_1d, hetero_unfused_1d, uniform_fused_2..."),
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": SCALAR}, "x must be [..., 4], 4 in_features, got ()"),
            ({"x": X}, "x must be [..., 4], 4 in_features, got (6, 5)"),
        ],
    ),
    "from_linear": Area(
        "slices", "RowParallelLinear", 2, [
            ({"linear": None}, "linear must be a torch.nn.Linear, got None"),
            ({"linear": 3}, "linear must be a torch.nn.Linear, got 3"),
            ({"linear": torch.nn.Conv1d(1, 1, 1)}, "linear must be a torch.nn.Linear, got Conv1d"),
        ],
    ),
    "gather_once": Area(
        "once", "gather_once", 2, [
            ({"layers": ()}, "layers must be one or more, got none"),
            ({"layers": (3,)}, "layers must be ColumnParallelLinear, got 3"),
            ({"layers": (torch.nn.Linear(4, 4),)}, "layers must be ColumnParallelLinear, got Linear"),
            ({"x": None}, "ColumnParallelLinear: x must be a Tensor, got NoneType"),
            ({"x": SCALAR}, "ColumnParallelLinear: x must be [..., 4], 4 in_features, got ()"),
        ],
    ),
    "copy_to_group": Area(
        "copied", "copy_to_group", 2, [
            ({"parameter": None}, "parameter must be a Tensor, got NoneType"),
            ({"parameter": 3}, "parameter must be a Tensor, got int"),
            ({"parameter": CSR}, "parameter must be a dense tensor, got torch.sparse_csr"),
            ({"group": "a"}, "group must be a ProcessGroup that has this rank, got a"),
        ],
    ),
    "ExpertParallelMLP": Area(
        "mlp", "ExpertParallelMLP", 2, [
            ({"features": None}, "features must be a whole number from 0 to 2**40, got None"),
            ({"features": 4.0}, "features must be a whole number from 0 to 2**40, got 4.0"),
            ({"features": -4}, "features must be a whole number from 0 to 2**40, got -4"),
            ({"hidden": "a"}, "hidden must be a whole number from 1 to 2**40, got 'a'"),
            ({"hidden": 0}, "hidden must be a whole number from 1 to 2**40, got 0"),
            ({"num_experts": 0}, "num_experts must be a whole number from 1 to 2**40, got 0"),
            ({"num_experts": 3}, "num_experts must be a multiple of the 2 ranks, got 3; take another number of ranks"),
            ({"num_experts": True}, "num_experts must be a whole number from 1 to 2**40, got True"),
            ({"num_experts": 2.0}, "num_experts must be a whole number from 1 to 2**40, got 2.0"),
            ({"max_rows": 0}, "max_rows must be a whole number from 1 to 2**40, got 0"),
            ({"max_rows": 1.5}, "max_rows must be a whole number from 1 to 2**40, got 1.5"),
            ({"max_rows": True}, "max_rows must be a whole number from 1 to 2**40, got True"),
            ({"capacity": None}, "capacity must be error or drop, got None"),
            ({"capacity": 4}, "capacity must be error or drop, got 4"),
            ({"capacity": "drop"}, 'max_rows must be given with capacity="drop", got None'),
            ({"plan": None}, "plan must be one of auto, serial, fused, grouped, islands, routed, got None"),
            ({"plan": "fast"}, "plan must be one of auto, serial, fused, grouped, islands, routed, got 'fast'"),
            ({"dtype": torch.int8}, "dtype must be bf16, fp16 or fp32, got torch.int8"),
            ({"device": "nope"}, "device must be a torch.device or its name, got 'nope'"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
            ({"x": None}, "x must be a Tensor, got NoneType"),
            ({"x": SCALAR}, "x must be [..., 4], got ()"),
            ({"x": X}, "x must be [..., 4], got (6, 5)"),
            ({"x": CSR}, "x must be a dense tensor, got torch.sparse_csr"),
            ({"experts": None}, "experts must be a Tensor where there are no logits, got NoneType"),
            ({"plan": "auto invariant"}, "plan must be without invariant, of which experts have no plans, got 'auto invariant'"),
            ({"experts": X}, "experts must be (2, 'top_k') as x, got (6, 5)"),
            ({"experts": CHOSEN + 5}, "experts must be (2, 'top_k') as x, got (3, 2)"),
            ({"experts": CHOSEN[:2]}, "weights must be (2, 2) as experts, got (3, 2)"),
            ({"experts": SCALAR}, "experts must be (2, 'top_k') as x, got ()"),
            ({"experts": CHOSEN.to("meta")}, "experts must be on cpu as x, got meta"),
            ({"weights": None}, "weights must be a Tensor where there are no logits, got NoneType"),
            ({"weights": X}, "experts must be (2, 'top_k') as x, got (3, 2)"),
            ({"weights": SCALAR}, "experts must be (2, 'top_k') as x, got (3, 2)"),
            ({"weights": SHARES.to("meta")}, "weights must be on cpu as x, got meta"),
            ({"weights": SHARES.long()}, "experts must be (2, 'top_k') as x, got (3, 2)"),
        ],
    ),
    "ExpertParallelMLP by logits": Area(
        "routed", "ExpertParallelMLP", 2, [
            ({"logits": None, "top_k": 1}, "logits must be given with top_k and renormalize, got none"),
            ({"logits": None, "renormalize": False}, "logits must be given with top_k and renormalize, got none"),
            ({"logits": 3, "top_k": 1}, "logits must be a Tensor, got int"),
            ({"logits": CSR, "top_k": 1}, "logits must be a dense tensor, got torch.sparse_csr"),
            ({"logits": X, "top_k": 1}, "logits must be (2, 4), one for each expert, got (6, 5)"),
            ({"logits": SCALAR, "top_k": 1}, "logits must be (2, 4), one for each expert, got ()"),
            ({"logits": LIKE.long(), "top_k": 1}, "logits must be floating point, got torch.int64"),
            ({"logits": LIKE.to("meta"), "top_k": 1}, "logits must be on cpu as x, got meta"),
            ({"logits": LIKE, "x": X, "top_k": 1}, "x must be [..., 4], got (6, 5)"),
            ({"logits": LIKE}, "top_k must be a whole number from 1 to 4, got None"),
            ({"logits": LIKE, "top_k": 0}, "top_k must be a whole number from 1 to 4, got 0"),
            ({"logits": LIKE, "top_k": 5}, "top_k must be a whole number from 1 to 4, got 5"),
            ({"logits": LIKE, "top_k": 2.0}, "top_k must be a whole number from 1 to 4, got 2.0"),
            ({"logits": LIKE, "top_k": True}, "top_k must be a whole number from 1 to 4, got True"),
            ({"logits": LIKE, "top_k": 1, "renormalize": None}, "renormalize must be True or False, got None"),
            ({"logits": LIKE, "top_k": 1, "renormalize": 1}, "renormalize must be True or False, got 1"),
        ],
    ),
    "ShardedEmbeddingBags": Area(
        "sharded_bags", "ShardedEmbeddingBags", 2, [
            ({"tables": None}, "tables must be (rows, columns) of each, >= 1, got None"),
            ({"tables": 3}, "tables must be (rows, columns) of each, >= 1, got 3"),
            ({"tables": []}, "tables must be (rows, columns) of each, >= 1, got []"),
            ({"tables": [(4,)]}, "tables must be (rows, columns) of each, >= 1, got [(4,)]"),
            ({"tables": [(4, 0)]}, "tables must be (rows, columns) of each, >= 1, got [(4, 0)]"),
            ({"tables": [(4.0, 3)]}, "tables must be (rows, columns) of each, >= 1, got [(4.0, 3)]"),
            ({"tables": [("a", 3)]}, "tables must be (rows, columns) of each, >= 1, got [('a', 3)]"),
            ({"tables": [(4, True)]}, "tables must be (rows, columns) of each, >= 1, got [(4, True)]"),
            ({"tables": "ab"}, "tables must be (rows, columns) of each, >= 1, got ab"),
            ({"tables": [(4, 3, 2)]}, "tables must be (rows, columns) of each, >= 1, got [(4, 3, 2)]"),
            ({"tables": [(2 ** 70, 3)]}, "tables must be (rows, columns) of each, >= 1, got [(1180591620717411303424, 3)]"),
            ({"owners": 3}, "owners must be one of 2 ranks for each of 2 tables, got 3"),
            ({"owners": ["a"]}, "owners must be one of 2 ranks for each of 2 tables, got ['a']"),
            ({"owners": [0.0]}, "owners must be one of 2 ranks for each of 2 tables, got [0.0]"),
            ({"owners": [True]}, "owners must be one of 2 ranks for each of 2 tables, got [True]"),
            ({"owners": [2]}, "owners must be one of 2 ranks for each of 2 tables, got [2]"),
            ({"mode": "max"}, "mode must be 'sum' or 'mean', got 'max'"),
            ({"mode": None}, "mode must be 'sum' or 'mean', got None"),
            ({"plan": "fast"}, "plan must be one of auto, serial, fused, fused_after_barrier, islands, got 'fast'"),
            ({"plan": 3}, "plan must be one of auto, serial, fused, fused_after_barrier, islands, got 3"),
            ({"sparse": "a"}, "sparse must be True or False, got 'a'"),
            ({"dtype": torch.int8}, "dtype must be bf16, fp16 or fp32, got torch.int8"),
            ({"dtype": "f"}, "dtype must be bf16, fp16 or fp32, got f"),
            ({"device": "nope"}, "device must be a torch.device or its name, got 'nope'"),
            ({"group": 3}, "group must be a ProcessGroup that has this rank, got 3"),
            ({"indices": None}, "embedding_bag_all_to_all: indices must be a Tensor, got NoneType"),
            ({"indices": 3}, "embedding_bag_all_to_all: indices must be a Tensor, got int"),
            ({"offsets": None}, "embedding_bag_all_to_all: offsets must be a Tensor, got NoneType"),
            ({"keys": 3}, "keyed: keys must be a name for each of 2 tables, got 3"),
            ({"keys": []}, "keyed: keys must be a name for each of 2 tables, got []"),
            ({"keys": [3]}, "keyed: keys must be a name for each of 2 tables, got [3]"),
            ({"pooled": None}, "split: pooled must be a Tensor, got NoneType"),
        ],
    ),
    "COUNTERPOINT_TIMEOUT_S": Area(
        "timeout", "environment", 2, [
            ({"text": "soon"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got soon"),
            ({"text": "0"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got 0"),
            ({"text": "-1"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got -1"),
            ({"text": "inf"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got inf"),
            ({"text": "nan"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got nan"),
            ({"text": ""}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got "),
            ({"text": "1e30"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got 1e30"),
            ({"text": "1e400"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got 1e400"),
            ({"text": "1e-300"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got 1e-300"),
            ({"text": "0x10"}, "COUNTERPOINT_TIMEOUT_S must be seconds from 0.001 to 1000000, got 0x10"),
        ],
    ),
}  # fmt: skip


def refused(call: str, op: str, rows: list[tuple[dict[str, Any], str]]) -> list[str]:
    """What is refused wrongly, or not at all."""
    wrong: list[str] = []
    for bad, text in rows:
        try:
            CALLS[call](**bad)
        except (InputError, PlanError, UnsupportedError) as error:
            # the longest are cut
            wants = [want.removesuffix("...") for want in (text, f"{op}: {text}")]
            got = str(error) if not text.endswith("...") else str(error)[: len(wants[1])]
            if got not in wants and got[: len(wants[0])] not in wants:
                wrong.append(f"{bad}\n  got  {got}\n  want {text}")
        except CounterpointError as error:
            wrong.append(f"{bad}: {type(error)}")
        else:
            wrong.append(f"{bad}: accepted")
    return wrong


@pytest.mark.parametrize("name", [name for name, area in BAD.items() if not area.ranks])
def test_bad_input_is_refused_by_its_text(name: str):
    area = BAD[name]
    wrong = refused(area.call, area.op, area.rows)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, area.ranks) for name, area in BAD.items() if area.ranks]
)
@on_ranks()
def test_ranks_refuse_bad_input_by_its_text(rank: int, ranks: int, name: str) -> list[str]:
    area = BAD[name]
    wrong = refused(area.call, area.op, area.rows)
    launched = [w for w in workspaces_of(dist.group.WORLD) if w.epoch or w.code]
    return wrong + ["something was launched"] * bool(launched)


def test_there_are_many():
    assert sum(len(area.rows) for area in BAD.values()) >= 150
