"""Sums over ranks are taken in one fixed order: a balanced binary tree, in the dtype of the result."""

import pytest
import torch
from torch import Tensor

from shardledger.transport.tree import tree_sum

#: The order for each number of ranks, written out.
BY_HAND = {
    1: lambda p: p[0],
    2: lambda p: p[0] + p[1],
    3: lambda p: (p[0] + p[1]) + p[2],
    4: lambda p: (p[0] + p[1]) + (p[2] + p[3]),
    5: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + p[4],
    6: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + (p[4] + p[5]),
    7: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6]),
    8: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])),
}


def parts_of(world: int, dtype: torch.dtype = torch.float32, numel: int = 257) -> list[Tensor]:
    """Numbers of very different sizes, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(world)
    exponents = torch.randint(-4, 5, (world, numel), generator=generator)
    return list((torch.randn(world, numel, generator=generator) * 10.0**exponents).to(dtype).unbind(0))


@pytest.mark.parametrize("world", BY_HAND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_is_the_tree_bit_for_bit(world, dtype):
    parts = parts_of(world, dtype)
    expected = BY_HAND[world]([part.float() for part in parts])
    out = torch.empty(257)
    tree_sum([part.clone() for part in parts], out)
    assert torch.equal(out, expected)


def test_the_order_matters_in_these_numbers():
    """Otherwise the test above would show nothing."""
    parts = parts_of(4)
    assert not torch.equal(((parts[0] + parts[1]) + parts[2]) + parts[3], BY_HAND[4](parts))
    halves = parts_of(4, torch.bfloat16)
    assert not torch.equal(BY_HAND[4](halves).float(), BY_HAND[4]([half.float() for half in halves]))


@pytest.mark.parametrize("world", BY_HAND)
def test_the_result_may_be_written_over_any_of_the_parts(world):
    expected = BY_HAND[world](parts_of(world))
    for mine in range(world):
        parts = parts_of(world)
        tree_sum(parts, parts[mine])
        assert torch.equal(parts[mine], expected)


@pytest.mark.parametrize("world", BY_HAND)
def test_one_part_may_have_another_dtype_than_the_rest(world):
    parts = parts_of(world, torch.bfloat16)
    expected = BY_HAND[world]([part.float() for part in parts])
    for mine in range(world):
        mixed = [part.float() if rank == mine else part.clone() for rank, part in enumerate(parts)]
        tree_sum(mixed, mixed[mine])
        assert torch.equal(mixed[mine], expected)


def test_a_sum_in_a_narrow_dtype_is_taken_in_it():
    parts = parts_of(2, torch.bfloat16)
    out = torch.empty(257, dtype=torch.bfloat16)
    tree_sum([part.clone() for part in parts], out)
    assert torch.equal(out, parts[0] + parts[1])


def test_many_ranks_and_no_elements():
    ones = [torch.ones(3) for _ in range(1000)]
    out = torch.empty(3)
    tree_sum(ones, out)
    assert out.tolist() == [1000.0] * 3
    nothing = torch.empty(0)
    tree_sum([torch.empty(0) for _ in range(5)], nothing)
    assert nothing.numel() == 0
