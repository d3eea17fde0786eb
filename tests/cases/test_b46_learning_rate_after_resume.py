"""B46: the learning rate goes on where it was, whoever made the scheduler; a missing state is not taken for a start."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from support.models import build, data
from support.ranks import run_ranks
from support.training import config, group

CONFIGURED = {"type": "WarmupDecayLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_max_lr": 0.1}}


def shape(step):
    return (step + 1) / 5 if step < 5 else max(0.0, (25 - step) / 20)


class Shape:
    """A callable whose own state torch writes into the scheduler's."""

    def __call__(self, step):
        return shape(step)


def sequence(optimizer):
    parts = [LambdaLR(optimizer, lambda step: 0.2 * (step + 1)), LambdaLR(optimizer, lambda step: 1 / (step + 1))]
    return SequentialLR(optimizer, parts, milestones=[5])


MAKERS = {
    "configured": None,
    "function": partial(LambdaLR, lr_lambda=shape),
    "object": partial(LambdaLR, lr_lambda=Shape()),
    "sequence": sequence,
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=6),
}


def start(kind, with_scheduler=True):
    import shardledger as sl

    settings = {**config(1, lr=0.1), "train_micro_batch_size_per_gpu": 6}
    if kind == "configured" and with_scheduler:
        settings["scheduler"] = CONFIGURED
    maker = MAKERS[kind] if with_scheduler else None
    return sl.initialize(model=build("regressor"), config=settings, lr_scheduler=maker)[0]


def rates(engine, until):
    seen = []
    while engine.global_steps < until:
        engine.backward(engine(*data("regressor", 12)))
        engine.step()
        seen.append(engine.get_lr()[0])
    return seen


def runs(folder):
    found = {}
    with group():
        for kind in MAKERS:
            engine = start(kind)
            rates(engine, 7)
            engine.save_checkpoint(folder, kind)
            whole = rates(engine, 20)
            engine.destroy()
            engine = start(kind)
            engine.load_checkpoint(folder, kind)
            found[kind] = whole, rates(engine, 20)
            engine.load_checkpoint(folder, kind, load_optimizer_states=False)
            found[f"{kind} alone"] = whole, rates(engine, 20)
            engine.destroy()
        engine = start("configured", with_scheduler=False)
        engine.save_checkpoint(folder, "none")
        with pytest.warns(UserWarning, match="the engine has none"):
            engine.load_checkpoint(folder, "configured")
        engine.destroy()
        engine = start("configured")
        with pytest.raises(Exception, match="would start anew.*load_lr_scheduler_states=False"):
            engine.load_checkpoint(folder, "none")
        engine.load_checkpoint(folder, "none", load_lr_scheduler_states=False)
        engine.destroy()
    return found


def test_rates_after_a_resume_are_those_of_the_uninterrupted_run(tmp_path):
    for found in run_ranks(runs, 2, str(tmp_path)):
        for kind, (whole, resumed) in found.items():
            assert resumed == whole, kind
            assert len(set(whole)) > 5, kind
