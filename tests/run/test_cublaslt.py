"""The matmul library's own interface, on paper: what it is asked for is y = c + x w."""

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.gpu import cublaslt

DTYPES = {number: dtype for dtype, number in cublaslt.TYPES.items()}


class Paper:
    """Does what cublasLt.h says of the calls, on a CPU; its handles are numbers of its objects."""

    def __init__(self) -> None:
        self.objects: list[dict[int, int]] = [{}]
        self.count, self.status, self.heuristic_status = 1, 0, 0
        self.aligned: list[int] = []

    def function(self, name: str) -> Callable[..., int]:
        return getattr(self, f"_{name}")

    def _new(self, handle: Any, *fields: Any) -> int:
        handle._obj.value = len(self.objects)
        self.objects.append({i: field.value for i, field in enumerate(fields)})
        return 0

    _MatmulDescCreate = _MatrixLayoutCreate = _MatmulPreferenceCreate = _new

    def _MatmulDescSetAttribute(self, what: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == 4
        self.objects[what.value][attribute.value] = value._obj.value
        return 0

    def _MatmulPreferenceSetAttribute(
        self, what: Any, attribute: Any, value: Any, size: Any
    ) -> int:
        self.aligned.append(value._obj.value)
        return self._MatmulDescSetAttribute(what, attribute, value, size)

    def _MatmulPreferenceDestroy(self, _: Any) -> int:
        return 0

    def _MatmulAlgoGetHeuristic(self, *given: Any) -> int:
        *_, wanted, found, count = given
        assert wanted.value == 1 and ctypes.sizeof(found._obj) == 96
        count._obj.value = self.count
        return self.heuristic_status

    def _Matmul(self, handle: Any, desc: Any, *given: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, _, room, size, _ = given
        assert handle.value == 7 and alpha._obj.value == beta._obj.value == 1.0
        assert room.value is None and size.value == 0
        how = self.objects[desc.value]
        assert (how[0], how[1]) == (68, 0)
        left, right = self._at(a, a_layout), self._at(b, b_layout)
        left = left.t() if how.get(3) else left
        right = right.t() if how.get(4) else right
        total = left.float() @ right.float() + self._at(c, c_layout).float()
        target = self._at(d, d_layout)
        target.copy_(total.to(target.dtype))
        return self.status

    def _at(self, address: Any, layout: Any) -> Tensor:
        """A matrix in memory, column by column."""
        fields = self.objects[layout.value]
        rows, cols, pitch = (fields[i] for i in (1, 2, 3))
        numel = (cols - 1) * pitch + rows
        raw = (ctypes.c_char * (2 * numel)).from_address(address.value)
        return torch.frombuffer(raw, dtype=DTYPES[fields[0]]).as_strided((rows, cols), (1, pitch))


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    found = Paper()
    monkeypatch.setattr(cublaslt, "_function", found.function)
    monkeypatch.setattr(cublaslt, "takes", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=3))
    cublaslt._prepared.cache_clear()
    yield found
    cublaslt._prepared.cache_clear()


def laid_out(rows: int, cols: int, how: str, dtype: torch.dtype) -> Tensor:
    """By rows, by columns, or as a part of wider rows or columns."""
    if how.startswith("columns"):
        return laid_out(cols, rows, how.replace("columns", "rows"), dtype).t()
    wide = torch.randn(rows, cols + 3 * how.endswith("apart")).to(dtype)
    return wide[:, :cols]


LAYOUTS = ("rows", "columns", "rows apart", "columns apart")


@pytest.mark.parametrize("dtype", cublaslt.TYPES, ids=str)
@pytest.mark.parametrize("of_w", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_a_sum_that_lies_elsewhere(paper: Paper, of_x: str, of_w: str, dtype: torch.dtype):
    for m, n, k in ((5, 7, 3), (1, 4, 6), (6, 1, 2), (3, 2, 1)):
        x, w = laid_out(m, k, of_x, dtype), laid_out(k, n, of_w, dtype)
        c, y = laid_out(m, n, "rows apart", dtype), laid_out(m, n, "rows", dtype)
        y.fill_(torch.nan)
        kept, want = c.clone(), (c.float() + x.float() @ w.float()).to(dtype)
        for _ in range(2):
            cublaslt.add(c, x, w, y)
            torch.testing.assert_close(y, want, rtol=0.0, atol=2e-2)
        assert torch.equal(c, kept)


def test_the_call_is_prepared_once_for_each_alignment(paper: Paper):
    c, x, w = (torch.randn(4, 4).bfloat16() for _ in range(3))
    y, odd = torch.empty_like(c), torch.empty(17, dtype=torch.bfloat16)[1:].view(4, 4)
    for target in (y, y, odd):
        cublaslt.add(c, x, w, target)
    assert len(paper.aligned) == 8 and paper.aligned[-1] == 2
    assert all(n & (n - 1) == 0 and 2 <= n <= 256 for n in paper.aligned)


@pytest.mark.parametrize("status", [0, 15])
def test_torch_adds_where_the_library_has_nothing(paper: Paper, status: int):
    paper.count, paper.heuristic_status = 0, status
    c, x, w = (torch.randn(4, 4).bfloat16() for _ in range(3))
    y = torch.full_like(c, torch.nan)
    cublaslt.add(c, x, w, y)
    assert torch.equal(y, torch.addmm(c, x, w))


def test_a_refused_call_is_an_error(paper: Paper):
    paper.status = 15
    c, x, w = (torch.randn(4, 4).bfloat16() for _ in range(3))
    with pytest.raises(CounterpointError, match=r"^cublasLtMatmul: status 15$"):
        cublaslt.add(c, x, w, torch.empty_like(c))


def test_what_is_not_on_a_gpu_is_torch_s():
    c, x, w = (torch.randn(4, 4) for _ in range(3))
    y = torch.full_like(c, torch.nan)
    assert not cublaslt.takes(c, x, w, y)
    cublaslt.add(c, x, w, y)
    assert torch.equal(y, torch.addmm(c, x, w))
