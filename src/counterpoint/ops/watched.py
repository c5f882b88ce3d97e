"""Whether anything but autograd sees what is done with tensors: a mode, a tracer, a transform.

All of it is private to torch, and asked at each call: a feature test holds it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
transformed: Callable[[], object] = _C._functorch.peek_interpreter_stack
function_modes: Callable[[], int] = _C._len_torch_function_stack
# which keys of torch's dispatcher a thread and a tensor have
keys_of_thread: Callable[[], Any] = _C._dispatch_tls_local_include_set
keys_of: Callable[[Tensor], Any] = _C._dispatch_keys


def _usual() -> frozenset[int]:
    key, of = _C.DispatchKey, _C.DispatchKeySet
    both = of(key.BackendSelect) | of(key.ADInplaceOrView)
    return frozenset({both.raw_repr(), of(key.BackendSelect).raw_repr()})


USUAL = _usual()  # the keys of a thread that nothing watches, and of one in inference mode


@cache
def keys_of_plain(device: str) -> frozenset[int]:
    """The keys of a tensor that is nothing but numbers in memory, and of one of inference mode."""
    found: list[int] = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.append(keys_of(torch.empty(0, device=device)).raw_repr())
    return frozenset(found)
