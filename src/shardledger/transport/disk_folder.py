"""A folder of an engine's own on a disk that has room for all ranks, agreed on before anything is written."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import psutil
import torch

from shardledger.errors import ConfigError, DoesNotFitError, RanksDisagreeError
from shardledger.transport.disk import free_bytes, full
from shardledger.transport.port import Transport

_FAILED = float(2**52)

_SURELY_STARTED = 600.0
"""Seconds after which a folder without files is not one that is just being made."""


def claim_folder(path: str, wanted: int, transport: Transport, key: str) -> Path:
    """Make this rank's folder below ``path`` and check that the disk holds what all ranks want there; collective.

    Args:
        wanted: bytes that this rank will reserve.
        key: key path of ``path`` in the configuration, for messages.

    Raises:
        ConfigError: ``path`` is no folder that this rank can write to.
        DoesNotFitError: ranks that share the disk want more bytes than are free.
        RanksDisagreeError: it is another rank that failed.
    """
    place = Path(path).expanduser()
    folder: Path | None = None
    problem: Exception | None = None
    where, free = 0.0, 0
    try:
        folder = _make(place, key, transport.rank)
        where = float(zlib.crc32(f"{socket.gethostname()} {os.stat(folder).st_dev}".encode()))
        free = free_bytes(folder)
    except ConfigError as error:
        problem = error
    row = torch.tensor([_FAILED if problem else where, float(wanted), float(free)], dtype=torch.float64)
    try:
        rows = transport.exchange(row, f"comparison of {key}").tolist()
        if problem is not None:
            raise problem
        failed = [rank for rank, other in enumerate(rows) if other[0] == _FAILED]
        if failed:
            raise RanksDisagreeError(f"{key}: ranks {failed} cannot use {place}; they say why.")
        assert folder is not None
        here = [other for other in rows if other[0] == where]
        total = int(sum(other[1] for other in here))
        if total > min(other[2] for other in here):
            raise full(folder, total, free)
        short = [
            rank
            for rank, other in enumerate(rows)
            if sum(o[1] for o in rows if o[0] == other[0]) > min(o[2] for o in rows if o[0] == other[0])
        ]
        if short:
            raise DoesNotFitError(f"{key}: the disk of ranks {short} is too small; they say by how much.")
    except BaseException:
        remove_folder(folder)
        raise
    return folder


def remove_with(owner: object, folder: Path) -> None:
    """Remove a folder when ``owner`` ends, or the program does; not when a forked child of it ends."""
    weakref.finalize(owner, _remove_in, os.getpid(), folder)


def _remove_in(process: int, folder: Path) -> None:
    if os.getpid() == process:
        remove_folder(folder)


def remove_folder(folder: Path | None) -> None:
    """Remove a folder made by ``claim_folder``, if it is still there."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _make(place: Path, key: str, rank: int) -> Path:
    """A new folder that no other process has.

    Raises:
        ConfigError: it cannot be made; says why.
    """
    reasons: dict[type[OSError], str] = {
        FileNotFoundError: "there is no such folder",
        NotADirectoryError: "that is no folder",
        PermissionError: "this user may not write there",
    }
    tell: Callable[[OSError], str] = lambda error: reasons.get(type(error), error.strerror or str(error))  # noqa: E731
    try:
        if not place.is_dir():
            raise NotADirectoryError if place.exists() else FileNotFoundError
        _sweep(place)
        return Path(mkdtemp(prefix=f"shardledger-{socket.gethostname()}-{os.getpid()}-rank{rank}-", dir=place))
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(place)!r}: {tell(error)}. Name an existing folder on a fast local disk that rank {rank} can "
            f"write to."
        ) from error


def _sweep(place: Path) -> None:
    """Remove empty folders that killed runs of this machine have left; their files ended with them."""
    start = f"shardledger-{socket.gethostname()}-"
    for folder in place.glob(f"{glob.escape(start)}*-rank*-*"):
        process = folder.name.removeprefix(start).split("-")[0]
        try:
            if not process.isdigit() or psutil.pid_exists(int(process)):
                continue
            if time.time() - folder.stat().st_mtime > _SURELY_STARTED:
                folder.rmdir()  # succeeds only when it is empty
        except OSError:
            continue
