"""Models that frameworks shard by FSDP2, overlapped: the real packages. Skipped without them."""

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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


def by_accelerate(patch: pytest.MonkeyPatch) -> None:
    """Have accelerate shard by FSDP2 on CPU ranks, where it knows DDP alone."""
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-not-found]
    from accelerate.utils import DistributedType  # type: ignore[import-not-found]

    made = PartialState.__init__

    def told(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.distributed_type = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(True)
    patch.setattr(PartialState, "__init__", told)
    patch.setenv("ACCELERATE_USE_FSDP", "false")  # an Accelerator sets both
    patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same four over and over, for a Trainer."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(i % 4))
        return {"input_ids": ids, "labels": ids}


@needs("transformers")
@needs("accelerate")
@pytest.mark.parametrize("sharded_by", ["accelerate", "transformers"])
@on_ranks(2)
def test_a_trainer_with_the_callback(rank: int, world_size: int, sharded_by: str):
    """Its whole training, with its clipping: the same bits."""
    with started(rank, world_size) as folder, pytest.MonkeyPatch.context() as patch:
        from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

        from counterpoint.adapters.transformers import Overlap

        class Sums(TrainerCallback):
            def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
                summed(model)

            def on_step_end(self, *_: Any, **__: Any) -> None:
                said.append(callback.overlapped.explain() if callback.overlapped else "")

        def trained(*callbacks: Any) -> list[float]:
            settings: dict[str, Any] = {}
            if sharded_by == "accelerate":
                by_accelerate(patch)
                settings = {"fsdp": True, "fsdp_config": {
                    "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]
                }}  # fmt: skip
                torch.manual_seed(0)
                model = LlamaForCausalLM(small())
            else:
                model = loaded(f"{folder}/model")
            arguments = TrainingArguments(
                f"{folder}/out", use_cpu=True, report_to=[], max_steps=4, logging_steps=1,
                per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True,
                learning_rate=1e-2, lr_scheduler_type="constant", **settings,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=Texts())
            for callback in (Sums(), *callbacks):
                trainer.add_callback(callback)
            trainer.train()
            logged: list[dict[str, float]] = trainer.state.log_history
            return [line[name] for line in logged for name in ("loss", "grad_norm") if name in line]

        os.makedirs(f"{folder}/model", exist_ok=True)
        callback, said = Overlap(trial_steps=0), list[str]()
        want, got = trained(), trained(callback)
        assert got == want and len(want) == 8
        assert want[-2] < want[0] - 0.1, "the model learns"
        assert said[-1].count("pushed in place") >= 4, said[-1]


@needs("transformers")
@needs("accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@on_ranks(2)
def test_a_model_that_accelerate_prepares(rank: int, world_size: int, precision: str):
    with started(rank, world_size), pytest.MonkeyPatch.context() as patch:
        from accelerate import (  # type: ignore[import-not-found]
            Accelerator,
            FullyShardedDataParallelPlugin,
        )
        from transformers import LlamaForCausalLM

        def trained(overlapped: bool) -> tuple[list[float], str]:
            by_accelerate(patch)
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )  # fmt: skip
            accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision, cpu=True)
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(small())
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = accelerator.prepare(model, optimizer)
            summed(model)
            explain = cp.overlap(model, trial_steps=0).explain if overlapped else str
            torch.manual_seed(3 + rank)
            ids, found = torch.randint(0, 64, (2, 12)), list[float]()
            for _ in range(4):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found, explain()

        (want, _), (got, said) = trained(False), trained(True)
        assert want[0] == got[0] and want[-1] < want[0] - 0.1, want
        # accelerate's reduction is in bf16: ours sums in fp32
        near = 0 if precision == "no" else 2e-2
        assert all(abs(a - b) <= near for a, b in zip(want, got, strict=True)), (want, got)
        assert said.count("pushed in place") >= 4, said


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 24))


@needs("lightning")
@on_ranks(2)
def test_a_model_that_lightning_trains(rank: int, world_size: int):
    """By its ModelParallelStrategy: the same bits."""
    with started(rank, world_size):
        from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
        from lightning.pytorch.strategies import (  # type: ignore[import-not-found]
            ModelParallelStrategy,
        )

        class Module(LightningModule):
            def __init__(self, overlapped: bool) -> None:
                super().__init__()
                self.found, self.wanted, self.overlapped = list[float](), overlapped, None
                torch.manual_seed(0)
                self.model = nn.Sequential(*(mlp() for _ in range(3)))

            def configure_model(self) -> None:
                mesh = self.device_mesh["data_parallel"]
                policy = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
                for layer in self.model:
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(self.model, mesh=mesh, mp_policy=policy)
                summed(self.model)

            def on_train_start(self) -> None:
                if self.wanted:
                    self.overlapped = cp.overlap(self.model, trial_steps=0)

            def training_step(self, x: torch.Tensor) -> torch.Tensor:
                loss = (self.model(x) - 1).square().mean()
                self.found.append(loss.item())
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def trained(overlapped: bool) -> Any:
            module = Module(overlapped)
            trainer = Trainer(
                accelerator="cpu", devices=world_size, max_epochs=2, logger=False,
                strategy=ModelParallelStrategy(world_size, 1),
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            torch.manual_seed(3)
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 24), batch_size=2))
            return module

        want, got = trained(False), trained(True)
        assert got.found == want.found and want.found[-1] < want.found[0] - 0.1, want.found
        assert got.overlapped.explain().count("pushed in place") >= 3
