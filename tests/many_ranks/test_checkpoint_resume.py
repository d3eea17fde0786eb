"""B42: a run that was saved and loaded in a new engine goes on bit by bit as if nothing had happened."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.ranks import run_ranks
from support.training import config, group, place

SAVED_AT, LAST = 7, 14  # steps; an epoch of the data has 12, and the save falls inside the first


class Noisy(nn.Module):
    """Dropout, noise of three generators, running statistics, a counter, a tied weight and a frozen one."""

    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.head = nn.Linear(width, width, bias=False)
        self.tail = nn.Linear(width, width, bias=False)
        self.tail.weight = self.head.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        x = self.tail(torch.tanh(self.head(self.norm(self.frozen(x)).to(x.dtype))))
        noise = random.random() + float(numpy.random.rand()) + 0.01 * float(self.calls % 3)
        return F.mse_loss(x.float().mean(dim=1, keepdim=True) + 0.1 * noise * torch.randn(()), y.float())


def dataset():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(48, 6, generator=generator), torch.randn(48, 1, generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def start(settings, seed, **arguments):
    import shardledger as sl

    torch.manual_seed(seed)
    model = Noisy()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
    ]
    return sl.initialize(model=model, config=settings, model_parameters=groups, training_data=dataset(), **arguments)


class Trainer:
    """A loop over epochs that is halted anywhere and goes on; its state besides the engine's is the epoch."""

    def __init__(self, engine, loader, epoch=0):
        self.engine, self.loader, self.epoch = engine, loader, epoch
        self.steps = self.micro_steps()

    def micro_steps(self):
        while True:
            self.loader.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = self.engine(x, y)
                self.engine.backward(loss * 3e38 if self.engine.micro_steps == 9 else loss)
                self.engine.step()
                entry = float(loss.detach()), self.engine.get_lr(), self.engine.loss_scale, float(x.sum())
                stepped = self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0
                norm = repr(self.engine.get_global_grad_norm()) if stepped else ""  # as text: a NaN is a NaN
                yield (*entry, norm, self.engine.skipped_steps)
            self.epoch += 1

    def run(self, until):
        """Until so many steps have been taken, skipped ones included."""
        seen = []
        while self.engine.micro_steps < until * self.engine.gradient_accumulation_steps():
            seen.append(next(self.steps))
        return seen


def twice(folder, cases):
    """For each case: the uninterrupted run, and the run of a new engine from a checkpoint of the first."""
    outcomes = []
    rank, _ = place()
    with group():
        for number, (stage, precision, more) in enumerate(cases):
            name = more.get("optimizer", "AdamW")
            settings = config(stage, optimizer=name, lr=0.02, precision=precision)
            arguments = {}
            if name == "Adafactor":  # whole matrices: a configuration cannot ask for it, a callable at stage 0 can
                del settings["optimizer"]
                arguments["optimizer"] = partial(torch.optim.Adafactor, lr=0.02)
            settings |= {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, **more.get("settings", {})}
            settings["fp16"] = {"enabled": precision == "fp16", "initial_scale_power": 6, "loss_scale_window": 3}
            torch.manual_seed(100 + rank)  # dropout differs between ranks
            random.seed(rank)
            numpy.random.seed(rank)
            engine, _, loader, _ = start(settings, 0, **arguments)
            trainer = Trainer(engine, loader)
            trainer.run(SAVED_AT)
            engine.save_checkpoint(folder, f"case{number}", client_state={"epoch": trainer.epoch, "rank": rank})
            first = trainer.run(LAST)
            ending = engine.state_dict(all_ranks=True)
            buffers = {name: b.clone() for name, b in engine.module.named_buffers()}
            engine.destroy()
            random.seed(99)
            engine, _, loader, _ = start(settings, 5, **arguments)
            _, client = engine.load_checkpoint(folder, f"case{number}")
            assert client["rank"] == 0
            second = Trainer(engine, loader, client["epoch"]).run(LAST)
            again = engine.state_dict(all_ranks=True)
            same = [k for k in ending if not torch.equal(ending[k], again[k])]
            same += [n for n, b in engine.module.named_buffers() if not torch.equal(b, buffers[n])]
            counters = engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples
            engine.destroy()
            outcomes.append((first, second, same, counters))
    return outcomes


SCHEDULE = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 5}}}
ONE_CYCLE = {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.05, "total_steps": 40}}}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((stage, "fp32", {"settings": SCHEDULE}) for stage in range(4)),
    *((stage, "bf16", {"settings": {**ONE_CYCLE, "gradient_accumulation_steps": 2}}) for stage in (0, 2, 3)),
    (3, "fp16", {"settings": SCHEDULE}),
    (1, "fp16", {}),
    (0, "fp32", {"optimizer": "Adafactor"}),
    (1, "fp32", {"optimizer": "SGD", "settings": {"shardledger": {"reproducible": True}}}),
    (2, "fp32", {"optimizer": "NAdam"}),
    (2, "fp32", {"optimizer": "Adagrad"}),
    (3, "fp32", {"optimizer": "ASGD"}),
    (1, "fp32", {"optimizer": "Rprop"}),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(twice, 2, str(tmp_path_factory.mktemp("resume")), CASES, timeout=150)


@pytest.mark.parametrize("number", range(len(CASES)), ids=str)
def test_the_continued_run_is_the_uninterrupted_one_to_the_last_bit(outcomes, number):
    for rank in outcomes:
        first, second, different, counters = rank[number]
        assert len(first) >= LAST - SAVED_AT
        assert [entry for entry, again in zip(first, second, strict=True) if entry != again] == []
        assert different == []
        assert counters[0] + counters[2] == LAST


def test_what_the_cases_contain_happens(outcomes):
    """Guards against an empty comparison: ranks drew different dropout, a step was skipped, the rate moved."""
    fp16 = outcomes[0][CASES.index((3, "fp16", {"settings": SCHEDULE}))]
    assert fp16[3][2] > 0, "no step was skipped"
    assert len({entry[2] for entry in fp16[0]}) > 1, "the loss scale did not move"
    assert len({entry[1][0] for entry in outcomes[0][0][0]}) > 3, "the learning rate did not move"
    assert outcomes[0][0][0] != outcomes[1][0][0]


def other_world(folder, save):
    """Train 4 steps and save, or load and train 4 more; what each step's global batch was and its mean loss."""
    rank, world = place()
    settings = {**config(2, optimizer="AdamW", lr=0.02), "train_batch_size": 8}
    del settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    seen = []
    with group():
        engine, _, loader, _ = start(settings, seed=0)
        engine.module.eval()  # no dropout: it cannot be the same on another number of ranks
        if not save:
            engine.load_checkpoint(folder)
        for step, (x, y) in enumerate(loader):
            if step == (4 if save else 2):
                break
            loss = engine(x, y)
            seen.append((sorted(x[:, 0].tolist()), float(loss.detach())))
            engine.backward(loss)
            engine.step()
            if save and step == 1:
                engine.save_checkpoint(folder)
        engine.destroy()
    return seen


@pytest.mark.parametrize("world", [1, 4])
def test_another_number_of_ranks_sees_the_same_samples_in_the_same_order(tmp_path, world):
    whole = run_ranks(other_world, 2, str(tmp_path), True)
    resumed = run_ranks(other_world, world, str(tmp_path), False)
    for step in range(2):
        before = sorted(value for rank in whole for value in rank[2 + step][0])
        after = sorted(value for rank in resumed for value in rank[step][0])
        assert before == after
