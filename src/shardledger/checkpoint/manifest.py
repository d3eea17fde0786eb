"""The manifest: what a checkpoint holds and in which file each element lies. Pure data, no torch.

A checkpoint is a folder: ``manifest.json``, safetensors files named ``rank-00000/unit-0003.safetensors``, and ``.pt``
files for what is neither a tensor nor JSON. Words:

entry      one tensor of a safetensors file: elements ``start`` to ``stop`` of a flattened parameter (or buffer), 1-D;
           complex numbers are [n, 2] of their real and imaginary parts
role       what the numbers are: ``"master"`` (the value of a trained parameter, fp32 or wider), ``"weight"`` (of a
           frozen one, in its own dtype), ``"buffer"``, ``"gradient.…"`` (of a window that is not finished), or an optimizer
           state by the optimizer's own name (``"exp_avg"``)
scalar     a state that is not one number per element (Adam's ``"step"``): one tensor of any shape for the parameter
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from shardledger.errors import CheckpointError

FORMAT = "shardledger-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
MODEL_CONFIG_NAME = "model_config.json"
"""The model's own configuration (``module.config``), where it has one that is JSON."""
SHARED_NAME = "shared.pt"
"""``{"client_state": {...}, ...}``: values that are not JSON, the same for all ranks."""

MASTER = "master"
WEIGHT = "weight"
BUFFER = "buffer"
GRADIENT = "gradient."
"""How the roles of gradients begin: there are some when a save came inside an accumulation window."""
VALUES = (MASTER, WEIGHT, BUFFER)
"""Roles that are not optimizer states. An optimizer whose states have these names cannot be saved."""


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """One parameter, under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in which the model computed with it."""
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def value_role(self) -> str:
        """The role that holds its value."""
        return MASTER if self.trainable else WEIGHT


@dataclass(frozen=True, kw_only=True)
class BufferRecord:
    """One persistent buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a safetensors file."""

    key: str
    """Its name in the file."""
    of: str
    """Parameter or buffer."""
    role: str
    dtype: str
    start: int = 0
    stop: int = 0
    scalar: bool = False


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file. Files that are not safetensors have no entries."""

    name: str
    """Relative to the checkpoint, with forward slashes."""
    bytes: int
    crc32: str
    """Checksum of the file, eight hexadecimal digits."""
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """One param group: its hyperparameters (JSON values) and its parameters."""

    options: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """The optimizer without its tensors."""

    class_name: str
    param_groups: tuple[GroupRecord, ...]
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """States that are plain numbers: by parameter, by name of the state."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its tensors."""

    step: int
    stage: int
    world: int
    precision: str
    """``"float32"``, ``"bfloat16"`` or ``"float16"``: dtype of the computation."""
    plan_fingerprint: str | None
    versions: Mapping[str, str]
    """Of torch, shardledger and python."""
    config: Mapping[str, Any] | None
    """The resolved configuration in DeepSpeed's keys."""
    parameters: tuple[ParameterRecord, ...]
    tied: Mapping[str, str]
    """Other names of parameters: ``{other name: name}``."""
    buffers: tuple[BufferRecord, ...]
    files: tuple[FileRecord, ...]
    optimizer: OptimizerRecord | None
    counters: Mapping[str, int]
    """``global_steps``, ``micro_steps``, ``skipped_steps``, ``global_samples``."""
    scheduler: Any = None
    """State dict of the learning-rate scheduler; None without one. See ``in_shared``."""
    loss_scale: Mapping[str, Any] | None = None
    data: Any = None
    """Position in the training data where it is the same on all ranks; None when it is not known."""
    window: tuple[Mapping[str, Any], ...] = ()
    """Where each rank was in an accumulation window; empty: at its beginning."""
    in_shared: tuple[str, ...] = ()
    """Which of ``scheduler``, ``data``, … are in ``shared.pt`` because they are not JSON."""

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        plain = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for parameter, record in zip(plain["parameters"], self.parameters, strict=True):
            parameter["numel"] = record.numel
        for file in plain["files"]:
            for entry in file["entries"]:
                if not entry["scalar"]:
                    del entry["scalar"]
        if self.optimizer is not None:
            plain["optimizer"] = {
                "class": self.optimizer.class_name,
                "param_groups": [{**g.options, "names": list(g.names)} for g in self.optimizer.param_groups],
                "values": self.optimizer.values,
            }
        return json.dumps(plain, indent=1, allow_nan=True) + "\n"

    def entries(self) -> list[tuple[FileRecord, Entry]]:
        """Every entry with its file."""
        return [(file, entry) for file in self.files for entry in file.entries]

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.bytes for file in self.files)


