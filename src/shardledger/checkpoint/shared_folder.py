"""Ranks on several machines write one checkpoint: is the folder the same one on all of them?

Nothing fails by itself where it is not. Every machine would write its part into a folder of its own, and the manifest would
name files that nobody can find.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from shardledger.checkpoint.manifest import FileRecord
from shardledger.errors import CheckpointError

PATIENCE_S = 5.0
"""A network file system may show what another machine has just made a moment later."""
_CURE = (
    "All machines must see one folder under this path: put it on a file system that they share, or give its full path."
)


def await_draft(draft: Path, rank: int) -> None:
    """Wait until this rank sees the draft's folder, which rank 0 has made.

    Raises:
        CheckpointError: it never does.
    """
    if not _comes(draft, draft.is_dir):
        raise CheckpointError(f"rank {rank} does not see {draft.absolute()}, which rank 0 has made. {_CURE}")


def check_seen(path: Path, rank: int) -> None:
    """Refuse a checkpoint that rank 0 has found and this rank does not see.

    Raises:
        CheckpointError: it does not.
    """
    if not _comes(path, path.is_dir):
        raise CheckpointError(f"rank {rank} does not see {path.absolute()}, which rank 0 has found. {_CURE}")


def check_arrived(draft: Path, rank: int, files: Iterable[FileRecord]) -> None:
    """Rank 0, before it publishes: what ``rank`` says to have written is in the draft. One file tells for all.

    Raises:
        CheckpointError: it is elsewhere.
    """
    for record in files:
        path = draft / record.name
        if not _comes(path, lambda: path.stat().st_size == record.bytes):  # noqa: B023 - called before the loop goes on
            raise CheckpointError(f"rank {rank} has written {path.absolute()}, but rank 0 does not see it. {_CURE}")
        return


def _comes(path: Path, look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError):
            if look():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(path.parent)  # makes network file systems ask their server again
