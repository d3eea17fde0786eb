"""Where records go: a JSON-lines file, and the console in one of two forms."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardledger.errors import writing
from shardledger.telemetry.records import EvalRecord, Record, StepRecord


class Sink(Protocol):
    """Takes records one at a time; only rank 0 has sinks."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """No more records; may be called twice."""


class JsonLinesSink:
    """Appends one JSON object per line and flushes it, so that a run that dies leaves every finished step on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with writing(path):
            self._file: IO[str] = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(self, record: Record) -> None:
        """Take one record."""
        with writing(self._path):
            self._file.write(record.to_json() + "\n")
            self._file.flush()

    def close(self) -> None:
        """No more records."""
        with writing(self._path):
            self._file.close()


class LineSink:
    """One line per record made of key=value pairs: what a log file wants."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout

    def write(self, record: Record) -> None:
        """Take one record."""
        print(format_line(record), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class ProgressSink:
    """A progress bar that follows the step records; evaluations are printed above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total_steps, state="")
        self._progress.start()

    def write(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StepRecord):
            state = f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s"
            self._progress.update(self._task, completed=record.step, state=state)
        else:
            self._progress.console.print(format_line(record), highlight=False, markup=False)

    def close(self) -> None:
        """No more records."""
        self._progress.stop()


class SinkGroup:
    """Several sinks as one; closes all of them at the end of a ``with`` block, also when training failed."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, record: Record) -> None:
        """Hand the record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> SinkGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def console_sink(total_steps: int, stream: IO[str] | None = None) -> Sink:
    """A progress bar when ``stream`` (standard output) is a terminal, lines otherwise."""
    stream = stream if stream is not None else sys.stdout
    console = Console(file=stream)
    return ProgressSink(total_steps, console) if console.is_terminal else LineSink(stream)


def format_line(record: Record) -> str:
    """The record as one greppable line.

    Step lines read ``step=12 loss=3.2104 lr=1.0e-03 grad_norm=0.812 tokens_per_s=12345 ...``; all other records start
    with ``event=``.
    """
    if isinstance(record, StepRecord):
        norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3f}"
        line = (
            f"step={record.step} loss={record.loss:.4f} lr={record.lr:.1e} grad_norm={norm} "
            f"tokens_per_s={record.tokens_per_s:.0f} step_s={record.step_s:.3f} data_s={record.data_s:.4f} "
            f"comm_wait_s={record.comm_wait_s:.4f} utilization={record.utilization:.2f} "
            f"memory_peak_mib={max(record.memory_peak_bytes) / 2**20:.0f}"
        )
        return line + (" skipped=true" if record.skipped else "")
    if isinstance(record, EvalRecord):
        return f"event=eval step={record.step} loss={record.loss:.4f} seconds={record.seconds:.2f}"
    return " ".join(f"{key}={value}" for key, value in record.to_dict().items())
