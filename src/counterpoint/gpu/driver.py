"""Copies, and calls of CUDA's driver, through cuda-bindings. The only importer of it.

torch's `copy_` is a DMA copy only for contiguous tensors of one dtype; here a copy is a DMA copy
because nothing else is asked for.
"""

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError

LEGACY = (0, 1)  # handles of the default stream that all others wait for
BATCHES_SINCE = 12080  # version of CUDA
IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class Copy(NamedTuple):
    """`height` rows of `width` bytes, from one pitch to another; one row is a plain copy."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


@cache
def bindings() -> ModuleType:
    """The CUDA runtime.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
    """
    return _bindings("runtime", "copy engine")


@cache
def driver_bindings() -> ModuleType:
    """The CUDA driver.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
    """
    return _bindings("driver", "graph nodes")


def _bindings(part: str, user: str) -> ModuleType:
    try:
        return import_module(f"cuda.bindings.{part}")
    except ImportError as error:
        fix = "pip install cuda-bindings, of torch's CUDA version"
        raise UnsupportedError(f"{user}: needs cuda-bindings ({error}); {fix}") from error


def copy_async(copy: Copy, stream: int) -> None:
    """Enqueue one DMA copy on `stream` (a cudaStream_t). Capturable.

    Raises:
        CounterpointError: CUDA refused it.
    """
    rt = bindings()
    kind = rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    if copy.height == 1:
        (status,) = rt.cudaMemcpyAsync(copy.target, copy.source, copy.width, kind, stream)
    else:
        (status,) = rt.cudaMemcpy2DAsync(
            copy.target, copy.target_pitch, copy.source, copy.source_pitch,
            copy.width, copy.height, kind, stream,
        )  # fmt: skip
    _check(status, "cudaMemcpyAsync")


def copy_batch_async(copies: Sequence[Copy], stream: int) -> None:
    """Enqueue copies of one row each in one call; as a whole they are in stream order.

    They have no order among themselves, so that a batch is ready when all of it is.

    Args:
        copies: that do not overlap.
        stream: a cudaStream_t that is neither the legacy default one nor being captured: a capture
            would go on, and lack the batch.

    Raises:
        InputError: a copy has several rows, or the stream is one of these.
        UnsupportedError: this driver has no batches.
        CounterpointError: CUDA refused it.
    """
    rt, op = bindings(), "copy_batch_async"
    if why := no_batches():
        raise UnsupportedError(f"{op}: {why}")
    tall = [copy.height for copy in copies if copy.height != 1]
    if tall:
        fix = "submit what has a pitch by copy_async"
        raise InputError(op, "copies", want="of one row each", got=f"{tall[0]} rows", fix=fix)
    if stream in LEGACY:
        fix = "use a stream of torch.cuda.Stream()"
        raise InputError(op, "stream", want="another than the legacy one", got=stream, fix=fix)
    status, capture = rt.cudaStreamIsCapturing(stream)
    _check(status, "cudaStreamIsCapturing")
    if int(capture) != 0:
        fix = "submit one by one by copy_async"
        raise InputError(op, "stream", want="one that is not captured", got="a capture", fix=fix)
    if not copies:
        return
    Batch(copies).submit(stream)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: the order, in which sources are read, and hints that are none."""

    _fields_ = (
        ("order", ctypes.c_int), ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2), ("flags", ctypes.c_uint),
    )  # fmt: skip


