"""``train --trace FILE``: where rank 0's time goes, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardledger.errors import ConfigError, writing

if TYPE_CHECKING:
    from shardledger.runtime.tracing import Tracer


def check_trace(path: str | None) -> None:
    """Refuse a file that could not be written, before any rank is started. Raises ConfigError."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        what = "is a folder" if Path(path).is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"--trace {path}: {what}; name a file, as in --trace trace.json.")


class Trace:
    """Records rank 0 from now on, and writes ``path`` when its block ends, also by an exception; None records nothing.

    Ctrl-C ends ranks at once and writes nothing; SIGTERM lets them end.

    Make it before anything else wraps the engine's transport for a while: what wraps first is what stays.
    """

    def __init__(self, engine: Any, path: str | None) -> None:
        self._path = path
        self._title = f"rank 0 of {engine.world}, stage {engine.zero_optimization_stage()}"
        self._tracer: Tracer | None = None
        if path is not None and engine.rank == 0:
            from shardledger.runtime.tracing import Tracer
            from shardledger.telemetry.trace import Spans

            self._tracer = Tracer(engine, Spans())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracer is None or self._path is None:
            return
        self._tracer.detach()
        spans = self._tracer.spans
        with writing(self._path):
            spans.write(self._path, self._title)
        dropped = f" ({spans.dropped:,} later spans did not fit)" if spans.dropped else ""
        print(f"trace of rank 0: {self._path}{dropped}", flush=True)
