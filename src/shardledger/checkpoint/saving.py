"""One save, in phases that all ranks go through together.

start        every rank has called, nothing is under way
preparation  everything but the tensors is described, for an asynchronous save they are copied; rank 0 makes the draft
writing      every rank writes its files; in an asynchronous save, from copies, by a thread
publication  rank 0 collects what was written, proves that every element is there once, writes the manifest, and gives
             the draft its name; in an asynchronous save by a thread too
"""

from __future__ import annotations

import json
import platform
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from shardledger.checkpoint import random_state
from shardledger.checkpoint.files import Files
from shardledger.checkpoint.folder import Place, abandon, prepare, publish, remove_surplus, surplus
from shardledger.checkpoint.manifest import (
    MODEL_CONFIG_NAME,
    SHARED_NAME,
    BufferRecord,
    FileRecord,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    coverage_problems,
    parse_files,
    random_file_name,
)
from shardledger.checkpoint.meeting import Meeting
from shardledger.checkpoint.pickled import is_json, pack
from shardledger.checkpoint.port import Held, TrainingState
from shardledger.checkpoint.shared_folder import check_arrived
from shardledger.checkpoint.staging import Staging
from shardledger.checkpoint.writing import RankWriter, checksum
from shardledger.errors import CheckpointError

_LOADER = "the position of the training data's loader"


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What a save is asked to do."""

    client_state: Mapping[str, Any] = field(default_factory=dict)
    latest: bool = True
    exclude_frozen: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    version: str = ""
    """Of shardledger."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did. Seconds of this rank."""

    path: str
    step: int
    bytes: int
    """Of all files of all ranks; 0 on ranks other than 0."""
    seconds: float
    """From the call to the published checkpoint."""
    blocked_s: float
    """Of which training waited."""


