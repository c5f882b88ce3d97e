"""`cp.overlap(model)`: gathers and reduce-scatters of an FSDP2 model, behind its computation."""

from typing import Any, get_args

from torch import nn

from counterpoint.errors import InputError
from counterpoint.fsdp import torch_parts
from counterpoint.fsdp.overlapped import OP, Memory, Overlapped


def overlap(
    model: nn.Module, *, slots: int = 2, gather: bool = True, scatter: bool = True,
    trial_steps: int = 16, memory: Memory = "auto",
) -> Overlapped:  # fmt: skip
    """Hide the communication of an FSDP2 model behind its computation. One line, on all ranks.

    Parameters are gathered by copy engines, from where each rank publishes its shards to where
    matmuls read them; gradients are pushed from where autograd wrote them to their owner, who sums
    them in fp32. What FSDP2 does around its collectives, copies in and copies out, is gone. A group
    of parameters that cannot be had so stays torch's, and `explain` says why. Both ways are then
    tried by turns on the first optimizer steps; ours stays only where it is faster beyond doubt.

    Args:
        model: `fully_shard` has been called on it, or on modules of it.
        slots: gathered groups that have memory at a time, of those that are resharded.
        gather: gather in place.
        scatter: scatter gradients in place, of groups that are gathered so. A gradient may be on
            its way once it is whole: whoever writes it behind that, in the midst of a backward and
            in no hook of a module, does so in place, not by `.data`.
        trial_steps: optimizer steps to try at least, 64 at most; 0: none, overlap at once.
        memory: "kept": each step publishes all shards once, in two bytes a parameter over the
            ranks. Between a forward and its backward it notices steps of `torch.optim` optimizers
            and in-place operators on one parameter or on local parts. It does not notice writes by
            `.data`, `torch._foreach_*` on DTensors, collectives, and fused or own kernels: call
            `Overlapped.mark_dirty` behind those. "ring": each gather publishes those of its group,
            where they are gathered to, whoever has written them.
            "auto": on GPUs two steps run as they are; "kept", where all ranks have so much left.

    Returns:
        What is done, and how to end it: see `Overlapped`.

    Raises:
        InputError: no module is one of FSDP2, or an argument is wrong.
        UnsupportedError: this torch's FSDP2 is none that we know.

    Example:
        >>> overlapped = counterpoint.overlap(model)  # doctest: +SKIP
        >>> print(overlapped.explain())  # doctest: +SKIP
    """
    states = _checked(model, slots, trial_steps, memory)
    made = Overlapped(
        model, slots=slots, gather=gather, scatter=scatter, trial_steps=trial_steps, memory=memory
    )
    for state in states:
        state._counterpoint_overlapped = True
    return made


def _checked(model: Any, slots: Any, trial_steps: Any, memory: Any) -> list[Any]:
    """The FSDP states of a model.

    Raises:
        InputError: it has none, or an argument is wrong.
        UnsupportedError: this torch's FSDP2 is none that we know.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        fix = (
            "shard it by torch.distributed.fsdp.fully_shard; overlapping DDP brought 1.00x to 1.05x"
        )
        raise InputError(
            OP, "model", want="a model of FSDP2", got="DistributedDataParallel", fix=fix
        )
    if not isinstance(model, nn.Module):
        raise InputError(OP, "model", want="a torch.nn.Module", got=type(model).__name__)
    if type(slots) is not int or slots < 1:
        raise InputError(OP, "slots", want="a number from 1 on", got=slots)
    if type(trial_steps) is not int or trial_steps < 0:
        raise InputError(OP, "trial_steps", want="a number from 0 on", got=trial_steps)
    if memory not in get_args(Memory):
        raise InputError(OP, "memory", want="'auto', 'kept' or 'ring'", got=repr(memory))
    torch_parts.need(torch_parts.refusal())
    states = torch_parts.states_of(model)
    if not states:
        fix = "call torch.distributed.fsdp.fully_shard on it before"
        raise InputError(OP, "model", want="sharded by FSDP2", got=type(model).__name__, fix=fix)
    if any("_counterpoint_overlapped" in state.__dict__ for state in states):
        fix = "call off() on what overlap returned before"
        raise InputError(
            OP, "model", want="one that is not overlapped yet", got="one that is", fix=fix
        )
    return states
