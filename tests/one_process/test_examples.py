"""The files in examples/ run: SLURM and Ray are played by the little of them that the examples use."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import typer

from shardledger.cli.main import app
from shardledger.config import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_every_example_is_tested_here():
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.suffix != ".pyc" and path.is_file()) == [
        "ray_train.py",
        "two_machines.sbatch",
    ]


def test_the_batch_script_is_a_shell_script_whose_command_the_command_line_understands():
    path = EXAMPLES / "two_machines.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text().replace("\\\n", " ")
    words = shlex.split(re.search(r"^srun .*$", text, re.MULTILINE)[0])
    at = words.index("shardledger")
    assert words[at - 2 : at] == ["python", "-m"] and words[at + 1] == "train"
    command = typer.main.get_command(app).commands["train"]
    with command.make_context("train", words[at + 2 :]) as context:  # refuses an option that does not exist
        assert context.params["resume"] == "auto" and context.params["out"] and context.params["config"]
    assert "MASTER_ADDR" in text


class Trainer:
    """The part of Ray's TorchTrainer that its documentation promises: one worker, in this process."""

    def __init__(self, train_loop_per_worker, *, train_loop_config, torch_config, scaling_config, run_config):
        self.run = lambda: train_loop_per_worker(train_loop_config)
        assert 0 < torch_config.timeout_s < 1800  # its own default
        assert scaling_config.num_workers > 1 and run_config.storage_path and run_config.failure_config.max_failures

    def fit(self):
        self.run()


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray; returns what was reported."""
    reported = []
    package, train, in_torch = ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    train.ScalingConfig = lambda *, num_workers, use_gpu: SimpleNamespace(num_workers=num_workers, use_gpu=use_gpu)
    train.RunConfig = lambda *, name, storage_path, failure_config: SimpleNamespace(**inspect.currentframe().f_locals)
    train.FailureConfig = lambda *, max_failures: SimpleNamespace(max_failures=max_failures)
    train.report = lambda metrics, checkpoint=None: reported.append(metrics)
    in_torch.TorchConfig = lambda *, timeout_s: SimpleNamespace(timeout_s=timeout_s)
    in_torch.TorchTrainer, in_torch.get_device = Trainer, lambda: torch.device("cpu")
    package.train, train.torch = train, in_torch
    for module in (package, train, in_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return reported


def test_the_ray_example_trains_and_goes_on_from_its_checkpoint(ray, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLES / "ray_train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    load_config(example.CONFIG, world=16)
    monkeypatch.setattr(example, "SHAPE", example.GPTConfig(layers=1, heads=1, width=8, context=8))
    monkeypatch.setattr(example, "SAVE_EVERY", 2)
    for steps in (2, 4):
        monkeypatch.setattr(example, "STEPS", steps)
        if steps == 2:
            with pytest.warns(UserWarning, match="nothing was loaded"):
                example.main(str(tmp_path))
        else:
            example.main(str(tmp_path))
    assert [report["step"] for report in ray] == [1, 2, 3, 4]
    assert all(0 < report["loss"] < 10 for report in ray)
