"""Predicted before the run, counted in it, on every rank: the peak within 1 %, the states to the byte.

The whole table is docs/ledger-accuracy.md, written by benchmarks/ledger_error.py.
"""

import itertools
import json
import os

import torch
from torch import nn

from support.models import FrozenRegressor, Transformer
from support.ranks import run_ranks
from support.training import group, place

STATES = ("params", "grads", "master", "optimizer")
STAGES = (0, 1, 2, 3)
#: recomputation, micro-batch, precision, accumulation
CHOICES = ((False, 1, "fp32", 1), (True, 4, "bf16", 1), (False, 2, "bf16", 3))


class Layered(FrozenRegressor):
    """Frozen layers with trainable paths beside them."""

    def __init__(self) -> None:
        super().__init__(width=48, layers=4, rank=4)


class Wide(Transformer):
    """Tied, and wide enough that small change does not count."""

    def __init__(self) -> None:
        super().__init__(vocabulary=64, width=32, layers=3, length=6)


def tokens(samples: int):
    return torch.zeros(samples, 6, dtype=torch.int64), torch.zeros(samples, 6, dtype=torch.int64)


def numbers(samples: int):
    return torch.zeros(samples, 48), torch.zeros(samples, 1)


#: name -> (model, batch, trainable)
MODELS: dict[str, tuple[type[nn.Module], object, str]] = {
    "tied": (Wide, tokens, "all"),
    "adapters": (Wide, tokens, "lora:r=2"),
    "frozen": (Layered, numbers, "all"),
}


def compare():
    from shardledger.cli.verify import measure
    from shardledger.forecast import Question, base_config, describe_model, model_maker, rehearse, variant

    rank, world = place()
    found = {}
    with group():
        for name, stage, choice in itertools.product(MODELS, STAGES, CHOICES):
            checkpointing, micro_batch, precision, accumulation = choice
            model, batch, trainable = MODELS[name]
            config = {
                "bf16": {"enabled": precision == "bf16"},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "gradient_accumulation_steps": accumulation,
            }
            question = Question(
                model=model, batch=batch, trainable=trainable, config=config, world=world, device="cpu", rank=rank
            )
            chosen = variant(base_config(question), world, stage, checkpointing, micro_batch)
            measured, engine = measure(question, chosen, 3)
            sent = sum(kind["bytes"] for kind in engine.communication()["step"].values())
            engine.destroy()
            make = model_maker(question)
            run = rehearse(question, chosen, describe_model(make), make).run
            found[(name, stage, *choice)] = (run.highest, measured, run.sent_bytes_per_step, sent)
    return found


def test_predictions_meet_measurements():
    for rank, found in enumerate(run_ranks(compare, 2, timeout=170)):
        assert len(found) == len(MODELS) * len(STAGES) * len(CHOICES)
        for key, (predicted, measured, predicted_sent, sent) in found.items():
            where = f"rank {rank}, {key}: {predicted} against {measured}"
            assert {c: predicted.by_category[c] for c in STATES} == {c: measured.by_category[c] for c in STATES}, where
            assert abs(predicted.total / measured.total - 1) < 0.01, where
            assert predicted_sent == sent, (key, predicted_sent, sent)


def test_verification_starts_ranks_of_its_own_and_compares(tmp_path, monkeypatch):
    from shardledger.cli.verify import Verification, verify

    (tmp_path / "tiny_model.py").write_text(
        "from shardledger.workload import GPT, GPTConfig\n"
        "def make(seq_len): return GPT(GPTConfig(layers=2, heads=2, width=32, context=seq_len))\n"
    )
    wanted = Verification(
        model="tiny_model:make", config=None, world=2, stage=3, checkpointing=False, micro_batch=2, seq_len=16
    )
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([known] if known else [])]))
    results = verify(wanted)
    assert [result.error for result in results] == [0.0, 0.0]
    assert all(json.dumps(result.predicted) == json.dumps(result.measured) for result in results)
