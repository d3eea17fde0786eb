"""B28: a weight used outside its own module while it is sharded must be right or refused by name, never a number."""

import pytest
import torch
from torch import nn

from support.models import numbers
from support.oracle import largest_difference, make_optimizer, micro_batches, reference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


class Inner(nn.Module):
    """A block; hands its weight out when asked."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 4)

    def forward(self, x, hand_out=False):
        out = torch.tanh(self.linear(x)) + self.plain(x)
        if hand_out == "dict":
            return {"out": out, "weight": self.linear.weight}
        if hand_out == "tuple":
            return out, (self.linear.weight, self.linear.bias)
        return out


class Parent(nn.Module):
    """Uses its children's weights from outside, in the way `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x, y):
        other = self.blocks[1].linear
        if self.kind == "bias":
            x = x + other.bias
        elif self.kind == "matmul":
            x = x @ other.weight.T
        elif self.kind == "functional":
            x = nn.functional.linear(x, other.weight, other.bias)
        elif self.kind == "dict":
            found = self.blocks[0](x, "dict")
            x = found["out"] @ found["weight"].T
        elif self.kind == "tuple":
            out, (weight, bias) = self.blocks[0](x, "tuple")
            x = out @ weight.T + bias
        elif self.kind == "penalty":
            return self.finish(x, y) + 0.1 * other.weight.pow(2).sum()
        elif self.kind == "child":
            x = self.blocks[1].linear(x)
        return self.finish(x, y)

    def finish(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x.sum(dim=1, keepdim=True), y)


KINDS = ("bias", "matmul", "functional", "dict", "tuple", "penalty", "child")


def make(kind):
    torch.manual_seed(0)
    return Parent(kind)


def use_elsewhere(kind):
    import shardledger as sl

    found = {}
    part = micro_batches(numbers(12, 4), *place(), 1)[0]
    with group(30):
        for stage in STAGES:
            settings = {**config(stage, lr=0.02), "train_micro_batch_size_per_gpu": len(part[0])}
            engine = sl.initialize(model=make(kind), config=settings)[0]
            try:
                for _ in range(3):
                    engine.backward(engine(*part))
                    engine.step()
                found[stage] = engine.state_dict()
            except sl_error() as error:
                found[stage] = str(error)
            engine.destroy()
    return found


def sl_error():
    from shardledger.errors import ShardledgerError

    return ShardledgerError


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_used_elsewhere_is_right_or_refused_by_name(kind):
    right = reference(make(kind), numbers(12, 4), make_optimizer("SGD", lr=0.02), steps=3).weights
    for rank, found in enumerate(run_ranks(use_elsewhere, 2, kind)):
        for stage, outcome in found.items():
            where = f"{kind}, stage {stage}, rank {rank}"
            if isinstance(outcome, str):
                assert stage == 3, f"{where}: {outcome}"
                assert "blocks." in outcome and ".linear." in outcome, f"{where} names no parameter: {outcome}"
                assert "units" in outcome, f"{where} names no cure: {outcome}"
            elif rank == 0:
                assert largest_difference(outcome, right) <= 1e-6, where


def use_as_one_unit(kind):
    import shardledger as sl

    part = micro_batches(numbers(12, 4), *place(), 1)[0]
    found = {}
    with group(30):
        for way, more in (("units", {"shardledger": {"units": []}}), ("kept", {})):
            zero = {"stage3_param_persistence_threshold": 10**6} if way == "kept" else None
            settings = {**config(3, lr=0.02, zero=zero, **more), "train_micro_batch_size_per_gpu": len(part[0])}
            engine = sl.initialize(model=make(kind), config=settings)[0]
            for _ in range(3):
                engine.backward(engine(*part))
                engine.step()
            found[way] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_cures_that_the_error_names_work(kind):
    right = reference(make(kind), numbers(12, 4), make_optimizer("SGD", lr=0.02), steps=3).weights
    for way, weights in run_ranks(use_as_one_unit, 2, kind)[0].items():
        assert largest_difference(weights, right) <= 1e-6, way
