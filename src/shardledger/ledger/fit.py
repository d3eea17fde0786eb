"""Does a row fit, and what would the same row cost with another micro-batch?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shardledger.ledger.row import Row
from shardledger.ledger.traffic import Moved, Speed

SLOW_LINK = 32e9
"""Bytes per second of a PCIe 4.0 x16 slot: a link this slow or slower is called slow when no FLOP/s are known."""

LITTLE_DATA = 10_000
"""Samples of a task below which adapters come before full fine-tuning."""
LARGE_MODEL = 100_000_000
"""Parameters below which full fine-tuning costs too little for adapters to matter."""

OFFLOAD_ORDER = (
    "optimizer:cpu",
    "optimizer:cpu+param:cpu",
    "optimizer:nvme",
    "optimizer:nvme+param:nvme",
)
"""Cheapest first: the optimizer before parameters, host memory before disk."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What there is: memory, ranks, links, data."""

    device_memory: int
    """Bytes of one rank's device."""
    world: int
    parameters: int
    """Of the whole model."""
    host_memory: int | None = None
    """Bytes of one machine; None: not known."""
    ranks_per_machine: int = 8
    bandwidth: float | None = None
    """Bytes per second that a rank sends to others."""
    flops: float | None = None
    """Operations per second of a rank."""
    link: float | None = None
    """Bytes per second between a rank's device and host memory."""
    disk: float | None = None
    """Bytes per second of a machine's disk, read and written together."""
    tokens: int | None = None
    """Tokens per rank and optimizer step."""
    task_samples: int | None = None
    """Samples there are to learn from."""
    trained: int | None = None
    """Parameters with gradients; None: all."""
    accumulation: int = 1
    states_only: bool = False
    """Whether the rows leave out activations, buffers and the framework."""

    @property
    def speed(self) -> Speed | None:
        """Both speeds, when both are known."""
        if self.bandwidth is None or self.flops is None:
            return None
        return Speed(bandwidth=self.bandwidth, flops=self.flops, link=self.link, disk=self.disk)

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are in one machine."""
        return self.world <= self.ranks_per_machine

    @property
    def here(self) -> int:
        """Ranks that share the host memory of one machine."""
        return min(self.world, self.ranks_per_machine)

    @property
    def little_data(self) -> bool:
        """Whether adapters should be trained rather than a large model."""
        trained = self.parameters if self.trained is None else self.trained
        samples = self.task_samples
        return samples is not None and samples < LITTLE_DATA and trained >= LARGE_MODEL


def moved_by(row: Row, situation: Situation) -> Moved:
    """What a row moves in one step; the disk is that of a machine, whose ranks share it."""
    here, in_step = situation.here, row.disk_bytes_in_step
    return Moved(
        row.sent_bytes_per_step, row.link_bytes_per_step, here * (row.disk_bytes_per_step - in_step), here * in_step
    )


def states_of(row: Row) -> int:
    """Bytes of params, grads, master and optimizer on the device."""
    return row.params + row.grads + row.master + row.optimizer


def per_batch(row: Row) -> int:
    """Bytes that grow with the micro-batch and that no stage shards."""
    return row.activations + row.temporary


def short_of(row: Row, situation: Situation) -> tuple[int, int]:
    """Bytes missing on the device and on the host (of one machine); (0, 0) when the row fits."""
    host = situation.host_memory
    return (
        max(0, row.total - situation.device_memory),
        0 if host is None else max(0, row.host_bytes * situation.here - host),
    )


def fits(row: Row, situation: Situation) -> bool:
    """Whether the peak is within the device's memory, and what sleeps on the host within the host's."""
    return short_of(row, situation) == (0, 0)


def with_micro_batch(row: Row, micro_batch: int) -> Row:
    """An estimate of the row at another micro-batch: activations and temporaries in proportion, all else as it is."""
    share = micro_batch / row.micro_batch
    activations, temporary = ceil(row.activations * share), ceil(row.temporary * share)
    return replace(
        row,
        micro_batch=micro_batch,
        activations=activations,
        temporary=temporary,
        total=row.total - row.activations - row.temporary + activations + temporary,
    )


@dataclass(frozen=True)
class Found:
    """A row, and whether it was planned or only estimated from another micro-batch."""

    row: Row
    estimated: bool = False


class Rows:
    """The rows of one plan, by what they choose."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.all: Sequence[Row] = tuple(rows)
        self._by_choice = {(r.stage, r.offload, r.checkpointing, r.micro_batch): r for r in self.all}
        self.micro_batch = max((r.micro_batch for r in self.all), default=1)
        """The micro-batch that was asked for: the largest one planned."""

    def get(self, stage: int, offload: str, checkpointing: bool, micro_batch: int | None = None) -> Found | None:
        """The row of a choice; estimated from the largest micro-batch where that one was not planned."""
        wanted = self.micro_batch if micro_batch is None else micro_batch
        exact = self._by_choice.get((stage, offload, checkpointing, wanted))
        if exact is not None:
            return Found(exact)
        base = self._by_choice.get((stage, offload, checkpointing, self.micro_batch))
        return None if base is None else Found(with_micro_batch(base, wanted), estimated=True)

    def lighter(self, stage: int, offload: str) -> Iterator[Found]:
        """The ways to fewer activation bytes at one stage: smaller micro-batches, then recomputation with each."""
        for checkpointing in (False, True):
            sizes = halvings(self.micro_batch)
            for size in sizes if checkpointing else sizes[1:]:
                found = self.get(stage, offload, checkpointing, size)
                if found is not None:
                    yield found

    def stages_of(self, offload: str) -> list[int]:
        """Stages that have rows with this offload, lowest first."""
        return sorted({row.stage for row in self.all if row.offload == offload})


def halvings(micro_batch: int) -> list[int]:
    """``[8, 4, 2, 1]`` for 8."""
    sizes = [micro_batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