def parse_manifest(text: str, where: str) -> Manifest:
    """Read ``manifest.json``; ``where`` names it in messages.

    Raises:
        CheckpointError: it is no manifest, is damaged, or of a newer version.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{where} is not JSON ({error}): the checkpoint is damaged, use an earlier one."
        ) from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a shardledger checkpoint.")
    version = plain.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{where} has version {version} of the format; this shardledger reads up to {VERSION}. Update it."
        )
    try:
        return _manifest(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__} at {error}. Use an earlier one.") from error


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=int(plain["step"]),
        stage=int(plain["stage"]),
        world=int(plain["world"]),
        precision=plain["precision"],
        plan_fingerprint=plain.get("plan_fingerprint"),
        versions=plain["versions"],
        config=plain.get("config"),
        parameters=tuple(
            ParameterRecord(
                name=p["name"], shape=tuple(map(int, p["shape"])), dtype=p["dtype"], trainable=p["trainable"]
            )
            for p in plain["parameters"]
        ),
        tied=plain.get("tied", {}),
        buffers=tuple(
            BufferRecord(name=b["name"], shape=tuple(map(int, b["shape"])), dtype=b["dtype"]) for b in plain["buffers"]
        ),
        files=parse_files(plain["files"]),
        optimizer=_optimizer(plain.get("optimizer")),
        counters={key: int(value) for key, value in plain["counters"].items()},
        scheduler=plain.get("scheduler"),
        loss_scale=plain.get("loss_scale"),
        data=plain.get("data"),
        window=tuple(plain.get("window", ())),
        in_shared=tuple(plain.get("in_shared", ())),
    )


def parse_files(plain: Sequence[Mapping[str, Any]]) -> tuple[FileRecord, ...]:
    """File records from their plain form. Raises ValueError or KeyError."""
    return tuple(_file(file) for file in plain)


def _file(plain: Mapping[str, Any]) -> FileRecord:
    name = plain["name"]
    # A manifest comes from elsewhere: it must not make us read or remove files outside its folder.
    if name.startswith(("/", "\\")) or ":" in name or ".." in name.replace("\\", "/").split("/"):
        raise ValueError(f"file name {name!r}")
    entries = tuple(
        Entry(
            key=e["key"],
            of=e["of"],
            role=e["role"],
            dtype=e["dtype"],
            start=int(e["start"]),
            stop=int(e["stop"]),
            scalar=bool(e.get("scalar", False)),
        )
        for e in plain["entries"]
    )
    return FileRecord(name=name, bytes=int(plain["bytes"]), crc32=str(plain["crc32"]), entries=entries)


def _optimizer(plain: Mapping[str, Any] | None) -> OptimizerRecord | None:
    if plain is None:
        return None
    groups = tuple(
        GroupRecord(options={k: v for k, v in group.items() if k != "names"}, names=tuple(group["names"]))
        for group in plain["param_groups"]
    )
    return OptimizerRecord(class_name=plain["class"], param_groups=groups, values=plain.get("values", {}))


def entry_key(of: str, role: str, start: int = 0) -> str:
    """The name of an entry in its safetensors file."""
    return f"{role}:{of}:{start}"


def tensor_file_name(rank: int, unit: int) -> str:
    """Name of the safetensors file of one unit on one rank."""
    return f"rank-{rank:05d}/unit-{unit:04d}.safetensors"


def random_file_name(rank: int) -> str:
    """Name of the file with one rank's random number generators and loader position."""
    return f"rank-{rank:05d}/random.pt"


def coverage_problems(manifest: Manifest) -> list[str]:
    """What is wrong with where elements lie, one sentence each: every element of every role exactly once.

    Values must be there for every parameter and buffer; an optimizer state may be missing altogether, not in part.
    """
    pieces: dict[tuple[str, str], list[Entry]] = {}
    for _, entry in manifest.entries():
        pieces.setdefault((entry.of, entry.role), []).append(entry)
    numel = {p.name: p.numel for p in manifest.parameters} | {b.name: b.numel for b in manifest.buffers}
    required = [(p.name, p.value_role) for p in manifest.parameters] + [(b.name, BUFFER) for b in manifest.buffers]
    problems = [
        f"{role} of {name!r} is missing" for name, role in required if numel[name] and (name, role) not in pieces
    ]
    for (name, role), entries in pieces.items():
        if name not in numel:
            problems.append(f"{role} of {name!r} belongs to no parameter or buffer")
        elif any(entry.scalar for entry in entries):
            problems += [f"{role} of {name!r} is there {len(entries)} times"] if len(entries) > 1 else []
        else:
            problems += _gaps(f"{role} of {name!r}", sorted(entries, key=lambda e: e.start), numel[name])
    return problems


def _gaps(what: str, entries: Sequence[Entry], numel: int) -> list[str]:
    problems, reached = [], 0
    for entry in entries:
        if entry.start > reached:
            problems.append(f"{what}: elements {reached} to {entry.start} are in no file")
        elif entry.start < reached:
            problems.append(f"{what}: elements {entry.start} to {min(reached, entry.stop)} are in two files")
        reached = max(reached, entry.stop)
    if reached != numel:
        problems.append(f"{what}: elements end at {reached}, the parameter at {numel}")
    return problems
