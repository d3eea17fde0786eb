"""One load, in phases that all ranks go through together: find, compare, check, read, share.

Nothing of the engine changes before the checkpoint has been found whole and fitting.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardledger.checkpoint import random_state
from shardledger.checkpoint.files import Files
from shardledger.checkpoint.fit import Fit, LoadOptions, check_scheduler, compare
from shardledger.checkpoint.folder import find, read_manifest
from shardledger.checkpoint.manifest import (
    BUFFER,
    MANIFEST_NAME,
    SHARED_NAME,
    GroupRecord,
    Manifest,
    parse_manifest,
    random_file_name,
)
from shardledger.checkpoint.meeting import Meeting
from shardledger.checkpoint.pickled import unpack
from shardledger.checkpoint.port import TrainingState
from shardledger.checkpoint.reader import CheckpointReader
from shardledger.checkpoint.shared_folder import check_seen
from shardledger.checkpoint.writing import buffer_file_name
from shardledger.errors import CheckpointError
from shardledger.layout.flat import Interval


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did. Seconds and elements of this rank."""

    path: str
    step: int
    bytes: int
    """Of all files together."""
    seconds: float
    elements_read: int


class Load:
    """One checkpoint on its way into an engine."""

    def __init__(self, state: TrainingState, meeting: Meeting, files: Files, options: LoadOptions) -> None:
        self.report: LoadReport | None = None
        self._state = state
        self._meeting = meeting
        self._files = files
        self._options = options

    def run(self, parent: Path, tag: str | None) -> tuple[str | None, dict[str, Any]]:
        """Load; returns the checkpoint's path and its client state, ``(None, {})`` when there is nothing to load.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        begin = time.perf_counter()
        meeting, state, options = self._meeting, self._state, self._options
        meeting.start(f"{parent}, tag={tag!r}, {options}", state.ready_to_load)
        found = meeting.together("search", lambda: _find(parent, tag), ranks=range(1))
        shared = json.loads(meeting.spread(json.dumps(found).encode(), "manifest"))
        if shared is None:
            return None, {}
        path = Path(shared[0])
        manifest = parse_manifest(shared[1], str(path / MANIFEST_NAME))
        fit = meeting.together("comparison", lambda: compare(manifest, state, options))
        values = meeting.together("check of the files", lambda: self._check(path, manifest))
        assert fit is not None and values is not None
        with CheckpointReader(path, manifest, fit.names) as reader:
            meeting.together("reading", lambda: self._read(reader, manifest, fit))
            state.share_weights()
            meeting.together("the rest", lambda: self._rest(path, reader, fit, values))
        seconds = time.perf_counter() - begin
        self.report = LoadReport(
            path=str(path),
            step=manifest.step,
            bytes=manifest.bytes,
            seconds=seconds,
            elements_read=reader.elements_read,
        )
        return str(path), dict(values.get("client_state", {}))

    def _same(self, manifest: Manifest) -> bool:
        """Whether as many ranks with the same plan saved it."""
        plan = self._state.plan
        return (manifest.world, manifest.plan_fingerprint) == (plan.world, plan.fingerprint)

    def _check(self, path: Path, manifest: Manifest) -> dict[str, Any]:
        """Compare this rank's share of the files with their checksums; returns the values of ``shared.pt``."""
        rank, world, count = self._meeting.rank, self._meeting.world, len(manifest.files)
        check_seen(path, rank)
        for index, record in enumerate(manifest.files):
            if index * world // count != rank:
                continue
            size, check = self._files.check(path / record.name)
            if (size, check) != (record.bytes, record.crc32):
                raise CheckpointError(
                    f"{path / record.name} is damaged: {size} bytes with checksum {check}, it was written with "
                    f"{record.bytes} bytes and {record.crc32}. Use another checkpoint."
                )
        known = any(record.name == SHARED_NAME for record in manifest.files)
        values: dict[str, Any] = unpack(path / SHARED_NAME) if known else {}
        if self._options.scheduler and not self._options.module_only:
            check_scheduler(_scheduler_state(manifest, values), self._state)
        if not self._options.module_only:
            self._own(path, manifest)
        if manifest.window and self._states:
            self._state.check_window(manifest.window, same=self._same(manifest))
        return values

    @property
    def _states(self) -> bool:
        return self._options.optimizer and not self._options.module_only

    def _read(self, reader: CheckpointReader, manifest: Manifest, fit: Fit) -> None:
        for unit in range(len(self._state.plan.units)):
            self._state.read_weights(unit, reader)
            if self._states:
                self._state.read_states(unit, reader)
            reader.close()  # memory-mapped pages count as this process's memory for as long as a file is open
        buffers = dict(self._state.buffers())
        for name in fit.buffers:
            buffer = buffers[name]
            flat = buffer.detach().new_empty(buffer.numel())
            reader.read_of(name, BUFFER, Interval(0, buffer.numel()), flat)
            buffer.detach().copy_(flat.view(buffer.shape))

    def _rest(self, path: Path, reader: CheckpointReader, fit: Fit, values: Mapping[str, Any]) -> None:
        """What is not sharded. Random numbers last, so that nothing here draws from them."""
        state, options, manifest = self._state, self._options, reader.manifest
        state.set_extra_states(values.get("extra_states", {}))
        own = self._meeting.rank if self._meeting.world == manifest.world else None
        if own is not None:
            self._own_buffers(path / buffer_file_name(own), manifest, own)
        if options.module_only:
            return
        if options.optimizer:
            self._groups(manifest, fit, values)
        schedule = _scheduler_state(manifest, values)
        scheduler = state.scheduler()
        if options.scheduler and scheduler is not None:
            scheduler.load_state_dict(schedule)
            if not options.optimizer:
                for index, rate in enumerate(getattr(scheduler, "_last_lr", ())):
                    state.set_param_group(index, {"lr": rate})
        elif options.scheduler and schedule is not None:
            warnings.warn(
                "the checkpoint holds the state of a learning-rate scheduler, but the engine has none: the rate stays "
                "what it was when it was saved. Pass lr_scheduler= to initialize, or configure one.",
                stacklevel=2,
            )
        state.set_counters(manifest.counters)
        if manifest.loss_scale is not None:
            state.set_loss_scale(manifest.loss_scale)
        if manifest.window and options.optimizer:
            state.read_window(manifest.window, reader, same=self._same(manifest))
        self._position_and_random(path, manifest)

    def _own_buffers(self, file: Path, manifest: Manifest, rank: int) -> None:
        """Buffers that only this rank had so, for the same rank of a run of the same size."""
        known = {record.name: record for record in manifest.files}
        record = known.get(buffer_file_name(rank))
        if rank == 0 or record is None:
            return
        buffers = dict(self._state.buffers())
        for key, value in load_file(file).items():
            name = key.split(":", 1)[1].rpartition(":")[0]
            if name in buffers:
                target = buffers[name].detach()
                stored = torch.view_as_complex(value) if target.is_complex() else value
                target.copy_(stored.reshape(target.shape))

    def _groups(self, manifest: Manifest, fit: Fit, values: Mapping[str, Any]) -> None:
        assert manifest.optimizer is not None
        odd = values.get("param_groups", [])
        for index, record in fit.groups.items():
            extra: Mapping[str, Any] = {}
            if odd:
                extra = odd[_index_of(record, manifest)]
            self._state.set_param_group(index, {**record.options, **extra})

    def _own(self, path: Path, manifest: Manifest) -> tuple[dict[str, Any], Any]:
        """What the checkpoint holds for this rank alone, and the position for its loader, None without one.

        Raises:
            CheckpointError: the position is one of a run with another number of ranks, or the file is damaged.
        """
        rank, world = self._meeting.rank, self._meeting.world
        known = {record.name for record in manifest.files}
        name = random_file_name(rank if rank < manifest.world else rank % manifest.world)
        saved = unpack(path / name) if name in known else {}
        loader = self._state.loader()
        position = manifest.data if manifest.data is not None else saved.get("loader")
        if loader is None or position is None:
            return saved, None
        if manifest.data is None and world != manifest.world:
            raise CheckpointError(
                f"the training data's {type(loader).__name__} has a position of its own on each of {manifest.world} "
                f"ranks, which cannot be turned into positions of {world} ranks. Load on {manifest.world} ranks, use "
                f"a loader whose state_dict() is the same on all ranks, or set engine.training_dataloader = None."
            )
        return saved, position

    def _position_and_random(self, path: Path, manifest: Manifest) -> None:
        state, rank = self._state, self._meeting.rank
        saved, position = self._own(path, manifest)
        if position is not None:
            state.loader().load_state_dict(position)
        if "torch" in saved:
            random_state.restore(saved, state.device)
            if rank >= manifest.world:
                random_state.fork(saved, rank, state.device)


def _find(parent: Path, tag: str | None) -> tuple[str, str] | None:
    path = find(parent, tag)
    return None if path is None else (str(path), read_manifest(path).to_json())


def _scheduler_state(manifest: Manifest, values: Mapping[str, Any]) -> Any:
    return values.get("scheduler") if "scheduler" in manifest.in_shared else manifest.scheduler


def _index_of(record: GroupRecord, manifest: Manifest) -> int:
    assert manifest.optimizer is not None
    return next(i for i, other in enumerate(manifest.optimizer.param_groups) if other is record)
