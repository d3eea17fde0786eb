"""The weights of a checkpoint in the layout of Hugging Face.

``model.safetensors``, or ``model-00001-of-00003.safetensors`` … with ``model.safetensors.index.json``; and ``config.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardledger.checkpoint.manifest import BUFFER, MODEL_CONFIG_NAME, VALUES
from shardledger.checkpoint.stream import Promise, write_safetensors
from shardledger.checkpoint.tools.find import Stored
from shardledger.checkpoint.tools.tensors import StoredTensors, dtype_named
from shardledger.checkpoint.tools.verify import file_problems
from shardledger.errors import CheckpointError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    files: tuple[str, ...]
    bytes: int
    tensors: int
    config: bool
    """Whether there is a ``config.json``."""
    notes: tuple[str, ...]


def export(
    stored: Stored,
    out: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    config: Mapping[str, Any] | None,
    tied: bool = True,
) -> Exported:
    """Write the weights to a new folder. Memory: one tensor.

    Trained weights are the masters rounded to ``dtype``, frozen ones and floating-point parameters are cast to it; buffers
    and integers keep theirs. A tied weight is written under each of its names unless ``tied`` is False.

    Args:
        stored: the checkpoint.
        out: a folder that does not exist or is empty.
        dtype: of the weights.
        shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.
        config: what ``config.json`` shall say, or None.
        tied: whether the other names of a weight get a copy of it.

    Raises:
        CheckpointError: ``out`` is in use, the checkpoint lacks weights or is damaged, or the disk is full; nothing is
            left behind.
    """
    check_out(out)
    tensors = StoredTensors(stored)
    promises = list(_promises(tensors, dtype, tied=tied))
    if not promises:
        raise CheckpointError(f"{stored.folder} holds no parameters.")
    _check_files(stored)
    draft = out.absolute().with_name(f".{out.absolute().name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        files = _write(draft, promises, shard_bytes)
        if config is not None:
            (draft / CONFIG).write_text(json.dumps(_with_dtype(config, dtype), indent=2) + "\n", encoding="utf-8")
        if out.is_dir():
            out.rmdir()
        os.replace(draft, out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    notes = []
    if config is None:
        notes.append(
            f"no {CONFIG}: the checkpoint has none. from_pretrained needs one; give it with --config FILE|FOLDER."
        )
    return Exported(
        files=tuple(files),
        bytes=sum(promise.bytes for promise in promises),
        tensors=len(promises),
        config=config is not None,
        notes=tuple(notes),
    )


def check_out(out: Path) -> None:
    """Raise CheckpointError unless ``out`` does not exist or is an empty folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} is {'a file' if out.is_file() else 'not empty'}; export writes to a new folder.")


def stored_config(stored: Stored) -> dict[str, Any] | None:
    """The model's own configuration, where the checkpoint has it."""
    file = stored.folder / MODEL_CONFIG_NAME
    if not any(record.name == MODEL_CONFIG_NAME for record in stored.manifest.files) or not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB``, ``500 MB`` or ``2GiB``.

    Raises:
        CheckpointError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise CheckpointError(f"{text!r} is no size of a file; write for example 5GB, 500MB or 2GiB.")
    return size


def _check_files(stored: Stored) -> None:
    """Refuse to pass on values that are not those that were saved."""
    records = (r for r in stored.manifest.files if any(entry.role in VALUES for entry in r.entries))
    problems = [problem for record in records for problem in file_problems(stored.folder / record.name, record)]
    if problems:
        raise CheckpointError(f"{stored.folder} is damaged: {'; '.join(problems)}. Export another checkpoint.")


def _promises(tensors: StoredTensors, dtype: torch.dtype, *, tied: bool) -> Iterator[Promise]:
    manifest = tensors.manifest
    others: dict[str, list[str]] = {}
    for other, name in manifest.tied.items():
        others.setdefault(name, []).append(other)
    for record in manifest.parameters:
        if not tensors.has(record.name, record.value_role) and record.numel:
            raise CheckpointError(
                f"the checkpoint does not hold the weights of {record.name!r}; run shardledger verify."
            )
        own = dtype_named(record.dtype)
        wanted = dtype if own.is_floating_point and own.itemsize > 1 else own
        for key in (record.name, *(others.get(record.name, ()) if tied else ())):
            yield Promise(key, record.shape, wanted, _reader(tensors, record.name, record.value_role, wanted))
    for buffer in manifest.buffers:
        own = dtype_named(buffer.dtype)
        yield Promise(buffer.name, buffer.shape, own, _reader(tensors, buffer.name, BUFFER, own))


def _reader(tensors: StoredTensors, name: str, role: str, dtype: torch.dtype) -> Any:
    return lambda: tensors.read(name, role).to(dtype)


def _write(folder: Path, promises: Sequence[Promise], shard_bytes: int) -> list[str]:
    shards: list[list[Promise]] = [[]]
    filled = 0
    for promise in promises:
        if shards[-1] and filled + promise.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(promise)
        filled += promise.bytes
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS, shards[0], {"format": "pt"})
        return [WEIGHTS]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    where = {}
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
        where.update({promise.key: name for promise in shard})
    index = {
        "metadata": {
            "total_size": sum(promise.bytes for promise in promises),
            "total_parameters": sum(prod(promise.shape) for promise in promises),
        },
        "weight_map": where,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*names, INDEX]


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A model's config names the dtype to load it in, by one of two keys."""
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if not keys and "model_type" in config:  # without either, older libraries load everything as fp32
        keys = ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, name)}
