"""What a run writes down: one frozen record per event, one JSON object per line.

The field names are a contract with whoever reads ``metrics.jsonl``. Numbers that are not finite become null, because
JSON has no other word for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of the records; ``event`` is the first key of the JSON object."""

    event: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, ``event`` first."""
        return {"event": self.event, **{key: _plain(value) for key, value in asdict(self).items()}}

    def to_json(self) -> str:
        """One line of JSON without the line's end."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One optimizer step, over all ranks.

    ``loss`` is the mean over ranks and micro-batches; ``grad_norm`` the global norm before clipping (None where the
    engine does not compute one); ``lr`` the rate the step used. ``step_s`` is wall-clock time from the start of one
    step to the start of the next, ``data_s`` and ``comm_wait_s`` the parts of it spent waiting for data and for other
    ranks (means over ranks). ``utilization`` is a share of 1: on CPU the part of the step not spent waiting, on CUDA
    what the device reports.
    """

    event: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    samples_per_s: float
    step_s: float
    data_s: float
    comm_wait_s: float
    utilization: float
    memory_peak_bytes: tuple[int, ...]  # one per rank
    stage: int
    offload: Mapping[str, str]  # {"optimizer": home, "param": home}, "none" without offload
    skipped: bool
    loss_scale: float
    offload_wait_s: Mapping[str, float] | None = None
    """Seconds of the step spent waiting for each tier that states rest on (``"host"``, ``"disk"``), means over ranks; left
    out where nothing is offloaded."""

    def to_dict(self) -> dict[str, Any]:
        """As for every record, without ``offload_wait_s`` where there is none."""
        fields = super().to_dict()
        if self.offload_wait_s is None:
            del fields["offload_wait_s"]
        return fields


@dataclass(frozen=True, kw_only=True)
class EvalRecord(Record):
    """One evaluation on held-out data; ``loss`` is the mean over ranks and batches."""

    event: ClassVar[str] = "eval"
    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint written or read; ``bytes`` is the size of all files together."""

    action: Literal["save", "load"]
    step: int
    seconds: float
    bytes: int
    path: str

    def to_dict(self) -> dict[str, Any]:
        """As for every record; the action is part of the event's name."""
        fields = {key: _plain(value) for key, value in asdict(self).items() if key != "action"}
        return {"event": f"checkpoint_{self.action}", **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
