"""One training run of the engine on this rank, and the DeepSpeed JSON that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from support.models import build, data
from support.oracle import micro_batches


@dataclass(frozen=True)
class Job:
    """One run: a model of `support.models` by name, its JSON, and how long to train on how many fixed samples."""

    model: str
    settings: dict[str, Any]
    steps: int = 5
    samples: int = 12
    seed: int = 0


@dataclass
class Outcome:
    """What one run showed on one rank. `weights` is engine.state_dict(): full on rank 0, empty elsewhere."""

    weights: dict[str, Tensor]
    losses: list[list[float]] = field(default_factory=list)  # [step][micro-step]
    norms: list[float | None] = field(default_factory=list)
    communication: dict[str, Any] = field(default_factory=dict)  # of the last step
    ledger: dict[str, Any] = field(default_factory=dict)


def config(
    stage: int,
    *,
    optimizer: str = "SGD",
    lr: float = 0.1,
    accumulation: int = 1,
    precision: str = "fp32",
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A DeepSpeed JSON as a dict; `zero` goes into zero_optimization, `optimizer_params` into params, `more` on top."""
    parameters = {"lr": lr, **more.pop("optimizer_params", {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "optimizer": {"type": optimizer, "params": parameters},
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }


def place() -> tuple[int, int]:
    """(rank, world) as the environment says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def group(seconds: float = 60.0) -> Iterator[None]:
    """One process group for many engines: what the user made, the engine uses and leaves alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    model: nn.Module, settings: dict[str, Any], batch: Sequence[Tensor], steps: int = 5, **arguments: Any
) -> Outcome:
    """Initialise, train `steps` steps on this rank's part of the global batch, return what happened, destroy."""
    import shardledger as sl

    rank, world = place()
    accumulation = settings["gradient_accumulation_steps"]
    low = settings.get("bf16", {}).get("enabled", False)
    micro = micro_batches(
        [p.to(torch.bfloat16) if low and p.is_floating_point() else p for p in batch], rank, world, accumulation
    )
    engine = sl.initialize(
        model=model, config={**settings, "train_micro_batch_size_per_gpu": len(micro[0][0])}, **arguments
    )[0]
    outcome = Outcome({})
    for _ in range(steps):
        losses = []
        for part in micro:
            loss = engine(*part)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        outcome.losses.append(losses)
        outcome.norms.append(engine.get_global_grad_norm())
    outcome.communication = engine.communication()
    outcome.ledger = engine.ledger()
    outcome.weights = engine.state_dict()
    engine.destroy()
    return outcome


def train_all(jobs: Sequence[Job]) -> list[Outcome]:
    """Several runs one after another in one process group: what `run_ranks` is given to compare configurations."""
    with group():
        return [
            train(build(job.model, job.seed), job.settings, data(job.model, job.samples), job.steps) for job in jobs
        ]


def mean_losses(outcomes: Sequence[Outcome]) -> list[float]:
    """Per step the mean over ranks and micro-steps; `outcomes` are one run's, rank by rank."""
    steps = zip(*(outcome.losses for outcome in outcomes), strict=True)
    return [sum(map(sum, step)) / sum(map(len, step)) for step in steps]
