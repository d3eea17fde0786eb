"""The recommended configuration as a DeepSpeed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardledger.cli.plan_options import PlanOptions
from shardledger.errors import ConfigError
from shardledger.ledger.recommend import Recommendation

_OPTIMIZER_CLASSES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adadelta": "Adadelta",
    "rprop": "Rprop",
    "sgd": "SGD",
    "sgd-momentum": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "asgd": "ASGD",
}


def write_config(
    options: PlanOptions, answer: Recommendation | None, base: Mapping[str, Any] | None = None, *, quiet: bool
) -> None:
    """Write what is recommended where ``--write`` says; nothing when nothing fits or it was not asked for.

    Args:
        options: the command line.
        answer: the recommendation.
        base: the configuration that was planned with; None makes a new one from the options.
        quiet: whether stdout belongs to a program, so that notes are left out.

    Raises:
        ConfigError: the file cannot be written.
    """
    if options.write is None or answer is None or answer.row is None:
        return
    content = recommended_config(options, answer, base)
    path = Path(options.write)
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: the file cannot be written: {error.strerror or error}") from None
    if quiet:
        return
    print(f"wrote {path}")
    if answer.row.offload != "none":
        print("note: offload is not available in this version, which refuses the file; DeepSpeed reads it")
    if answer.adapters:
        print("note: the file does not add adapters; wrap the model before initialize")


def recommended_config(
    options: PlanOptions, answer: Recommendation, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """DeepSpeed's keys; what DeepSpeed does not know stands under ``shardledger``."""
    row = answer.row
    assert row is not None
    content = dict(base) if base is not None else _fresh(options)
    before = int(content.get("train_micro_batch_size_per_gpu", row.micro_batch) or row.micro_batch)
    accumulation = int(content.get("gradient_accumulation_steps", 1) or 1)
    content["train_micro_batch_size_per_gpu"] = row.micro_batch
    content["gradient_accumulation_steps"] = accumulation * max(1, before // row.micro_batch)
    content.pop("train_batch_size", None)
    zero = {**content.get("zero_optimization", {}), "stage": row.stage}
    for part in ("optimizer", "param"):
        key = f"offload_{part}"
        zero.pop(key, None)
        for device in ("cpu", "nvme"):
            if f"{part}:{device}" in row.offload:
                zero[key] = {"device": device, **({"nvme_path": "nvme"} if device == "nvme" else {})}
    content["zero_optimization"] = zero
    own = {k: v for k, v in content.get("shardledger", {}).items() if k != "memory_budget"}
    if row.checkpointing or "activation_checkpointing" in own:
        own["activation_checkpointing"] = row.checkpointing
    content.pop("shardledger", None)
    return {**content, **({"shardledger": own} if own else {})}


def _fresh(options: PlanOptions) -> dict[str, Any]:
    optimizer = options.optimizer.lower()
    arguments: dict[str, Any] = {"lr": 1e-4}
    if optimizer == "sgd-momentum":
        arguments["momentum"] = 0.9
    precision = options.precision.lower()
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 1,
        "gradient_accumulation_steps": options.accumulation or 1,
        "gradient_clipping": 1.0,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        "zero_optimization": {},
        "optimizer": {"type": _OPTIMIZER_CLASSES[optimizer], "params": arguments},
    }
