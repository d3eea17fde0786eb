"""What is in a checkpoint, from its manifest alone, and in what two checkpoints' runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardledger.checkpoint.manifest import BUFFER, GRADIENT, MASTER, WEIGHT, Entry, Manifest
from shardledger.checkpoint.tools.find import Stored
from shardledger.plan.spec import DTYPE_BYTES

OPTIMIZER = "optimizer states"
_CATEGORIES = {MASTER: "master weights", WEIGHT: "frozen weights", BUFFER: "buffers"}


def describe(stored: Stored) -> dict[str, Any]:
    """Facts of one checkpoint, as JSON values; sizes in bytes."""
    manifest = stored.manifest
    optimizer = manifest.optimizer
    trained = [p for p in manifest.parameters if p.trainable]
    return {
        "path": str(stored.folder),
        "step": manifest.step,
        "stage": manifest.stage,
        "micro_batches_after_step": manifest.window[0]["micro_batches"] if manifest.window else 0,
        "world": manifest.world,
        "precision": manifest.precision,
        "versions": dict(manifest.versions),
        "parameters": {
            "tensors": len(manifest.parameters),
            "elements": sum(p.numel for p in manifest.parameters),
            "trained_tensors": len(trained),
            "trained_elements": sum(p.numel for p in trained),
            "tied": dict(manifest.tied),
        },
        "buffers": len(manifest.buffers),
        "bytes": sizes(manifest),
        "files": len(manifest.files),
        "optimizer": optimizer and {
            "class": optimizer.class_name,
            "states": sorted({e.role for _, e in manifest.entries() if _category(e.role) == OPTIMIZER}),
            "param_groups": [{**g.options, "tensors": len(g.names)} for g in optimizer.param_groups],
        },
        "scheduler": manifest.scheduler if "scheduler" not in manifest.in_shared else "in shared.pt",
        "loss_scale": manifest.loss_scale,
        "counters": dict(manifest.counters),
        "data": manifest.data if "data" not in manifest.in_shared else "in shared.pt",
        "config": manifest.config,
        "plan_fingerprint": manifest.plan_fingerprint,
    }  # fmt: skip


def sizes(manifest: Manifest) -> dict[str, int]:
    """Bytes by category; they add up to ``total``, the size of all files but the manifest."""
    found = dict.fromkeys((*_CATEGORIES.values(), OPTIMIZER, "gradients"), 0)
    for _, entry in manifest.entries():
        found[_category(entry.role)] += _bytes(entry)
    tensor_files = sum(file.bytes for file in manifest.files if file.entries)
    found["file headers"] = tensor_files - sum(found.values())
    found["random numbers and other state"] = manifest.bytes - tensor_files
    found["total"] = manifest.bytes
    return found


def _category(role: str) -> str:
    return "gradients" if role.startswith(GRADIENT) else _CATEGORIES.get(role, OPTIMIZER)


def differences(one: Manifest, other: Manifest) -> dict[str, tuple[Any, Any]]:
    """What differs between two checkpoints' runs: ``{dotted key: (in one, in the other)}``, None where it is not set."""
    first, second = _settings(one), _settings(other)
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _settings(manifest: Manifest) -> dict[str, Any]:
    head = {name: getattr(manifest, name) for name in ("step", "stage", "world", "precision")}
    found = {**head, **{f"versions.{name}": value for name, value in manifest.versions.items()}}
    if manifest.optimizer is not None:
        found["optimizer class"] = manifest.optimizer.class_name
    found["parameters"] = sum(p.numel for p in manifest.parameters)
    found["trained parameters"] = sum(p.numel for p in manifest.parameters if p.trainable)
    return found | {f"config.{key}": value for key, value in _flatten(manifest.config or {}).items()}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _bytes(entry: Entry) -> int:
    return DTYPE_BYTES.get(entry.dtype, 0) * (1 if entry.scalar else entry.stop - entry.start)
