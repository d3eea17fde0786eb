"""What did we see: typed records, where they go, memory, and the ledger as a table."""

from __future__ import annotations

from shardledger.telemetry.memory import MemoryMeter, peak_resident_bytes
from shardledger.telemetry.records import CheckpointRecord, EvalRecord, Record, StepRecord
from shardledger.telemetry.report import CATEGORIES, ledger_table, mebibytes, print_ledger
from shardledger.telemetry.run_folder import RunFolder
from shardledger.telemetry.sinks import (
    JsonLinesSink,
    LineSink,
    ProgressSink,
    Sink,
    SinkGroup,
    console_sink,
    format_line,
)

__all__ = [
    "CATEGORIES",
    "CheckpointRecord",
    "EvalRecord",
    "JsonLinesSink",
    "LineSink",
    "MemoryMeter",
    "ProgressSink",
    "Record",
    "RunFolder",
    "Sink",
    "SinkGroup",
    "StepRecord",
    "console_sink",
    "format_line",
    "ledger_table",
    "mebibytes",
    "peak_resident_bytes",
    "print_ledger",
]
