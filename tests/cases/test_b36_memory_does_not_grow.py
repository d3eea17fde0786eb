"""B36: memory grows with the iterations or with each save, or is not returned when the engine is destroyed."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.memory import live_bytes
from support.models import build, numbers
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 3)


class Distiller(nn.Module):
    """A frozen teacher and a student in one model; x[n, 3] -> loss."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = (
            nn.Sequential(nn.Linear(3, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
            for _ in range(2)
        )
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted)


def hooks_of(model):
    """Hooks on modules and on parameters."""
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
    for parameter in model.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())
    return count


def train_long(stage, steps):
    import shardledger as sl

    rank, _ = place()
    with group():
        torch.manual_seed(0)
        engine = sl.initialize(model=Distiller(), config=config(stage, optimizer="AdamW", lr=1e-3))[0]
        found = []
        for step in range(1, steps + 1):
            engine.backward(engine(numbers(2, 3, seed=7 * rank + step)[0]))
            engine.step()
            if step % 10 == 0:
                engine.state_dict()
                engine.eval()
                with torch.no_grad():
                    engine(numbers(2, 3)[0])
                engine.train()
            if step % 5 == 0:
                found.append((live_bytes(), hooks_of(engine.module)))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_and_hooks_at_step_50_are_those_at_step_5(stage):
    for found in run_ranks(train_long, 2, stage, 50, timeout=90):
        assert len(set(found)) == 1, found


def make_and_destroy(times):
    """Two engines each time: one trains, the other only answers."""
    import shardledger as sl

    found, hooks = [], []
    with group():
        for turn in range(times):
            models = [build("transformer"), build("regressor")]
            engines = [
                sl.initialize(model=model, config=config(3 - turn % 4, optimizer="AdamW", lr=1e-3))[0]
                for model in models
            ]
            batch = numbers(1, 3)
            with torch.no_grad():
                engines[1](*batch)
            engines[0].backward(engines[0](torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)))
            engines[0].step()
            for engine in engines:
                engine.destroy()
            hooks.append(sum(map(hooks_of, models)))
            del engine, engines, models, batch
            gc.collect()
            found.append(live_bytes())
    return found, hooks


def test_an_engine_returns_every_byte_and_every_hook():
    for found, hooks in run_ranks(make_and_destroy, 2, 10):
        assert hooks == [0] * 10
        assert len(set(found[2:])) == 1, found
        assert found[-1] <= found[0], found


def train_two_engines(steps):
    """A student's engine beside a teacher's, whose model is all frozen."""
    import shardledger as sl

    rank, _ = place()
    with group():
        torch.manual_seed(0)
        teacher, student = Distiller().teacher, Distiller().student
        settings = config(3, optimizer="AdamW", lr=1e-3)
        engines = [sl.initialize(model=model, config=settings)[0] for model in (teacher, student)]
        found = []
        for step in range(1, steps + 1):
            x = numbers(2, 3, seed=7 * rank + step)[0]
            with torch.no_grad():
                wanted = engines[0](x)
            engines[1].backward(F.mse_loss(engines[1](x), wanted))
            engines[1].step()
            del x, wanted
            if step % 5 == 0:
                found.append((live_bytes(), sum(hooks_of(engine.module) for engine in engines)))
        for engine in engines:
            engine.destroy()
    return found


def test_a_frozen_teacher_may_have_an_engine_of_its_own():
    for found in run_ranks(train_two_engines, 2, 20):
        assert len(set(found)) == 1, found
