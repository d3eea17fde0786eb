"""Gradients and the optimizer are in the engine: who works on p.grad or on the optimizer instead is told."""

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import EngineStateError
from support.models import build, data
from support.training import config

BATCH = [part[:4] for part in data("transformer", 12)]


def start(stage, accumulation=1, model=None):
    settings = {
        **config(stage, optimizer="AdamW", lr=0.01, accumulation=accumulation),
        "train_micro_batch_size_per_gpu": 4,
    }
    return sl.initialize(model=model or build("transformer"), config=settings)[0]


def clear(engine):
    engine.module.zero_grad()


def clear_one(engine):
    engine.module.blocks[1].mix.weight.grad = None


def replace(engine):
    engine.module.position.grad = torch.zeros(6, 10)


@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (clear, "'position' was cleared.*engine.zero_grad"),
        (clear_one, "'blocks.1.mix.weight' was cleared"),
        (replace, "'position' was set.*safe_set_full_grad"),
    ],
)
def test_a_change_of_p_grad_is_refused_at_the_next_use_and_training_goes_on(touch, words, stage):
    right = start(stage, accumulation=2)
    for _ in range(2):
        right.backward(right(*BATCH))
        right.step()
    engine = start(stage, accumulation=2)
    engine.backward(engine(*BATCH))
    touch(engine)
    with pytest.raises(EngineStateError, match=words):
        engine.step()  # not at the boundary: counts only
        engine.backward(engine(*BATCH))
    for _ in range(2):  # the window began anew
        engine.backward(engine(*BATCH))
        engine.step()
    engine.backward(engine(*BATCH))
    touch(engine)
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(EngineStateError, match=words):
        engine.step()
    assert engine.global_steps == 1
    ours, theirs = engine.state_dict(), right.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    engine.destroy()
    right.destroy()


def test_gradients_that_the_model_brings_along_are_not_of_the_first_window():
    model = build("transformer")
    model(*BATCH).backward()
    engine, right = start(0, model=model), start(0)
    for one in (engine, right):
        one.backward(one(*BATCH))
        one.step()
    assert engine.get_global_grad_norm() == right.get_global_grad_norm()
    engine.module.position.grad = torch.ones(6, 10)
    with pytest.raises(EngineStateError, match="'position' was set"):
        engine.backward(engine(*BATCH))
    engine.destroy()
    right.destroy()


def other_layout(engine):
    model = build("transformer")
    optimizer = torch.optim.AdamW(model.parameters())
    model(*BATCH).backward()
    optimizer.step()
    engine.optimizer.load_state_dict(optimizer.state_dict())


def new_group(engine):
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def new_optimizer(engine):
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (other_layout, r"'exp_avg' of shape \(6, 10\) does not fit .* 'position', \(60,\).*load_checkpoint"),
        (new_group, "hold 41 tensors now, and the engine gave it 40.*model_parameters"),
        (new_optimizer, "engine.optimizer was replaced"),
    ],
)
def test_a_change_of_the_optimizer_that_would_have_no_effect_is_refused(touch, words, stage):
    engine = start(stage)
    engine.backward(engine(*BATCH))
    with pytest.raises(EngineStateError, match=words):
        touch(engine)
        engine.step()
    engine.destroy()


def test_an_optimizers_own_state_can_be_loaded_back():
    engine = start(3)
    for _ in range(2):
        engine.backward(engine(*BATCH))
        engine.step()
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert engine.global_steps == 2
    engine.destroy()
