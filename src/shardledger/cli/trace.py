"""``train --trace FILE``: where rank 0's time goes, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardledger.errors import ConfigError


def check_trace(path: str | None) -> None:
    """Refuse a file that could not be written, before any rank is started. Raises ConfigError."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        what = "is a folder" if Path(path).is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"--trace {path}: {what}; name a file, as in --trace trace.json.")


@contextmanager
def traced(engine: Any, path: str | None) -> Iterator[None]:
    """Record the block on rank 0 and write ``path`` at its end, also when it raises; without ``path`` do nothing."""
    if path is None or engine.rank != 0:
        yield
        return
    from shardledger.runtime.tracing import Tracer
    from shardledger.telemetry.trace import Spans

    spans = Spans()
    tracer = Tracer(engine, spans)
    try:
        yield
    finally:
        tracer.detach()
        spans.write(path, f"rank 0 of {engine.world}, stage {engine.zero_optimization_stage()}")
        dropped = f" ({spans.dropped:,} later spans did not fit)" if spans.dropped else ""
        print(f"trace of rank 0: {path}{dropped}", flush=True)
