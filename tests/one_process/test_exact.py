"""Sums that do not depend on order or on how elements are spread."""

import itertools
import math

import pytest
import torch

from shardledger.runtime import exact
from shardledger.runtime.treesum import TreeSum


def norm_of(parts):
    bound = max(exact.largest([part]) for part in parts)
    return exact.norm([exact.square_sum([part], bound) for part in parts], bound)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("numel", [1, 7, 1000, 3_000_001])
def test_the_norm_is_accurate_and_the_same_for_every_cut(numel, scale):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    whole = norm_of([values])
    assert whole == pytest.approx(float(torch.linalg.vector_norm(values, dtype=torch.float64)), rel=1e-12)
    for count in (2, 3, 4):
        assert norm_of([p for p in values.tensor_split(count) if p.numel()]) == whole
    assert norm_of([values.flip(0)]) == whole


def test_small_values_beside_large_ones_count():
    values = torch.cat([torch.ones(1), torch.full((10_000,), 1e-4)])
    assert norm_of([values]) == pytest.approx(math.sqrt(1 + 1e-8 * 10_000), rel=1e-7)


def test_largest_tells_nan_and_inf():
    assert exact.largest([torch.tensor([1.0, -3.0]), torch.empty(0)]) == 3.0
    assert math.isinf(exact.largest([torch.tensor([1.0, -math.inf])]))
    assert math.isnan(exact.largest([torch.tensor([1.0]), torch.tensor([math.nan, math.inf])]))


@pytest.mark.parametrize("count", range(1, 18))
def test_tensors_are_added_as_a_balanced_tree(count):
    def tree(names):
        if len(names) == 1:
            return names[0]
        split = 1 << ((len(names) - 1).bit_length() - 1)
        return f"({tree(names[:split])}+{tree(names[split:])})"

    class Name:
        def __init__(self, text):
            self.text = text

        def add_(self, other):
            self.text = f"({self.text}+{other.text})"
            return self

    names = list(itertools.islice((f"{i}" for i in itertools.count()), count))
    total = TreeSum()
    for name in names:
        total.add(Name(name))
    assert total.total().text == tree(names)
