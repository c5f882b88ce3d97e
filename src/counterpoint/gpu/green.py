"""Streams whose kernels run on some of the SMs only: green contexts, as far as torch has them."""

from typing import Any

import torch

from counterpoint.errors import InputError, UnsupportedError


def green_stream(device: torch.device, num_sms: int) -> torch.cuda.Stream:
    """A stream whose kernels run on this many SMs only: of a green context.

    Args:
        device: of the stream.
        num_sms: the driver rounds it up to a multiple of 8.

    Raises:
        InputError: there are not as many.
        UnsupportedError: this torch or driver has no green contexts.
    """
    here = torch.cuda.get_device_properties(device).multi_processor_count
    if not 1 <= num_sms <= here:
        raise InputError("green_stream", "num_sms", want=f"from 1 to {here}", got=num_sms)
    contexts: Any = getattr(torch.cuda, "green_contexts", None)
    try:
        made: Any = contexts.GreenContext.create(num_sms=num_sms, device_id=device.index)
        stream: torch.cuda.Stream = made.Stream()
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"no green contexts here: {error}") from error
    stream.counterpoint_context = made  # type: ignore[attr-defined]  # lives as long as the stream
    return stream
