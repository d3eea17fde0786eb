"""What an engine is given to save and load itself with: one object per engine, made by the composition root."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardledger.checkpoint.files import Files
from shardledger.checkpoint.fit import LoadOptions
from shardledger.checkpoint.folder import Place, check_tag
from shardledger.checkpoint.loading import Load, LoadReport
from shardledger.checkpoint.meeting import Meeting
from shardledger.checkpoint.port import TrainingState
from shardledger.checkpoint.saving import Save, SaveOptions, SaveReport
from shardledger.checkpoint.staging import Staging
from shardledger.transport import Transport


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the configuration says about checkpoints."""

    asynchronous: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    version: str = ""
    """Of shardledger."""


class Checkpoints:
    """Saves and loads one engine. All methods but ``report_of_*`` are collective."""

    def __init__(
        self, state: TrainingState, transport: Transport, settings: Settings, files: Files | None = None
    ) -> None:
        self.saves: list[SaveReport] = []
        """Completed saves that nobody has taken note of yet; see ``take_reports``."""
        self.last_load: LoadReport | None = None
        self.files = Files() if files is None else files
        self._state: TrainingState | None = state
        self._transport = transport
        self._settings = settings
        self._staging = Staging() if settings.asynchronous else None
        self._pending: Save | None = None
        _ALIVE.add(self)

    def save(
        self,
        save_dir: object,
        tag: object,
        client_state: Mapping[str, Any] | None,
        *,
        latest: bool,
        exclude_frozen: bool,
    ) -> bool:
        """Save; returns True. An asynchronous save is published by a later ``after_step``, ``wait`` or ``close``.

        Raises:
            CheckpointError: on all ranks, when this save, or an asynchronous one before it, failed on any.
            EngineStateError: inside an accumulation window.
        """
        self.wait()
        state = self._live()
        tag = f"global_step{state.counters()['global_steps']}" if tag is None else tag
        settings = self._settings
        options = SaveOptions(
            client_state=client_state or {},
            latest=latest,
            exclude_frozen=exclude_frozen,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            version=settings.version,
        )
        meeting = Meeting(self._transport, state.device, "save_checkpoint")
        place = Place(Path(str(save_dir)), check_tag(tag))
        save = Save(state, meeting, self.files, place, options, self._staging)
        save.start()
        if self._staging is not None:
            self._pending = save
        else:
            self._note(save)
        return True

    def load(self, load_dir: object, tag: object, **options: bool) -> tuple[str | None, dict[str, Any]]:
        """Load, as ``LoadOptions`` say; returns the path and the client state, ``(None, {})`` when there is nothing.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        self.wait()
        state = self._live()
        load = Load(
            state, Meeting(self._transport, state.device, "load_checkpoint"), self.files, LoadOptions(**options)
        )
        result = load.run(Path(str(load_dir)), None if tag is None else str(tag))
        self.last_load = load.report
        return result

    def after_step(self) -> None:
        """Go on with an asynchronous save as far as all ranks are, or raise its error; never waits for the disk."""
        save = self._pending
        if save is None:
            return
        state = self._live()
        meeting = Meeting(self._transport, state.device, "save_checkpoint (asynchronous)")
        rows = meeting.numbers([float(save.done), float(save.failed)], "progress")
        if all(row[0] for row in rows) or any(row[1] for row in rows):
            self._advance(save)

    def wait(self) -> None:
        """Wait for an asynchronous save and publish it. Raises CheckpointError on all ranks when it failed on any."""
        while self._pending is not None:
            self._advance(self._pending)

    def close(self, *, abandon: bool = False) -> None:
        """The engine ends: publish what is under way and let go of it.

        ``abandon``: an error ends it, so that other ranks may not come; what is under way stays unpublished.
        """
        try:
            if not abandon:
                self.wait()
            elif self._pending is not None:
                self._pending.join()
        finally:
            self._state = self._staging = None
            _ALIVE.discard(self)

    def take_reports(self) -> list[SaveReport]:
        """Saves completed since the last call. Not collective."""
        reports, self.saves = self.saves, []
        return reports

    @property
    def pending(self) -> bool:
        """Whether an asynchronous save has not been published yet."""
        return self._pending is not None

    def _advance(self, save: Save) -> None:
        self._pending = None  # an error ends it
        save.advance()
        if save.published:
            self._note(save)
        else:
            self._pending = save

    def _note(self, save: Save) -> None:
        assert save.report is not None
        self.saves = [*self.saves[-9:], save.report]

    def _live(self) -> TrainingState:
        assert self._state is not None
        return self._state


_ALIVE: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


def _warn_at_exit() -> None:
    # Publishing now would need the other ranks, which may be somewhere else, or gone.
    for checkpoints in list(_ALIVE):
        if checkpoints.pending:
            print(
                "shardledger: the process ends with an asynchronous save unpublished; the checkpoint before it is the "
                "last one. Call engine.destroy(), or engine.checkpoints.wait(), on every rank at the end.",
                file=sys.stderr,
            )


atexit.register(_warn_at_exit)
