"""Unmodified models of transformers, served: prefill and decode, beside what `serve` predicts.

    compile       torch.compile
    one-shot      the same with torch's all-reduce of few bytes in one kernel
    counterpoint  torch.compile(model, options=cp.compile_options())

Sizes of Llama 3 and Qwen3 with random weights in bf16, sharded by transformers' own plan where
there are several GPUs; one GPU has the first arm alone. A prefill is one prompt, up to the logits
of its last token; a decode is one token of each sequence behind a static cache that is full. Both
are replayed CUDA graphs. Logits are compared with the same model in fp32. Needs transformers 5.24
or newer; it has no short form."""

import atexit
import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import counterpoint as cp
from benchmarks.compile import LIMIT, ONE_SHOT, OPTIONS, OURS, PLAIN, local
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table
from counterpoint.machine_of import shipped
from counterpoint.measure.timing import relative_error
from counterpoint.presets import preset_of
from counterpoint.run.replay import SEEN_BEFORE
from counterpoint.scale.models import Model
from counterpoint.scale.serving import serve

PREFILL, DECODE = "prefill", "decode"
LONGEST = 8192  # tokens of a case
MODEL = {"sequence": 8192, "source": "sizes of a benchmark"}
MODELS = {
    model.name: model
    for model in (
        Model(name="8B", hidden=4096, layers=16, heads=32, kv_heads=8, ffn=14336, vocab=128256,
              **MODEL),
        Model(name="70B", hidden=8192, layers=4, heads=64, kv_heads=8, ffn=28672, vocab=128256,
              **MODEL),
        Model(name="3B", hidden=3072, layers=28, heads=24, kv_heads=8, ffn=8192, vocab=128256,
              head_dim=128, **MODEL),
        Model(name="toy", hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=64, **MODEL),
    )
}  # fmt: skip


def case_of(step: str, model: str, sequences: int, length: int) -> Case:
    """One prompt of `length` tokens, or a token of each sequence behind as many."""
    what = f"{sequences} x {length}" if step == DECODE else f"{length}"
    facts = {"step": step, "model": model, "sequences": sequences, "length": length,
             "layers": MODELS[model].layers}  # fmt: skip
    return Case(f"{step} {model}, {what}", facts)


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [
        *(case_of(DECODE, "8B", sequences, 2048) for sequences in (1, 8, 32)),
        *(case_of(PREFILL, "8B", 1, length) for length in (2048, 8192, 512)),
        case_of(DECODE, "3B", 1, 2048), case_of(DECODE, "3B", 16, 1024),
        case_of(PREFILL, "3B", 1, 4096), case_of(DECODE, "70B", 1, 2048),
        case_of(DECODE, "70B", 8, 4096), case_of(PREFILL, "70B", 1, 8192),
        case_of(PREFILL, "70B", 1, 1024),
    ]  # fmt: skip


@cache
def weights_of(name: str, bench: Bench) -> str:
    """The folder of a Llama with random weights in bf16, equal for all ranks."""
    import transformers  # type: ignore[import-not-found]

    sizes = MODELS[name]
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, intermediate_size=sizes.ffn, vocab_size=sizes.vocab,
        head_dim=sizes.width, max_position_embeddings=2 * LONGEST,
    )  # fmt: skip
    memory = Path("/dev/shm")
    where = [tempfile.mkdtemp(dir=memory if memory.is_dir() else None)]
    if bench.ranks > 1:
        dist.broadcast_object_list(where, 0, group=bench.group)
    if bench.rank == 0:
        torch.manual_seed(0)
        with bench.device:
            made = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        made.save_pretrained(where[0])
        atexit.register(shutil.rmtree, where[0], ignore_errors=True)
    bench.meet()
    bench.say(f"{name}: written")
    return where[0]