class Batch:
    """Copies in no order among themselves, ready to be submitted again and again.

    CUDA is called with arrays that are made once: by lists it took twice the host's time. Copies of
    several rows go singly, behind the others.

    Args:
        copies: that do not overlap.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._flat = [i for i, copy in enumerate(copies) if copy.height == 1]
        self._tall = [(i, copy) for i, copy in enumerate(copies) if copy.height != 1]
        flat = [copies[i] for i in self._flat]
        words = ctypes.c_uint64 * len(flat)
        self.targets = words(*(c.target for c in flat))
        self.sources = words(*(c.source for c in flat))
        self.sizes = words(*(c.width for c in flat))
        in_stream_order = _Attributes(order=IN_STREAM_ORDER)
        self._behind = [
            ctypes.c_size_t(len(flat)), ctypes.byref(in_stream_order),
            ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1),
        ]  # fmt: skip
        if cuda_major() < 13:
            self._behind.append(ctypes.byref(ctypes.c_size_t(0)))  # which copy failed

    def submit(self, stream: int, sources: Sequence[int] | None = None) -> None:
        """Enqueue them, those of one row in one call unless the stream is being captured.

        Args:
            stream: a cudaStream_t.
            sources: other addresses to copy from.

        Raises:
            CounterpointError: CUDA refused it.
        """
        status, capture = bindings().cudaStreamIsCapturing(stream)
        _check(status, "cudaStreamIsCapturing")
        if sources is not None and len(self.sizes):
            self.sources[:] = [sources[i] for i in self._flat] if self._tall else sources
        if len(self.sizes):
            self._submit_flat(stream, capturing=int(capture) != 0)
        for i, copy in self._tall:
            copy_async(copy if sources is None else copy._replace(source=sources[i]), stream)

    def _submit_flat(self, stream: int, *, capturing: bool) -> None:
        of = self.targets, self.sources, self.sizes
        if not batches(stream, capturing=capturing):
            for target, source, size in zip(*of, strict=True):
                copy_async(Copy(target, size, source, size, size, 1), stream)
            return
        status = runtime().cudaMemcpyBatchAsync(*of, *self._behind, ctypes.c_void_p(stream))
        if status:
            _check(bindings().cudaError_t(status), "cudaMemcpyBatchAsync")


@cache
def runtime() -> Any:
    """The CUDA runtime that torch has loaded, for calls with arrays that are made once.

    The profiler tells whose copies are whose by calls of the runtime, not of the driver.
    """
    return ctypes.CDLL(f"libcudart.so.{cuda_major()}")


def cuda_major() -> int:
    """Of the CUDA that torch was built for."""
    return int((torch.version.cuda or "0").partition(".")[0])


@cache
def no_batches() -> str:
    """Why copies cannot be submitted as one batch here; '' if they can.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CounterpointError: CUDA does not say its version.
    """
    status, version = bindings().cudaDriverGetVersion()
    _check(status, "cudaDriverGetVersion")
    if version < BATCHES_SINCE:
        has = f"{version // 1000}.{version % 1000 // 10}"
        return f"the driver is of CUDA {has}; 12.8 or newer has cudaMemcpyBatchAsync"
    try:
        runtime().cudaMemcpyBatchAsync  # noqa: B018
    except (AttributeError, OSError) as error:
        return f"torch's CUDA runtime has none ({error}); that of CUDA 12.8 or newer has"
    return ""


def copies_async(copies: Sequence[Copy], stream: int, *, capturing: bool) -> None:
    """Enqueue copies that need no order among themselves: as one batch where there can be one.

    Those of several rows go singly, and all do on the legacy stream, in a capture, and where there
    are no batches.

    Args:
        copies: that do not overlap.
        stream: a cudaStream_t.
        capturing: whether it is being captured.

    Raises:
        CounterpointError: CUDA refused one.
    """
    flat = [copy for copy in copies if copy.height == 1 and copy.width]
    if len(flat) < 2 or not batches(stream, capturing=capturing):
        flat = []
    if flat:
        copy_batch_async(flat, stream)
    for copy in copies:
        if not flat or copy.height != 1:
            copy_async(copy, stream)


def batches(stream: int, *, capturing: bool) -> bool:
    """Whether a batch of copies can go on `stream`, which is being captured or not."""
    return not capturing and stream not in LEGACY and not no_batches()


def num_copy_engines(device: int) -> int:
    """How many copies of a GPU's copy engines can run at a time.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CounterpointError: there is no such GPU.
    """
    rt = bindings()
    engines = rt.cudaDeviceAttr.cudaDevAttrAsyncEngineCount
    status, count = rt.cudaDeviceGetAttribute(engines, device)
    _check(status, "cudaDeviceGetAttribute")
    return int(count)


def _check(status: Any, call: str) -> None:
    if int(status) != 0:
        raise CounterpointError(f"{call} failed: {getattr(status, 'name', status)}")


@contextmanager
def relaxed_capture() -> Generator[None]:
    """Let this thread allocate, load modules and synchronise although a capture is open.

    What runs inside must use a stream that is not being captured.
    """
    rt = bindings()
    relaxed = rt.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    status, before = rt.cudaThreadExchangeStreamCaptureMode(relaxed)
    _check(status, "cudaThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        (status, *_) = rt.cudaThreadExchangeStreamCaptureMode(before)
        _check(status, "cudaThreadExchangeStreamCaptureMode")


def upload(host: Tensor, target: int, stream: int) -> None:
    """Copy a CPU tensor to address `target` on `stream` now, capture or not; waits for it.

    Raises:
        CounterpointError: CUDA refused it.
    """
    rt = bindings()
    num_bytes = host.numel() * host.element_size()
    kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
    with relaxed_capture():
        (status,) = rt.cudaMemcpyAsync(target, host.data_ptr(), num_bytes, kind, stream)
        _check(status, "cudaMemcpyAsync")
        (status,) = rt.cudaStreamSynchronize(stream)
        _check(status, "cudaStreamSynchronize")


def capture_of(stream: int) -> int:
    """The number of the capture that a stream is in, of this process; 0: none."""
    # which results come after the first three differs between versions of CUDA
    status, state, number, *_ = bindings().cudaStreamGetCaptureInfo(stream)
    _check(status, "cudaStreamGetCaptureInfo")
    return int(number) if int(state) else 0


def ask(call: str, *arguments: Any) -> Any:
    """What a driver call returns behind its status: one value, or a list of them."""
    status, *found = getattr(driver_bindings(), call)(*arguments)
    _check(status, call)
    return found[0] if len(found) == 1 else found
