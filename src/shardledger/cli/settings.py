"""One run, decided and checked: made from the command line before any rank is started, and again in every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardledger.cli.ranks import rank_of, world_of

DEMO_RANKS = 2
DEMO_SEQ_LEN = 64
DEMO_MICRO_BATCH = 16
DEMO_EVALUATIONS = 4
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-4}}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``demo`` and ``train`` have in common on the command line; ``nproc`` None: not given."""

    data: str | None
    steps: int
    seed: int
    device: str
    out: str | None
    nproc: int | None
    resume: str | None = None
    """``"latest"``, ``"auto"`` or a path; None starts anew."""
    trace: str | None = None
    """File for the trace of rank 0."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything a rank needs to know about the run. ``config`` is a checked dict in DeepSpeed's key names."""

    name: str
    model: str
    config: Mapping[str, Any]
    options: Options
    world: int
    seq_len: int
    eval_every: int  # 0: only before the first step and after the last one
    notes: tuple[str, ...] = field(default=())  # lines for the user, printed by rank 0


def demo_settings(options: Options, *, stage: int, precision: str) -> RunSettings:
    """The demo as a DeepSpeed-style config. Raises ConfigError."""
    world, source = _world(options, DEMO_RANKS)
    warmup = max(1, min(40, options.steps // 5))
    config = {
        "train_micro_batch_size_per_gpu": DEMO_MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "shardledger": {"timeout_s": 60},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": max(options.steps, warmup + 1),
                "warmup_num_steps": warmup,
                "warmup_min_ratio": 0.05,
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
    }
    return RunSettings(
        name=f"demo-stage{stage}",
        model="gpt:1m",
        config=_checked(config, world, source),
        options=options,
        world=world,
        seq_len=DEMO_SEQ_LEN,
        eval_every=max(1, options.steps // DEMO_EVALUATIONS),
        notes=_notes(options, world),
    )


def train_settings(options: Options, *, config: str, model: str, seq_len: int, eval_every: int) -> RunSettings:
    """The user's config, model and text. Raises ConfigError with every problem of the config."""
    world, source = _world(options, 1)
    checked = _checked(config, world, source)
    notes = _notes(options, world)
    if checked.get("optimizer") is None:
        checked = _checked({**checked, "optimizer": DEFAULT_OPTIMIZER}, world, source)
        notes += ('the config has no "optimizer" section: AdamW with lr 3e-4 is used',)
    return RunSettings(
        name="train",
        model=model,
        config=checked,
        options=options,
        world=world,
        seq_len=seq_len,
        eval_every=eval_every,
        notes=notes,
    )


def with_budget(settings: RunSettings, memory_budget: str) -> RunSettings:
    """The run with its stage chosen by ``--memory-budget``, whatever stage the config says.

    Raises:
        ConfigError: the budget is no memory size.
    """
    from shardledger.cli.plan_options import read
    from shardledger.config.quantities import byte_size

    read("--memory-budget", memory_budget, byte_size)
    given = settings.config.get("shardledger", {})
    own = {key: value for key, value in given.items() if key not in ("unit_stages", "recomputed_units")}
    config = {
        **settings.config,
        "zero_optimization": {**settings.config.get("zero_optimization", {}), "stage": "auto"},
        "shardledger": {**own, "memory_budget": memory_budget},
    }
    return replace(settings, config=_checked(config, settings.world, "--nproc"))


def _world(options: Options, default: int) -> tuple[int, str]:
    if rank_of(os.environ) is not None:
        return world_of(os.environ)
    return (default, "--nproc's default") if options.nproc is None else (options.nproc, "--nproc")


def _notes(options: Options, world: int) -> tuple[str, ...]:
    if options.nproc is not None and options.nproc != world:
        return (f"--nproc {options.nproc} has no effect: the launcher around this command started {world} ranks",)
    return ()


def _checked(config: str | Mapping[str, Any], world: int, source: str) -> dict[str, Any]:
    from shardledger.config import load_config  # pydantic is not needed for --help

    return dict(load_config(config, world=world, world_source=source).to_dict())
