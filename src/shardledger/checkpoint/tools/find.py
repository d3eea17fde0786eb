"""From the path a user gives to one checkpoint: a run's folder, a folder of checkpoints, or the checkpoint itself."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from shardledger.checkpoint.folder import LATEST_NAME, complete_tags, is_complete, read_manifest
from shardledger.checkpoint.manifest import MANIFEST_NAME, Manifest
from shardledger.errors import CheckpointError

#: Folders that may lie between what the user names and the checkpoints.
_INNER = "checkpoints"


@dataclass(frozen=True)
class Stored:
    """One checkpoint on disk."""

    folder: Path
    manifest: Manifest


def open_checkpoint(path: Path) -> Stored:
    """The checkpoint at ``path``, or the latest one below it.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    folder = find_checkpoint(path)
    return Stored(folder, read_manifest(folder))


def find_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that ``path`` means.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.{did_you_mean(path)}")
    if path.is_file():
        if path.name == MANIFEST_NAME:
            return path.parent
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint or of a run.")
    if is_complete(path):
        return path
    if (path / LATEST_NAME).is_file():
        return _latest(path)
    if (path / _INNER).is_dir():
        return find_checkpoint(path / _INNER)
    there = complete_tags(path)
    if there:
        raise CheckpointError(f"{path} has no file {LATEST_NAME!r}; give one of its checkpoints: {', '.join(there)}.")
    raise CheckpointError(f"{path} {_what_it_is(path)}")


def _latest(path: Path) -> Path:
    named = (path / LATEST_NAME).read_text(encoding="utf-8", errors="replace").strip()
    if named and is_complete(path / named):
        return path / named
    if named and _is_deepspeed(path / named):
        raise CheckpointError(
            f"{path} is a DeepSpeed checkpoint; convert it first: shardledger import {path} NEW_FOLDER"
        )
    there = ", ".join(complete_tags(path)) or "none"
    raise CheckpointError(f"{path / LATEST_NAME} names {named!r}, which is no checkpoint here; there: {there}.")


def _is_deepspeed(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*_model_states.pt"))


def _what_it_is(path: Path) -> str:
    names = {item.name for item in path.iterdir()}
    if not names:
        return "is empty."
    outer = next((parent for parent in path.absolute().parents[:2] if (parent / MANIFEST_NAME).is_file()), None)
    if outer is not None:
        return f"is a part of the checkpoint {outer}; give that folder."
    if _is_deepspeed(path) or any(_is_deepspeed(path / name) for name in names):
        return f"is a DeepSpeed checkpoint; convert it first: shardledger import {path} NEW_FOLDER"
    inner = sorted(item for item in path.iterdir() if item.is_dir() and (item / LATEST_NAME).is_file())
    if inner:
        return f"is no checkpoint. Did you mean {inner[0]}?"
    if any(name.endswith(".safetensors") for name in names):
        return f"holds model weights, but no {MANIFEST_NAME}: it is no checkpoint of a training run."
    return f"is no checkpoint: it has neither {MANIFEST_NAME} nor a file {LATEST_NAME!r}." + (
        " The run has saved none." if "config.resolved.json" in names or _INNER in path.parts[-1:] else ""
    )


def did_you_mean(path: Path) -> str:
    """The end of a message about a path that does not exist: its first missing part against that part's neighbours."""
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    if not missing.parent.is_dir():
        return ""
    names = [item.name for item in missing.parent.iterdir()]
    near = get_close_matches(missing.name, names, n=1)
    return f" Did you mean {missing.parent / near[0]}?" if near else f" {missing.parent} has no {missing.name!r}."
