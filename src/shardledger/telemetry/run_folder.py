"""The folder one run writes, and nothing else writes to.

``config.resolved.json`` the config with every value decided; ``metrics.jsonl`` the records; ``ledger.json`` the bytes
by category; ``checkpoints/``; ``final/`` the trained weights.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardledger.errors import ConfigError, writing


class RunFolder:
    """Paths and writers of one run's folder. Only rank 0 creates it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.resolved.json"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.json"
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"

    @classmethod
    def fresh(cls, parent: str | os.PathLike[str], name: str) -> RunFolder:
        """A folder below ``parent`` that does not exist yet: ``name`` and the time, numbered when that is taken."""
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        path = Path(parent) / stem
        while path.exists():
            number += 1
            path = Path(parent) / f"{stem}-{number}"
        return cls(path)

    def check_unused(self) -> None:
        """Raise ConfigError when writing here would mix with, or overwrite, what is already there."""
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        if self.path.exists():
            what = "already exists and is not empty" if self.path.is_dir() else "is a file"
            raise ConfigError(
                f"{self.path} {what}; runs are never overwritten. Give another --out, or move the old one away."
            )

    def create(self, *, reuse: bool = False) -> None:
        """Make the folder; ``reuse`` goes on in one that a run has left."""
        if not reuse:
            self.check_unused()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass  # a folder that is there may still be one that nobody can write to
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} cannot be made or written: {error.strerror or error}."
            ) from error

    def forget_after(self, step: int) -> None:
        """Drop the records of steps after ``step``: a run that goes on from there takes them again."""
        if not self.metrics.is_file():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        draft = self.metrics.with_name(self.metrics.name + ".part")
        with writing(self.metrics):
            draft.write_text("".join(line for line in lines if _step_of(line) <= step), encoding="utf-8")
            draft.replace(self.metrics)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.resolved.json``."""
        _write_json(self.config, config)

    def write_ledger(self, stage: int, ranks: Sequence[Mapping[str, Mapping[str, int | None]]]) -> None:
        """Write ``ledger.json``: for each rank, bytes by category, predicted and measured (null: not known)."""
        _write_json(self.ledger, {"world": len(ranks), "stage": stage, "ranks": [dict(rank) for rank in ranks]})


def _step_of(line: str) -> float:
    """Step of a record; a line that a killed run has left half written comes after every step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    # Renaming is atomic: a run killed while it writes leaves no half file behind.
    draft = path.with_name(path.name + ".part")
    with writing(path):
        draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
