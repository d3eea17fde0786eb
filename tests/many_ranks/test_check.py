"""``shardledger check`` as a user runs it: a clean model passes, a model that ranks cannot train as one process is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
EQUAL_TO_THE_BIT = "every tensor bit for bit"

MODELS = '''
import torch
import torch.nn.functional as F
from torch import nn
from shardledger.workload import GPT, gpt_config

class Net(nn.Module):
    """Tied, partly frozen, partly unused, with a batch norm and dropout."""

    def __init__(self, kind, width=24):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(256, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("average", torch.zeros(width))
        self.generator = torch.Generator().manual_seed(1234)

    def drop(self, x):
        if self.kind == "own_generator":
            return x * (torch.rand(x.shape, generator=self.generator) > 0.1) / 0.9
        return F.dropout(x, 0.1)

    def forward(self, tokens, targets):
        x = self.drop(torch.tanh(self.hidden(self.frozen(self.table(tokens)))))
        y = self.norm(x.flatten(0, 1))
        if self.kind == "moving_average":
            self.average.lerp_(x.detach().float().mean((0, 1)), 0.1)
            y = y - self.average
        logits = self.head(y.to(self.head.weight.dtype))
        return F.cross_entropy(logits.float(), targets.flatten())

def clean(): return Net("clean")
def own_generator(): return Net("own_generator")
def moving_average(): return Net("moving_average")
def gpt(seq_len):
    model = GPT(gpt_config("1m", context=seq_len))
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1))
    return model
'''

BROKEN_ENGINE = """
from models import *
from shardledger.runtime import step

hand_over = step.Stepper._hand_over

def without_one(self, *arguments):
    hand_over(self, *arguments)
    for piece in self._pieces:
        if piece.name == "hidden.bias":
            piece.values.grad = None

step.Stepper._hand_over = without_one
"""


def settings(stage: int, precision: str = "fp32", accumulation: int = 1, clipping: float = 0.0) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-4}},
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text(BROKEN_ENGINE)
    (tmp_path / "text.txt").write_text("".join(f"{n} is not {n * n}\n" for n in range(2000)))
    return tmp_path


def check(folder: Path, model: str, config: dict, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "ds.json").write_text(json.dumps(config))
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "shardledger", "check", model, "--config", "ds.json", "--data", "text.txt"]
    return subprocess.run(
        [*command, "--device", "cpu", "--seq-len", "16", *more],
        cwd=folder,
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    [(0, "fp32", 2), (1, "bf16", 2), (2, "fp32", 1), (3, "bf16", 2)],
)
def test_a_gpt_with_dropout_is_equal_to_the_bit(folder, stage, precision, accumulation):
    result = check(folder, "models:gpt", settings(stage, precision, accumulation), "--steps", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1].startswith(f"equal: 3 steps of 2 ranks, stage {stage}, {precision}, cpu")
    assert EQUAL_TO_THE_BIT in result.stdout


def test_tied_frozen_unused_and_normalised_weights_pass_on_four_ranks(folder):
    result = check(folder, "models:clean", settings(3), "--steps", "2", "--nproc", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "note: buffers differ between ranks" in result.stdout and "norm.running_mean" in result.stdout
    assert EQUAL_TO_THE_BIT in result.stdout


@pytest.mark.parametrize(("ranks", "precision"), [("3", "fp32"), ("2", "bf16")])
def test_sums_that_round_differently_are_equal(folder, ranks, precision):
    # The engine's norm, and so its clipping coefficient, is rounded otherwise than the reference's.
    result = check(folder, "models:gpt", settings(2, precision, clipping=1.0), "--steps", "3", "--nproc", ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("equal: ")


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_dropout_that_is_not_seeded_per_rank_is_found(folder, stage, precision):
    result = check(folder, "models:own_generator", settings(stage, precision))
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr == ""
    verdict = result.stdout[result.stdout.index("different: ") :]
    assert verdict.startswith("different: step 1, rank 1, micro-batch 1 of 1: the loss is ")
    assert "in one process (difference " in verdict
    assert "The first tensor that differs after that step: weight table.weight at [" in verdict
    assert "a random generator of the model's own" in verdict


def test_a_moving_average_that_drifts_apart_is_found(folder):
    result = check(folder, "models:moving_average", settings(2), "--steps", "3")
    assert result.returncode == 1
    assert "different: step 3, rank 1: buffer average is no longer the same on all ranks" in result.stdout


def test_a_weight_that_the_engine_does_not_update_is_found(folder):
    result = check(folder, "broken:clean", settings(1))
    assert result.returncode == 1
    assert "different: step 1, weight hidden.bias at [" in result.stdout
    assert "(updated on rank " in result.stdout
    assert "Losses and gradient norm were equal" in result.stdout


def test_a_mistake_is_found_before_any_rank_exists(folder):
    result = check(folder, "models:claen", settings(2))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and "Did you mean models:clean" in result.stderr
    assert result.stdout == ""


def test_under_another_launcher_every_rank_ends_with_the_verdict(folder):
    (folder / "ds.json").write_text(json.dumps(settings(2)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = [
        "-m",
        "shardledger",
        "check",
        "--config",
        "ds.json",
        "--data",
        "text.txt",
        "--seq-len",
        "16",
        "--steps",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, *ours, "--device", "cpu", "models:own_generator"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("different: ") == 1
    assert result.stderr.count("exitcode  : 1 ") >= 1  # as the launcher reports it