class Save:
    """One checkpoint on its way to the disk."""

    def __init__(
        self,
        state: TrainingState,
        meeting: Meeting,
        files: Files,
        place: Place,
        options: SaveOptions,
        staging: Staging | None = None,
    ) -> None:
        """``staging``: the save is asynchronous, and copies to this memory."""
        self.place = place
        self.report: SaveReport | None = None
        self._state = state
        self._meeting = meeting
        self._files = files
        self._options = options
        self._staging = staging
        self._begin = time.perf_counter()
        self._blocked_s = 0.0
        self._head: Manifest | None = None
        self._untold: bytes | None = b""
        """What this rank has written, for the manifest; None when rank 0 knows."""
        self._lock: int | None = None
        """Rank 0's, of the draft; None when there is no draft of ours."""
        self._size = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; a synchronous save is complete when this returns, an asynchronous one goes on with ``advance``.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        options, meeting = self._options, self._meeting
        call = f"{self.place.final}, latest={options.latest}, exclude_frozen={options.exclude_frozen}"
        seen = meeting.start(call, self._look)
        assert seen is not None
        own = [float(zlib.crc32(_fixed(seen.position))), *seen.checksums]
        rows = meeting.numbers(own, "comparison of buffers and positions")
        try:
            prepared = meeting.together("preparation", lambda: self._prepare(seen, rows))
            assert prepared is not None
            others, units = prepared
            if self._staging is not None:
                self._in_thread(lambda: self._write(units, others))
            else:
                self._write(units, others)
                self._collect()
                self._close()
        except BaseException:
            self._give_up()
            raise
        self._blocked_s = time.perf_counter() - self._begin

    @property
    def done(self) -> bool:
        """Whether this rank's thread has ended: there is something to agree on."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.done and self._error is not None

    @property
    def published(self) -> bool:
        """Whether the checkpoint is complete and has its name."""
        return self.report is not None

    def advance(self) -> None:
        """Wait for this rank's thread and go on: from writing to publication, from publication to the end. Collective.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        begin = time.perf_counter()
        self.join()
        try:
            if self._untold is None:
                self._close()
            else:
                self._collect()
        except BaseException:
            self._give_up()
            raise
        self._blocked_s += time.perf_counter() - begin

    def join(self) -> None:
        """Wait for this rank's thread."""
        if self._thread is not None:
            self._thread.join()

    def _in_thread(self, action: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=action, name="shardledger-save", daemon=True)
        self._thread.start()

    # --- this rank's part ----------------------------------------------------------------------------------------

    def _units(self) -> range:
        return range(len(self._state.plan.units))

    def _unit(self, index: int) -> list[Held]:
        frozen = "weight" if self._options.exclude_frozen else None
        return [(portion, tensor) for portion, tensor in self._state.held(index) if portion.role != frozen]

    def _look(self) -> _Seen:
        """Whether a save may come now, and what may differ between ranks."""
        self._state.ready_to_save()
        loader = self._state.loader()
        buffers = dict(self._state.buffers())
        return _Seen(
            position=None if loader is None else loader.state_dict(),
            buffers=buffers,
            checksums=[float(checksum(buffer)) for buffer in buffers.values()],
        )

    def _prepare(self, seen: _Seen, rows: Sequence[Sequence[float]]) -> tuple[_Others, Iterable[list[Held]]]:
        """Everything that a thread may write while training goes on, and rank 0's draft."""
        others = self._describe(seen, rows)
        if self._meeting.rank == 0:
            self._lock = prepare(self._files, self.place)
        if self._staging is None:
            return others, (self._unit(i) for i in self._units())
        return others, [self._staging.copy(i, self._unit(i)) for i in self._units()]

    def _describe(self, seen: _Seen, rows: Sequence[Sequence[float]]) -> _Others:
        """Everything but the tensors of the units: small things only."""
        state, rank = self._state, self._meeting.rank
        same = all(row[0] == rows[0][0] for row in rows) and is_json(seen.position)
        differs = {name for i, name in enumerate(seen.buffers, 1) if rows[rank][i] != rows[0][i]}
        rank_state = {**random_state.capture(state.device), "loader": None if same else seen.position}
        shared: dict[str, Any] = {"client_state": dict(self._options.client_state)}
        if rank == 0:
            self._head, extra = _head(state, self._options, seen.position if same else None)
            shared |= extra
        return _Others(
            buffers={n: b.detach().to("cpu", copy=True) for n, b in seen.buffers.items() if rank == 0 or n in differs},
            # What is known to be readable again is packed where training does not wait for it.
            random=rank_state if is_json(rank_state["loader"]) else pack(rank_state, _LOADER),
            shared=pack(shared, "client_state") if rank == 0 else None,
            model_config=state.model_config() if rank == 0 else None,
            numbers=state.numbers(),
            window=state.window(),
        )

    def _write(self, units: Iterable[list[Held]], others: _Others) -> None:
        """Write this rank's files. Errors are kept for the agreement that follows."""
        rank = self._meeting.rank
        writer = RankWriter(self._files, self.place.draft, rank)
        try:
            writer.open()
            for index, held in enumerate(units):
                writer.unit(index, held)
                held.clear()  # a copy is given back as soon as it is written
            writer.buffers(others.buffers, shared=rank == 0)
            random = others.random
            writer.content(random_file_name(rank), random if isinstance(random, bytes) else pack(random, _LOADER))
            if others.shared is not None:
                writer.content(SHARED_NAME, others.shared)
            if others.model_config is not None:
                writer.content(MODEL_CONFIG_NAME, others.model_config.encode())
            records = writer.close()
            part = {"files": [asdict(record) for record in records], "numbers": others.numbers, "window": others.window}
            self._untold = zlib.compress(json.dumps(part).encode(), 1)
        except Exception as error:  # noqa: BLE001 - it is raised again on all ranks
            writer.cancel()
            self._error = error

    # --- all ranks -----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """All have written: rank 0 publishes, now or in a thread."""
        meeting = self._meeting
        meeting.agree("writing", self._error)
        assert self._untold is not None
        written = meeting.collect(self._untold, "what was written")
        self._untold = None
        if meeting.rank == 0 and self._staging is not None:
            self._in_thread(lambda: self._publish(written))
        elif meeting.rank == 0:
            self._publish(written)

    def _publish(self, written: Sequence[bytes]) -> None:
        try:
            self._size = self._commit(written)
        except Exception as error:  # noqa: BLE001 - it is raised again on all ranks
            self._error = error

    def _close(self) -> None:
        """Rank 0 has published: every rank learns of it."""
        self._meeting.agree("publication", self._error)
        seconds = time.perf_counter() - self._begin
        step = self._state.counters()["global_steps"] if self._head is None else self._head.step
        self.report = SaveReport(
            path=str(self.place.final),
            step=step,
            bytes=self._size,
            seconds=seconds,
            blocked_s=self._blocked_s if self._staging is not None else seconds,
        )

    def _commit(self, written: Sequence[bytes]) -> int:
        assert self._head is not None and self._head.optimizer is not None
        files: list[FileRecord] = []
        numbers: dict[str, Any] = {}
        windows: list[Mapping[str, Any]] = []
        for rank, content in enumerate(written):
            part = json.loads(zlib.decompress(content))
            own = parse_files(part["files"])
            check_arrived(self.place.draft, rank, own)
            files += own
            numbers |= part["numbers"]
            windows += [part["window"]] if part["window"] else []
        optimizer = replace(self._head.optimizer, values=numbers)
        manifest = replace(self._head, files=tuple(files), optimizer=optimizer, window=tuple(windows))
        problems = coverage_problems(manifest)
        if problems:
            raise CheckpointError(f"an engine bug, nothing was published: {'; '.join(problems[:5])}. Please report it.")
        publish(self._files, self.place, manifest, latest=self._options.latest)
        self._unlock()
        try:
            remove_surplus(self._files, surplus(self.place.parent, self._options.keep_last, self._options.keep_every))
        except OSError as error:
            warnings.warn(
                f"{self.place.final} is saved, but an old checkpoint could not be removed: {error}", stacklevel=2
            )
        return manifest.bytes

    def _give_up(self) -> None:
        self.join()
        if self._lock is not None:
            abandon(self._files, self.place)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._files.unlock(self._lock)
        self._lock = None


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What may differ between ranks: the loader's position and the buffers."""

    position: Any
    buffers: dict[str, torch.Tensor]
    checksums: list[float]


