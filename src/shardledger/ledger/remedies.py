"""What to change when it does not fit: each remedy with the bytes it saves and what it costs, best first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardledger.ledger.amounts import gib
from shardledger.ledger.fit import OFFLOAD_ORDER, Found, Rows
from shardledger.ledger.row import Row

_KEPT_SHARE = 2 / 34
"""Of a transformer layer's activations, its input: 2 of 34 bytes per token and channel (arXiv 2205.05198, table 2)."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to change."""

    what: str
    key: str
    """Where it is set: a key of the configuration, or a way to start the run."""
    saves_bytes: int
    """Bytes off the peak of one rank's device."""
    cost: str
    suffices: bool
    """Whether it is enough alone."""
    estimated: bool
    """Whether the saving is an estimate, not planned."""

    def __str__(self) -> str:
        about = "about " if self.estimated else ""
        enough = "enough alone" if self.suffices else "not enough alone"
        return f"{self.what} ({self.key}): saves {about}{gib(self.saves_bytes)}, {enough}; costs {self.cost}"


def remedies(row: Row, rows: Iterable[Row], budget: int, *, buckets_numel: int | None = None) -> tuple[Remedy, ...]:
    """What would lower the peak of ``row``, best first.

    Those that suffice come first, in the order of what they cost; then the others, largest saving first.

    Args:
        row: what was asked for.
        rows: other choices of the same plan, where they are known.
        budget: bytes the device has.
        buckets_numel: elements of one gradient reduction now, when a smaller one is possible.
    """
    known = Rows([*rows, row])
    found = [
        *_micro_batch(row, known),
        *_checkpointing(row, known),
        *_buckets(row, buckets_numel),
        *_stages(row, known),
        *_offloads(row, known),
    ]
    priced = [(candidate[0], _made(row, budget, candidate)) for candidate in found]
    useful = [(price, remedy) for price, remedy in priced if remedy.saves_bytes > 0]
    useful.sort(key=lambda pair: (not pair[1].suffices, pair[0] if pair[1].suffices else -pair[1].saves_bytes))
    return tuple(remedy for _, remedy in useful)


def table(row: Row, budget: int) -> str:
    """The bytes of one row against the budget, a line per category."""
    names = ("params", "grads", "master", "optimizer", "activations", "communication", "temporary", "framework")
    lines = [f"  {name:<14}{gib(getattr(row, name)):>12}" for name in names if getattr(row, name)]
    lines += [f"  {'total':<14}{gib(row.total):>12}", f"  {'device':<14}{gib(budget):>12}"]
    if row.total > budget:
        lines.append(f"  {'missing':<14}{gib(row.total - budget):>12}")
    return "\n".join(lines)


def listing(found: Sequence[Remedy]) -> str:
    """Remedies as numbered lines."""
    if not found:
        return "  no remedy is known: use more ranks, or a device with more memory"
    return "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(found, 1))


_Candidate = tuple[int, str, str, Found, str]
"""Price (0 is nothing), what, key, the row afterwards, cost."""


def _made(row: Row, budget: int, candidate: _Candidate) -> Remedy:
    _, what, key, found, cost = candidate
    return Remedy(
        what=what,
        key=key,
        saves_bytes=row.total - found.row.total,
        cost=cost,
        suffices=found.row.total <= budget,
        estimated=found.estimated,
    )


def _micro_batch(row: Row, rows: Rows) -> list[_Candidate]:
    if row.micro_batch < 2:
        return []
    half = Rows([r for r in rows.all if r.micro_batch <= row.micro_batch]).get(
        row.stage, row.offload, row.checkpointing, row.micro_batch // 2
    )
    what = f"halve the micro-batch to {row.micro_batch // 2}"
    cost = "twice the micro-batches for the same global batch, each a little less efficient"
    key = "train_micro_batch_size_per_gpu, with gradient_accumulation_steps doubled"
    return [] if half is None else [(2, what, key, half, cost)]


def _checkpointing(row: Row, rows: Rows) -> list[_Candidate]:
    if row.checkpointing:
        return []
    after = rows.get(row.stage, row.offload, True, row.micro_batch)
    if after is None and row.activations:
        saved = int(row.activations * (1 - _KEPT_SHARE))
        after = Found(_less(row, "activations", saved), estimated=True)
    key = '"shardledger": {"activation_checkpointing": true}'
    cost = "one more forward pass, about a third more computing"
    return [] if after is None else [(3, "recompute activations", key, after, cost)]


def _buckets(row: Row, numel: int | None) -> list[_Candidate]:
    """Half the bucket: a reduction has one bucket to send and one that arrives, of 2 bytes an element at least."""
    if numel is None or numel < 2 or not row.communication:
        return []
    saved = min(row.communication, numel // 2 * 2)
    key = f"zero_optimization.reduce_bucket_size = {numel // 2}"
    after = Found(_less(row, "communication", saved), estimated=True)
    return [(0, "halve the reduction buckets", key, after, "more and smaller messages")]


def _stages(row: Row, rows: Rows) -> list[_Candidate]:
    found: list[_Candidate] = []
    for stage in range(row.stage + 1, 4):
        after = rows.get(stage, row.offload, row.checkpointing, row.micro_batch)
        if after is None:
            continue
        more = after.row.sent_bytes_per_step - row.sent_bytes_per_step
        cost = f"{gib(more)} more sent per rank and step" if more > 0 else "no more bytes sent"
        price = 1 if more <= 0 else 4
        found.append((price, f"stage {stage}", f"zero_optimization.stage = {stage}", after, cost))
    return found


def _offloads(row: Row, rows: Rows) -> list[_Candidate]:
    found: list[_Candidate] = []
    for place, offload in enumerate(OFFLOAD_ORDER):
        after = rows.get(row.stage, offload, row.checkpointing, row.micro_batch)
        if row.offload != "none" or after is None:
            continue
        moved = after.row.host_bytes + after.row.disk_bytes
        tier = "host memory" if after.row.host_bytes else "disk"
        key = "zero_optimization.offload_optimizer" + (" and offload_param" if "param:" in offload else "")
        cost = f"{gib(moved)} of {tier} per rank, and that much over the host link in every step"
        found.append((5 + place, f"offload {offload}", key, after, cost))
    return found


def _less(row: Row, category: str, saved: int) -> Row:
    return replace(row, total=row.total - saved, **{category: getattr(row, category) - saved})
