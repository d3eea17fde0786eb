"""Offload that cannot work is refused by name before training; what it leaves behind, and whose."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import ConfigError, PlanError


def start(zero, optimizer=None, model=None):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    return sl.initialize(model=model or nn.Linear(4, 4), config=config, optimizer=optimizer, device="cpu")[0]


class CountsInGroup(torch.optim.SGD):
    """Keeps its step count beside the parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class CountsFromTheStart(CountsInGroup):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("step", 0)


def test_an_optimizer_that_counts_in_its_groups_is_refused():
    with pytest.raises(ConfigError, match="changes 'step' of its param group"):
        start({"stage": 2, "offload_optimizer": {"device": "cpu"}}, optimizer=CountsFromTheStart)
    start({"stage": 2}, optimizer=CountsFromTheStart).destroy()


def test_an_optimizer_that_needs_whole_parameters_is_refused():
    with pytest.raises(ConfigError, match="offload steps parts of them"):
        start({"stage": 0, "offload_optimizer": {"device": "cpu"}}, optimizer=torch.optim.Adafactor)


def test_parameters_alone_can_leave_only_when_some_are_frozen():
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    with pytest.raises(PlanError, match="moves frozen parameters alone"):
        start(zero)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    engine = start(zero, model=model)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


def test_on_a_cpu_the_run_says_once_that_host_memory_saves_nothing(capsys):
    start({"stage": 2, "offload_optimizer": {"device": "cpu"}}).destroy()
    assert capsys.readouterr().out.count("offload to cpu saves nothing on cpu") == 1


def test_a_program_that_ends_by_an_error_leaves_nothing_and_others_files_stay(tmp_path):
    (tmp_path / "theirs").write_text("kept")
    script = (
        "import os, sys, torch, shardledger as sl\n"
        "zero = {'stage': 3, 'offload_optimizer': {'device': 'nvme', 'nvme_path': sys.argv[1]}}\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': zero,\n"
        "          'optimizer': {'type': 'AdamW', 'params': {'lr': 0.1}}}\n"
        "engines = [sl.initialize(model=torch.nn.Linear(4, 4), config=config, device='cpu')[0] for _ in range(2)]\n"
        "print(len(os.listdir(sys.argv[1])))\n"
        "raise ValueError('the user made a mistake')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and "the user made a mistake" in ended.stderr
    assert ended.stdout.split()[-1] == "3", "each engine has a folder of its own"
    assert os.listdir(tmp_path) == ["theirs"]
