"""SIGTERM: the step at hand is finished and saved before the run ends."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Notes SIGTERM while it is entered. Ranks agree on it at the end of a step: it may reach them in different ones."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not the main thread: whoever owns it deals with signals
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
