"""What ``shardledger plan --model`` asks the dry run, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardledger.ledger.plot import Moment
from shardledger.ledger.row import Row

DEFAULT_SEQ_LEN = 1024
ADAPTERS = "lora:r=16"
"""What is planned when there is little data."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned, decided: the config is checked and in DeepSpeed's keys."""

    model: str
    world: int
    config: Mapping[str, Any]
    """Everything but the batch: ``micro_batch`` and ``accumulation`` replace what it says."""
    written: Mapping[str, Any]
    """The configuration as the user wrote it: what ``--write`` changes."""
    micro_batch: int
    seq_len: int
    accumulation: int
    device: str = "cuda"
    """``cuda`` or ``cpu``: how ranks talk."""
    framework_bytes: int | None = 0
    """What the process has on the device before the model; None: what it has as a rule."""
    trainable: str = "all"
    """``all``: the model as it comes; ``lora:r=16``: adapters."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the dry run says."""

    rows: Sequence[Row]
    parameters: int
    trained: int
    timeline: Sequence[Moment] = field(default=())
    """One step of the first row that was run."""
    timelines: Mapping[tuple[int, bool], Sequence[Moment]] = field(default_factory=dict)
    """One step of each stage, without and with recomputation."""
    notes: Sequence[str] = field(default=())
    """What could not be planned, and why."""
    within: Callable[[int, int | None], Row] | None = None
    """The cheapest choice for every unit under a memory budget and the host memory of one rank (None: any), in bytes;
    raises DoesNotFitError."""


Planner = Callable[[Question], Planned]
