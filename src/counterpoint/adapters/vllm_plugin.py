"""What vLLM calls in each of its processes, by its entry point: COUNTERPOINT_VLLM=1 switches on.

    COUNTERPOINT_VLLM=1 vllm serve MODEL --tensor-parallel-size 2

Light, as vLLM loads it wherever this library is installed.
"""

import os
from typing import Any

SWITCH = "COUNTERPOINT_VLLM"


def load() -> None:
    """Let each configuration of several GPUs have the settings of `compilation_config`.

    Raises:
        UnsupportedError: this vLLM has no place for them. A configuration with another pass in
            that place raises an InputError.
    """
    if os.environ.get(SWITCH) != "1":
        return
    from counterpoint.adapters.seams import taken
    from counterpoint.adapters.vllm import SEAM, TESTED, DecodePass, compilation_config
    from counterpoint.errors import InputError

    config: Any
    (config,) = taken("vllm", TESTED, "vllm.config", "VllmConfig")
    finish = config.__post_init__
    if hasattr(finish, SWITCH):  # loaded before
        return

    def with_settings(self: Any, *given: Any) -> None:
        compiled, ours = self.compilation_config, compilation_config()
        if self.parallel_config.tensor_parallel_size > 1:
            ends = {*(compiled.compile_ranges_endpoints or ()), *ours["compile_ranges_endpoints"]}
            compiled.compile_ranges_endpoints = sorted(ends)
            there = compiled.inductor_compile_config.setdefault(
                SEAM, ours["inductor_compile_config"][SEAM]
            )
            if not isinstance(getattr(there, "callable", None), DecodePass):
                want = "without a pass of yours at " + SEAM
                raise InputError(SWITCH, "compilation_config", want=want, got=there)
        finish(self, *given)

    setattr(with_settings, SWITCH, True)
    config.__post_init__ = with_settings
