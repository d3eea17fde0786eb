"""Whether a checkpoint fits a live engine, decided before anything of the engine is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardledger.checkpoint.manifest import GroupRecord, Manifest
from shardledger.checkpoint.port import TrainingState
from shardledger.errors import CheckpointError

_SAME_STATES = ({"Adam", "AdamW"},)
"""Optimizers whose states mean the same."""
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a load is asked to do, in DeepSpeed's words."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False


@dataclass(frozen=True)
class Fit:
    """What goes where."""

    names: Mapping[str, str]
    """For each of the model's parameters that the checkpoint has: under which name."""
    groups: Mapping[int, GroupRecord]
    """For each of the engine's param groups that the checkpoint knows: its record."""
    buffers: tuple[str, ...]
    """Buffers that both have."""


def compare(manifest: Manifest, state: TrainingState, options: LoadOptions) -> Fit:
    """Match parameters, buffers and param groups by name.

    Raises:
        CheckpointError: shapes differ; names are missing or unexpected (``strict``); or the optimizers differ.
    """
    slots = {slot.name: slot.shape for flat in state.layout.flats for slot in flat.slots}
    names = _names(manifest, list(slots), state.tied())
    saved = {p.name: p for p in manifest.parameters}
    live_buffers = {name: tuple(buffer.shape) for name, buffer in state.buffers()}
    saved_buffers = {b.name: b.shape for b in manifest.buffers}
    problems = [
        f"{name!r} has shape {saved[there].shape} in the checkpoint and {slots[name]} in the model"
        for name, there in names.items()
        if saved[there].shape != slots[name]
    ]
    problems += [
        f"buffer {name!r} has shape {shape} in the checkpoint and {live_buffers[name]} in the model"
        for name, shape in saved_buffers.items()
        if name in live_buffers and live_buffers[name] != shape
    ]
    if options.strict:
        used = set(names.values())
        problems += [f"{n!r} {s} is missing in the checkpoint" for n, s in slots.items() if n not in names]
        problems += [
            f"buffer {n!r} {s} is missing in the checkpoint" for n, s in live_buffers.items() if n not in saved_buffers
        ]
        problems += [f"{n!r} {r.shape} is not in the model" for n, r in saved.items() if n not in used]
        problems += [f"buffer {n!r} {s} is not in the model" for n, s in saved_buffers.items() if n not in live_buffers]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        cure = " load_module_strict=False loads what both have." if options.strict else ""
        raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems[:_SHOWN])}{more}.{cure}")
    groups: dict[int, GroupRecord] = {}
    if options.optimizer and not options.module_only:
        _check_optimizer(manifest, state)
        groups = _match_groups(manifest, state.param_groups(), names)
    return Fit(names, groups, tuple(name for name in live_buffers if name in saved_buffers))


def check_scheduler(saved: Any, state: TrainingState) -> None:
    """Refuse to go on with a schedule that would start anew.

    Raises:
        CheckpointError: the engine has a scheduler and the checkpoint has no state for it.
    """
    scheduler = state.scheduler()
    if scheduler is not None and saved is None:
        raise CheckpointError(
            f"the engine has a {type(scheduler).__name__}, and the checkpoint holds no state of a scheduler, so the "
            f"learning rate would start anew. Pass load_lr_scheduler_states=False to accept that."
        )


def _names(manifest: Manifest, live: Sequence[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Live name to saved name: the same one, or one that was, or is, tied to it."""
    saved = {p.name: p.name for p in manifest.parameters}
    saved.update(manifest.tied)
    others: dict[str, list[str]] = {}
    for other, name in tied.items():
        others.setdefault(name, []).append(other)
    found = {}
    for name in live:
        for candidate in (name, *others.get(name, ())):
            if candidate in saved:
                found[name] = saved[candidate]
                break
    return found


def _check_optimizer(manifest: Manifest, state: TrainingState) -> None:
    cure = "Pass load_optimizer_states=False to load the weights alone."
    if manifest.optimizer is None:
        raise CheckpointError(f"the checkpoint holds no optimizer. {cure}")
    saved, live = manifest.optimizer.class_name, state.optimizer_class()
    if saved != live and not any({saved, live} <= same for same in _SAME_STATES):
        raise CheckpointError(f"the checkpoint holds states of {saved}, the engine's optimizer is {live}. {cure}")


def _match_groups(
    manifest: Manifest, live: Sequence[tuple[Mapping[str, Any], Sequence[str]]], names: Mapping[str, str]
) -> dict[int, GroupRecord]:
    """The saved group whose parameters a live one has. Groups may be split or joined where their options agree.

    Raises:
        CheckpointError: a live group has parameters of saved groups that differ in their hyperparameters.
    """
    assert manifest.optimizer is not None
    records = manifest.optimizer.param_groups
    home = {name: index for index, record in enumerate(records) for name in record.names}
    found = {}
    for index, (_, members) in enumerate(live):
        sources = sorted({home[names[name]] for name in members if name in names and names[name] in home})
        if not sources:
            if not members and index < len(records):
                found[index] = records[index]
            continue
        distinct = {json.dumps(dict(records[source].options), sort_keys=True) for source in sources}
        if len(distinct) > 1:
            raise CheckpointError(
                f"param group {index} of the engine has parameters of the checkpoint's groups {sources}, which have "
                f"different hyperparameters. Group the parameters as the saved run did, or pass "
                f"load_optimizer_states=False."
            )
        found[index] = records[sources[0]]
    return found
