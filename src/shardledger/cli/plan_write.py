"""The recommended configuration as a DeepSpeed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardledger.cli.plan_options import PlanOptions, optimizer_of, precision_of
from shardledger.errors import ConfigError
from shardledger.ledger.recommend import Recommendation
from shardledger.ledger.row import Row

NVME_PATH = "offload"
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


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the written configuration starts from."""

    content: Mapping[str, Any]
    """In DeepSpeed's keys."""
    micro_batch: int
    accumulation: int


def write_config(file: str | None, answer: Recommendation | None, base: Base, *, quiet: bool) -> None:
    """Write what is recommended into ``file``; nothing when nothing fits or no file was asked for.

    Args:
        file: where to.
        answer: the recommendation.
        base: what was planned with.
        quiet: whether stdout belongs to a program, so that notes are left out.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is None or answer is None or answer.row is None:
        return
    text = json.dumps(recommended_config(answer, base), indent=2) + "\n"
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {file}: the file cannot be written: {error.strerror or error}") from None
    if quiet:
        return
    print(f"wrote {file}")
    if "nvme" in answer.row.offload:
        print(f'note: nvme_path is "{NVME_PATH}": name a folder on a local disk')
    if answer.adapters:
        print("note: the file does not add adapters; wrap the model before initialize")


def recommended_config(answer: Recommendation, base: Base) -> dict[str, Any]:
    """DeepSpeed's keys; what DeepSpeed does not know stands under ``shardledger``. The global batch stays what it was."""
    row = answer.row
    assert row is not None
    content = {key: value for key, value in base.content.items() if key not in ("train_batch_size", "shardledger")}
    content["train_micro_batch_size_per_gpu"] = row.micro_batch
    content["gradient_accumulation_steps"] = max(1, base.accumulation * base.micro_batch // row.micro_batch)
    zero = {**(content.get("zero_optimization") or {}), "stage": row.stage}
    for part in ("optimizer", "param"):
        key = f"offload_{part}"
        zero.pop(key, None)
        for device in ("cpu", "nvme"):
            if f"{part}:{device}" in row.offload:
                zero[key] = {"device": device, **({"nvme_path": NVME_PATH} if device == "nvme" else {})}
    content["zero_optimization"] = zero
    chosen = ("memory_budget", "unit_stages", "recomputed_units")
    own = {k: v for k, v in (base.content.get("shardledger") or {}).items() if k not in chosen}
    if row.checkpointing or "activation_checkpointing" in own:
        own["activation_checkpointing"] = row.checkpointing
    own.update(by_unit(row))
    return {**content, **({"shardledger": own} if own else {})}


def by_unit(row: Row) -> dict[str, Any]:
    """The keys of ``shardledger`` that tell units apart, where they are not all alike."""
    return {
        **({"unit_stages": dict(row.unit_stages)} if row.unit_stages else {}),
        **({"recomputed_units": list(row.recomputed_units)} if row.recomputed_units else {}),
    }


def fresh_base(options: PlanOptions) -> Base:
    """A configuration made from the options alone."""
    micro_batch, accumulation = options.micro_batch or 1, options.accumulation or 1
    return Base(content=_fresh(options), micro_batch=micro_batch, accumulation=accumulation)


def _fresh(options: PlanOptions) -> dict[str, Any]:
    optimizer = optimizer_of(options)
    arguments: dict[str, Any] = {"lr": 1e-4}
    if optimizer == "sgd-momentum":
        arguments["momentum"] = 0.9
    precision = precision_of(options)
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 1,
        "gradient_accumulation_steps": options.accumulation or 1,
        "gradient_clipping": 1.0,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        "zero_optimization": {},
        "optimizer": {"type": _OPTIMIZER_CLASSES[optimizer], "params": arguments},
    }
