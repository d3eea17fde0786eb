"""Between steps a quick look at the module suffices, and it misses nothing of what the thorough one sees."""

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import EngineStateError


def swap(model):
    first, second = model[0], model[2]
    first.weight, second.weight = second.weight, first.weight


CHANGES = {
    "swapped": (swap, "was replaced"),
    "module in its place": (lambda m: setattr(m, "2", nn.Linear(4, 4)), "was added"),
    "module within": (lambda m: m[0].add_module("more", nn.Linear(1, 1)), "was added"),
    "parameter added": (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "was added"),
    "moved": (lambda m: setattr(m[2].bias, "data", torch.zeros(4)), "other memory"),
    "unfrozen": (lambda m: m[1].weight.requires_grad_(), "has been unfrozen"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_steps_is_refused_by_name(change):
    act, message = CHANGES[change]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = sl.initialize(model=model, config=config, device="cpu")[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    watch = engine._live().watch
    assert watch._is_as_it_was()
    act(model)
    with pytest.raises(EngineStateError, match=message):
        engine(torch.ones(1, 4))
    engine.destroy()


def test_an_edit_of_a_16_bit_weight_reaches_its_master_after_steps_too():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    model = nn.Linear(4, 4)
    engine = sl.initialize(model=model, config=config, device="cpu")[0]
    for number in range(4):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        with torch.no_grad():
            model.weight.fill_(number)
    engine(torch.ones(1, 4))
    assert engine.state_dict()["weight"].eq(3).all()
    engine.destroy()
