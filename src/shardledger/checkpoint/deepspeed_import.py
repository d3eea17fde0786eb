"""A DeepSpeed checkpoint written anew as one of ours. Memory: one tensor.

What DeepSpeed does not save stays unsaved: random numbers, the position in the training data.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardledger.checkpoint.deepspeed import DeepSpeedCheckpoint, DeepSpeedParameter
from shardledger.checkpoint.deepspeed_pickle import Inert
from shardledger.checkpoint.files import Files
from shardledger.checkpoint.folder import Place, abandon, check_tag, complete_tags, prepare, publish
from shardledger.checkpoint.manifest import (
    BUFFER,
    SHARED_NAME,
    BufferRecord,
    Entry,
    FileRecord,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    entry_key,
    tensor_file_name,
)
from shardledger.checkpoint.pickled import is_json, pack
from shardledger.checkpoint.stream import Promise, write_safetensors
from shardledger.errors import CheckpointError

FILE_BYTES = 1 << 28
"""A file is closed when it has this many bytes."""
#: Options of DeepSpeed's own optimizers, and of torch's that say how a process computes rather than what.
_NOT_OURS = frozenset({"step", "bias_correction", "fused", "foreach", "capturable", "differentiable"})
_DEEPSPEED_SCHEDULES = frozenset({"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import did."""

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...]
    """What could not be taken over as it was, or had to be guessed; one sentence each."""


def import_deepspeed(
    source: DeepSpeedCheckpoint, target: Path, *, optimizer_class: str | None = None, version: str = ""
) -> Imported:
    """Write ``target/TAG`` and ``target/latest``; ``engine.load_checkpoint(target)`` loads it at any world and stage.

    Args:
        source: the opened checkpoint.
        target: a folder that does not exist, is empty, or holds checkpoints of ours.
        optimizer_class: name of the torch.optim class; None takes what the configuration names, or guesses from the states.
        version: of shardledger.

    Raises:
        CheckpointError: the target is in use, a file of the source is damaged, or the disk is full. Nothing is left behind.
    """
    check_target(target, source.facts.tag)
    place = Place(target, source.facts.tag)
    notes: list[str] = []
    files = Files()
    try:
        prepare(files, place)
        records = [*_tensor_files(source, place.draft), _shared(source, place.draft, files, notes)]
        manifest = _manifest(source, tuple(records), optimizer_class, version, notes)
        publish(files, place, manifest, latest=True)
    except OSError as error:
        abandon(files, place)
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}.") from error
    except BaseException:
        abandon(files, place)
        raise
    return Imported(folder=place.final, manifest=manifest, notes=tuple(notes))


def check_target(target: Path, tag: str | None) -> None:
    """Raise CheckpointError unless a checkpoint ``tag`` (None: any) may be written into the folder."""
    if target.is_file():
        raise CheckpointError(f"{target} is a file; give a new folder for the checkpoint.")
    if tag is not None and (target / check_tag(tag)).exists():
        raise CheckpointError(f"{target / tag} exists; import does not overwrite. Give another folder, or remove it.")
    if target.is_dir() and any(target.iterdir()) and not complete_tags(target):
        raise CheckpointError(f"{target} is not empty and holds no checkpoints of shardledger; give a new folder.")


# --- tensors ---------------------------------------------------------------------------------------------------------


def _tensor_files(source: DeepSpeedCheckpoint, draft: Path) -> Iterator[FileRecord]:
    waiting: list[tuple[Entry, Promise]] = []
    number = 0
    for item in _tensors(source):
        if waiting and sum(promise.bytes for _, promise in waiting) + item[1].bytes > FILE_BYTES:
            yield _write(draft, number, waiting)
            waiting, number = [], number + 1
        waiting.append(item)
    if waiting:
        yield _write(draft, number, waiting)


def _write(draft: Path, number: int, items: list[tuple[Entry, Promise]]) -> FileRecord:
    name = tensor_file_name(0, number)
    (draft / name).parent.mkdir(parents=True, exist_ok=True)
    size, check = write_safetensors(draft / name, [promise for _, promise in items])
    return FileRecord(name=name, bytes=size, crc32=check, entries=tuple(entry for entry, _ in items))


