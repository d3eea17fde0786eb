"""From the path a user gives to one checkpoint: a run's folder, a folder of checkpoints, or the checkpoint itself."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from shardledger.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest
from shardledger.errors import CheckpointError

LATEST_NAME = "latest"
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
    file = folder / MANIFEST_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    return Stored(folder, parse_manifest(text, str(file)))


def find_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that ``path`` means.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.{_near(path)}")
    if path.is_file():
        if path.name == MANIFEST_NAME:
            return path.parent
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint or of a run.")
    if (path / MANIFEST_NAME).is_file():
        return path
    if (path / LATEST_NAME).is_file():
        return _latest(path)
    if (path / _INNER).is_dir():
        return find_checkpoint(path / _INNER)
    there = complete_checkpoints(path)
    if there:
        raise CheckpointError(
            f"{path} has no file {LATEST_NAME!r}; give one of its checkpoints: {', '.join(item.name for item in there)}."
        )
    raise CheckpointError(f"{path} {_what_it_is(path)}")


def complete_checkpoints(path: Path) -> list[Path]:
    """Folders directly below ``path`` that hold a manifest, by name."""
    return sorted(item for item in path.iterdir() if item.is_dir() and (item / MANIFEST_NAME).is_file())


def _latest(path: Path) -> Path:
    named = (path / LATEST_NAME).read_text(encoding="utf-8", errors="replace").strip()
    if named and (path / named / MANIFEST_NAME).is_file():
        return path / named
    if named and _is_deepspeed(path / named):
        raise CheckpointError(
            f"{path} is a DeepSpeed checkpoint; convert it first: shardledger import {path} NEW_FOLDER"
        )
    there = ", ".join(item.name for item in complete_checkpoints(path)) or "none"
    raise CheckpointError(f"{path / LATEST_NAME} names {named!r}, which is no checkpoint here; there: {there}.")


def _is_deepspeed(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*_model_states.pt"))


def _what_it_is(path: Path) -> str:
    names = {item.name for item in path.iterdir()}
    if not names:
        return "is empty."
    if _is_deepspeed(path) or any(_is_deepspeed(path / name) for name in names):
        return f"is a DeepSpeed checkpoint; convert it first: shardledger import {path} NEW_FOLDER"
    if any(name.endswith(".safetensors") for name in names):
        return "holds model weights, but no manifest.json: it is no checkpoint of a training run."
    return "is no checkpoint: it has neither manifest.json nor a file 'latest'." + (
        " Did the run save one?" if "config.resolved.json" in names or _INNER in names else ""
    )


def _near(path: Path) -> str:
    """What the user may have meant: the first part of the path that is not there, against its neighbours."""
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    if not missing.parent.is_dir():
        return ""
    names = [item.name for item in missing.parent.iterdir()]
    near = get_close_matches(missing.name, names, n=1)
    return f" Did you mean {missing.parent / near[0]}?" if near else f" {missing.parent} has no {missing.name!r}."
