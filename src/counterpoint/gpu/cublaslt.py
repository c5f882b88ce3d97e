"""y = c + x w in one pass where c lies elsewhere: cuBLASLt, which torch has loaded, by ctypes.

torch's addmm copies c to y first: as long as a sum takes. Drop when torch >= 2.14 does not.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError

# numbers of cublasLt.h, library_types.h and cublas_api.h
TYPES = {torch.float16: 2, torch.bfloat16: 14}
FLOAT, COMPUTE_FLOAT, TRANSPOSED = 0, 68, 1
DESC_TRANSPOSE_A, DESC_TRANSPOSE_B = 3, 4
PREFER_ALIGNMENT = (5, 6, 7, 8)  # of A, B, C and D
MOST_ALIGNMENT = 256  # bytes


class Matrix(NamedTuple):
    """As the library counts: columns one after another, `pitch` numbers apart."""

    rows: int
    cols: int
    pitch: int
    transposed: bool


class _Heuristic(ctypes.Structure):
    """What the library says of an algorithm, which is the first of it."""

    _fields_ = (("algorithm", c_uint64 * 8), ("workspace_bytes", c_size_t), ("status", c_int),
                ("waves", c_float), ("reserved", c_int * 4))  # fmt: skip


class _Prepared(NamedTuple):
    description: c_void_p
    layouts: tuple[c_void_p, ...]  # of A, B, C and D
    found: _Heuristic


def add(c: Tensor, x: Tensor, w: Tensor, y: Tensor) -> None:
    """y = c + x w, summed in fp32 and rounded once, on the current stream.

    Args:
        c: of the dtype of y; on a GPU, read where it lies, where `takes` says so.
        x: [M, K].
        w: [K, N].
        y: [M, N], of other memory than `c`.

    Raises:
        CounterpointError: the library refuses.
    """
    if not takes(c, x, w, y):
        torch.addmm(c, x, w, out=y)
        return
    # the library's y^T = w^T x^T + c^T
    matrices = tuple(map(matrix, (w, x, c, y)))
    aligned = tuple(map(_alignment, (w, x, c, y)))
    handle = torch.cuda.current_blas_handle()
    ready = _prepared(handle, TYPES[y.dtype], matrices, aligned)
    if ready is None:
        torch.addmm(c, x, w, out=y)
        return
    one, stream = c_float(1), torch.cuda.current_stream().cuda_stream
    a, b, from_c, to = ready.layouts
    _call("Matmul", c_void_p(handle), ready.description, byref(one), c_void_p(w.data_ptr()), a,
          c_void_p(x.data_ptr()), b, byref(one), c_void_p(c.data_ptr()), from_c,
          c_void_p(y.data_ptr()), to, byref(ready.found), c_void_p(), c_size_t(0),
          c_void_p(stream))  # fmt: skip


def takes(c: Tensor, x: Tensor, w: Tensor, y: Tensor) -> bool:
    """Whether the library adds without a copy: 16-bit numbers on an NVIDIA GPU, rows without gaps.

    Other sums are torch's.
    """
    if not y.is_cuda or torch.version.hip or y.dtype not in TYPES or not (y.numel() and x.numel()):
        return False
    return all(map(_by_rows, (c, y))) and all(_by_rows(t) or _by_rows(t.t()) for t in (x, w))


def _by_rows(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) >= t.shape[1]


def matrix(t: Tensor) -> Matrix:
    """The transpose of t, of which one stride is 1, by the library's order."""
    (rows, cols), (down, along) = t.shape, t.stride()
    if _by_rows(t):
        return Matrix(cols, rows, down, transposed=False)
    return Matrix(rows, cols, along, transposed=True)


def _alignment(t: Tensor) -> int:
    address = t.data_ptr()
    return min(address & -address, MOST_ALIGNMENT)


@lru_cache(maxsize=1024)
def _prepared(
    handle: int, dtype: int, matrices: tuple[Matrix, ...], aligned: tuple[int, ...]
) -> _Prepared | None:
    """The call of such operands, which needs no workspace; None where the library has none."""
    description, preference = c_void_p(), c_void_p()
    _call("MatmulDescCreate", byref(description), c_int(COMPUTE_FLOAT), c_int(FLOAT))
    for attribute, given in zip((DESC_TRANSPOSE_A, DESC_TRANSPOSE_B), matrices, strict=False):
        if given.transposed:
            _set("MatmulDesc", description, attribute, c_int(TRANSPOSED))
    layouts: list[c_void_p] = []
    for given in matrices:
        layouts.append(c_void_p())
        _call("MatrixLayoutCreate", byref(layouts[-1]), c_int(dtype), c_uint64(given.rows),
              c_uint64(given.cols), c_int64(given.pitch))  # fmt: skip
    _call("MatmulPreferenceCreate", byref(preference))
    for attribute, num_bytes in zip(PREFER_ALIGNMENT, aligned, strict=True):
        _set("MatmulPreference", preference, attribute, c_uint32(num_bytes))
    found, count = _Heuristic(), c_int()
    status = _function("MatmulAlgoGetHeuristic")(
        c_void_p(handle), description, *layouts, preference, c_int(1), byref(found), byref(count)
    )
    _call("MatmulPreferenceDestroy", preference)
    if status or not count.value:  # it says in either way that it has none
        return None
    return _Prepared(description, tuple(layouts), found)


def _set(of: str, what: c_void_p, attribute: int, value: Any) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _call(f"{of}SetAttribute", what, c_int(attribute), byref(value), size)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library.

    Raises:
        CounterpointError: its status is not 0.
    """
    if status := _function(name)(*arguments):
        raise CounterpointError(f"cublasLt{name}: status {status}")


@cache
def _function(name: str) -> Callable[..., int]:
    major = str(torch.version.cuda).partition(".")[0]
    return getattr(ctypes.CDLL(f"libcublasLt.so.{major}"), f"cublasLt{name}")
