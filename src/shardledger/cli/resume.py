"""``--resume``: which checkpoint a run goes on from, and in which folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardledger.checkpoint.manifest import MANIFEST_NAME
from shardledger.cli.arguments import AUTO, LATEST, RESUME
from shardledger.cli.exits import UsageFailure
from shardledger.errors import CheckpointError
from shardledger.telemetry import RunFolder


def run_folder_of(resume: str | None, out: str | None) -> str | None:
    """``--out``, or the run folder that ``--resume PATH`` names.

    Raises:
        UsageFailure: the latest checkpoint of an unnamed folder.
    """
    if resume is None or out is not None:
        return out
    if resume in (LATEST, AUTO):
        raise UsageFailure(f"{RESUME} {resume} needs --out DIR, the folder of the run to go on with.")
    return resume if (Path(resume) / "checkpoints").is_dir() else None


def source_of(resume: str | None, folder: RunFolder) -> tuple[Path, str | None] | None:
    """Folder and tag to load; None starts anew.

    Raises:
        UsageFailure: there is no checkpoint.
    """
    if resume is None:
        return None
    if resume in (LATEST, AUTO):
        if _has_latest(folder.checkpoints):
            return folder.checkpoints, None
        if resume == AUTO:
            return None
        raise UsageFailure(
            f"{RESUME}: {folder.checkpoints} has no complete checkpoint. {RESUME} auto starts anew in that case."
        )
    path = Path(resume)
    if (path / MANIFEST_NAME).is_file():
        return path.absolute().parent, path.absolute().name
    for candidate in (path / "checkpoints", path):
        if _has_latest(candidate):
            return candidate, None
    raise UsageFailure(
        f"{RESUME} {resume}: that is neither a checkpoint (no {MANIFEST_NAME}) nor a run folder with one "
        f"(no checkpoints/latest)."
    )


def check_folder(resume: str | None, folder: RunFolder, source: tuple[Path, str | None] | None) -> None:
    """Refuse to write into a folder that this run does not go on with.

    Raises:
        ConfigError: it holds something else.
    """
    own = source is not None and source[0].absolute() == folder.checkpoints.absolute()
    # A run that was killed before its first checkpoint starts anew in its own folder.
    own = own or (resume == AUTO and folder.config.is_file())
    if not own:
        folder.check_unused()


def _has_latest(folder: Path) -> bool:
    return (folder / "latest").is_file()


def agree(engine: Any, folder: RunFolder, source: tuple[Path, str | None] | None) -> RunFolder:
    """The run's folder as rank 0 names it: clocks and folders of other machines may say something else. Collective.

    Raises:
        CheckpointError: on all ranks, when only some have found the checkpoint to go on with.
    """
    name = os.fsencode(folder.path)
    rows = engine.gather_scalars([float(len(name)), float(source is not None)])
    length = max(int(row[0]) for row in rows)
    missing = [rank for rank, row in enumerate(rows) if not row[1]]
    if missing and len(missing) < len(rows):
        raise CheckpointError(
            f"ranks {missing} see no checkpoint to go on with in {folder.checkpoints}, the others do. All machines must "
            f"see one folder under this path."
        )
    names = engine.gather_scalars([float(byte) for byte in name.ljust(length, b"\0")])
    return RunFolder(os.fsdecode(bytes(map(int, names[0])).rstrip(b"\0")))
