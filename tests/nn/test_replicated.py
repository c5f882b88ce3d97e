"""Gradients of parameters that every rank has a copy of."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks

import counterpoint.nn as cnn
from counterpoint import InputError, UnsupportedError

ROWS, DIM = 4, 6


@on_ranks(1, 2, 4)
def test_the_gradient_is_that_of_all_rows(rank: int, world_size: int):
    """RMSNorm of some rows on each rank; the gradient is that of all rows."""
    whole, dy = torch.randn(2, ROWS * world_size, DIM)
    weight = torch.rand(DIM).requires_grad_()
    F.rms_norm(whole, (DIM,), weight).backward(dy)
    want, weight.grad = weight.grad, None
    mine = slice(ROWS * rank, ROWS * (rank + 1))
    copy = cnn.copy_to_group(weight)
    assert copy.data_ptr() == weight.data_ptr()
    F.rms_norm(whole[mine], (DIM,), copy).backward(dy[mine])
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, want)
    all_ranks = [torch.empty_like(want) for _ in range(world_size)]
    dist.all_gather(all_ranks, weight.grad)
    assert all(torch.equal(weight.grad, other) for other in all_ranks)


@on_ranks(4)
def test_groups_and_uses(rank: int, world_size: int):
    """A group of some ranks, an expanded gradient, an embedding that is the head as well."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    table = torch.randn(5, DIM).requires_grad_()
    copy = cnn.copy_to_group(table, group=pairs[rank // 2])
    F.linear(F.embedding(torch.tensor([rank, rank]), copy), copy).sum().backward()
    got, table.grad = table.grad, None
    for r in (rank // 2 * 2, rank // 2 * 2 + 1):
        F.linear(F.embedding(torch.tensor([r, r]), table), table).sum().backward()
    torch.testing.assert_close(got, table.grad)
    bias = torch.randn(DIM).requires_grad_()
    cnn.copy_to_group(bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((DIM,), 4.0))  # type: ignore[arg-type]


@on_ranks(2)
def test_without_gradients_and_twice(rank: int, world_size: int):
    weight = torch.randn(DIM)
    assert cnn.copy_to_group(weight) is weight
    weight.requires_grad_()
    with torch.no_grad():
        assert cnn.copy_to_group(weight) is weight
    (dw,) = torch.autograd.grad(cnn.copy_to_group(weight).square().sum(), weight, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"double backward .* is not supported"):
        dw.sum().backward()


def test_a_group_is_wanted():
    with pytest.raises(InputError, match="copy_to_group: group must be an initialised"):
        cnn.copy_to_group(torch.zeros(2))


@on_ranks(2)
def test_opcheck(rank: int, world_size: int):
    group = dist.group.WORLD
    assert group is not None
    op = torch.ops.counterpoint.sum_over_group.default
    # without test_autograd_registration: a gradient of it is refused
    tests = ("test_schema", "test_faketensor")
    args = (torch.randn(3, 4).t(), group.group_name, 1)
    found = torch.library.opcheck(op, args, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
