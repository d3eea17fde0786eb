"""Is a checkpoint whole? Checksums, and every element of every role exactly once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardledger.checkpoint.manifest import Entry, FileRecord, coverage_problems
from shardledger.checkpoint.stream import DTYPE_NAMES, crc32_of_file
from shardledger.checkpoint.tools.find import Stored

_FORMAT_NAMES = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPE_NAMES.items()}
_FORMAT_NAMES |= {"complex64": "F32", "complex128": "F64"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found."""

    problems: tuple[str, ...]
    """One sentence each; empty when the checkpoint is whole."""
    damaged: tuple[str, ...]
    """Files that are missing or differ from what was written."""
    unknown: tuple[str, ...]
    """Files in the folder that the manifest does not know: harmless."""
    files: int
    bytes: int


def verify(stored: Stored) -> Verdict:
    """Read every file once. Memory: one MiB."""
    problems: list[str] = []
    damaged: list[str] = []
    for record in stored.manifest.files:
        found = file_problems(stored.folder / record.name, record)
        problems += found
        damaged += [record.name] if found else []
    problems += coverage_problems(stored.manifest)
    known = {record.name for record in stored.manifest.files} | {"manifest.json"}
    there = (item for item in sorted(stored.folder.rglob("*")) if item.is_file())
    return Verdict(
        problems=tuple(problems),
        damaged=tuple(damaged),
        unknown=tuple(n for n in (item.relative_to(stored.folder).as_posix() for item in there) if n not in known),
        files=len(stored.manifest.files),
        bytes=stored.manifest.bytes,
    )


def file_problems(path: Path, record: FileRecord) -> list[str]:
    """What is wrong with one file, one sentence each. Memory: one MiB."""
    if not path.is_file():
        return [f"{record.name} is missing"]
    size = path.stat().st_size
    if size != record.bytes:
        return [f"{record.name} has {size} bytes, {record.bytes} were written"]
    try:
        _, check = crc32_of_file(path)
    except OSError as error:
        return [f"{record.name} cannot be read: {error.strerror or error}"]
    if check != record.crc32:
        return [f"{record.name} has other contents than were written (checksum {check}, not {record.crc32})"]
    return _header_problems(path, record) if record.entries else []


def _header_problems(path: Path, record: FileRecord) -> list[str]:
    """The tensors that the file says it holds against those that the manifest says it holds."""
    try:
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (ValueError, OSError, MemoryError, OverflowError):
        return [f"{record.name} is no safetensors file"]
    header.pop("__metadata__", None)
    expected = {entry.key: entry for entry in record.entries}
    problems = [f"{record.name} lacks the tensor {key!r}" for key in expected if key not in header]
    problems += [
        f"{record.name} holds {key!r}, which the manifest does not know" for key in header if key not in expected
    ]
    for key, entry in expected.items():
        if key in header:
            problems += _entry_problems(record.name, entry, header[key])
    return problems


def _entry_problems(name: str, entry: Entry, said: dict[str, Any]) -> list[str]:
    problems = []
    if said.get("dtype") != _FORMAT_NAMES.get(entry.dtype, said.get("dtype")):
        problems.append(f"{name}: {entry.key!r} is {said.get('dtype')} in the file, {entry.dtype} in the manifest")
    numel = 1
    for size in said.get("shape", ()):
        numel *= size
    if entry.dtype.startswith("complex"):
        numel //= 2
    if not entry.scalar and numel != entry.stop - entry.start:
        problems.append(f"{name}: {entry.key!r} has {numel} elements, the manifest says {entry.stop - entry.start}")
    return problems