@dataclass(frozen=True, kw_only=True)
class _Others:
    """What a rank writes beside its units."""

    buffers: dict[str, torch.Tensor]
    random: bytes | dict[str, Any]
    shared: bytes | None
    model_config: str | None
    numbers: Mapping[str, Mapping[str, Any]]
    window: Mapping[str, Any] | None


def _head(state: TrainingState, options: SaveOptions, data: Any) -> tuple[Manifest, dict[str, Any]]:
    """The manifest without files, and what of it is not JSON."""
    plan, counters = state.plan, dict(state.counters())
    scheduler = state.scheduler()
    schedule = scheduler.state_dict() if scheduler is not None else None
    shared: dict[str, Any] = {}
    if not is_json(schedule):
        shared["scheduler"], schedule = schedule, None
    extra = state.extra_states()
    if extra:
        shared["extra_states"] = dict(extra)
    groups, odd = _groups(state)
    if any(odd):
        shared["param_groups"] = odd
    parameters = [
        ParameterRecord(name=slot.name, shape=slot.shape, dtype=flat.dtype, trainable=flat.trainable)
        for flat in state.layout.flats
        for slot in flat.slots
        if flat.trainable or not options.exclude_frozen
    ]
    names = {p.name for p in parameters}
    manifest = Manifest(
        step=counters["global_steps"],
        stage=plan.stage,
        world=plan.world,
        precision=plan.precision.compute,
        plan_fingerprint=plan.fingerprint,
        versions={"torch": torch.__version__, "shardledger": options.version, "python": platform.python_version()},
        config=state.config(),
        parameters=tuple(parameters),
        tied={other: name for other, name in state.tied().items() if name in names},
        buffers=tuple(
            BufferRecord(name=name, shape=tuple(b.shape), dtype=str(b.dtype).removeprefix("torch."))
            for name, b in state.buffers()
        ),
        files=(),
        optimizer=OptimizerRecord(class_name=state.optimizer_class(), param_groups=tuple(groups)),
        counters=counters,
        scheduler=schedule,
        loss_scale=state.loss_scale(),
        data=data,
        in_shared=tuple(key for key in shared if key != "client_state"),
    )
    return manifest, shared


def _groups(state: TrainingState) -> tuple[list[GroupRecord], list[dict[str, Any]]]:
    groups, odd = [], []
    for options, names in state.param_groups():
        plain = {key: _number(value) for key, value in options.items()}
        groups.append(GroupRecord(options={k: v for k, v in plain.items() if is_json(v)}, names=tuple(names)))
        odd.append({k: v for k, v in plain.items() if not is_json(v)})
    return groups, odd


def _number(value: Any) -> Any:
    """Hyperparameters as JSON has them: numbers out of tensors, lists for tuples."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [_number(item) for item in value] if isinstance(value, tuple) else value


def _fixed(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()
