"""Learning-rate schedules under DeepSpeed's names give DeepSpeed's values."""

import math

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.config import load_config
from shardledger.errors import ConfigError
from shardledger.runtime.schedulers import build_scheduler
from support.training import config

#: What DeepSpeed 0.19.8 used in ten steps of WarmupLR, linear, 10 steps from 0 to 0.001, and had after each of them.
RECORDED_USED = [0.0, 0.0, 0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008]
RECORDED_AFTER = [0.0, 0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008, 0.0009000000000000001]
LINEAR = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 10, "warmup_type": "linear"}


def used(name: str, params: dict, steps: int, lrs=(0.5,)) -> list[float] | list[list[float]]:
    """The learning rate of each of ``steps`` steps; with several groups a list for each step."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    optimizer = torch.optim.SGD(groups)
    section = load_config({"scheduler": {"type": name, "params": params}}).scheduler
    assert section is not None
    scheduler = build_scheduler(*section.resolved(), optimizer)
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found if len(lrs) > 1 else [values[0] for values in found]


def by_formula(steps: int, value) -> list[float]:
    """DeepSpeed counts iterations from -1, and uses iteration 0's value for the first step too."""
    return [value(max(step - 1, 0)) for step in range(steps)]


def test_linear_warmup_uses_the_values_deepspeed_recorded():
    assert used("WarmupLR", LINEAR, 10) == RECORDED_USED


def test_the_engine_steps_the_schedule_as_deepspeed_did():
    model = nn.Linear(3, 1)
    settings = {**config(1, optimizer="AdamW", lr=0.001), "scheduler": {"type": "WarmupLR", "params": LINEAR}}
    engine, optimizer, _, scheduler = sl.initialize(model=model, config=settings)
    before, after = [], []
    for _ in range(10):
        before.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        after.append(engine.get_lr()[0])
    assert before == RECORDED_USED
    assert after == RECORDED_AFTER
    assert optimizer.param_groups[0]["lr"] == RECORDED_AFTER[-1]
    assert scheduler.get_last_lr() == [RECORDED_AFTER[-1]]
    engine.destroy()


def test_the_schedule_advances_once_per_step_not_per_micro_batch():
    settings = {**config(0, accumulation=3), "scheduler": {"type": "WarmupLR", "params": LINEAR}}
    engine = sl.initialize(model=nn.Linear(3, 1), config=settings)[0]
    found = []
    for _ in range(9):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        found.append(engine.get_lr()[0])
    assert found == [0.0, 0.0, 0.0] + [0.0] * 2 + [0.0001] * 3 + [0.0002]
    engine.destroy()


def test_logarithmic_warmup_is_the_default():
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 6}
    expected = by_formula(12, lambda i: 0.1 + 0.8 * (math.log(i + 1) / math.log(6) if i < 6 else 1.0))
    assert used("WarmupLR", params, 12) == pytest.approx(expected, rel=1e-12)
    assert used("WarmupLR", {**params, "warmup_type": "log"}, 12) == used("WarmupLR", params, 12)


def test_after_the_warmup_the_rate_stays():
    assert used("WarmupLR", LINEAR, 15)[-4:] == [0.001] * 4


def test_a_warmup_has_at_least_two_steps():
    params = {**LINEAR, "warmup_num_steps": 1}
    assert used("WarmupLR", params, 5) == used("WarmupLR", {**LINEAR, "warmup_num_steps": 2}, 5)


def test_a_schedule_can_begin_later():
    begun = {**LINEAR, "last_batch_iteration": 5}
    assert used("WarmupLR", begun, 4) == pytest.approx([0.0005, 0.0006, 0.0007, 0.0008], rel=1e-12)


def test_the_optimizers_rate_is_the_peak_when_none_is_given_for_each_group():
    params = {**LINEAR, "warmup_max_lr": None, "warmup_num_steps": 4}
    found = used("WarmupLR", params, 7, lrs=(0.4, 0.04))
    expected = by_formula(7, lambda i: min(i / 4, 1.0))
    assert found == [[pytest.approx(0.4 * factor), pytest.approx(0.04 * factor)] for factor in expected]


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_decay_falls_linearly_to_the_minimum_and_stays_there(kind):
    params = {
        "total_num_steps": 20, "warmup_min_lr": 0.01, "warmup_max_lr": 0.11, "warmup_num_steps": 5, "warmup_type": kind,
    }  # fmt: skip

    def factor(i: int) -> float:
        if i < 5:
            return i / 5 if kind == "linear" else math.log(i + 1) / math.log(5)
        return max(0.0, (20 - i) / 15)

    found = used("WarmupDecayLR", params, 30)
    assert found == pytest.approx(by_formula(30, lambda i: 0.01 + 0.1 * factor(i)), rel=1e-12)
    assert found[6] == pytest.approx(0.11) and found[21:] == [0.01] * 9


def test_cosine_warms_up_from_a_ratio_and_ends_at_a_ratio_of_the_optimizers_rate():
    params = {
        "total_num_steps": 24, "warmup_min_ratio": 0.2, "warmup_num_steps": 4, "cos_min_ratio": 0.05,
        "warmup_type": "linear",
    }  # fmt: skip

    def ratio(i: int) -> float:
        if i < 4:
            return 0.2 + 0.8 * i / 4
        return 0.05 + 0.95 * (1 + math.cos(math.pi * (i - 4 + 1) / 20)) / 2

    found = used("WarmupCosineLR", params, 25, lrs=(0.5, 2.0))
    expected = by_formula(25, ratio)
    assert found == [[pytest.approx(0.5 * r), pytest.approx(2.0 * r)] for r in expected]
    assert max(max(pair) for pair in found) <= 2.0


def test_cosine_stays_at_its_floor_after_the_last_step():
    params = {"total_num_steps": 10, "warmup_num_steps": 2, "cos_min_ratio": 0.1}
    assert used("WarmupCosineLR", params, 30)[11:] == pytest.approx([0.05] * 19)


def test_classes_of_torch_are_taken_by_name():
    assert used("StepLR", {"step_size": 2, "gamma": 0.1}, 5) == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])


@pytest.mark.parametrize(
    ("name", "params", "parts"),
    [
        ("NoSuchLR", {}, ("scheduler.type", "'NoSuchLR'", "WarmupLR")),
        ("Optimizer", {}, ("scheduler.type", "'Optimizer'")),
        ("StepLR", {"stepsize": 2}, ("scheduler.params", "StepLR", "stepsize")),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_key(name, params, parts):
    with pytest.raises(ConfigError) as raised:
        build_scheduler(name, params, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert all(part in str(raised.value) for part in parts)
