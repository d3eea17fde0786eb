"""Named spans of time, written as a Chrome trace: open the file in ``chrome://tracing`` or Perfetto."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_EVENTS = 200_000
"""What is kept; some 100 bytes each."""


class Spans:
    """Spans of one rank, by the host's clock: on a GPU they are when work was asked for, not when it was done."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self.dropped = 0
        """Spans that came after the record was full."""
        self._events: list[dict[str, Any]] = []
        self._most = most
        self._begin = time.perf_counter()
        self._number = 0

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Record the block as a span of the thread that trains; spans nest."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(name, kind, begin)

    def add(self, name: str, kind: str, begin: float) -> None:
        """Record a span of the thread that trains, from ``begin`` (of ``now()``) until now."""
        event = {"name": name, "cat": kind, "ph": "X", "ts": begin, "dur": self.now() - begin, "pid": 0, "tid": 0}
        self._keep([event])

    def add_beside(self, name: str, kind: str, begin: float) -> None:
        """Record a span that ran beside the thread, from ``begin`` until now; such spans may overlap each other."""
        self._number += 1
        shared = {"name": name, "cat": kind, "pid": 0, "tid": 0, "id": self._number}
        self._keep([{**shared, "ph": "b", "ts": begin}, {**shared, "ph": "e", "ts": self.now()}])

    def mark(self, name: str, kind: str) -> None:
        """Record a moment."""
        self._keep([{"name": name, "cat": kind, "ph": "i", "s": "t", "ts": self.now(), "pid": 0, "tid": 0}])

    def now(self) -> float:
        """Microseconds since the record began."""
        return (time.perf_counter() - self._begin) * 1e6

    def write(self, path: str | os.PathLike[str], process: str) -> None:
        """Write everything recorded; ``process`` is the title of the picture. Raises OSError."""
        title = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": process}}
        thread = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "training"}}
        trace = {"traceEvents": [title, thread, *self._events], "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace) + "\n", encoding="utf-8")

    def _keep(self, events: list[dict[str, Any]]) -> None:
        if len(self._events) + len(events) > self._most:
            self.dropped += 1
            return
        self._events += events