def _tensors(source: DeepSpeedCheckpoint) -> Iterator[tuple[Entry, Promise]]:
    for parameter in source.parameters:
        yield from _of_parameter(source, parameter)
    for name, buffer in source.buffers.items():
        if buffer.numel():
            yield _whole(name, BUFFER, buffer.numel(), buffer.dtype, lambda buffer=buffer: buffer)


def _of_parameter(source: DeepSpeedCheckpoint, parameter: DeepSpeedParameter) -> Iterator[tuple[Entry, Promise]]:
    name, numel = parameter.name, prod(parameter.shape)
    if not numel:
        return
    if not parameter.trainable:
        yield _whole(name, "weight", numel, parameter.dtype, lambda: source.weight(name))
        return
    # 16-bit masters, which DeepSpeed can be asked to keep, are exact in fp32.
    yield _whole(name, "master", numel, torch.float32, lambda: source.master(name).float())
    for state, dtype in source.states(name).items():
        if dtype is not None:
            wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
            yield _whole(name, state, numel, wide, lambda state=state, wide=wide: source.state(name, state).to(wide))
            continue
        value = source.state(name, state)
        # torch's optimizers count steps in fp32 tensors; DeepSpeed's own in integers.
        single = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32)
        entry = Entry(
            key=entry_key(name, state), of=name, role=state, dtype=str(single.dtype).removeprefix("torch."), scalar=True
        )
        yield entry, Promise(entry.key, (), single.dtype, lambda single=single: single.reshape(()))


def _whole(name: str, role: str, numel: int, dtype: torch.dtype, make: Any) -> tuple[Entry, Promise]:
    text = str(dtype).removeprefix("torch.")
    entry = Entry(key=entry_key(name, role), of=name, role=role, dtype=text, start=0, stop=numel)
    return entry, Promise(entry.key, (numel,), dtype, lambda: make().reshape(-1))


# --- everything else -------------------------------------------------------------------------------------------------


def _shared(source: DeepSpeedCheckpoint, draft: Path, files: Files, notes: list[str]) -> FileRecord:
    client, schedule = {}, _schedule(source)
    for key, value in source.facts.client_state.items():
        if _holds_inert(value):
            notes.append(f"client state {key!r} holds objects of your own classes and was left out")
        else:
            client[key] = value
    shared = {"client_state": client} if is_json(schedule) else {"client_state": client, "scheduler": schedule}
    files.write(draft / SHARED_NAME, pack(shared, "the client state"))
    files.settle(draft / SHARED_NAME)
    size, check = files.check(draft / SHARED_NAME)
    return FileRecord(name=SHARED_NAME, bytes=size, crc32=check)


def _manifest(
    source: DeepSpeedCheckpoint, files: tuple[FileRecord, ...], wanted: str | None, version: str, notes: list[str]
) -> Manifest:
    facts, schedule = source.facts, _schedule(source)
    if facts.unread:
        notes.append(f"left out, neither parameters nor buffers: {', '.join(facts.unread)}")
    trained = next((p.dtype for p in source.parameters if p.trainable), torch.float32)
    accumulation = _accumulation(facts.config, facts.world)
    return Manifest(
        step=facts.global_steps,
        stage=facts.stage,
        world=facts.world,
        precision=str(trained).removeprefix("torch."),
        plan_fingerprint=None,
        versions={
            "torch": torch.__version__,
            "shardledger": version,
            "python": platform.python_version(),
            "deepspeed": facts.version,
        },
        config=dict(facts.config) if is_json(dict(facts.config)) else None,
        parameters=tuple(
            ParameterRecord(
                name=p.name, shape=p.shape, dtype=str(p.dtype).removeprefix("torch."), trainable=p.trainable
            )
            for p in source.parameters
        ),
        tied=dict(source.tied),
        buffers=tuple(
            BufferRecord(name=name, shape=tuple(b.shape), dtype=str(b.dtype).removeprefix("torch."))
            for name, b in source.buffers.items()
        ),
        files=files,
        optimizer=OptimizerRecord(
            class_name=wanted or _optimizer_class(source, notes), param_groups=tuple(_groups(source, notes))
        ),
        counters={
            "global_steps": facts.global_steps,
            "micro_steps": facts.global_steps * accumulation,
            "skipped_steps": facts.skipped_steps,
            "global_samples": facts.global_samples,
        },
        scheduler=schedule if is_json(schedule) else None,
        loss_scale=_loss_scale(facts.loss_scaler) if trained == torch.float16 else None,
        in_shared=() if is_json(schedule) else ("scheduler",),
    )


