"""Gradients of parameters that every rank has a copy of."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rankpool import RankPool

import counterpoint.nn as cnn
from counterpoint import InputError, UnsupportedError

ROWS, DIM = 4, 6


def summed(rank: int, world_size: int) -> torch.Tensor:
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
    return weight.grad


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_gradient_is_that_of_all_rows(pool: RankPool, ranks: int):
    first, *others = pool.run(summed, ranks)
    assert all(torch.equal(first, other) for other in others)


def within(rank: int, world_size: int) -> None:
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


def test_groups_and_uses(pool: RankPool):
    pool.run(within, 4)


def not_asked_for(rank: int, world_size: int) -> None:
    weight = torch.randn(DIM)
    assert cnn.copy_to_group(weight) is weight
    weight.requires_grad_()
    with torch.no_grad():
        assert cnn.copy_to_group(weight) is weight
    (dw,) = torch.autograd.grad(cnn.copy_to_group(weight).square().sum(), weight, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"double backward .* is not supported"):
        dw.sum().backward()


def test_without_gradients_and_twice(pool: RankPool):
    pool.run(not_asked_for, 2)


def test_a_group_is_wanted():
    with pytest.raises(InputError, match="copy_to_group: group must be an initialised"):
        cnn.copy_to_group(torch.zeros(2))


def opcheck(rank: int, world_size: int) -> dict[str, str]:
    group = dist.group.WORLD
    assert group is not None
    op = torch.ops.counterpoint.sum_over_group.default
    # without test_autograd_registration: a gradient of it is refused
    tests = ("test_schema", "test_faketensor")
    args = (torch.randn(3, 4).t(), group.group_name)
    return torch.library.opcheck(op, args, test_utils=tests)


def test_opcheck(pool: RankPool):
    for report in pool.run(opcheck, 2):
        assert set(report.values()) == {"SUCCESS"}, report