@cache
def model_of(name: str, bench: Bench, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A Llama with these weights, sharded by its own plan; one GPU has it whole."""
    import transformers  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    how = {"distributed_config": DistributedConfig(tp_plan="auto")} if bench.ranks > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights_of(name, bench), dtype=dtype, **how
    )
    bench.say(f"{name}: loaded as {dtype}")
    return model.to(bench.device).eval()


def given_of(
    model: nn.Module, case: Case, bench: Bench
) -> tuple[Callable[[nn.Module], Tensor], Any]:
    """What calls a model with this case's tokens, for the last logits; and its cache, if any."""
    from transformers import StaticCache  # type: ignore[import-not-found]

    vocabulary, length = MODELS[case["model"]].vocab, case["length"]
    drawn = torch.Generator(bench.device).manual_seed(7)  # equal on all ranks
    rows = case["sequences"]
    shape = (rows, length) if case["step"] == PREFILL else (rows, 1)
    ids = torch.randint(vocabulary, shape, device=bench.device, generator=drawn)
    if case["step"] == PREFILL:
        return (
            lambda called: called(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ), None
    before = torch.randint(vocabulary, (rows, length - 1), device=bench.device, generator=drawn)
    cache = StaticCache(config=model.config, max_cache_len=length)
    at = torch.tensor([length - 1], device=bench.device)
    for each in range(rows):  # one prompt's activations at a time
        one = StaticCache(config=model.config, max_cache_len=length)
        model(input_ids=before[each : each + 1], cache=one, logits_to_keep=1)
        if each == 0:
            model(input_ids=before[:, :1], cache=cache)  # makes room for all
        for whole, part in zip(cache.layers, one.layers, strict=True):
            whole.keys[each].copy_(part.keys[0])
            whole.values[each].copy_(part.values[0])
    positions = at.expand(rows, 1)

    def call(called: nn.Module) -> Tensor:
        for layer in cache.layers:  # the next token's place is the last one, at every call
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(length - 1)
        return called(input_ids=ids, cache=cache, position_ids=positions).logits

    return call, cache


def compiled(
    name: str, model: nn.Module, call: Callable[[nn.Module], Tensor], bench: Bench
) -> Call:
    """One arm, compiled and run until its calls are known."""
    options = cp.compile_options() if name == OURS else dict(OPTIONS[name])
    ours = torch.compile(model, options=options)

    def step(_: int) -> Tensor:
        with torch.no_grad():
            return call(ours)

    for _ in range(SEEN_BEFORE + 2):
        step(0)
    bench.say(f"{name}: compiled")
    return step


def predicted(case: Case, bench: Bench) -> dict[str, dict[str, float]]:
    """Seconds that `serve` says, by arm, before anything is timed; none of an unknown GPU."""
    if not bench.on_gpu:
        return {}
    gpu = torch.cuda.get_device_name(bench.device)
    machine = shipped(gpu, max(bench.ranks, 2)) or preset_of(gpu, max(bench.ranks, 2))
    if machine is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, overlap in ((PLAIN, "none"), (OURS, "ours")):
        of = serve(MODELS[case["model"]], machine, tp=bench.ranks, sequences=case["sequences"],
                   length=case["length"], overlap=overlap, attention="sdpa")  # type: ignore[arg-type]  # fmt: skip
        found[name] = {"predicted_s": of.first_s if case["step"] == PREFILL else of.token_s}
    return found


@torch.no_grad()
def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one case."""
    if bench.short:
        return Arms({PLAIN: "it has no short form"}, lambda *_: [], baseline=PLAIN)
    if find_spec("transformers") is None:
        raise cp.UnsupportedError("bench", "transformers", want="5.24 or newer", got="none such")
    about = predicted(case, bench)
    torch.compiler.reset()  # else what another case has compiled
    model = model_of(case["model"], bench)
    call, past = given_of(model, case, bench)
    exact = model_of(case["model"], bench, torch.float32)
    kept = [(layer, layer.keys, layer.values) for layer in past.layers] if past else []
    for layer, keys, values in kept:  # of bf16, which all arms read; here in fp32
        layer.keys, layer.values = keys.float(), values.float()
    want = local(call(exact)).clone()
    for layer, keys, values in kept:
        layer.keys, layer.values = keys, values
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    names = [PLAIN] if bench.ranks == 1 else [PLAIN, *[ONE_SHOT] * bench.on_gpu, OURS]
    calls: dict[str, Call | str] = {n: compiled(n, model, call, bench) for n in names}

    def check(_: str, got: Tensor) -> list[float]:
        return [relative_error(local(got), want)]

    return Arms(
        calls, check, baseline=PLAIN, limit=LIMIT, about=about, floor=2e-2, peers=[ONE_SHOT],
        pool=torch.cuda.graph_pool_handle() if bench.on_gpu else None,
        close=lambda: cp.release(bench.group),
    )  # fmt: skip


def _off(case: Timed) -> str:
    row: Mapping[str, Any] = case.main[PLAIN]
    return f"{row['predicted_s'] / row['median_s'] - 1:+.0%}" if "predicted_s" in row else "-"


COLUMNS = [
    Column("step", lambda case: f"{case.head['step']}, {case.head['sequences']} x "
                                f"{case.head['length']}"),
    Column("model, layers", lambda case: f"{case.head['model']}, {case.head['layers']}"),
    arm(PLAIN, ms, "torch.compile, ms"),
    Column("`serve` predicts", _off),
    arm(ONE_SHOT, ms, "one-shot, ms"),
    arm(OURS, ms, "ours, ms"),
]  # fmt: skip


def write(rows: list[Row]) -> str:
    """Times by case."""
    note = (
        "Sequences x tokens of each. *`serve` predicts* is its time over the one measured with "
        "torch.compile, less one."
    )
    return table(COLUMNS, [*taken(rows, "step", "model", "sequences", "length")], note)


SERVED = Benchmark(
    "served", cases, arms, short=lambda case: case.name == "decode 8B, 1 x 2048", least=1,
    unit="ms", calls=1, host=False,
    sections=(Section("docs/scale.md", "served", by_machine(write)),),
)  # fmt: skip
