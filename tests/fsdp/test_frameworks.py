"""Models that frameworks shard by FSDP2, overlapped: the real packages. Skipped without them."""

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule

import counterpoint as cp


def needs(package: str) -> Any:
    here = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not here, reason=f"{package} is not installed")


@contextmanager
def started(rank: int, world_size: int) -> Iterator[str]:
    """Environment of a rank, as torchrun sets it, and a folder of all ranks."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks, in their own code
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": 29577}
        for name, number in names.items():
            patch.setenv(name, str(number))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield folder[0]


def summed(model: nn.Module) -> nn.Module:
    """gloo has no average."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def small() -> Any:
    from transformers import LlamaConfig  # type: ignore[import-not-found]

    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip


def losses(model: nn.Module, rank: int, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3 + rank)
    found = list[float]()
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 12))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loaded(folder: str) -> nn.Module:
    """A model of transformers that is sharded as it is loaded."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    if dist.get_rank() == 0 and not os.listdir(folder):
        torch.manual_seed(0)
        LlamaForCausalLM(small()).save_pretrained(folder)
    dist.barrier()
    how = DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_mixed_precision=True)
    return summed(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=how)
    )


@needs("transformers")
@on_ranks(2)
def test_a_model_that_transformers_shards(rank: int, world_size: int):
    with started(rank, world_size) as folder:
        want, model = losses(loaded(folder), rank), loaded(folder)
        overlapped = cp.overlap(model, trial_steps=0)
        assert losses(model, rank) == want
        assert overlapped.explain().count("pushed in place") >= 4, overlapped.explain()


@needs("transformers")
@on_ranks(2)
def test_the_callback_of_a_trainer(rank: int, world_size: int):
    """As the Trainer calls it: with its model, once that is sharded, and at the end."""
    with started(rank, world_size) as folder:
        from transformers import TrainerControl, TrainerState, TrainingArguments

        from counterpoint.adapters.transformers import Overlap

        want, model, callback = losses(loaded(folder), rank), loaded(folder), Overlap(trial_steps=0)
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
        given = (arguments, TrainerState(), TrainerControl())
        callback.on_train_begin(*given, model=model)
        assert losses(model, rank) == want
        assert callback.overlapped is not None and "in place" in callback.overlapped.explain()
        callback.on_train_end(*given, model=model)
        assert "torch's own way" in callback.overlapped.explain()
        with pytest.raises(cp.InputError, match="fully_shard"):
            callback.on_train_begin(*given, model=nn.Linear(2, 2))


@needs("accelerate")
@on_ranks(2)
def test_a_model_that_accelerate_prepares(rank: int, world_size: int):
    with started(rank, world_size):
        from accelerate import FullyShardedDataParallelPlugin  # type: ignore[import-not-found]
        from accelerate.utils.fsdp_utils import (  # type: ignore[import-not-found]
            fsdp2_prepare_model,
        )
        from transformers import LlamaForCausalLM

        def prepared() -> nn.Module:
            torch.manual_seed(0)
            model = LlamaForCausalLM(small())
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )  # fmt: skip
            plugin.set_mixed_precision("bf16")
            of = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16",
                torch_device_mesh=None, parallelism_config=None, device=torch.device("cpu"),
                is_main_process=rank == 0,
            )  # fmt: skip
            return summed(fsdp2_prepare_model(of, model))

        want, model = losses(prepared(), rank), prepared()
        overlapped = cp.overlap(model, trial_steps=0)
        got = losses(model, rank)
        # its reduction is in bf16: ours sums in fp32
        assert all(abs(a - b) < 2e-2 for a, b in zip(want, got, strict=True)), (want, got)
        assert overlapped.explain().count("pushed in place") >= 3, overlapped.explain()
