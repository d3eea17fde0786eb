"""The checkpoints of one run: when they are written, and the records of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shardledger.cli.exits import TERMINATED, RunFailure
from shardledger.telemetry import CheckpointRecord, RunFolder, SinkGroup
from shardledger.workload import BatchSampler


class RunCheckpoints:
    """Saves an engine as ``OUT/checkpoints/step-000123``. All ranks call it; rank 0 writes to ``sinks``."""

    def __init__(
        self, engine: Any, folder: RunFolder, sinks: SinkGroup, counting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """``counting``: a context for every save."""
        self.engine = engine
        self.counting = counting
        self.folder = folder.checkpoints
        self.sinks = sinks
        self.every: int | None = engine.config.shardledger.checkpoint.every
        self._saved = 0

    def load(self, source: tuple[Path, str | None], sampler: BatchSampler) -> int:
        """Go on from a checkpoint; returns its step.

        Raises:
            CheckpointError: it is damaged, or does not fit the model.
        """
        engine = self.engine
        path, _ = engine.load_checkpoint(*source)
        if sampler.step == 0:  # a checkpoint from elsewhere knows its steps, not our position
            sampler.step = engine.global_steps + engine.skipped_steps
        report = engine.checkpoints.last_load
        self.sinks.write(
            CheckpointRecord(
                action="load", step=sampler.step, seconds=report.seconds, bytes=report.bytes, path=str(path)
            )
        )
        self._saved = sampler.step
        return sampler.step

    def after_step(self, step: int, *, last: bool) -> None:
        """Save when it is time to, and after the last step of a run that saves at all."""
        if self.every is not None and (step % self.every == 0 or last) and step != self._saved:
            self._save(step)
        self._report()

    def stop(self, step: int) -> None:
        """Save now and end the run.

        Raises:
            RunFailure: always, with the exit code of SIGTERM.
        """
        if step != self._saved:
            self._save(step)
        self.close()
        raise RunFailure(
            f"stopped by SIGTERM after step {step}; saved in {self.folder}. Go on with --resume.", TERMINATED
        )

    def close(self) -> None:
        """Wait for a save under way."""
        self.engine.checkpoints.wait()
        self._report()

    def _save(self, step: int) -> None:
        with self.counting():
            self.engine.save_checkpoint(self.folder, tag=f"step-{step:06d}")
        self._saved = step

    def _report(self) -> None:
        for report in self.engine.checkpoints.take_reports():
            step = int(Path(report.path).name.rpartition("-")[2])
            self.sinks.write(
                CheckpointRecord(action="save", step=step, seconds=report.seconds, bytes=report.bytes, path=report.path)
            )