def _groups(source: DeepSpeedCheckpoint, notes: list[str]) -> Iterator[GroupRecord]:
    ours = _is_deepspeed_schedule(source)
    for group in source.facts.param_groups:
        if group.get("bias_correction") is False:
            notes.append("DeepSpeed's Adam ran without bias correction, which torch's always has: updates will differ")
        options = {key: value for key, value in group.items() if key not in _NOT_OURS and key != "names"}
        options = {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}
        # Our WarmupLR and its kin are LambdaLR with the rate itself as the factor.
        options |= {"initial_lr": 1.0} if ours else {}
        yield GroupRecord(options={k: v for k, v in options.items() if is_json(v)}, names=tuple(group["names"]))


def _schedule(source: DeepSpeedCheckpoint) -> Any:
    """The scheduler's state as the engine's own scheduler takes it.

    DeepSpeed's schedules count iterations from -1 (``last_batch_iteration``), torch's count steps from 0.
    """
    state = source.facts.scheduler
    if state is None or not _is_deepspeed_schedule(source):
        return None if state is None else dict(state)
    params = source.facts.config["scheduler"].get("params") or {}
    epoch = int(state["last_batch_iteration"]) - int(params.get("last_batch_iteration", -1))
    rates = [group["lr"] for group in source.facts.param_groups]
    return {
        "last_epoch": epoch,
        "_step_count": epoch + 1,
        "_last_lr": rates,
        "base_lrs": [1.0] * len(rates),
        "lr_lambdas": [None] * len(rates),
    }


def _is_deepspeed_schedule(source: DeepSpeedCheckpoint) -> bool:
    section = source.facts.config.get("scheduler")
    named = section.get("type") if isinstance(section, Mapping) else None
    return named in _DEEPSPEED_SCHEDULES and "last_batch_iteration" in (source.facts.scheduler or {})


def _loss_scale(scaler: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "steps": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
        "hysteresis": int(scaler.get("cur_hysteresis", 1)),
    }


def _optimizer_class(source: DeepSpeedCheckpoint, notes: list[str]) -> str:
    """The torch.optim class with the same states as DeepSpeed's optimizer."""
    section = source.facts.config.get("optimizer")
    named = section.get("type") if isinstance(section, Mapping) else None
    if isinstance(named, str):
        params = section.get("params") if isinstance(section, Mapping) else None
        decoupled = not isinstance(params, Mapping) or params.get("adam_w_mode", True)
        known = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
        return known.get(named.lower(), named)
    trained = next((p.name for p in source.parameters if p.trainable), None)
    states = set(source.states(trained)) if trained is not None else set()
    guess = "AdamW" if "exp_avg" in states or not states else "SGD" if "momentum_buffer" in states else "Adagrad"
    notes.append(
        f"the script made the optimizer itself, so its class is not in the checkpoint: {guess} was guessed from the states "
        f"({', '.join(sorted(states)) or 'none'}); name another with --optimizer"
    )
    return guess


def _accumulation(config: Mapping[str, Any], world: int) -> int:
    """Micro-batches per step; DeepSpeed does not count them in its checkpoints."""
    given = config.get("gradient_accumulation_steps")
    if isinstance(given, int):
        return given
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    return max(1, batch // (micro * world)) if isinstance(batch, int) and isinstance(micro, int) and micro else 1


def _holds_inert(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_inert(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(_holds_inert(item) for item in value)
    return isinstance(value, Inert)
